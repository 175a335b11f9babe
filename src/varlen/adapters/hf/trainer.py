"""PackedTrainer: transformers' Trainer on a PackedLoader, whose batches aren't sharded, collated or replayed.

A loader already assigns packs to ranks and resumes at any step. So the Trainer takes it directly, and not through
Accelerate, which would distribute each rank's batches over the ranks again. A step's loss is divided by its targets
over all ranks, a number that each batch carries, so no communication is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from varlen.adapters.hf.inputs import model_inputs
from varlen.adapters.hf.mixing import check_family
from varlen.adapters.hf.trainer_checks import (
    check_evaluation,
    check_head,
    check_own_loss,
    check_settings,
    check_train_dataset,
    checked_loader,
    noise_of_documents,
)
from varlen.batch.packed import LossWeighting, PackedBatch
from varlen.errors import SettingError, StateError, UnknownLengthError
from varlen.feed.loader import PackedLoader

PACKED = "packed"
WEIGHTS = "loss_weights"

if TYPE_CHECKING:
    from transformers import Trainer as _BeforeTrainer
else:
    _BeforeTrainer = object


class PackedTraining(_BeforeTrainer):
    """A mixin that trains a Trainer on a PackedLoader; list it before the Trainer's class among the bases.

    ::

        class MyPackedTrainer(PackedTraining, MyTrainer):
            pass
    """

    def __init__(
        self,
        *args: Any,
        train_loader: PackedLoader | None = None,
        loss_weighting: LossWeighting = "token",
        **rest: Any,
    ) -> None:
        loader = checked_loader(train_loader, type(self).__name__)
        check_evaluation(rest.get("eval_dataset"))
        super().__init__(*args, **rest)
        self.train_loader = loader
        self.loss_weighting = loss_weighting
        self._resumed_at = 0
        self._batches: LoaderBatches | None = None
        check_settings(self)
        check_family(self.model)
        check_head(self)
        self._reduces_weights = loss_weighting != "token" or loader.has_weights
        self._applies_weights = self._reduces_weights or not self.model_accepts_loss_kwargs
        if self._applies_weights:
            check_own_loss(self)
            self.loss_is_scaled_for_ga = True
        self.add_callback(LoaderPlace())

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **rest: Any) -> Any:
        """Train, as the Trainer does, after loading the checkpoint's state into the loader."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)  # type: ignore[no-untyped-call]
        self._resumed_at = 0
        if folder:
            self._resumed_at = go_to_checkpoint(
                self.train_loader, folder, with_data=not self.args.ignore_data_skip
            )
        return super().train(resume_from_checkpoint, *args, **rest)

    def get_train_dataloader(self) -> DataLoader[PackedBatch | None]:
        """Return the loader's batches, as they are: neither sharded nor collated."""
        state = self.train_loader.state_dict()
        if state["micro_batch"]:
            raise StateError(
                f"the loader has given {state['micro_batch']:,} of {self.train_loader.micro_batches:,} batches of "
                f"step {state['step']:,}, and a Trainer begins with a step; call train_loader.seek({state['step']})"
            )
        steps, an_epoch = self._num_steps(), None
        if steps == 0:
            raise SettingError(
                "the loader has given all its batches; to start over, call train_loader.seek(0) or make a new loader"
            )
        if steps is not None:
            an_epoch = -(-steps // (self.train_loader.settings.epochs or 1))
        drawn = 0 if self.args.ignore_data_skip else self._resumed_at % (an_epoch or self.args.max_steps or 1)
        accumulated = self.args.gradient_accumulation_steps
        length = None if an_epoch is None else an_epoch * accumulated
        self._batches = LoaderBatches(self.train_loader, length, drawn * accumulated)
        return DataLoader(self._batches, batch_size=None)

    def _num_steps(self) -> int | None:
        """Return the updates of the whole run, including those before the checkpoint; None if unknown."""
        loader = self.train_loader
        try:
            whole = len(loader) // loader.micro_batches
        except UnknownLengthError:
            return None
        return self._resumed_at + whole - loader.step

    def set_initial_training_values(self, *args: Any, **rest: Any) -> Any:
        """Return the Trainer's numbers of epochs, steps and examples, with no more steps than there are."""
        values, steps = super().set_initial_training_values(*args, **rest), self._num_steps()
        if steps is None:
            return values
        if self.args.max_steps > steps:
            raise SettingError(
                f"max_steps={self.args.max_steps:,}, but the loader has {steps:,} steps; pass at most so many, or a "
                "larger epochs= (None for no end) to the loader"
            )
        return *values[:-1], min(values[-1], steps)

    def get_batch_samples(
        self, epoch_iterator: Iterator[PackedBatch | None], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor | None]:
        """Return the batches of a step, and the divisor of its losses, summed over these batches and all ranks."""
        assert self._batches is not None
        self._batches.begin_step(self.state.global_step)
        drawn = (batch for batch in epoch_iterator if batch is not None)
        batches = [batch.to_torch() for batch in islice(drawn, num_batches)]
        if not batches:
            return [], None
        made = [
            {
                "input_ids": batch.input_ids,
                "labels": batch.labels,
                "attention_mask": batch.segment_ids >= 0,  # for counting tokens; the model gets another
                PACKED: batch,
            }
            for batch in batches
        ]
        if not self._reduces_weights:
            return made, torch.tensor(batches[0].step_num_targets, device=device)
        for inputs, batch in zip(made, batches):
            inputs[WEIGHTS] = batch.loss_weights(self.loss_weighting)
        mine = torch.stack([inputs[WEIGHTS].sum(dtype=torch.float64) for inputs in made]).sum()
        return made, self.accelerator.reduce(mine.to(device), "sum") / self.get_tp_size()

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **rest: Any) -> torch.Tensor:
        """Compute one batch's loss and gradients, after making the arguments that this model wants."""
        batch: PackedBatch = inputs[PACKED]
        wanted = model_inputs(batch, self.model)
        if self._applies_weights:
            wanted[WEIGHTS] = inputs.get(WEIGHTS, batch.loss_weights("token"))
            wanted["labels"] = batch.labels
        with noise_of_documents(self, batch):
            loss: torch.Tensor = super().training_step(model, wanted, *args, **rest)
        return loss

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **rest: Any) -> Any:
        """Return a batch's share of the loss: the Trainer's own, unless targets are to be weighed."""
        if WEIGHTS not in inputs:
            return super().compute_loss(model, inputs, *args, **rest)
        ours = (WEIGHTS, "labels", "shift_labels")
        outputs = model(**{name: value for name, value in inputs.items() if name not in ours})
        total = weighted_sum(outputs.logits, inputs["labels"], inputs[WEIGHTS])
        # DDP and FSDP divide by the number of ranks.
        replicas = self.accelerator.num_processes // self.get_tp_size()
        return (total * replicas / rest["num_items_in_batch"]).to(total.dtype)


