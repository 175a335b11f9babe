"""Micro-batches under a limit of tokens, as many on every rank: the division of verl's `rearrange_micro_batches`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from varlen.adapters.verl.partitions import Partitions, calculate_workload
from varlen.errors import LengthsError, OverlongDocumentError, SettingError
from varlen.pack.lengths import LARGEST, as_count, as_lengths
from varlen.plan.partition import even_packs, fitting_parts, packed
from varlen.types import FloatArray, Int32Array


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
    except LengthsError as error:  # told below: the other ranks ask for their numbers all the same
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
        raise OverlongDocumentError(
            f"{longest:,} tokens that must stay together: over the max_token_len of {limit:,}; raise it, or cut "
            "such samples"
        )
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
    """Return the tokens of each group of neighbours, and its work.

    Raises:
        LengthsError: lengths of 0, or groups that aren't whole.
    """
    lengths = as_lengths(seqlen_list)
    if lengths.size and not lengths.min():
        raise LengthsError(f"sample {int(np.argmin(lengths)):,} has no tokens; leave such samples out")
    if lengths.size % size:
        raise LengthsError(f"{lengths.size:,} samples aren't whole groups of {size:,}; give a multiple")
    work = calculate_workload(lengths.astype(np.float64)).reshape(-1, size).sum(axis=1)
    return as_lengths(lengths.reshape(-1, size).sum(axis=1, dtype=np.int64)), work


def _needed(lengths: Int32Array, work: FloatArray, limit: int) -> int:
    """Return how few micro-batches keep to the limit: those of best-fit-decreasing, or fewer that are even parts."""
    if not lengths.size:
        return 0
    packs = packed(lengths, limit)[1]
    for fewer in range(-(-int(lengths.sum(dtype=np.int64)) // limit), packs):
        if fitting_parts(lengths, work, fewer, limit):
            return fewer
    return packs
