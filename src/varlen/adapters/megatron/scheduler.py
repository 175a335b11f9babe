"""`balance_microbatches`: a step's samples in, packed micro-batches of even work out, as many on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from varlen.adapters.peers import raises_too
from varlen.arguments import LARGEST, as_choice, as_count
from varlen.counts import many
from varlen.errors import DocumentsError, LengthsError, SettingError
from varlen.pack.api import DEFAULT_WORK, as_work
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import check_fit
from varlen.plan.partition import even_ways, packed
from varlen.types import FloatArray, Int32Array, IntArray

Overlong = Literal["error", "alone"]
Fill = Literal["error", "repeat", "empty"]
_LARGEST_ID = 2**63 - 1


def balance_microbatches(
    lengths: npt.ArrayLike,
    *,
    capacity: int,
    dp_size: int,
    cp_size: int = 1,
    group_multiple: int = 1,
    max_samples: int | None = None,
    ids: npt.ArrayLike | None = None,
    overlong: Overlong = "error",
    fill: Fill = "error",
    work: tuple[float, float] = DEFAULT_WORK,
) -> Microbatches:
    """Pack the samples of a global batch into micro-batches of even work, as many on every data-parallel rank.

    There are as few micro-batches as best-fit-decreasing needs, rounded up, or as many as Megatron-Core makes where
    that takes less time. Of several ways to fill them (even parts by the planner, spreading by work, full packs with
    the heaviest cut in two, and Megatron-Core's own) the one with the least makespan is taken. Micro-batches of about
    equal work run at the same time, and the heaviest goes to the rank with the least work so far (Graham 1969).

    Args:
        lengths: `[samples]` tokens that each takes up in a pack, whole numbers from 1; padded ones where samples are.
        capacity: tokens a micro-batch can hold: `max_seqlen_per_dp_cp_rank * cp_size`.
        dp_size: data-parallel ranks.
        cp_size: context-parallel ranks; they share their micro-batches.
        group_multiple: micro-batches per rank come in multiples of this: `microbatch_group_size_per_vp_stage` with a
            virtual pipeline.
        max_samples: most samples of a micro-batch; None for no limit.
        ids: `[samples]` whole numbers, each once; None: 0, 1, ….
        overlong: samples longer than `capacity`: "error", or a micro-batch "alone".
        fill: a step with fewer samples than micro-batches: "error"; "repeat" its shortest sample in the others, or
            leave them "empty". Both are named in `dummies`, and their loss must be masked.
        work: (a, b): a sample of s tokens is a·s + b·s² of work.

    Returns:
        Micro-batches that hold every sample once. The heaviest come first; samples of one stand in input order.
        Equal input gives equal output, on every rank.

    Raises:
        LengthsError: lengths that aren't whole numbers from 1.
        OverlongDocumentError: a sample is longer than `capacity`, and `overlong` is "error".
        DocumentsError: ids that aren't one for each length, or one twice; too few samples, and `fill` is "error".
        SettingError: a setting out of range.

    Cost: O(samples · log samples) and at most 0.1 s for even parts; a millisecond or two for a few hundred samples.

    >>> balance_microbatches([5, 2, 6, 3, 1, 7], capacity=8, dp_size=2).to_lists()
    [[[5], [2]], [[0], [1, 3, 4]]]
    """
    step = _checked(lengths, capacity, max_samples, overlong, work)
    names = _as_ids(ids, step.lengths.size)
    ranks, contexts = as_count(dp_size, "dp_size"), as_count(cp_size, "cp_size")
    multiple = ranks * as_count(group_multiple, "group_multiple")
    as_choice(fill, "fill", get_args(Fill))
    pack_of, packs = _best(step, ranks, multiple)
    missing = -packs % multiple
    if missing and fill == "error" and packs:
        raise DocumentsError(
            f"{many(packs, 'sample')} can't fill {packs + missing:,} micro-batches, {multiple:,} at a time "
            f"(dp_size {ranks:,} times group_multiple {multiple // ranks:,}); give at least {packs + missing:,} "
            'samples a step, or pass fill="repeat" or fill="empty" and mask the loss of the dummies'
        )
    return _dealt(step, names, pack_of, packs, missing, ranks, contexts, fill)


def dealt(work: FloatArray, ranks: int) -> IntArray:
    """Deal packs to ranks: those of about equal work at the same time, the heaviest where there was least so far.

    `work`: float64 `[packs]`, a multiple of the ranks. Returns int64 `[packs / ranks, ranks]`: the pack that each
    rank runs, one after another.

    >>> dealt(np.array([1.0, 9.0, 5.0, 2.0]), 2).tolist()
    [[1, 2], [0, 3]]
    """
    heavy_first = np.argsort(-work, kind="stable").reshape(-1, ranks)
    total = np.zeros(ranks)
    numbers = np.empty_like(heavy_first)
    for row, at_once in zip(numbers, heavy_first):
        row[np.argsort(total, kind="stable")] = at_once
        total += work[row]
    return numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """The samples of a step, checked."""

    lengths: Int32Array
    work: FloatArray
    """float64 `[samples]`."""
    fits: npt.NDArray[np.bool_]
    """bool `[samples]`: not longer than a micro-batch."""
    capacity: int
    most: int
    """Samples a micro-batch can hold."""


def _checked(
    lengths: npt.ArrayLike, capacity: int, max_samples: int | None, overlong: str, work: tuple[float, float]
) -> _Step:
    sizes, room = as_lengths(lengths), as_count(capacity, "capacity")
    as_choice(overlong, "overlong", get_args(Overlong))
    empty = np.flatnonzero(sizes == 0)
    if empty.size:
        raise LengthsError(
            f"sample {int(empty[0]):,} has no tokens ({int(empty.size):,} of {sizes.size:,} have none); leave "
            "such samples out before the step is scheduled"
        )
    fits = sizes <= room
    if overlong == "error":
        out = "cut it, raise `max_seqlen_per_dp_cp_rank` or the context-parallel size, or "
        out += 'pass overlong="alone"'
        check_fit([sizes], room, "sample {:,}".format, out=out, units="samples")
    a, b = as_work(work)
    tokens = sizes.astype(np.float64)
    most = LARGEST if max_samples is None else as_count(max_samples, "max_samples")
    return _Step(lengths=sizes, work=a * tokens + b * tokens**2, fits=fits, capacity=room, most=most)


def _as_ids(ids: npt.ArrayLike | None, samples: int) -> IntArray:
    if ids is None:
        return np.arange(samples)
    given = np.asarray(ids)
    if given.size == 0 and samples == 0:
        return np.arange(0)
    if given.dtype.kind == "u" and given.size and int(given.max()) > _LARGEST_ID:
        raise DocumentsError(
            f"id {int(given.max()):,} is over {_LARGEST_ID:,}, the largest of int64; give smaller ones"
        )
    if given.shape != (samples,) or given.dtype.kind not in "iu":
        raise DocumentsError(
            f"ids must be one whole number for each of the {samples:,} lengths; got {given.dtype} {given.shape}"
        )
    names, counts = np.unique(given, return_counts=True)
    if names.size < samples:
        raise DocumentsError(
            f"id {int(names[np.argmax(counts > 1)]):,} stands {int(counts.max()):,} times; give each sample its own"
        )
    return given.astype(np.int64)


def _best(step: _Step, ranks: int, multiple: int) -> tuple[IntArray, int]:
    """Return the pack of each sample, and how many there are: a multiple, or fewer where there aren't enough samples.

    No pack is empty. Over-long samples are single in the last ones.
    """
    inner = np.flatnonzero(step.fits)
    beyond = step.work[~step.fits]
    lengths, work = step.lengths[inner], step.work[inner]
    found: list[tuple[float, int, Int32Array]] = []
    for pack_of, packs in _ways(step, lengths, work, beyond.size, multiple):
        loads = np.bincount(pack_of, weights=work, minlength=packs)
        heavy = np.sort(np.concatenate([loads, beyond]))[::-1]
        found.append((float(heavy[::ranks].sum()), packs, pack_of))
    _, packs, chosen = min(found, key=lambda way: way[:2])  # the first of equally good ones
    pack_of_all = np.empty(step.lengths.size, np.int64)
    pack_of_all[inner] = chosen
    pack_of_all[~step.fits] = packs + np.arange(beyond.size)
    return pack_of_all, packs + beyond.size


def _ways(
    step: _Step, lengths: Int32Array, work: FloatArray, single: int, multiple: int
) -> list[tuple[Int32Array, int]]:
    """Return ways to pack samples that fit: the pack of each, and how many, which with `single` fill all ranks."""
    fullest, packs = packed(lengths, step.capacity, step.most, "best_fit_decreasing")
    goal = min(packs + -(packs + single) % multiple, lengths.size)
    ways = [(way, goal) for way in even_ways(lengths, work, fullest, goal, step.capacity, step.most)]
    in_order, packs = packed(lengths, step.capacity, step.most, "next_fit")
    theirs = packs + -(packs + single) % multiple
    if theirs <= lengths.size:
        ways.append((_peeled(in_order, packs, theirs), theirs))
    return ways


def _peeled(pack_of: Int32Array, packs: int, goal: int) -> Int32Array:
    """Take last samples off late packs, each for a pack of its own, until there are as many packs as wanted.

    `pack_of`: int32 `[samples]`, rising, as next-fit packs them.
    """
    peeled = pack_of.copy()
    is_first = np.diff(pack_of, prepend=np.int32(-1)) != 0
    peeled[np.flatnonzero(~is_first)[::-1][: goal - packs]] = np.arange(packs, goal)
    return peeled


def _dealt(
    step: _Step,
    names: IntArray,
    pack_of: IntArray,
    packs: int,
    missing: int,
    ranks: int,
    contexts: int,
    fill: Fill,
) -> Microbatches:
    """Return the micro-batches that the packs become, dealt to the ranks."""
    work = np.concatenate([np.bincount(pack_of, weights=step.work, minlength=packs), np.zeros(missing)])
    by_number = dealt(work, ranks).reshape(-1)  # the pack that each micro-batch is
    dummies = np.flatnonzero(by_number >= packs)
    position = np.empty(packs + missing, np.int64)
    position[by_number] = np.arange(by_number.size)
    order = np.argsort(position[pack_of], kind="stable")
    counts = np.bincount(position[pack_of], minlength=by_number.size)
    held, work = names[order], work[by_number]
    if missing and fill == "repeat":
        shortest = int(np.argmin(step.lengths))
        held = np.insert(held, (np.cumsum(counts) - counts)[dummies], names[shortest])
        counts[dummies], work[dummies] = 1, step.work[shortest]
    wide = step.lengths.astype(np.int64)
    return Microbatches(
        ids=held,
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        dummies=dummies,
        work=work,
        dp_size=ranks,
        cp_size=contexts,
        lower_bound=max(float(step.work.sum()) / ranks, float(step.work.max(initial=0))),
        seqlen_sum=int(wide.sum()),
        seqlen_squared_sum=sum(length * length for length in wide.tolist()),
    )


# `DpBalancedScheduler`: the balanced schedule behind the interface of Megatron-Core's `dp_balanced`.

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
            overlong: as in `balance_microbatches`, like `work`.
            fill: likewise; Megatron-Core's `run` can't pack an empty micro-batch, and masks none: with "repeat",
                pass what its `build_packed_microbatches` returns to `mask_dummies`.

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
            f"{len(samples):,} micro-batches of rank {dp_rank} were given; pass all "
            f"{microbatches.num_microbatches:,} of one of the ranks 0 to {microbatches.dp_size - 1}"
        )
    found = microbatches.is_dummy[:, dp_rank]
    for sample, is_dummy in zip(samples, found):
        if is_dummy and sample.get("loss_mask") is not None:
            sample["loss_mask"][...] = 0
    return int(found.sum())


# Micro-batches of one global batch, as many on every data-parallel rank.

Groups = list[list[list[int]]]
"""As Megatron-Core passes them: for each micro-batch, for each rank of data and context parallelism, sample ids."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Microbatches:
    """What each data-parallel rank runs in one step.

    Micro-batch m of rank r has number `m * dp_size + r` and holds the samples `ids[offsets[number]:offsets[number +
    1]]`, packed into one row. All ranks have as many, and none is empty but the dummies.
    """

    ids: IntArray
    """int64 `[samples]`: sample ids; in a dummy that repeats a sample, its id again."""
    offsets: IntArray
    """int64 `[num_microbatches * dp_size + 1]`."""
    dummies: IntArray
    """int64 `[any]`, rising: numbers of micro-batches that run only so that no rank waits in a collective: their loss
    must be masked. There are some only where a step has fewer samples than micro-batches."""
    work: FloatArray
    """float64 `[num_microbatches * dp_size]`: a·s + b·s², summed over the samples of each."""
    dp_size: int
    """Data-parallel ranks."""
    cp_size: int
    """Context-parallel ranks that share each micro-batch."""
    lower_bound: float
    """No division of these samples over these ranks has a smaller makespan: the mean work of a rank, or that of the
    sample with the most work where it is more."""
    seqlen_sum: int
    """Σs over the step's samples, dummies not counted: what Megatron-Core computes FLOPs from, exactly."""
    seqlen_squared_sum: int
    """Σs² over the step's samples, dummies not counted."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of each rank."""
        return (len(self.offsets) - 1) // self.dp_size

    @property
    def is_dummy(self) -> npt.NDArray[np.bool_]:
        """Whether each micro-batch is a dummy: bool `[num_microbatches, dp_size]`."""
        found = np.zeros(len(self.offsets) - 1, np.bool_)
        found[self.dummies] = True
        return found.reshape(-1, self.dp_size)

    @property
    def rank_work(self) -> FloatArray:
        """Work of each rank in the whole step: float64 `[dp_size]`."""
        total: FloatArray = self.work.reshape(-1, self.dp_size).sum(axis=0)
        return total

    @property
    def makespan(self) -> float:
        """Work of the step where ranks wait for each other at every micro-batch: Σ over them of the heaviest."""
        return float(self.work.reshape(-1, self.dp_size).max(axis=1, initial=0).sum())

    def samples(self, microbatch: int, dp_rank: int) -> IntArray:
        """Return the sample ids of one micro-batch.

        Args:
            microbatch, dp_rank: numbers from 0.
        """
        number = microbatch * self.dp_size + dp_rank
        return self.ids[self.offsets[number] : self.offsets[number + 1]]

    def to_lists(self) -> Groups:
        """Return `[num_microbatches][dp_size * cp_size]` lists of ids, as Megatron-Core's schedulers do.

        The ranks of context parallelism that share a micro-batch stand next to each other.
        """
        packs = [pack.tolist() for pack in np.split(self.ids, self.offsets[1:-1])]
        return [
            [list(pack) for pack in packs[first : first + self.dp_size] for _ in range(self.cp_size)]
            for first in range(0, len(self.offsets) - 1, self.dp_size)
        ]