class PackedTrainer(PackedTraining, Trainer):
    """transformers' Trainer, fed by a loader.

    ::

        loader = loader_for(args, "store", capacity=4096)
        trainer = PackedTrainer(model=model, args=args, train_loader=loader)
        trainer.train(resume_from_checkpoint=True)
    """

    def __init__(self, *args: Any, **rest: Any) -> None:
        check_train_dataset(args, rest)
        super().__init__(*args, **rest)


def loader_for(
    args: Any, source: Any, tokenizer: Any = None, *, capacity: int, **settings: Any
) -> PackedLoader:
    """Return a loader with the settings of TrainingArguments.

    `per_device_train_batch_size` counts packs; a step has this number times `gradient_accumulation_steps` times the
    number of processes. `num_train_epochs` and `max_steps` determine the end of the data, and `data_seed` or `seed`
    the shuffle.
    """
    size, batches = args.per_device_train_batch_size, args.gradient_accumulation_steps
    given = {
        "micro_batch_size": size,
        "global_batch_size": size * batches * args.world_size,
        "dp_rank": args.process_index,
        "dp_world_size": args.world_size,
        "epochs": None if args.max_steps > 0 else math.ceil(args.num_train_epochs),
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "ring_slots": 2 * batches + 2,  # the Trainer holds the batches of two steps
    }
    return PackedLoader(source, tokenizer, capacity=capacity, **{**given, **settings})


