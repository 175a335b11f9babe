"""PackedDPOTrainer: TRL's DPOTrainer, all its losses, without a token of padding in the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from trl.trainer.dpo_trainer import DPOTrainer

from varlen.adapters.hf.agreement import check_scaling
from varlen.adapters.hf.mixing import check_family
from varlen.adapters.hf.noise import noise_of_documents
from varlen.adapters.replicas import check_processes
from varlen.adapters.trl.pairs import PACKED, FlatCall, PairCollator, PairPacks
from varlen.errors import SettingError
from varlen.pack.lengths import as_count


class PackedDPOTrainer(DPOTrainer):
    """TRL's DPOTrainer, whose models see the answers of a batch as documents of one row.

    TRL collates padded rows and computes the losses; between the two, the policy and the reference model get the
    same documents without padding, and what they return is put where TRL looks for it. So every `loss_type`, metric
    and setting is TRL's own.

    A step's loss is the mean over its pairs on all ranks, also where batches hold different numbers of pairs. (The
    loss "sft" is a mean over tokens in TRL, and "aot" sorts within a batch: those depend on what shares a batch.)

    Args:
        args: as DPOTrainer takes them.
        capacity: most tokens of a pack of pairs, prompts counted twice; `per_device_train_batch_size` then counts
            packs. None for batches of that many pairs, whatever their length.
        rest: as DPOTrainer takes it.

    Raises:
        SettingError: pairs with images, processes of which accelerate doesn't know, or batches to accumulate with a
            transformers before 5.19.
        OverlongDocumentError: a pair longer than `capacity`.
        ModelError: a model whose documents no argument keeps apart.
    """

    loss_is_scaled_for_ga = True

    def __init__(self, *args: Any, capacity: int | None = None, **rest: Any) -> None:
        super().__init__(*args, **rest)
        config: Any = self.args
        if config.gradient_accumulation_steps > 1:
            check_scaling("a step of pairs is several batches")
        check_processes(cast(Any, self.accelerator).num_processes)
        check_family(self.model)
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
        """Return the batches of a step, and the number of their pairs on all ranks.

        Args:
            epoch_iterator: over batches.
            num_batches: of a step.
            device: where the number is wanted.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        pairs = torch.tensor(sum(num_pairs(batch) for batch in batches), device=device)
        return batches, self.accelerator.reduce(pairs, "sum")

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return TRL's loss of a batch; within a step, its share of the mean over the step's pairs.

        Args:
            model: the policy, as the Trainer has wrapped it.
            inputs: of the collator.
            return_outputs: return the model's outputs beside it.
            num_items_in_batch: pairs of the step; None in evaluation.
        """
        pairs = num_pairs(inputs)
        with self._flat(model, inputs) as (flat, padded):
            found: Any = super().compute_loss(flat, padded, return_outputs)  # type: ignore[no-untyped-call]
        if num_items_in_batch is None:
            return found
        # DDP and FSDP divide by the number of ranks.
        scale = pairs * self.accelerator.num_processes / num_items_in_batch
        return (found[0] * scale, found[1]) if return_outputs else found * scale

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Return the reference's log-probabilities of chosen and rejected answers, as TRL does.

        Args:
            model: the reference, as the Trainer has wrapped it.
            inputs: of the collator.
        """
        with self._flat(model, inputs) as (flat, padded):
            return super().compute_ref_log_probs(flat, padded)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _flat(self, model: Any, inputs: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Let the policy and the reference be called with padded rows, and compute a flat one.

        Yields:
            What to call in place of the policy, and the inputs without the flat row.
        """
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
    """An Accelerator that gathers a number a pair from ranks whose batches hold different numbers of pairs.

    Args:
        accelerator: does all the rest.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        """Return what the Accelerator has."""
        return getattr(self._accelerator, name)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, one after the other.

        Args:
            values: `[pairs]`, or a single number.
        """
        gather = self._accelerator.gather
        if values.ndim == 0:
            alone: torch.Tensor = gather(values)
            return alone
        counts = gather(torch.tensor([len(values)], device=values.device)).tolist()
        rows = gather(self._accelerator.pad_across_processes(values)).chunk(len(counts))
        return torch.cat([row[:count] for row, count in zip(rows, counts)])


def num_pairs(inputs: dict[str, Any]) -> int:
    """Count the pairs of a batch.

    Args:
        inputs: of the collator: two rows a pair.
    """
    return int(inputs["input_ids"].shape[0]) // 2
