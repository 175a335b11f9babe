"""What a document takes up in a row: slots that context and sequence parallelism can divide."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.dialects import NEWEST, as_dialect
from varlen.arguments import as_count
from varlen.errors import OverlongDocumentError, SettingError
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import Pieces, fit
from varlen.types import Int32Array, IntArray, Overlong


def alignment(
    context_parallel_size: int = 1,
    tensor_model_parallel_size: int = 1,
    sequence_parallel: bool = False,
    eval_context_parallel_size: int | None = None,
) -> int:
    """Return the multiple to which every document of a row must be padded: `pad_seq_to_mult`.

    Each document is cut into 2 parts a context-parallel rank; with sequence parallelism each of those is divided
    over the tensor-parallel ranks too: lcm(2·CP, CP·TP). Megatron-Bridge computes it for packing in the batch, and
    leaves it to the user for packing ahead.

    Args:
        context_parallel_size: CP.
        tensor_model_parallel_size: TP.
        sequence_parallel: whether tensor-parallel ranks divide the sequence.
        eval_context_parallel_size: CP of evaluation, where it is another.

    Raises:
        SettingError: a size below 1.

    >>> alignment(2), alignment(2, 8, sequence_parallel=True), alignment(2, eval_context_parallel_size=3)
    (4, 16, 12)
    """
    tensor = as_count(tensor_model_parallel_size, "tensor_model_parallel_size")
    sizes = {"context_parallel_size": context_parallel_size}
    if eval_context_parallel_size is not None:
        sizes["eval_context_parallel_size"] = eval_context_parallel_size
    multiple = 1
    for name, value in sizes.items():
        context = as_count(value, name)
        multiple = math.lcm(multiple, 2 * context if context > 1 else 1)
        if sequence_parallel and tensor > 1:
            multiple = math.lcm(multiple, context * tensor)
    return multiple


def longest_aligned(pack_size: int, multiple: int = 1, longest: int | None = None) -> int:
    """Return the most positions of a document whose slot still fits: the limit rounded down to the multiple.

    >>> longest_aligned(4096, 8), longest_aligned(4096, 8, longest=1_003)
    (4096, 1000)
    """
    pack_size, multiple = as_count(pack_size, "pack_size"), as_count(multiple, "multiple")
    limit = pack_size if longest is None else min(pack_size, as_count(longest, "longest"))
    if limit < multiple:
        name = "longest" if limit < pack_size else "pack_size"
        raise SettingError(
            f"{name} is {limit:,}, but documents are padded to multiples of {multiple:,} positions, so that none "
            f"fits; pass at least {multiple:,}"
        )
    return limit // multiple * multiple


def check_size(size: int, multiple: int, name: str) -> None:
    """Require that a row's size is a multiple of what documents are padded to."""
    if size % multiple:
        below = size // multiple * multiple
        near = f"{below:,} or {below + multiple:,}" if below else f"{multiple:,}"
        raise SettingError(
            f"{name} is {size:,}, which is no multiple of pad_seq_to_mult, {multiple:,}; the nearest: {near}"
        )


def aligned_pieces(
    positions: npt.ArrayLike,
    pack_size: int,
    *,
    multiple: int = 1,
    longest: int | None = None,
    overlong: Overlong = "error",
) -> Pieces:
    """Cut documents so that each piece's slot fits in a row, and nothing is cut in silence.

    The releases cut a document at the last multiple that fits, near the pack size too where it is no multiple:
    `overlong="truncate"` does the same, and counts it.

    Args:
        positions: `[documents]`: positions of input, `len(input_ids) - 1`.
    """
    lengths = as_lengths(positions)
    limit = longest_aligned(pack_size, multiple, longest)
    if overlong == "error" and lengths.size and int(lengths.max()) > limit:
        too_long = lengths > limit
        first = int(np.argmax(too_long))
        to = f"; aligned to {multiple:,} it would take {_up(int(lengths[first]), multiple):,}"
        raise OverlongDocumentError(
            f"document {first:,} has {int(lengths[first]) + 1:,} tokens, {int(lengths[first]):,} positions of input"
            f"{to if multiple > 1 else ''}, but {limit:,} are the most that fit ({int(too_long.sum()):,} of "
            f'{lengths.size:,} documents are too long); pass overlong="split", "truncate" or "drop" (--overlong), or '
            f"positions for {_up(int(lengths.max()), multiple):,} (--capacity, --longest)"
        )
    return fit(lengths, limit, overlong)


def slots_of(positions: Int32Array, multiple: int) -> Int32Array:
    """Return the positions that pieces take up, int32: rounded up to the multiple; a row stores one token more each.

    Args:
        positions: int32 `[pieces]`.
    """
    if multiple == 1:
        return positions
    slots: Int32Array = (-(-positions.astype(np.int64) // multiple) * multiple).astype(np.int32)
    return slots


def stored_lengths(
    lengths: npt.ArrayLike, longest: int, multiple: int = 1, dialect: str = NEWEST
) -> IntArray:
    """Return how many tokens of each document a release stores, padding included: what its own packing would do.

    From 0.6 on a document of n tokens becomes min(⌊longest/m⌋·m, ⌈(n - 1)/m⌉·m) positions and one token more; what is
    longer is cut. Before, it became ⌈n/m⌉·m + 1 tokens or `longest` + 1, which doesn't always divide, and a document
    of just `longest` tokens overflowed its pack.

    Args:
        lengths: `[documents]` tokens of each.
        longest: the release's `max_seq_length`.
        multiple: its `pad_seq_to_mult`.
        dialect: or a release.

    Returns:
        int64 `[documents]`.

    >>> stored_lengths([9, 10, 17, 40], 16, 8).tolist(), stored_lengths([9, 10, 17, 40], 16, 8, "0.4").tolist()
    ([9, 17, 17, 17], [17, 17, 16, 16])
    """
    tokens = as_lengths(lengths).astype(np.int64)
    if multiple == 1:
        return tokens
    if as_dialect(dialect) == "0.6":
        limit = longest_aligned(longest, multiple)
        target: IntArray = np.minimum(-(-np.maximum(tokens - 1, 0) // multiple) * multiple, limit) + 1
        return target
    most = np.minimum(-(-tokens // multiple) * multiple, longest)
    stored: IntArray = np.where(tokens <= most, most + 1, np.minimum(tokens, longest))
    return stored


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