def weighted_sum(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum over targets of weight times loss, in float32 at least.

    Args:
        logits: `[rows, width, vocabulary]`.
        labels: int64 `[rows, width]`, not shifted; -100 for no target.
        weights: `[rows, width]`, aligned with the labels.
    """
    wide = logits[:, :-1].flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(wide, labels[:, 1:].flatten(), ignore_index=-100, reduction="none")
    return (losses * weights[:, 1:].flatten().to(losses.dtype)).sum()


# A loader as the data set of a Trainer's run, and its state in the Trainer's own checkpoints.
#
# A Trainer that resumes from a checkpoint draws the batches of earlier steps again and discards them. Instead, the
# loader seeks to its state, and yields None for each batch that the Trainer discards.


class LoaderBatches(IterableDataset[PackedBatch | None]):
    """A data set whose items are the remaining batches of a loader.

    A new iteration continues where the last one stopped, as with the loader.
    """

    def __init__(self, loader: PackedLoader, length: int | None, drawn: int = 0) -> None:
        self.loader = loader
        self._length, self._drawn = length, drawn
        self._before: tuple[int, dict[str, Any]] | None = None

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        if self._length is None:
            raise UnknownLengthError("the loader doesn't know its number of batches")
        return self._length

    def __iter__(self) -> Iterator[PackedBatch | None]:
        """Yield None for every batch that the Trainer discards, then the batches."""
        while self._drawn:
            self._drawn -= 1
            yield None
        for batch in self.loader:  # noqa: UP028 (`yield from` would close the loader with this iterator)
            yield batch

    def begin_step(self, global_step: int) -> None:
        """Record the loader's state before the batches of a step are drawn."""
        self._before = global_step, self.loader.state_dict()

    def state_at(self, global_step: int) -> dict[str, Any]:
        """Return the loader's state after the last update, even if batches of the next step are drawn already."""
        if self._before is not None and self._before[0] == global_step:
            return self._before[1]
        return self.loader.state_dict()


class LoaderPlace(TrainerCallback, ExportableState):
    """Stores the loader's state in `trainer_state.json`, which the Trainer writes into each checkpoint."""

    def __init__(self) -> None:
        self.batches: LoaderBatches | None = None
        self.trainer_state: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Set the data set again, as the Trainer may have created this object from a checkpoint."""
        del args, control
        self.batches, self.trainer_state = rest["train_dataloader"].dataset, state
        state.stateful_callbacks.setdefault(type(self).__name__, {})  # not in another Trainer's checkpoint

    def state(self) -> dict[str, Any]:
        """Return the loader's state in transformers' format of exportable states."""
        if self.batches is None:
            return {"args": {}, "attributes": {}}
        return {"args": {}, "attributes": {"place": self.batches.state_at(self.trainer_state.global_step)}}


def go_to_checkpoint(loader: PackedLoader, folder: str | Path, *, with_data: bool) -> int:
    """Load a checkpoint's state into a loader; returns the step."""
    state = TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME))
    if with_data:
        found = _saved_state(state, folder)
        if found != loader.state_dict():  # loading the same state would discard prefetched batches
            loader.load_state_dict(found)
    return int(state.global_step)


def _saved_state(state: Any, folder: str | Path) -> Mapping[str, Any]:
    saved = state.stateful_callbacks.get(LoaderPlace.__name__, {})
    found: Mapping[str, Any] | None
    found = (saved[-1] if isinstance(saved, list) else saved).get("attributes", {}).get("place")
    if found is None:
        raise StateError(
            f"{folder} holds no loader state, since another Trainer saved it; to continue after its "
            f"{state.global_step:,} steps call loader.seek({state.global_step}), and pass ignore_data_skip=True"
        )
    return found
