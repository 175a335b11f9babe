"""Packing lengths: beside peers, of a hundred million, by windows, and what of the padding is left.

Sections: `packing` races `vl.pack` with peers that assign documents to packs, and with those that move tokens too, on
log-normal lengths (mean 675, capacity 8,192); `scale` packs up to a hundred million lengths on one core, for seconds
and memory; `windows` counts packs by windows against packing real sets whole; `utilization` measures what a page on
token packing promises: padding in rows of 2,048 without and with it, at three mean lengths, where it says that
utilization rises from 12.5, 25 and 50 % to 80, 85 and 90 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from statistics import median

import numba  # noqa: F401 - once it is imported, vl.pack uses its kernels from the first call on
import numpy as np

import varlen as vl
from benchmarks import checks
from benchmarks.inputs import (
    CAPACITY,
    NUM_DOCUMENTS,
    REAL_LENGTHS,
    Documents,
    Int32Array,
    lognormal_lengths,
    real_lengths,
)
from benchmarks.peers import axolotl, grain, megatron_bridge, mosaic, trl
from benchmarks.rows import Limit, Race, Row, Step
from benchmarks.stopwatch import measure, race

FEWER = 20_000
"""Documents for the peers whose time grows with the square, or which take seconds for this many."""
PACKS_PER_BATCH = 8
BATCH_DOCUMENTS = 480
"""Documents that a collator packs at a time."""


def packing_steps() -> list[Step]:
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


def _seqpack(lengths: np.ndarray, capacity: int) -> Callable[[], list]:
    """Worst-fit-decreasing with a heap, which its documentation recommends by default."""
    from seqpack.packing import heap_pack_sequences

    return lambda: heap_pack_sequences(lengths, capacity)


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
    "seqpack": _Peer("seqpack heap_pack_sequences", "lengths as a numpy array", _seqpack, rounds=7),
}


def _race_ids(key: str) -> list[Row]:
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
    def pack() -> vl.Packing:
        return vl.pack(lengths, capacity=CAPACITY)

    our_fill = checks.fill_of_ids(pack().to_lists(), lengths, CAPACITY)
    return race(
        f"assign {len(lengths):,} documents",
        ("vl.pack(lengths, capacity=8192)", pack),
        (peer.name, peer.settings, call),
        rounds=peer.rounds,
        fills=(our_fill, fill),
        target=peer.target,
        note=peer.note,
    )


def _race_pack_dataset(window: int | None) -> list[Row]:
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
    call = mosaic.foundry_packer(documents.arrays, CAPACITY, packing.num_packs)
    theirs = call()
    kept = int((theirs["attention_mask"] == 1).sum())

    def pack_and_collate() -> object:
        return vl.collate(documents.arrays, vl.pack(documents.lengths, capacity=CAPACITY)).to_torch()

    our_fill = checks.fill_of_ids(packing.to_lists(), documents.lengths, CAPACITY)
    settings = (
        f"as many rows, from a padded batch; {1 - kept / documents.num_tokens:.1%} of the tokens "
        "are left for its next batch"
    )
    return [
        race(
            f"pack a batch of {BATCH_DOCUMENTS:,} documents into {packing.num_packs:,} rows of tensors",
            ("vl.pack, vl.collate, to_torch", pack_and_collate),
            (mosaic.FOUNDRY, settings, call),
            rounds=5,
            fills=(our_fill, kept / (packing.num_packs * CAPACITY)),
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
    lengths = documents.lengths

    def pack_and_collate() -> vl.Packing:
        packing = vl.pack(lengths, capacity=CAPACITY)
        for first in range(0, packing.num_packs, PACKS_PER_BATCH):
            pack_ids = np.arange(first, min(first + PACKS_PER_BATCH, packing.num_packs))
            vl.collate(given, packing, pack_ids=pack_ids)
        return packing

    our_fill = checks.fill_of_ids(pack_and_collate().to_lists(), lengths, CAPACITY)
    our_call = f"vl.pack, then vl.collate of all packs, {PACKS_PER_BATCH} at a time, from {form}"
    return race(
        f"pack {len(lengths):,} documents and move their tokens",
        (our_call, pack_and_collate),
        (name, settings, call),
        rounds=3,
        fills=(our_fill, fill),
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
    return [row.values.to_numpy() for chunk in column.chunks for row in chunk]


def _grain_row(row: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return a grain row's tokens and segment lengths, padding (segment 0) left out."""
    segments = row["input_ids_segment_ids"]
    return row["input_ids"][segments > 0], np.bincount(segments)[1:]


