"""From the lengths in a token store to the rows of a packed set: the releases' packs, or better ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from varlen.adapters.megatron.packing.alignment import aligned_pieces
from varlen.adapters.megatron.packing.replay import as_packing, replay_packs
from varlen.adapters.megatron.packing.settings import RELEASES, WINDOWED, MegatronPackSettings
from varlen.documents.order import DocumentOrder
from varlen.pack.pieces import Pieces
from varlen.pack.window import WindowPacker
from varlen.store.store import TokenStore
from varlen.types import Int32Array, IntArray, Packing


def plan_rows(store: TokenStore, settings: MegatronPackSettings) -> Packing:
    """Return which positions of which documents stand in which row.

    Cost: about 100 bytes a document.
    """
    lengths = _lengths(store)
    if settings.algorithm in RELEASES:
        return _replayed(lengths, settings)
    positions = np.maximum(lengths - 1, 0)
    pieces = aligned_pieces(
        positions,
        settings.pack_size,
        multiple=settings.multiple,
        longest=settings.longest,
        overlong=settings.overlong,
    )
    order = _order(store, pieces, settings.seed if settings.shuffle else None)
    items, offsets = _windowed(pieces.lengths[order], settings)
    return as_packing(
        positions,
        pieces,
        order[items],
        offsets,
        settings.pack_size,
        settings.multiple,
        settings.overlong,
        settings.algorithm,
    )


def _lengths(store: TokenStore) -> Int32Array:
    """Return the tokens of every document, int32 `[documents]`."""
    parts = [np.zeros(0, dtype=np.int32)]
    for index in range(len(store.shards)):
        with store.shard(index) as shard:
            shard.check_offsets()
            parts.append(np.diff(shard.offsets).astype(np.int32))
    return np.concatenate(parts)


def _replayed(lengths: Int32Array, settings: MegatronPackSettings) -> Packing:
    """Pack as the release does; a document without a token has no place there, one of a single token has."""
    some = np.flatnonzero(lengths > 0).astype(np.int64)
    packing = replay_packs(
        lengths[some] - 1,
        settings.pack_size,
        settings.seed,
        algorithm="first_fit_shuffle"
        if settings.algorithm == "first_fit_shuffle"
        else "first_fit_decreasing",
        overlong=settings.overlong,
        multiple=settings.multiple,
        longest=settings.longest,
    )
    empty = len(lengths) - len(some)
    ledger = replace(
        packing.ledger,
        documents_in=len(lengths),
        empty_documents=packing.ledger.empty_documents + empty,
    )
    return replace(packing, document_ids=some[packing.document_ids], ledger=ledger)


def _order(store: TokenStore, pieces: Pieces, seed: int | None) -> IntArray:
    """Return the numbers of the pieces in shuffled order, or as they lie; a document's one after the other."""
    order = DocumentOrder(store.documents, seed)
    first = np.concatenate([[0], np.cumsum(store.documents)])
    documents = [np.zeros(0, dtype=np.int64)]
    for number in range(order.num_stretches):
        shards, within = order.stretch(number)
        documents.append(first[shards] + within)
    shuffled = np.concatenate(documents)
    if pieces.documents is None:
        return shuffled
    place = np.empty(len(shuffled), dtype=np.int64)
    place[shuffled] = np.arange(len(shuffled))
    return np.argsort(place[pieces.documents], kind="stable").astype(np.int64)


def _windowed(lengths: Int32Array, settings: MegatronPackSettings) -> tuple[IntArray, IntArray]:
    """Pack by windows in the order given; returns the pieces row by row, and where rows begin."""
    packer = WindowPacker(
        capacity=settings.pack_size,
        window=settings.window,
        method=WINDOWED[settings.algorithm],
        max_documents=settings.max_documents,
        document_multiple_of=settings.multiple,
    )
    steps = range(0, len(lengths), settings.window)
    packings = [packer.add(lengths[start : start + settings.window]) for start in steps]
    packings.append(packer.flush())
    shifts = np.cumsum([0, *(packing.num_pieces for packing in packings)])
    offsets = [packing.offsets[1:] + shift for packing, shift in zip(packings, shifts)]
    items = np.concatenate([packing.document_ids for packing in packings])
    return items, np.concatenate([np.zeros(1, dtype=np.int64), *offsets])
