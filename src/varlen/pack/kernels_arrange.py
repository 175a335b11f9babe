"""Kernels that turn an assignment into the arrays of a Packing, and that cut a stream into full packs.

Compiled by numba; `tests/oracles/pack.py` says in plain Python what each must return.
"""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from varlen.jit import compiled
from varlen.pack import in_python

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@compiled(in_python=in_python._scramble)
def _scramble(state: np.uint64) -> np.uint64:
    """SplitMix64's output function (Steele, Lea and Flood 2014): 64 well mixed bits of a counter."""
    word = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@compiled(in_python=in_python.permutation)
def permutation(seed: np.uint64, order: Int64) -> None:
    """Write a random permutation of 0 … n - 1, the same for a seed on every machine and version."""
    for index in range(order.size):
        order[index] = index
    state = seed
    for index in range(order.size - 1, 0, -1):
        state += np.uint64(0x9E3779B97F4A7C15)
        other = np.int64(_scramble(state) % np.uint64(index + 1))
        order[index], order[other] = order[other], order[index]


@compiled(in_python=in_python.rank_packs)
def rank_packs(pack_of: Int32, rank: Int32) -> int:
    """Renumber packs, in place, by their first piece; returns the number of packs that hold a piece.

    Args:
        pack_of: int32 `[num_pieces]`: the pack of each piece as opened, -1 for none; ranks afterwards.
        rank: int32 `[num_packs]` of -1, overwritten.
    """
    used = 0
    for piece in range(pack_of.size):
        pack = pack_of[piece]
        if pack < 0:
            continue
        if rank[pack] < 0:
            rank[pack] = used
            used += 1
        pack_of[piece] = rank[pack]
    return used


@compiled(in_python=in_python.renumber)
def renumber(pack_of: Int32, number: Int64) -> None:
    """Give every pack another number, in place; -1 stays."""
    for piece in range(pack_of.size):
        if pack_of[piece] >= 0:
            pack_of[piece] = number[pack_of[piece]]


@compiled(in_python=in_python.batch_bounds)
def batch_bounds(pack_of: Int32, shift: int, begin: Int64) -> int:
    """Write where each batch of 2^shift neighbouring packs begins; returns the pieces of the largest batch.

    Args:
        pack_of: int32 `[num_pieces]`: the pack of each piece, -1 for none.
        shift: packs of a batch, as a power of two.
        begin: int64 `[num_batches + 1]` of zeros, written.
    """
    for piece in range(pack_of.size):
        if pack_of[piece] >= 0:
            begin[(pack_of[piece] >> shift) + 1] += 1
    largest = np.int64(0)
    for batch in range(1, begin.size):
        largest = max(largest, begin[batch])
        begin[batch] += begin[batch - 1]
    return largest


@compiled(in_python=in_python.gather_batches)
def gather_batches(
    pack_of: Int32, lengths: Int32, shift: int, length_bits: int, position: Int64, words: Int64
) -> None:
    """Bring the pieces of neighbouring packs together.

    First of two passes of a radix sort that never writes far from where it wrote before: at 10^8 pieces it
    takes a fraction of the time of one scattered write each. A word holds a piece's number, its pack's place
    in the batch, and its length.

    Args:
        pack_of: int32 `[num_pieces]`: the pack of each piece, -1 for none.
        lengths: int32 `[num_pieces]`.
        shift: packs of a batch, as a power of two.
        length_bits: bits that the largest length takes.
        position: where each batch begins, from `batch_bounds`; moved on.
        words: int64 `[num_placed]`, written.
    """
    place = (1 << shift) - 1
    for piece in range(pack_of.size):
        pack = pack_of[piece]
        if pack >= 0:
            batch = pack >> shift
            word = (((np.int64(piece) << shift) | (pack & place)) << length_bits) | lengths[piece]
            words[position[batch]] = word
            position[batch] += 1


@compiled(in_python=in_python.order_batches)
def order_batches(
    words: Int64,
    begin: Int64,
    shift: int,
    length_bits: int,
    buffer: Int64,
    position: Int64,
    offsets: Int64,
    lengths: Int32,
) -> None:
    """Finish the sort within each batch of packs, which fits in a core's cache, and take the words apart.

    Args:
        words: int64 `[num_placed]` as `gather_batches` left them; piece numbers afterwards.
        begin: int64 `[num_batches + 1]`: where each batch begins.
        shift: packs of a batch, as a power of two.
        length_bits: bits that the largest length takes.
        buffer: int64, as long as the largest batch: working space.
        position: int64 `[2^shift + 1]`: working space.
        offsets: int64 `[num_packs + 1]`, written.
        lengths: int32 `[num_placed]`, written.
    """
    place = (1 << shift) - 1
    length_mask = (np.int64(1) << length_bits) - 1
    for batch in range(begin.size - 1):
        start, stop = begin[batch], begin[batch + 1]
        for local in range(place + 2):
            position[local] = 0
        for index in range(start, stop):
            buffer[index - start] = words[index]
            position[((words[index] >> length_bits) & place) + 1] += 1
        position[0] = start
        for local in range(place + 1):
            position[local + 1] += position[local]
            if (batch << shift) + local < offsets.size:
                offsets[(batch << shift) + local] = position[local]
        for index in range(stop - start):
            word = buffer[index]
            local = (word >> length_bits) & place
            to = position[local]
            position[local] = to + 1
            words[to] = word >> (length_bits + shift)
            lengths[to] = word & length_mask
    offsets[offsets.size - 1] = words.size