CAPACITIES = (2048, 4096, 8192, 16384, 32768)
WINDOW = 16_384
MORE = 0.001
"""Packing by windows may take this share of packs more, and one pack a window."""
CHUNK = 10_000
"""Documents handed to the packer at a time, as a stream brings them."""


def window_steps() -> list[Step]:
    names = [path.stem for path in sorted(REAL_LENGTHS.glob("*.npz"))]
    if not names:
        where = "the real sets, shared/data/lengths beside the checkout, are not here"
        return [Step.absent("real sets", where)]
    return [Step(name, partial(_measure_windows, name)) for name in names]


def _measure_windows(name: str) -> list[Row]:
    lengths = dict(real_lengths(only=name))[name]
    num_windows = -(-len(lengths) // WINDOW)
    rows: list[Row] = []
    for capacity in CAPACITIES:
        whole = vl.pack(lengths, capacity=capacity, overlong="split")
        by_windows = _pack_by_windows(lengths, capacity)
        rows.append(
            Limit(
                what=f"{name}: {len(lengths):,} documents, capacity {capacity:,}",
                value=by_windows,
                unit="packs",
                limit=whole.num_packs * (1 + MORE) + num_windows,
                limit_text=f"{100 * MORE} % + {num_windows:,}",
                base=whole.num_packs,
                group=name,
            )
        )
    return rows


def _pack_by_windows(lengths: np.ndarray, capacity: int) -> int:
    """Return the packs that a window packer hands out, after checking that they hold every token."""
    packer = vl.WindowPacker(capacity=capacity, window=WINDOW, overlong="split")
    parts = [packer.add(lengths[start : start + CHUNK]) for start in range(0, len(lengths), CHUNK)]
    parts.append(packer.flush())
    tokens = np.zeros(len(lengths), np.int64)
    for part in parts:
        np.add.at(tokens, part.document_ids, part.lengths)
        if part.num_packs and part.pack_sums(part.lengths).max() > capacity:
            raise checks.WrongResultError(f"a pack over its capacity of {capacity:,}")
    if not np.array_equal(tokens, lengths):
        raise checks.WrongResultError("packing by windows lost or doubled tokens")
    return sum(part.num_packs for part in parts)


ROW = 2_048
SIGMA = 1.0
"""Standard deviation of the logarithm of a length."""
PROMISED = {256: (0.125, 0.80, 6.4), 512: (0.25, 0.85, 3.4), 1_024: (0.50, 0.90, 1.8)}
"""By mean length: utilization without packing, with packing, and the improvement."""


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """Tokens over slots of the same documents, each padded to a whole row, and packed."""

    mean: float
    """Mean length of the documents drawn."""
    padded: float
    packed: float
    packs: int
    lower_bound: int
    """Packs that no packing can go below."""

    @property
    def improvement(self) -> float:
        return self.packed / self.padded


def utilization(mean: int, capacity: int = ROW, num_documents: int = 100_000, seed: int = 0) -> Utilization:
    """Measure padding to `capacity` and best-fit-decreasing on log-normal lengths.

    The mean is that after clipping; see `lengths_of_mean`.
    """
    lengths = lengths_of_mean(mean, capacity, num_documents, seed)
    packing = vl.pack(lengths, capacity=capacity)
    return Utilization(
        mean=float(lengths.mean()),
        padded=float(lengths.mean()) / capacity,
        packed=packing.fill_ratio,
        packs=packing.num_packs,
        lower_bound=vl.lower_bound(lengths, capacity),
    )


def lengths_of_mean(mean: int, longest: int, num_documents: int, seed: int) -> Int32Array:
    """Draw log-normal lengths, clipped to `[1, longest]`, whose mean after clipping is the one wanted.

    Clipping takes tokens from the long tail only and so lowers the mean. The scale of the distribution is
    therefore raised until the clipped lengths have the mean that is asked for, to within a hundredth of a
    token or as near as whole tokens allow; their spread (`SIGMA`) and the order of the draws stay as they are.
    """
    shape = np.random.default_rng(seed).lognormal(0.0, SIGMA, num_documents)
    low, high = 0.0, float(longest) / shape.min()
    for _ in range(60):
        middle = (low + high) / 2
        clipped = _clipped(shape * middle, longest)
        if clipped.mean() < mean:
            low = middle
        else:
            high = middle
    return _clipped(shape * high, longest)


def _clipped(lengths: np.ndarray, longest: int) -> Int32Array:
    return np.clip(np.rint(lengths), 1, longest).astype(np.int32)


def utilization_steps() -> list[Step]:
    return [Step(f"mean {mean:,}", partial(_measure_utilization, mean)) for mean in PROMISED]


def _measure_utilization(mean: int) -> list[Row]:
    """Measure the padding that is left, beside what is promised and what is there without packing."""
    found = utilization(mean)
    _, promised, improvement = PROMISED[mean]
    return [
        Limit(
            what=f"padding in rows of {ROW:,}, packed; documents of {mean:,} tokens on average",
            value=100 * (1 - found.packed),
            unit="%",
            limit=100 * (1 - promised),
            base=100 * (1 - found.padded),
            note=f"{found.improvement:.2f}x as many tokens in a row as padded, {improvement}x promised",
        )
    ]


COUNTS = (1_000_000, 10_000_000, 100_000_000)
TARGETED = 100_000_000
LIMIT_S = 5.0
LIMIT_GB = 2.0
RUNS = 3

_SCALE = """
import json, os, sys, time
from contextlib import suppress
from benchmarks.inputs import lognormal_lengths
from benchmarks.stopwatch import forget_peak, peak_bytes, resident_bytes
import varlen as vl

with suppress(AttributeError, OSError):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
count, capacity = int(sys.argv[1]), int(sys.argv[2])
vl.pack(lognormal_lengths(1_000_000), capacity=capacity)  # enough for kernels to be worth loading
lengths = lognormal_lengths(count)
forget_peak()
before = resident_bytes()
cpu, wall = time.process_time(), time.perf_counter()
packing = vl.pack(lengths, capacity=capacity)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps({"wall_s": wall, "cpu_s": cpu, "bytes": peak_bytes() - before, "fill": packing.fill_ratio}))
"""


def scale_steps() -> list[Step]:
    return [Step(f"{count:,} lengths", partial(_measure_scale, count)) for count in COUNTS]


def _measure_scale(count: int) -> list[Row]:
    """Pack so many lengths in fresh processes on one core; memory is what the peak adds to the input."""
    runs = [measure(_SCALE, count, CAPACITY) for _ in range(RUNS)]
    limits = (LIMIT_S, LIMIT_GB) if count == TARGETED else (None, None)
    cpu_s = median(run["cpu_s"] for run in runs)
    note = f"{cpu_s:.3g} s of processor time, {100 * runs[0]['fill']:.3f} % full"
    what = f"peak memory of that beyond the input of {count * 4 / 1e9:.3g} GB"
    return [
        Limit.of_times(
            f"vl.pack of {count:,} lengths on one core", [run["wall_s"] for run in runs], limits[0], note
        ),
        Limit.of_peaks(what, [run["bytes"] for run in runs], limits[1], "the result included"),
    ]


SECTIONS = {
    "packing": packing_steps,
    "windows": window_steps,
    "utilization": utilization_steps,
    "scale": scale_steps,
}
