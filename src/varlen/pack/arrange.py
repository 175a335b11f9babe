"""An assignment of pieces to packs, laid out as the arrays of a Packing and audited."""

from __future__ import annotations

import numpy as np

from varlen.errors import LedgerError
from varlen.pack import kernels_arrange
from varlen.types import Int32Array, IntArray


def shuffled(seed: int, size: int) -> IntArray:
    """Return a random permutation, int64 `[size]`, the same for a seed on every machine and version."""
    order = np.empty(size, np.int64)
    kernels_arrange.permutation(np.uint64(seed), order)
    return order


def arrange(
    lengths: Int32Array, pack_of: Int32Array, num_packs: int, seed: int | None
) -> tuple[IntArray, Int32Array, IntArray]:
    """Bring the pieces of each pack together: packs by their first piece, or at random.

    Args:
        lengths: int32 `[num_pieces]`.
        pack_of: int32 `[num_pieces]`: packs as opened, -1 for pieces that are not packed. Its memory holds the
            lengths afterwards: at 10^8 pieces, memory that was never touched costs more than the sorting.
        num_packs: how many packs were opened.
        seed: permutes the packs; None leaves them in the order of their first piece.

    Returns:
        Piece numbers int64 `[num_placed]`, rising within a pack, their lengths int32 `[num_placed]`, and
        offsets int64 `[num_packs + 1]`.

    Raises:
        LedgerError: a pack was opened and left empty; a bug in varlen.
    """
    used = kernels_arrange.rank_packs(pack_of, np.full(num_packs, -1, np.int32))
    if used != num_packs:
        raise LedgerError(
            f"{num_packs:,} packs were opened and {num_packs - used:,} of them left empty. "
            "This is a bug in varlen; please report the lengths and the settings"
        )
    if seed is not None:
        kernels_arrange.renumber(pack_of, shuffled(seed, num_packs))
    length_bits = max(int(lengths.max(initial=0)), 1).bit_length()
    # A word is 63 bits; 2^11 packs, some 20,000 pieces, are sorted within a core's cache.
    shift = min(11, 63 - length_bits - max(pack_of.size, 1).bit_length())
    begin = np.zeros(-(-num_packs >> shift) + 1 if num_packs else 1, np.int64)
    largest = int(kernels_arrange.batch_bounds(pack_of, shift, begin))
    words = np.empty(int(begin[-1]), np.int64)
    kernels_arrange.gather_batches(pack_of, lengths, shift, length_bits, begin.copy(), words)
    placed_lengths, offsets = pack_of[: words.size], np.zeros(num_packs + 1, np.int64)
    space = np.empty(largest, np.int64), np.empty((1 << shift) + 1, np.int64)
    kernels_arrange.order_batches(words, begin, shift, length_bits, *space, offsets, placed_lengths)
    return words, placed_lengths, offsets


def checksum(lengths: Int32Array) -> int:
    """Return a 64-bit number that any loss, swap or repetition of a piece would change; see `audit`."""
    return int(kernels_arrange.checksum(lengths))


def audit_cuts(documents: IntArray, starts: Int32Array, lengths: Int32Array, wholes: Int32Array) -> None:
    """Require that pieces, in input order, make up their documents: each begins where the one before ended.

    `audit` then follows the pieces by number and length into the packs.

    Args:
        documents: int64 `[num_pieces]`.
        starts: int32 `[num_pieces]`.
        lengths: int32 `[num_pieces]`.
        wholes: int32 `[num_documents]`: tokens of each document that must be packed.

    Raises:
        LedgerError: a token stands in no piece or in two; a bug in varlen.
    """
    wrong = int(kernels_arrange.misplaced(documents, starts, lengths, wholes))
    if wrong:
        raise LedgerError(
            f"documents were cut so that {wrong:,} of {documents.size:,} pieces miss or repeat tokens. "
            "This is a bug in varlen; please report the lengths and the settings"
        )


def audit(
    pieces: IntArray,
    lengths: Int32Array,
    offsets: IntArray,
    capacity: int,
    max_documents: int,
    multiple: int,
    expected: int,
) -> tuple[int, int]:
    """Count the tokens in finished packs, and those of them that stand there twice.

    Pieces are compared with what went in by an order-free checksum of their numbers and lengths; only where
    it differs are repetitions counted one by one.

    Args:
        pieces: int64 `[num_placed]`.
        lengths: int32 `[num_placed]`.
        offsets: int64 `[num_packs + 1]`.
        capacity: tokens a pack may hold.
        max_documents: pieces a pack may hold.
        multiple: slots are lengths rounded up to it.
        expected: `checksum` of the pieces that went in.

    Raises:
        LedgerError: a pack is over its limits, or other pieces came out than went in; a bug in varlen.
    """
    tokens, overfull, total = kernels_arrange.audit(pieces, lengths, offsets, capacity, multiple)
    crowded = int((np.diff(offsets) > max_documents).sum())
    if overfull or crowded or int(total) != expected:
        _, first = np.unique(pieces, return_index=True)
        again = tokens - int(lengths[first].sum(dtype=np.int64))
        raise LedgerError(
            f"{overfull:,} of {offsets.size - 1:,} packs hold more than {capacity:,} tokens, {crowded:,} "
            f"more than {max_documents:,} pieces, {again:,} tokens stand twice, and the pieces packed "
            f"{'match' if int(total) == expected else 'differ from'} those given. "
            "This is a bug in varlen; please report the lengths and the settings"
        )
    return tokens, 0
