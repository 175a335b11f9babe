"""What a document takes up in a row: slots that context and sequence parallelism can divide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.files.opening import open_packed
from varlen.adapters.megatron.rows import NEWEST, as_dialect, near_multiples
from varlen.adapters.peers import raises_too
from varlen.arguments import as_count
from varlen.errors import DocumentsError, SettingError
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import Pieces, fit, too_long, ways_out
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
        raise SettingError(
            f"{name} is {size:,}, which is no multiple of pad_seq_to_mult, {multiple:,}; the nearest: "
            f"{near_multiples(size, multiple)}"
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

    `positions`: `[documents]`: positions of input, `len(input_ids) - 1`.
    """
    lengths = as_lengths(positions)
    limit = longest_aligned(pack_size, multiple, longest)
    if overlong == "error" and lengths.size and int(lengths.max()) > limit:
        over = lengths > limit
        first, most = int(np.argmax(over)), _up(int(lengths.max()), multiple)
        long = int(lengths[first])
        seen = f"document {first:,} has {long + 1:,} tokens, {long:,} positions of input"
        if multiple > 1:
            seen += f"; aligned to {multiple:,} it would take {_up(long, multiple):,}"
        out = f"{ways_out(limit='the limit')} to {most:,} positions (--overlong, --capacity, --longest)"
        raise too_long(f"{seen},", f"{limit:,} are the most that fit", out, (int(over.sum()), lengths.size))
    return fit(lengths, limit, overlong)


def slots_of(positions: Int32Array, multiple: int) -> Int32Array:
    """Return the positions that pieces take up, int32: rounded up to the multiple; a row stores one token more each.

    `positions`: int32 `[pieces]`.
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
        dialect: "0.4", "0.5" or "0.6"; or a release, such as "0.5.1".

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


# How long the documents of packed rows are on average: what the releases compute the work of a step from.


@raises_too(AssertionError)
def get_seqlen_list(elem: Mapping[str, Any]) -> tuple[list[int], int]:
    """Return the positions of each document of a packed row, and of all.

    Args:
        elem: a row with `input_ids` and `seq_start_id`.

    >>> get_seqlen_list({"input_ids": [5, 6, 7, 8, 9], "seq_start_id": [0, 2]})
    ([1, 2], 3)
    """
    bounds = [*(int(start) for start in elem["seq_start_id"]), len(elem["input_ids"])]
    lengths = [stop - start - 1 for start, stop in zip(bounds, bounds[1:])]
    return lengths, sum(lengths)


def calculate_avg_seqlen(
    dataset_file: str, gbs: int, max_seq_len: int, drop_remainder: bool
) -> tuple[float, float, float, float]:
    """Return what the documents of a packed set are like on average.

    The numbers are the release's, of `input_ids` and `seq_start_id` alone; Parquet is read a million tokens at a
    time, and a `.npy` file's pickle isn't run.

    Args:
        dataset_file: packed rows: Parquet (a file, glob or folder), or `.npy`.
        gbs: rows of a global batch.
        max_seq_len: not used, as in the release.
        drop_remainder: leave out the rows after the last whole batch.

    Returns:
        Four means: documents of a row, positions of a row, squared positions of a document, and the sum of squared
        positions of a row.

    Raises:
        DocumentsError: no whole batch is there, or no document.
        SourceError: the file isn't there or is damaged.
    """
    del max_seq_len
    size = as_count(gbs, "gbs")
    with open_packed(dataset_file, masks=False) as reader:
        count = reader.num_rows // size * size if drop_remainder else reader.num_rows
        if count == 0:
            raise DocumentsError(
                f"{dataset_file} has {reader.num_rows:,} rows, fewer than a global batch of {size:,}; pass a smaller "
                "gbs, or drop_remainder=False"
            )
        documents = tokens = squares = taken = 0
        for rows in reader.batches():
            some = min(rows.num_rows, count - taken)
            held = int(rows.document_offsets[some])
            lengths = rows.stored_lengths[:held] - 1
            documents += held
            tokens += int(lengths.sum())
            squares += int(np.square(lengths).sum())
            taken += some
            if taken == count:
                break
    if documents == 0:
        raise DocumentsError(f"{dataset_file} has rows without a document; pack the data again")
    return documents / count, tokens / count, squares / documents, squares / count
