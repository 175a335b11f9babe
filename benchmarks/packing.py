"""Packing: `vl.pack` beside peers that assign documents to packs, and beside those that move tokens too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numba  # noqa: F401 - once it is imported, vl.pack uses its kernels from the first call on
import numpy as np

import varlen as vl
from benchmarks import checks
from benchmarks.inputs import CAPACITY, NUM_DOCUMENTS, Documents, lognormal_lengths
from benchmarks.peers import axolotl, grain, llm_foundry, megatron_bridge, seqpack, trl
from benchmarks.rows import Contestant, Race, Row
from benchmarks.step import Step
from benchmarks.stopwatch import alternate

SECTION = "packing"
FEWER = 20_000
"""Documents for the peers whose time grows with the square, or which take seconds for this many."""
PACKS_PER_BATCH = 8
BATCH_DOCUMENTS = 480
"""Documents that a collator packs at a time."""
_OURS = "vl.pack(lengths, capacity=8192)"


def steps() -> list[Step]:
    """Return what this section measures."""
    return [
        Step("axolotl's sampler", partial(_race_ids, "sampler")),
        Step("axolotl's compiled loop alone", partial(_race_ids, "kernel")),
        Step("axolotl's sampler, small groups", partial(_race_ids, "small groups")),
        Step("TRL's algorithm alone", partial(_race_ids, "trl")),
        Step("seqpack", partial(_race_ids, "seqpack")),
        Step("Megatron-Bridge", _race_megatron),
        Step("TRL's pack_dataset, one window", partial(_race_pack_dataset, NUM_DOCUMENTS)),
        Step("TRL's pack_dataset, its default window", partial(_race_pack_dataset, None)),
        Step("grain, first fit", partial(_race_grain, "first", 256)),
        Step("grain, best fit", partial(_race_grain, "best", 1024)),
        Step("llm-foundry's collator", _race_llm_foundry),
    ]


@cache
def _lengths(count: int) -> np.ndarray:
    return lognormal_lengths(count)


@cache
def _documents(count: int) -> Documents:
    return Documents.draw(_lengths(count))


@dataclass(frozen=True)
class _Peer:
    """A peer that turns lengths into packs of document numbers, and how to race it."""

    name: str
    settings: str
    make: Callable[[np.ndarray, int], Callable[[], list]]
    rounds: int
    target: float | None = None
    note: str = ""


_SMALL_GROUP = 1000
_PEERS = {
    "sampler": _Peer(
        axolotl.SAMPLER,
        f"generate_batches, one process, group_size={axolotl.GROUP_SIZE:,}, bin_size={axolotl.BIN_SIZE}",
        axolotl.sampler,
        rounds=9,
        target=50,
    ),
    "kernel": _Peer(
        axolotl.KERNEL,
        "its compiled loop without the sampler",
        axolotl.kernel,
        rounds=9,
        note="our whole call beside their loop alone",
    ),
    "small groups": _Peer(
        axolotl.SAMPLER,
        f"the same with group_size={_SMALL_GROUP:,}",
        partial(axolotl.sampler, group_size=_SMALL_GROUP),
        rounds=9,
        note="its fastest setting, less full",
    ),
    "trl": _Peer(
        trl.ALGORITHM,
        "the statements of the installed _pack_bfd from its sort to the end of its loop",
        trl.algorithm,
        rounds=5,
        target=150,
    ),
    "seqpack": _Peer(seqpack.NAME, "lengths as a numpy array", seqpack.packer, rounds=7),
}


def _race_ids(key: str) -> list[Row]:
    """Race a peer whose packs hold document numbers."""
    lengths, peer = _lengths(NUM_DOCUMENTS), _PEERS[key]
    call = peer.make(lengths, CAPACITY)
    fill = checks.fill_of_ids(_as_ids(call()), lengths, CAPACITY)
    return [_race(lengths, peer, call, fill)]


def _race_megatron() -> list[Row]:
    """Race Megatron-Bridge on fewer documents: the newest on PyPI scans all packs for each document."""
    lengths = _lengths(FEWER)
    call = megatron_bridge.packer(lengths, CAPACITY)
    fill = checks.fill_of_lengths(call(), lengths, CAPACITY)
    peer = _Peer(
        megatron_bridge.NAME,
        "create_packing_strategy on a histogram",
        megatron_bridge.packer,
        rounds=3,
        note="its file loaded alone, as its package needs CUDA; time grows with the square of the documents",
    )
    return [_race(lengths, peer, call, fill)]


def _race(lengths: np.ndarray, peer: _Peer, call: Callable[[], list], fill: float) -> Race:
    """Check and time `vl.pack` beside a peer that was checked already."""

    def pack() -> vl.Packing:
        return vl.pack(lengths, capacity=CAPACITY)

    our_fill = checks.fill_of_ids(pack().to_lists(), lengths, CAPACITY)
    ours, theirs = alternate(pack, call, rounds=peer.rounds)
    return Race(
        section=SECTION,
        what=f"assign {len(lengths):,} documents",
        ours=Contestant(name="varlen", call=_OURS, samples=ours, fill=our_fill),
        peer=Contestant(name=peer.name, call=peer.settings, samples=theirs, fill=fill),
        target=peer.target,
        note=peer.note,
    )


def _race_pack_dataset(window: int | None) -> list[Row]:
    """Race TRL end to end: Arrow column in, packed tokens out."""
    documents = _documents(NUM_DOCUMENTS)
    call = trl.pack_dataset(documents.arrow, CAPACITY, window=window)
    table = call().with_format("arrow")[:]
    rows = zip(_list_arrays(table["input_ids"]), _list_arrays(table["seq_lengths"]))
    fill = checks.fill_of_rows(rows, documents.tokens, documents.offsets, CAPACITY)
    del table, rows
    every = "all documents in one window" if window else "windows of 1,000 documents, its default"
    settings = f'strategy="bfd", {every}, kept in memory'
    return [_race_tokens(documents, documents.arrow, "Arrow", trl.PACK_DATASET, settings, call, fill)]


def _race_grain(fit: grain.Fit, num_bins: int) -> list[Row]:
    """Race grain end to end: token arrays in, padded rows of ids, segments and positions out."""
    documents = _documents(FEWER)
    call = grain.packer(documents.arrays, CAPACITY, fit=fit, num_bins=num_bins)
    rows = (_grain_row(row) for row in call())
    fill = checks.fill_of_rows(rows, documents.tokens, documents.offsets, CAPACITY)
    name = grain.FIRST_FIT if fit == "first" else grain.BEST_FIT
    settings = f"{num_bins} bins, no shuffle, read without threads"
    return [_race_tokens(documents, documents.arrays, "arrays", name, settings, call, fill)]


def _race_llm_foundry() -> list[Row]:
    """Race llm-foundry's packing collator: one padded batch of documents in, packed rows of tensors out."""
    documents = Documents.draw(lognormal_lengths(BATCH_DOCUMENTS))
    packing = vl.pack(documents.lengths, capacity=CAPACITY)
    call = llm_foundry.packer(documents.arrays, CAPACITY, packing.num_packs)
    theirs = call()
    kept = int((theirs["attention_mask"] == 1).sum())

    def pack_and_collate() -> object:
        return vl.collate(documents.arrays, vl.pack(documents.lengths, capacity=CAPACITY)).to_torch()

    our_fill = checks.fill_of_ids(packing.to_lists(), documents.lengths, CAPACITY)
    ours, peer = alternate(pack_and_collate, call, rounds=5)
    return [
        Race(
            section=SECTION,
            what=f"pack a batch of {BATCH_DOCUMENTS:,} documents into {packing.num_packs:,} rows of tensors",
            ours=Contestant(name="varlen", call="vl.pack, vl.collate, to_torch", samples=ours, fill=our_fill),
            peer=Contestant(
                name=llm_foundry.NAME,
                call=f"as many rows, from a padded batch; {1 - kept / documents.num_tokens:.1%} of the tokens "
                "are left for its next batch",
                samples=peer,
                fill=kept / (packing.num_packs * CAPACITY),
            ),
            tokens=documents.num_tokens,
        )
    ]


