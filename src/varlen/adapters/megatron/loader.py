"""A PackedLoader as Megatron's external data loader: a batch of its dialect a micro-batch, its place in checkpoints.

Read in Megatron-Bridge 0.3.1 to 0.6.0 and Megatron-LM (core 0.20): `dataloader_type="external"` hands the iterator
through as it is; `maybe_save_dataloader_state` calls its `save_state` and writes what that returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from varlen.adapters.megatron.batches.from_batch import megatron_batch
from varlen.adapters.megatron.dialects import NEWEST, Dialect, as_dialect
from varlen.arguments import as_count
from varlen.errors import SettingError, StateError
from varlen.feed.loader import PackedLoader
from varlen.feed.state import MOST, merge_states

_FILES = "train_dataloader_dprank*.pt"
_KEY = "dataloader_state_dict"
_TRACKERS = ("latest_train_state.pt", "latest_checkpointed_iteration.txt")
"""Of Megatron-Bridge, and of Megatron-LM."""


class MegatronLoader:
    """What Megatron's training loop takes micro-batches from, with `dataloader_type="external"`.

    Every call of `next` returns the next micro-batch of this data-parallel rank as a mapping of tensors. Nothing is
    read, and no worker started, before the first: a rank whose stage takes no data costs nothing.

    Megatron writes what `save_state` returns where `dataset.dataloader_save` (`--dataloader-save`) names a folder.
    The state is the same on all ranks, so any of its files will do, also for another number of data-parallel ranks:
    `restore_state(saved_state(folder, iteration))`.
    """

    def __init__(
        self,
        loader: PackedLoader,
        *,
        dialect: str = NEWEST,
        restart_after: int | None = None,
        **batch_settings: Any,
    ) -> None:
        """Take a loader.

        Args:
            loader: of numpy arrays in rows, with batches of one pack; the ranks that share a replica (tensor,
                pipeline and context parallel) have the same `dp_rank`.
            dialect: of Megatron-Bridge that the training loop reads: "0.4", "0.5" or "0.6", or a release.
            restart_after: batches after which it begins at the beginning again, for evaluations that are to see the
                same data each time: `eval_iters` x the micro-batches of an evaluation step.
            batch_settings: of `megatron_batch`.

        Raises:
            SettingError: an unknown dialect, or a loader whose batches Megatron can't read.
        """
        self._dialect: Dialect = as_dialect(dialect)
        _check(loader)
        self._restart_after = None if restart_after is None else as_count(restart_after, "restart_after")
        self._loader, self._batch_settings = loader, batch_settings
        self._begin, self._taken = loader.state_dict(), 0

    @property
    def loader(self) -> PackedLoader:
        """The loader behind it: `documents(step)`, `stats()`."""
        return self._loader

    def __iter__(self) -> MegatronLoader:
        """Return itself: Megatron's loop goes on where it stopped."""
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next micro-batch of this rank."""
        if self._taken == self._restart_after:
            self._loader.load_state_dict(self._begin)
            self._taken = 0
        try:
            batch = next(self._loader)
        except StopIteration:
            samples = self._loader.step * self._loader.settings.global_batch_size
            raise SettingError(
                f"all epochs of the data are over after {samples:,} packs, and Megatron asks for more; train for so "
                "many samples at most (train_iters x global_batch_size), or give the loader more epochs (epochs=None "
                "is without end)"
            ) from None
        self._taken += 1
        made: dict[str, Any] = dict(megatron_batch(batch, dialect=self._dialect, **self._batch_settings))
        return made

    def save_state(self) -> dict[str, Any]:
        """Return what was taken, the same on every rank; Megatron's checkpoints call this.

        Numbers, texts, lists and mappings, so that it can be read with `torch.load(..., weights_only=True)`.
        """
        return self._loader.state_dict()

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Go on after a state, of any data-parallel rank; their number may be another one.

        Args:
            state: of `save_state`.

        Raises:
            StateError: of other data or settings, which are named; nothing has changed then.
        """
        self._loader.load_state_dict(state)

    save_state_rank, restore_state_rank = save_state, restore_state
    """As Megatron-Energon's loaders call them."""

    def seek(self, consumed_samples: int) -> None:
        """Go to where so many packs were taken, for a checkpoint that holds no state of its loader.

        It counts steps as the loader does. Steps without any target, which the loader leaves out, Megatron never
        counted: where there are such, only a state is exact.

        Args:
            consumed_samples: Megatron's `consumed_train_samples`.

        Raises:
            SettingError: it stands within a step, or behind the last.

        Cost: as `PackedLoader.seek`.
        """
        consumed = as_count(consumed_samples, "consumed_samples", 0, MOST)
        each = self._loader.settings.global_batch_size
        if consumed % each:
            raise SettingError(
                f"{consumed:,} consumed samples aren't whole steps of {each:,} packs; they were counted with another "
                "global_batch_size. Restore the state of the loader, or pass a multiple: "
                f"{consumed // each * each:,} or {-(-consumed // each) * each:,}"
            )
        self._loader.seek(consumed // each)

    def __len__(self) -> int:
        """Count the micro-batches of this rank, over all epochs."""
        return len(self._loader)

    def __bool__(self) -> bool:
        """Be true, without counting anything."""
        return True

    def close(self) -> None:
        """Leave no process, thread or memory behind."""
        self._loader.close()


def saved_state(folder: str | Path, iteration: int) -> dict[str, Any] | None:
    """Return the state that Megatron saved of a loader, or None where there is none of this iteration.

    Args:
        folder: `dataset.dataloader_save` (`--dataloader-save`).
        iteration: of the checkpoint.

    Raises:
        StateError: what is there can't be read, or its files say different things.
    """
    place = Path(folder) / f"iter_{as_count(iteration, 'iteration', 0):07d}"
    states = []
    for file in sorted(place.rglob(_FILES)):  # Megatron-LM puts a folder mp_rank_00 between
        try:
            states.append(torch.load(file, map_location="cpu", weights_only=True)[_KEY])
        except Exception as error:  # whatever it raises, this is none of ours
            raise StateError(
                f"{file} is no state of a MegatronLoader: {type(error).__name__}: {str(error)[:200]}; remove it, and "
                "seek(consumed_samples) instead"
            ) from error
    if not states:
        return None
    try:
        return merge_states(states)
    except (StateError, RuntimeError) as error:  # another loader's tensors can't be compared: RuntimeError
        raise StateError(f"{place} holds states of different loaders, or of others: {error}") from None


def last_checkpoint(load: str | Path) -> tuple[int, int]:
    """Return the iteration of the newest checkpoint of a folder, and the samples consumed until then.

    Megatron's providers of data sets aren't told either; what it loads, its trackers say.

    Args:
        load: `checkpoint.load` (`--load`).

    Returns:
        Both 0 where there is no checkpoint, or one without iterations (a release). Megatron-LM's tracker doesn't say
        how many samples there were: 0; its `args.consumed_train_samples` does.

    Raises:
        StateError: the tracker can't be read.
    """
    ours, theirs = (Path(load) / name for name in _TRACKERS)
    file = ours if ours.exists() else theirs
    if not file.exists():
        return 0, 0
    try:
        if file == ours:
            state = torch.load(file, map_location="cpu", weights_only=True)
            return int(state["step"]), int(state["consumed_train_samples"])
        told = file.read_text().strip()
        return (0 if told == "release" else int(told)), 0
    except Exception as error:  # whatever it raises, nobody knows the iteration
        raise StateError(
            f"{file} doesn't say which checkpoint is the newest: {type(error).__name__}: {str(error)[:200]}; pass "
            "iteration and consumed_train_samples"
        ) from error


def _check(loader: PackedLoader) -> None:
    """Refuse batches that Megatron can't read."""
    settings = loader.settings
    if settings.batch_sizes[1] != 1:
        raise SettingError(
            f"micro_batch_size is {settings.batch_sizes[1]:,}: Megatron takes packed rows one a micro-batch; pass "
            "micro_batch_size=1, and a larger capacity for more tokens"
        )
    if loader.has_weights:
        raise SettingError(
            "the rows are read with their weights (row_weights), and Megatron divides a loss by the sum of its loss "
            "mask as a whole number, so that the mean would be off by its fraction; read them without"
        )
    if settings.layout != "rows" or settings.device is not None:
        raise SettingError(
            'MegatronLoader takes a PackedLoader with layout="rows" and device=None: Megatron copies batches itself'
        )
