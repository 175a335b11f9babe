"""`balance_microbatches`: a step's samples in, packed micro-batches of even work out, as many on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.scheduling.microbatches import Microbatches
from varlen.arguments import LARGEST, as_choice, as_count
from varlen.counts import many
from varlen.errors import DocumentsError, LengthsError, OverlongDocumentError
from varlen.pack.api import DEFAULT_WORK, as_work
from varlen.pack.lengths import as_lengths
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

    There are as few micro-batches as best-fit-decreasing needs, rounded up. Of several ways to fill them (even parts
    by the planner, spreading by work, full packs with the heaviest cut in two, and what Megatron-Core does) the one
    with the least makespan is taken, so that no step takes longer than there. Micro-batches of about equal work run
    at the same time, and the heaviest of them goes to the rank with the least work so far (Graham 1969).

    Args:
        lengths: `[samples]` tokens that each takes up in a pack, whole numbers from 1; padded ones where samples are.
        capacity: tokens a micro-batch can hold: `max_seqlen_per_dp_cp_rank * cp_size`.
        dp_size: data-parallel ranks.
        cp_size: context-parallel ranks; they share their micro-batches.
        group_multiple: micro-batches a rank come in multiples of this: `microbatch_group_size_per_vp_stage` with a
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

    Args:
        work: float64 `[packs]`, a multiple of the ranks.

    Returns:
        int64 `[packs / ranks, ranks]`: the pack that each rank runs, one after another.

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
    """Return samples, or raise for what can't be scheduled."""
    sizes, room = as_lengths(lengths), as_count(capacity, "capacity")
    as_choice(overlong, "overlong", get_args(Overlong))
    empty = np.flatnonzero(sizes == 0)
    if empty.size:
        raise LengthsError(
            f"sample {int(empty[0]):,} has no tokens ({int(empty.size):,} of {sizes.size:,} have none); leave "
            "such samples out before the step is scheduled"
        )
    fits = sizes <= room
    if overlong == "error" and not fits.all():
        first = int(np.argmin(fits))
        raise OverlongDocumentError(
            f"sample {first:,} has {int(sizes[first]):,} tokens, over the {room:,} of a micro-batch "
            f"({int((~fits).sum()):,} of {sizes.size:,} samples are over it); cut it, raise "
            '`max_seqlen_per_dp_cp_rank` or the context-parallel size, or pass overlong="alone"'
        )
    a, b = as_work(work)
    tokens = sizes.astype(np.float64)
    most = LARGEST if max_samples is None else as_count(max_samples, "max_samples")
    return _Step(lengths=sizes, work=a * tokens + b * tokens**2, fits=fits, capacity=room, most=most)


def _as_ids(ids: npt.ArrayLike | None, samples: int) -> IntArray:
    """Return the samples' ids, each once."""
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
            f"ids must be one whole number for each of the {samples:,} lengths; got {given.dtype} of shape "
            f"{given.shape}"
        )
    names, counts = np.unique(given, return_counts=True)
    if names.size < samples:
        raise DocumentsError(
            f"id {int(names[np.argmax(counts > 1)]):,} stands {int(counts.max()):,} times; give each sample its own"
        )
    return given.astype(np.int64)


def _best(step: _Step, ranks: int, multiple: int) -> tuple[IntArray, int]:
    """Return the pack of each sample, and how many there are: a multiple, or fewer where there aren't enough samples.

    No pack is empty. Over-long samples stand alone in the last ones.
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
    step: _Step, lengths: Int32Array, work: FloatArray, alone: int, multiple: int
) -> list[tuple[Int32Array, int]]:
    """Return ways to pack samples that fit: the pack of each, and how many; with those alone, they fill all ranks."""
    fullest, packs = packed(lengths, step.capacity, step.most, "best_fit_decreasing")
    goal = min(packs + -(packs + alone) % multiple, lengths.size)
    ways = [(way, goal) for way in even_ways(lengths, work, fullest, goal, step.capacity, step.most)]
    in_order, packs = packed(lengths, step.capacity, step.most, "next_fit")
    theirs = packs + -(packs + alone) % multiple
    if theirs <= lengths.size:
        ways.append((_peeled(in_order, packs, theirs), theirs))
    return ways


def _peeled(pack_of: Int32Array, packs: int, goal: int) -> Int32Array:
    """Take last samples off late packs, each for a pack of its own, until there are as many packs as wanted.

    Args:
        pack_of: int32 `[samples]`, rising, as next-fit packs them.
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
    place = np.empty(packs + missing, np.int64)
    place[by_number] = np.arange(by_number.size)
    order = np.argsort(place[pack_of], kind="stable")
    counts = np.bincount(place[pack_of], minlength=by_number.size)
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
