"""`DpBalancedScheduler`: the balanced schedule behind the interface of Megatron-Core's `dp_balanced`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from varlen.adapters.megatron.scheduling.balance import Fill, Overlong, balance_microbatches
from varlen.adapters.megatron.scheduling.microbatches import Groups, Microbatches
from varlen.adapters.peers import raises_too
from varlen.arguments import as_choice, as_count
from varlen.errors import SettingError
from varlen.pack.api import DEFAULT_WORK

REQUIRED_SAMPLE_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "original_seq_len", "padded_seq_len")
"""What every sample must carry that Megatron-Core's schedulers pack."""


@raises_too(AssertionError)
class DpBalancedScheduler:
    """Packs the samples of each global batch into micro-batches of even work.

    Constructor and methods are those of `megatron.core.datasets.data_schedule.DpBalancedScheduler` (Megatron-LM's
    main branch of August 2026). That one fills micro-batches in order of arrival and balances only how many there
    are. Here their work is even too; no micro-batch is empty where the first sample is over-long; over-long samples
    are refused by name; and a step with fewer samples than ranks is what `fill` says, where that one fails in an
    assertion.

    `run`, which moves samples between the ranks, isn't here: a class that inherits from both has theirs.

    >>> scheduler = DpBalancedScheduler(4, cp_size=2, dp_size=2, microbatch_group_size_per_vp_stage=None)
    >>> scheduler.get_groups_and_subsamples([(0, 5), (1, 2), (2, 6), (3, 3)])
    [[[1, 2], [1, 2], [0, 3], [0, 3]]]
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None,
        max_num_seqs: int | None = None,
        *,
        overlong: Overlong = "error",
        fill: Fill = "error",
        work: tuple[float, float] = DEFAULT_WORK,
    ) -> None:
        """Take the settings.

        Args:
            max_seqlen_per_dp_cp_rank: tokens of a micro-batch that each context-parallel rank holds.
            cp_size: context-parallel ranks.
            dp_size: data-parallel ranks.
            microbatch_group_size_per_vp_stage: micro-batches come in multiples of it; None: no virtual
                pipeline.
            max_num_seqs: most samples of a micro-batch.
            overlong: samples longer than a micro-batch: "error", or a micro-batch "alone".
            fill: a step with fewer samples than micro-batches: "error", "repeat" or "empty"; see
                `balance_microbatches`. Megatron-Core's `run` can't pack an empty micro-batch, and masks none: with
                "repeat", `mask_dummies` what its `build_packed_microbatches` returns.
            work: (a, b): a sample of s tokens is a·s + b·s² of work.

        Raises:
            SettingError: a size out of range.
        """
        self.max_seqlen_per_dp_cp_rank = as_count(max_seqlen_per_dp_cp_rank, "max_seqlen_per_dp_cp_rank")
        self.cp_size, self.dp_size = as_count(cp_size, "cp_size"), as_count(dp_size, "dp_size")
        if microbatch_group_size_per_vp_stage is not None:
            as_count(microbatch_group_size_per_vp_stage, "microbatch_group_size_per_vp_stage")
        if max_num_seqs is not None:
            as_count(max_num_seqs, "max_num_seqs")
        as_choice(overlong, "overlong", get_args(Overlong))
        as_choice(fill, "fill", get_args(Fill))
        self.microbatch_group_size_per_vp_stage = microbatch_group_size_per_vp_stage
        self.max_num_seqs = max_num_seqs
        self.max_seq_len_all_ranks = self.max_seqlen_per_dp_cp_rank * self.cp_size
        self.is_dynamic_cp = False
        self.overlong: Overlong = overlong
        self.fill: Fill = fill
        self.work = work
        self.microbatches: Microbatches | None = None
        """What the last step was given, with its dummies and its work."""

    def get_required_sample_keys(self) -> list[str]:
        """Return the keys that every sample must have."""
        return list(REQUIRED_SAMPLE_KEYS)

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> Groups:
        """Return the sample ids of each micro-batch and rank, and keep them in `microbatches`.

        Args:
            sample_id_seqlens: (global id, padded length) of every sample of the step; the same on every rank.

        Raises:
            LengthsError: lengths that aren't whole numbers from 1.
            OverlongDocumentError: a sample is longer than a micro-batch, and `overlong` is "error".
            DocumentsError: an id twice, or too few samples, and `fill` is "error".
        """
        self.microbatches = balance_microbatches(
            [length for _, length in sample_id_seqlens],
            capacity=self.max_seq_len_all_ranks,
            dp_size=self.dp_size,
            cp_size=self.cp_size,
            group_multiple=self.microbatch_group_size_per_vp_stage or 1,
            max_samples=self.max_num_seqs,
            ids=[number for number, _ in sample_id_seqlens],
            overlong=self.overlong,
            fill=self.fill,
            work=self.work,
        )
        return self.microbatches.to_lists()


def mask_dummies(samples: Sequence[dict[str, Any]], microbatches: Microbatches, dp_rank: int) -> int:
    """Set the loss mask of a rank's dummies to zero, in place, so that a repeated sample isn't trained twice.

    Args:
        samples: the rank's packed micro-batches in order, as Megatron-Core's `build_packed_microbatches` returns
            them; one without a `loss_mask` (a stage of the pipeline that has none) is left as it is.
        microbatches: what they were packed from.
        dp_rank: which rank's they are.

    Returns:
        How many of them are dummies.

    Raises:
        SettingError: another number of micro-batches, or a rank that isn't one.
    """
    if len(samples) != microbatches.num_microbatches or not 0 <= dp_rank < microbatches.dp_size:
        raise SettingError(
            f"{len(samples):,} micro-batches of rank {dp_rank} were given, but the schedule has "
            f"{microbatches.num_microbatches:,} for each of ranks 0 to {microbatches.dp_size - 1}"
        )
    found = microbatches.is_dummy[:, dp_rank]
    for sample, is_dummy in zip(samples, found):
        if is_dummy and sample.get("loss_mask") is not None:
            sample["loss_mask"][...] = 0
    return int(found.sum())
