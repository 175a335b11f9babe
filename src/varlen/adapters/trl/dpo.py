"""PackedDPOTrainer: TRL's DPOTrainer, all its losses, without a token of padding in the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow.compute as pc
import torch
from torch.utils.data import Dataset
from trl.trainer.dpo_trainer import DPOTrainer

from varlen.adapters.hf.inputs import model_inputs
from varlen.adapters.hf.mixing import check_family
from varlen.adapters.hf.trainer_checks import check_head, check_scaling, noise_of_documents
from varlen.adapters.peers import check_processes
from varlen.arguments import as_count
from varlen.batch.collate import collate
from varlen.batch.packed import IGNORE_INDEX, PackedBatch
from varlen.errors import DocumentsError, SettingError
from varlen.pack.api import pack
from varlen.pack.pieces import shuffled
from varlen.pack.steps import steps_of
from varlen.types import IntArray


class PackedDPOTrainer(DPOTrainer):
    """TRL's DPOTrainer, whose models compute the completions of a batch as documents of one row.

    TRL collates padded rows and computes the losses; in between, the policy and the reference model run on the same
    documents without padding, and their outputs are put back into padded rows. So every `loss_type`, metric and
    setting is TRL's own.

    A step's loss is the mean over its pairs on all ranks, even if batches have different numbers of pairs. (The loss
    "sft" is a mean over tokens in TRL, and "aot" sorts within a batch: these depend on the batch of a pair.)

    With `capacity`, training rows are packs of pairs of at most so many tokens, and `per_device_train_batch_size`
    counts packs; without it, pairs, as in TRL.
    """

    loss_is_scaled_for_ga = True

    def __init__(self, *args: Any, capacity: int | None = None, **rest: Any) -> None:
        super().__init__(*args, **rest)
        config: Any = self.args
        if config.gradient_accumulation_steps > 1:
            check_scaling("a step of pairs is several batches")
        check_processes(cast(Any, self.accelerator).num_processes)
        check_family(self.model)
        check_head(self)
        if self._is_vision_dataset:
            raise SettingError("pairs with images can't be packed; use TRL's DPOTrainer for them")
        self.data_collator = PairCollator(cast(Any, self.data_collator))
        if capacity is not None:
            self.train_dataset = PairPacks(
                self.train_dataset,
                as_count(capacity, "capacity"),
                longest=config.max_length,
                at_once=config.world_size * config.per_device_train_batch_size,
                seed=config.seed if config.data_seed is None else config.data_seed,
            )

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor]:
        """Return the batches of a step, and the number of their pairs on all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        pairs = torch.tensor(sum(num_pairs(batch) for batch in batches), device=device)
        return batches, self.accelerator.reduce(pairs, "sum")

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return TRL's loss of a batch; within a step, its share of the mean over the step's pairs."""
        pairs = num_pairs(inputs)
        with self._flat(model, inputs) as (flat, padded):
            loss: Any = super().compute_loss(flat, padded, return_outputs)  # type: ignore[no-untyped-call]
        if num_items_in_batch is None:
            return loss
        # DDP and FSDP divide by the number of ranks.
        scale = pairs * self.accelerator.num_processes / num_items_in_batch
        return (loss[0] * scale, loss[1]) if return_outputs else loss * scale

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Return the reference's log-probabilities of chosen and rejected completions, as TRL does."""
        with self._flat(model, inputs) as (flat, padded):
            return super().compute_ref_log_probs(flat, padded)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _flat(self, model: Any, inputs: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Wrap the policy and the reference in `FlatCall`; yields the wrapped policy and the padded inputs."""
        if PACKED not in inputs:
            yield model, inputs
            return
        padded = {name: value for name, value in inputs.items() if name != PACKED}
        row = {"batch": inputs[PACKED], "width": inputs["input_ids"].shape[1]}
        reference: Any = self.ref_model
        accelerator: Any = self.accelerator
        try:
            if reference is not None:
                self.ref_model = cast(Any, FlatCall(model=reference, **row))
            if accelerator.num_processes > 1:
                self.accelerator = cast(Any, UnevenGather(accelerator))
            with noise_of_documents(self, row["batch"]):
                yield FlatCall(model=model, **row), padded
        finally:
            self.ref_model, self.accelerator = reference, accelerator


class UnevenGather:
    """An Accelerator whose `gather` accepts different numbers of pairs on different ranks."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, one after the other (`values`: `[pairs]`, or a single number)."""
        gather = self._accelerator.gather
        if values.ndim == 0:
            numbers: torch.Tensor = gather(values)
            return numbers
        counts = gather(torch.tensor([len(values)], device=values.device)).tolist()
        rows = gather(self._accelerator.pad_across_processes(values)).chunk(len(counts))
        return torch.cat([row[:count] for row, count in zip(rows, counts)])


def num_pairs(inputs: dict[str, Any]) -> int:
    """Count the pairs of a batch."""
    return int(inputs["input_ids"].shape[0]) // 2


# Packs of preference pairs, and the conversion of TRL's padded batches to one flat row.

PACKED = "packed"
_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
_REPLACED = frozenset(("input_ids", "attention_mask", "labels", "use_cache"))


class PairPacks(Dataset[list[dict[str, Any]]]):
    """A data set whose rows are packs, which are lists of pairs; both completions of a pair are in one pack.

    Packs are random samples of the pairs, the same in every epoch, and equally many on every rank.
    """

    def __init__(
        self, rows: Any, capacity: int, *, longest: int | None = None, at_once: int = 1, seed: int | None = 0
    ) -> None:
        self._rows = rows
        lengths = pair_lengths(rows, longest)
        order = np.arange(lengths.size) if seed is None else shuffled(seed, lengths.size)
        steps = steps_of(lengths[order], capacity, ranks=at_once, fill="empty", in_order=True)
        self._pairs, self._offsets = order[steps.documents], steps.offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> list[dict[str, Any]]:
        begin, end = self._offsets[number : number + 2].tolist()
        return [self._rows[pair] for pair in self._pairs[begin:end].tolist()]


def pair_lengths(rows: Any, longest: int | None = None) -> IntArray:
    """Return the number of tokens of each pair, int64 `[num_pairs]`: its prompt twice, and both completions."""
    missing = [name for name in _IDS if name not in (getattr(rows, "column_names", None) or ())]
    if missing:
        raise DocumentsError(
            f"packs of pairs are made of stored sets with {', '.join(_IDS)}, as DPOTrainer tokenizes them; this "
            f"{type(rows).__name__} has no {', '.join(missing)}; leave capacity out where pairs are streamed"
        )
    table = rows.select_columns(list(_IDS)).with_format("arrow")[:]
    prompt, *lengths = (pc.list_value_length(table[name]).to_numpy().astype(np.int64) for name in _IDS)
    sizes = [
        prompt + length if longest is None else np.minimum(prompt + length, longest) for length in lengths
    ]
    total: IntArray = sizes[0] + sizes[1]
    return total


@dataclass(frozen=True)
class PairCollator:
    """TRL's collator of pairs, which adds the same documents as one flat row to the padded batch."""

    padded: Callable[[list[Any]], dict[str, Any]]
    """Collates B pairs into a batch of 2B padded rows, all chosen completions first."""

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Return TRL's batch, and a PackedBatch as `packed`."""
        pairs = [pair for row in examples for pair in (row if isinstance(row, list) else [row])]
        batch = self.padded(pairs)
        return {**batch, PACKED: flat_row(batch)}


def flat_row(batch: dict[str, Any]) -> PackedBatch:
    """Return the rows of a padded batch as the documents of one row, whose targets are completions, if marked.

    `batch`: `input_ids`, `attention_mask` and, if they are marked, `completion_mask`, int64 `[rows, width]`.
    """
    real = batch["attention_mask"].bool()
    ids = batch["input_ids"][real]
    targets = batch.get("completion_mask", batch["attention_mask"])
    labels = torch.where(targets[real].bool(), ids, IGNORE_INDEX)
    lengths = real.sum(1).numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    packing = pack(lengths, max(int(offsets[-1]), 1))
    return collate(
        (ids.numpy(), offsets), packing, labels=(labels.numpy(), offsets), layout="flat", report=False
    ).to_torch()


@dataclass(frozen=True, kw_only=True)
class FlatCall:
    """A model that is called with padded rows, and computes them as one flat row.

    Its outputs per token are returned in the shape of padded rows.
    """

    model: Any
    """The model, possibly wrapped."""
    batch: PackedBatch
    """The rows' documents."""
    width: int
    """Width of the padded rows."""

    def __call__(self, **inputs: Any) -> Any:
        """Call the model."""
        if "labels" not in inputs:
            return self.model(**inputs)
        others = {name: value for name, value in inputs.items() if name not in _REPLACED}
        outputs = self.model(**model_inputs(self.batch, self.model), **others)
        tokens = self.batch.input_ids.shape[1]
        for name, value in outputs.items():
            if torch.is_tensor(value) and value.shape == (1, tokens - 1):
                outputs[name] = padded_rows(value[0], self.batch.document_lengths, self.width - 1)
        return outputs


def padded_rows(values: torch.Tensor, lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Return values of shifted tokens, document after document, as rows.

    Args:
        values: `[tokens - 1]`: one for each token that predicts another. A document's last token would predict the
            next document's first, which is never a target, so its value is left out.
        lengths: `[documents]` in tokens.

    Returns:
        `[documents, width]`, 0 after a document's end.
    """
    if not values.numel():  # one document of one token
        return values.new_zeros(len(lengths), width)
    lengths = lengths.to(values.device, torch.int64)
    columns = torch.arange(width, device=values.device)
    indices = (lengths.cumsum(0) - lengths)[:, None] + columns
    row = values[indices.clamp(max=len(values) - 1)]
    return torch.where(columns < (lengths - 1)[:, None], row, torch.zeros_like(row))
