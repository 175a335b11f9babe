"""The partition functions of verl, with its names, arguments and outputs, over varlen's planner.

verl 0.9.1 is what they follow. It refuses by assertions; the errors here are AssertionErrors too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.adapters.peers import raises_too
from varlen.arguments import LARGEST, as_count
from varlen.errors import LengthsError, OverlongDocumentError, SettingError
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import too_long
from varlen.plan.partition import Division, as_weights, by_part, even_packs, fitting_parts, packed, partition
from varlen.types import FloatArray, Int32Array

__all__ = [
    "calculate_workload",
    "get_group_balanced_partitions",
    "get_seqlen_balanced_partitions",
    "greedy_partition",
    "karmarkar_karp",
    "log_seqlen_unbalance",
    "micro_batch_partitions",
]

Partitions = list[list[int]]  # the items of each part, by number


@raises_too(AssertionError)
def get_seqlen_balanced_partitions(
    seqlen_list: npt.ArrayLike, k_partitions: int, equal_size: bool
) -> Partitions:
    """Divide samples into parts of even weight.

    Args:
        seqlen_list: `[num_samples]`: what each weighs: its length, or its `calculate_workload`.
        k_partitions: parts, at most as many as samples.
        equal_size: every part has as many samples as the others.

    Returns:
        `k_partitions` lists of sample numbers, each rising and none empty, in the order of their first samples.
        The heaviest part is never heavier than verl's.

    Raises:
        LengthsError: weights that are negative or no numbers.
        SettingError: more parts than samples, or samples that can't be divided evenly with `equal_size`.

    >>> get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2, equal_size=False)
    [[0, 1], [2, 3, 4]]
    """
    return _as_lists(seqlen_list, k_partitions, equal_size, "best")


@raises_too(AssertionError)
def karmarkar_karp(seqlen_list: npt.ArrayLike, k_partitions: int, equal_size: bool) -> Partitions:
    """Divide samples by the largest differencing method, as verl does, in a fraction of its time.

    Args:
        seqlen_list: `[num_samples]`: what each weighs.
        k_partitions: parts, at most as many as samples.
        equal_size: every part has as many samples as the others.

    Returns:
        The parts that verl's function of this name returns for whole numbers, in its order: from heavy to light.
        Within a part sample numbers rise; verl leaves them in the order in which they were joined.

    Raises:
        LengthsError: weights that are negative or no numbers.
        SettingError: more parts than samples, or samples that can't be divided evenly with `equal_size`.
    """
    return _as_lists(seqlen_list, k_partitions, equal_size, "karmarkar_karp")


@raises_too(AssertionError)
def greedy_partition(seqlen_list: npt.ArrayLike, k_partitions: int, equal_size: bool) -> Partitions:
    """Assign each sample, in order, to the part with the least weight.

    Args:
        seqlen_list: `[num_samples]`: what each weighs.
        k_partitions: parts, at most as many as samples.
        equal_size: fill all parts alike: of those with the fewest samples, the part with the least weight.

    Returns:
        The parts that verl's function of this name returns.

    Raises:
        LengthsError: weights that are negative or no numbers.
        SettingError: more parts than samples, or samples that can't be divided evenly with `equal_size`.
    """
    return _as_lists(seqlen_list, k_partitions, equal_size, "greedy")


@raises_too(AssertionError)
def get_group_balanced_partitions(
    seqlen_list: npt.ArrayLike, uid_list: Sequence[Any], k_partitions: int
) -> Partitions:
    """Divide samples into parts of even work, those of one uid kept together, as many uids in each part.

    Args:
        seqlen_list: `[num_samples]` lengths.
        uid_list: `[num_samples]`: what tells groups apart; a group's samples stand next to each other.
        k_partitions: parts; the number of groups is a multiple.

    Returns:
        `k_partitions` lists of sample numbers, each rising.

    Raises:
        LengthsError: lengths that are negative, or not one uid for each.
        SettingError: groups that can't be divided evenly, or a uid that comes back after another.
    """
    lengths = as_weights(seqlen_list)
    if len(uid_list) != lengths.size:
        raise LengthsError(
            f"{lengths.size:,} lengths and {len(uid_list):,} uids were given; pass one uid for each length"
        )
    uids = list(uid_list)
    opens = [number == 0 or uid != uids[number - 1] for number, uid in enumerate(uids)]
    groups = sum(opens)
    if len(set(uids)) != groups:
        raise SettingError(
            f"{len(set(uids)):,} uids stand in {groups:,} runs: some come back after another; "
            "sort the samples by uid, so that each group stays together"
        )
    group_of = np.cumsum(opens) - 1
    work = np.zeros(groups, lengths.dtype)
    np.add.at(work, group_of, calculate_workload(lengths))
    return _lists(partition(work, k_partitions, is_equal=True)[group_of], k_partitions)


def calculate_workload(seqlen_list: Any) -> Any:
    """Return the work of sequences as verl counts it, 24,576·s + s²: of a model 4,096 wide.

    Args:
        seqlen_list: lengths: an array, a tensor or a number.
    """
    return 24576 * seqlen_list + seqlen_list**2


def log_seqlen_unbalance(seqlen_list: npt.ArrayLike, partitions: Partitions, prefix: str) -> dict[str, Any]:
    """Return how even parts are, beside those of the samples in the order given.

    Args:
        seqlen_list: `[num_samples]`: what each weighs.
        partitions: the samples of each part.
        prefix: what the names begin with.

    Returns:
        `min`, `max` and `minmax_diff` of as many runs of the samples in order, `balanced_min` and `balanced_max` of
        the parts, and their `mean`. Where the samples can't be divided evenly, runs differ by at most one sample;
        verl's last run is then what is left over.

    Raises:
        SettingError: no parts.
    """
    values = as_weights(seqlen_list)
    if not len(partitions):
        raise SettingError(
            "0 parts were given, so nothing can be compared; pass what a partition function returned"
        )
    runs = [run.sum().item() for run in np.array_split(values, len(partitions))]
    loads = [values[np.asarray(part, np.int64)].sum().item() for part in partitions]
    return {
        f"{prefix}/min": min(runs),
        f"{prefix}/max": max(runs),
        f"{prefix}/minmax_diff": max(runs) - min(runs),
        f"{prefix}/balanced_min": min(loads),
        f"{prefix}/balanced_max": max(loads),
        f"{prefix}/mean": values.sum().item() / len(partitions),
    }


def _as_lists(weights: npt.ArrayLike, num_parts: int, is_equal: bool, method: Division) -> Partitions:
    return _lists(partition(weights, num_parts, is_equal=is_equal, method=method), num_parts)


def _lists(part_of: npt.NDArray[np.int32], num_parts: int) -> Partitions:
    items, offsets = by_part(part_of, num_parts)
    return [part.tolist() for part in np.split(items, offsets[1:-1])]


# Micro-batches under a limit of tokens, as many on every rank: the division of verl's `rearrange_micro_batches`.


def micro_batch_partitions(
    seqlen_list: npt.ArrayLike,
    max_token_len: int,
    *,
    num_batches_divided_by: int | None = None,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
    largest_of_all: Callable[[int], int] | None = None,
) -> Partitions:
    """Divide a rank's samples into micro-batches of even work, with arguments of verl's `rearrange_micro_batches`.

    The parts are as many as it takes to keep to the limit, found by best-fit-decreasing where verl tries one number
    after the other; and their heaviest is as light as can be. Moving the tensors is the caller's.

    Args:
        seqlen_list: `[num_samples]` tokens of each, from 1.
        max_token_len: tokens a micro-batch can hold.
        num_batches_divided_by: their number is a multiple of this, for a virtual pipeline.
        min_num_micro_batch: fewest of them, for a pipeline.
        use_dynamic_bsz_balance: the heaviest stand in the middle, where a pipeline's bubbles don't show; else in the
            order of their first samples.
        force_group_size: so many neighbours stay together, for pairs.
        largest_of_all: returns the largest of a number over all data-parallel ranks; all must call this function
            then, and get as many micro-batches. It is called twice on each before any of them raises for its samples,
            so that none is left waiting for the others.

    Returns:
        The samples of each micro-batch, none empty.

    Raises:
        LengthsError: lengths that aren't whole numbers from 1, or not whole groups of them.
        OverlongDocumentError: a sample or group is over the limit; or another rank raises one of these two.
        SettingError: more micro-batches than a rank has samples or groups; or a setting out of range.

    >>> micro_batch_partitions([5, 2, 6, 3, 1, 7], 8, num_batches_divided_by=2)
    [[1, 3, 4], [5], [2], [0]]
    """
    limit, size = as_count(max_token_len, "max_token_len"), as_count(force_group_size, "force_group_size")
    multiple = as_count(
        1 if num_batches_divided_by is None else num_batches_divided_by, "num_batches_divided_by"
    )
    fewest = as_count(
        1 if min_num_micro_batch is None else min_num_micro_batch, "min_num_micro_batch", least=0
    )
    wrong: LengthsError | None = None
    try:
        lengths, work = _grouped(seqlen_list, size)
    except LengthsError as error:  # raised below: the other ranks ask for their numbers all the same
        wrong, lengths, work = error, np.zeros(0, np.int32), np.zeros(0)

    def largest(number: int) -> int:
        return number if largest_of_all is None else int(largest_of_all(number))

    longest = int(lengths.max(initial=0))
    is_divisible = wrong is None and longest <= limit
    parts = largest(max(_needed(lengths, work, limit), fewest) if is_divisible else LARGEST)
    groups = -largest(-lengths.size)
    if wrong is not None:
        raise wrong
    if parts == LARGEST:
        if longest <= limit:
            raise OverlongDocumentError(
                f"a sample of another rank is over the max_token_len of {limit:,}, or none that can be divided; its "
                "own error says which. Raise it, or cut or leave out such samples, on all ranks"
            )
        seen = f"a sample or group has {longest:,} tokens that must stay together"
        raise too_long(seen, f"max_token_len is {limit:,}", "raise it, or cut such samples")
    parts += -parts % multiple
    if parts > groups:
        raise SettingError(
            f"{parts:,} micro-batches of at most {limit:,} tokens are needed, but a rank has only {groups:,} "
            "samples or groups; lower min_num_micro_batch or num_batches_divided_by, or give it more samples"
        )
    part_of = even_packs(lengths, work, parts, limit) if lengths.size else np.zeros(0, np.int32)
    loads = np.bincount(part_of, weights=work, minlength=parts)
    first = np.unique(part_of, return_index=True)[1]
    order = np.lexsort((-first, -loads)) if use_dynamic_bsz_balance else np.argsort(first)
    if use_dynamic_bsz_balance:
        order = np.concatenate([order[::2][::-1], order[1::2]])
    owners = np.repeat(part_of, size)
    return [np.flatnonzero(owners == part).tolist() for part in order]


def _grouped(seqlen_list: npt.ArrayLike, size: int) -> tuple[Int32Array, FloatArray]:
    """Return tokens and work of each group of neighbours."""
    lengths = as_lengths(seqlen_list)
    if lengths.size and not lengths.min():
        raise LengthsError(f"sample {int(np.argmin(lengths)):,} has no tokens; leave such samples out")
    if lengths.size % size:
        raise LengthsError(f"{lengths.size:,} samples aren't whole groups of {size:,}; give a multiple")
    work = calculate_workload(lengths.astype(np.float64)).reshape(-1, size).sum(axis=1)
    return as_lengths(lengths.reshape(-1, size).sum(axis=1, dtype=np.int64)), work


def _needed(lengths: Int32Array, work: FloatArray, limit: int) -> int:
    """Return the fewest micro-batches within the limit that best-fit-decreasing or an even division finds."""
    if not lengths.size:
        return 0
    packs = packed(lengths, limit)[1]
    for fewer in range(-(-int(lengths.sum(dtype=np.int64)) // limit), packs):
        if fitting_parts(lengths, work, fewer, limit):
            return fewer
    return packs