@compiled(in_python=in_python.checksum)
def checksum(lengths: Int32) -> np.uint64:
    """An order-free 64-bit sum over all non-empty pieces of their numbers and lengths, scrambled."""
    total = np.uint64(0)
    for piece in range(lengths.size):
        if lengths[piece] > 0:
            total += _scramble((np.uint64(piece) << np.uint64(31)) | np.uint64(lengths[piece]))
    return total


@compiled(in_python=in_python.audit)
def audit(
    pieces: Int64, lengths: Int32, offsets: Int64, capacity: int, multiple: int
) -> tuple[int, int, np.uint64]:
    """Count what stands in finished packs, from nothing but the packs.

    Args:
        pieces: int64 `[num_placed]`: piece numbers, pack by pack.
        lengths: int32 `[num_placed]`.
        offsets: int64 `[num_packs + 1]`.
        capacity: tokens a pack may hold.
        multiple: slots are lengths rounded up to it.

    Returns:
        Tokens in all packs, packs over capacity, and the `checksum` of the pieces in them.
    """
    tokens = 0
    total = np.uint64(0)
    for index in range(pieces.size):
        length = lengths[index]
        total += _scramble((np.uint64(pieces[index]) << np.uint64(31)) | np.uint64(length))
        tokens += length
    overfull = 0
    index = 0
    for pack in range(offsets.size - 1):
        used = 0
        while index < offsets[pack + 1]:
            length = np.int64(lengths[index])
            used += length if multiple == 1 else (length + multiple - 1) // multiple * multiple
            index += 1
        overfull += used > capacity
    return tokens, overfull, total


@compiled(in_python=in_python.misplaced)
def misplaced(documents: Int64, starts: Int32, lengths: Int32, wholes: Int32) -> int:
    """Count pieces, in input order, that don't go on where the one before ended, and documents left unfinished.

    Args:
        documents: int64 `[num_pieces]`: the document of each piece.
        starts: int32 `[num_pieces]`: its first token.
        lengths: int32 `[num_pieces]`: its tokens.
        wholes: int32 `[num_documents]`: tokens of each document that the pieces must make up.
    """
    if documents.size > 0 and documents[0] < 0:
        return documents.size + 1
    wrong = 0
    document = -1
    at = np.int64(0)
    for piece in range(documents.size + 1):
        coming = documents[piece] if piece < documents.size else wholes.size
        if coming != document:
            if document >= 0 and at != wholes[document]:
                wrong += 1
            for skipped in range(document + 1, min(coming, wholes.size)):
                wrong += wholes[skipped] != 0
            if coming < document or (coming >= wholes.size and piece < documents.size):
                return documents.size + 1
            document = coming
            at = np.int64(0)
        if piece < documents.size:
            wrong += starts[piece] != at
            at += lengths[piece]
    return wrong


@compiled(in_python=in_python.wrapped)
def wrapped(
    lengths: Int32,
    capacity: int,
    max_documents: int,
    multiple: int,
    documents: Int64,
    starts: Int32,
    stops: Int32,
    pack_of: Int32,
) -> tuple[int, int]:
    """Lay the documents end to end and cut every `capacity` tokens (slots, where those are rounded up).

    The four arrays are written if they have room for every piece, else only counted, so a first call with
    empty arrays tells how large they must be.

    Returns:
        The number of pieces and the number of packs.
    """
    num_pieces = 0
    num_packs = 0
    room = 0
    places = 0
    for document in range(lengths.size):
        start = 0
        while start < lengths[document]:
            if room == 0 or places == 0:
                num_packs += 1
                room = capacity
                places = max_documents
            stop = min(lengths[document], start + room)
            if num_pieces < documents.size:
                documents[num_pieces] = document
                starts[num_pieces] = start
                stops[num_pieces] = stop
                pack_of[num_pieces] = num_packs - 1
            num_pieces += 1
            room -= (stop - start + multiple - 1) // multiple * multiple
            places -= 1
            start = stop
    return num_pieces, num_packs