def _race_tokens(
    documents: Documents,
    given: object,
    form: str,
    name: str,
    settings: str,
    call: Callable[[], object],
    fill: float,
) -> Race:
    """Time `vl.pack` and `vl.collate` of every pack beside a peer that packs and moves tokens."""
    lengths = documents.lengths

    def pack_and_collate() -> vl.Packing:
        packing = vl.pack(lengths, capacity=CAPACITY)
        for first in range(0, packing.num_packs, PACKS_PER_BATCH):
            pack_ids = np.arange(first, min(first + PACKS_PER_BATCH, packing.num_packs))
            vl.collate(given, packing, pack_ids=pack_ids)
        return packing

    our_fill = checks.fill_of_ids(pack_and_collate().to_lists(), lengths, CAPACITY)
    ours, peer = alternate(pack_and_collate, call, rounds=3)
    our_call = f"vl.pack, then vl.collate of all packs, {PACKS_PER_BATCH} at a time, from {form}"
    return Race(
        section=SECTION,
        what=f"pack {len(lengths):,} documents and move their tokens",
        ours=Contestant(name="varlen", call=our_call, samples=ours, fill=our_fill),
        peer=Contestant(name=name, call=settings, samples=peer, fill=fill),
        tokens=documents.num_tokens,
        note="varlen also writes labels, positions and segments",
    )


def _as_ids(packs: list) -> list[list[int]]:
    """Return document numbers of packs as any of the peers gives them."""
    if packs and isinstance(packs[0], dict):  # TRL's bins
        return [bin_["ids"] for bin_ in packs]
    if packs and packs[0] and isinstance(packs[0][0], list):  # axolotl's batches of one pack
        return [pack for batch in packs for pack in batch]
    return packs


def _list_arrays(column: object) -> list[np.ndarray]:
    """Return a list column's rows as numpy arrays."""
    return [row.values.to_numpy() for chunk in column.chunks for row in chunk]


def _grain_row(row: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return a grain row's tokens and segment lengths, padding (segment 0) left out."""
    segments = row["input_ids_segment_ids"]
    return row["input_ids"][segments > 0], np.bincount(segments)[1:]
