"""The partition functions of verl, with its names, arguments and outputs, over varlen's planner.

verl 0.9.1 is what they follow. It refuses by assertions; the errors here are AssertionErrors too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.adapters.peers import raises_too
from varlen.errors import LengthsError, SettingError
from varlen.plan.partition import Division, as_weights, by_part, partition

Partitions = list[list[int]]
"""The items of each part, by number."""


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
    """Give each sample, in order, to the part with the least weight.

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
    """A division by one of the planner's methods, in verl's form."""
    return _lists(partition(weights, num_parts, is_equal=is_equal, method=method), num_parts)


def _lists(part_of: npt.NDArray[np.int32], num_parts: int) -> Partitions:
    """The items of each part as lists."""
    items, offsets = by_part(part_of, num_parts)
    return [part.tolist() for part in np.split(items, offsets[1:-1])]
