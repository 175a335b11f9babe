"""PackedDataModule: a PackedLoader as Lightning's trainer wants it, with a place in the data that is exact.

Lightning may take a batch ahead of training, and saves what a loader has given. So each batch travels with the state
behind it, and what is saved is the state of the last one that reached the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule

from varlen.adapters.peers import check_processes
from varlen.batch.packed import PackedBatch
from varlen.errors import SettingError
from varlen.feed.loader import PackedLoader

__all__ = ["PackedDataModule"]


class PackedDataModule(LightningDataModule):
    """The training data of a Lightning run, packed: `trainer.fit(module, datamodule=PackedDataModule(...))`.

    - `training_step` gets a `PackedBatch` of tensors on its device.
    - Each rank's loader gives this rank's batches; no sampler is put before it.
    - A checkpoint holds the place in the data, and `fit(..., ckpt_path=...)` goes on behind the last batch that was
      trained, also where Lightning takes batches ahead (streaming, epochs without end).

    Lightning divides the loss by the batches that it accumulates, and averages gradients over ranks. Where `loss_sum`
    is the sum of a batch's target losses, the token mean of the step is trained by returning
    `loss_sum * batch.loss_scale() * self.trainer.accumulate_grad_batches`.

    One epoch of Lightning is everything that the loader gives: all of its `epochs`.
    """

    def __init__(self, source: Any, tokenizer: Any = None, **settings: Any) -> None:
        """Take the settings; nothing is opened before the ranks are known.

        Args:
            source: of `PackedLoader`.
            tokenizer: of `PackedLoader`.
            settings: of `PackedLoader`, but for `dp_rank` and `dp_world_size`: the ranks are Lightning's.

        Raises:
            SettingError: a rank among the settings.
        """
        super().__init__()
        given = [name for name in ("dp_rank", "dp_world_size") if name in settings]
        if given:
            raise SettingError(
                f"leave {' and '.join(given)} out of the settings: Lightning says which rank this is"
            )
        self._source, self._tokenizer, self._settings = source, tokenizer, settings
        self._batches: _Batches | None = None

    @property
    def loader(self) -> PackedLoader:
        """The loader of this rank, while `fit` trains.

        Raises:
            SettingError: there is none yet, or none any more.
        """
        if self._batches is None:
            raise SettingError("there is no loader outside of Trainer.fit; read it in a hook of training")
        return self._batches.loader

    def train_dataloader(self) -> Any:
        """Return this rank's batches, the same ones however often Lightning asks.

        Raises:
            SettingError: of `PackedLoader`, or the trainer's settings would train something else.
        """
        trainer: Any = self.trainer
        if self._batches is None:
            check_processes(
                trainer.world_size, "Lightning", 'pass Trainer(strategy="ddp", devices=...) for all of them'
            )
            ranks = getattr(trainer, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
            loader = PackedLoader(
                self._source,
                self._tokenizer,
                dp_rank=ranks["rank"],
                dp_world_size=ranks["num_replicas"],
                **self._settings,
            )
            try:
                _check(trainer, loader)
            except BaseException:
                loader.close()
                raise
            self._batches = _Batches(loader)
        return self._batches

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Return a batch on the device, and note that it is trained now.

        Args:
            batch: of the training data, or of any other loader.
            device: of the model.
            dataloader_idx: which loader, where there are several.
        """
        if isinstance(batch, _Taken):
            batch.given_by.trained = batch.state
            batch = batch.batch
        if isinstance(batch, PackedBatch):
            return batch.to_torch(device)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def teardown(self, stage: str) -> None:
        """Close the loader when `fit` ends.

        Args:
            stage: Lightning's name of what ends.
        """
        if stage == "fit" and self._batches is not None:
            self._batches.loader.close()
            self._batches = None

    def on_exception(self, exception: BaseException) -> None:
        """Close the loader where `fit` fails.

        Args:
            exception: what failed.
        """
        del exception
        self.teardown("fit")


class _Batches:
    """The iterable for Lightning: each batch with the state behind it, and the state of the last trained batch."""

    def __init__(self, loader: PackedLoader) -> None:
        self.loader = loader
        self.trained: Mapping[str, Any] = loader.state_dict()
        self._given, self._has_begun = 0, False

    def __iter__(self) -> _Batches:
        self._given = 0
        return self

    def __next__(self) -> _Taken:
        was_begun, self._has_begun = self._has_begun, True
        try:
            batch = next(self.loader)
        except StopIteration:
            if was_begun and not self._given:
                raise SettingError(
                    f"all epochs of the data are over after {self.loader.step:,} steps, and the trainer wants more; "
                    "give the data module epochs=None, or the trainer max_epochs=1"
                ) from None
            raise
        self._given += 1
        return _Taken(batch, self.loader.state_dict(), self)

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.trained)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self.trained, self._has_begun = dict(state), False


class _Taken:
    """A batch with its state; not a collection, so that precision plugins don't look for tensors in it."""

    def __init__(self, batch: PackedBatch, state: Mapping[str, Any], given_by: _Batches) -> None:
        self.batch, self.state, self.given_by = batch, state, given_by


def _check(trainer: Any, loader: PackedLoader) -> None:
    """Refuse a trainer whose steps or epochs differ from the loader's."""
    accumulated = trainer.accumulate_grad_batches
    by_itself = getattr(trainer.lightning_module, "automatic_optimization", True)
    if by_itself and accumulated != loader.micro_batches:
        raise SettingError(
            f"a step is {loader.micro_batches:,} batches of each rank, and the trainer steps after {accumulated:,}; "
            f"pass Trainer(accumulate_grad_batches={loader.micro_batches}), or another micro_batch_size"
        )
    if (trainer.max_epochs or -1) > 1 and trainer.limit_train_batches == 1.0:
        raise SettingError(
            "one epoch of Lightning is all epochs of the loader, and max_epochs is "
            f"{trainer.max_epochs:,}; pass Trainer(max_epochs=1), and the number of epochs to the data module"
        )
