"""PackedRewardTrainer: TRL's RewardTrainer, without a token of padding in the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from trl.trainer.reward_trainer import RewardTrainer

from varlen.adapters.hf.documents import document_outputs
from varlen.adapters.hf.trainer_checks import noise_of_documents
from varlen.adapters.trl.dpo import PACKED, flat_row
from varlen.batch.packed import PackedBatch


class PackedRewardTrainer(RewardTrainer):
    """TRL's RewardTrainer, whose model computes the answers of a batch as documents of one row.

    TRL collates pairs into padded rows, and computes the loss, with margins and centring, and all metrics of the
    model's scores; these are computed in between of the same documents without padding. All settings are TRL's own.
    """

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.data_collator = AnswerCollator(cast(Any, self.data_collator))

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return TRL's loss of a batch of pairs."""
        if PACKED not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[no-untyped-call]
        padded = {name: value for name, value in inputs.items() if name != PACKED}
        call = DocumentCall(model=model, batch=inputs[PACKED])
        with noise_of_documents(self, inputs[PACKED]):
            return super().compute_loss(call, padded, return_outputs, num_items_in_batch)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class AnswerCollator:
    """TRL's collator of pairs, which adds the same documents as one flat row to the padded batch."""

    padded: Callable[[list[Any]], dict[str, Any]]
    """Collates B pairs into a batch of 2B padded rows, all chosen answers first."""

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Return TRL's batch, and a PackedBatch as `packed`."""
        batch = self.padded([*examples])
        return {**batch, PACKED: flat_row(batch)}


@dataclass(frozen=True, kw_only=True)
class DocumentCall:
    """A model that is called with padded rows, and computes their documents in one flat row."""

    model: Any
    """The model, possibly wrapped."""
    batch: PackedBatch
    """The rows' documents, in their order."""

    def __call__(self, **_: Any) -> Any:
        """Return the model's outputs, one a row."""
        return document_outputs(self.model, self.batch)
