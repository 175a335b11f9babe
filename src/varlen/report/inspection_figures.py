"""The figures of an inspection, and the packings that they are measured on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from varlen.errors import SettingError
from varlen.feed.settings import LoaderSettings
from varlen.feed.streaming.foreseen import BYTES_A_TOKEN, indexed_packs, streamed_packs
from varlen.offline.pack import PackSettings, PartPlans
from varlen.pack.api import DEFAULT_WORK, lower_bound, pack
from varlen.pack.score import length_correlation
from varlen.report.demo import PieceFigures
from varlen.store.blank import BlankTokens
from varlen.types import FloatArray, Int32Array, IntArray, Method, Overlong

Kind = Literal["pack", "loader", "method", "policy"]
"""What packs: `varlen pack`, `vl.PackedLoader`, a method of `vl.pack`, or what a peer does by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BinFigures:
    """Counts of documents within half an octave of lengths."""

    low: int
    """Shortest length of the bin, in tokens."""
    high: int
    """Longest length of the bin."""
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributionFigures:
    """The distribution of lengths; empty documents are only counted."""

    documents: int
    """Number of documents, empty ones included."""
    empty: int
    tokens: int
    mean: float
    median: float
    p90: float
    p99: float
    longest: int
    longest_share: float
    """Share of all tokens in the longest hundredth of the documents (at least one)."""
    targets: int | None
    """Supervised tokens; None if unknown."""
    targets_share: float | None
    histogram: tuple[BinFigures, ...]
    """Half octaves from the shortest to the longest document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddingFigures:
    """The slots of one way of padding; every document once, none packed."""

    name: str
    """An identifier: "random", "maximum" or "buckets", with "_cut" if documents are cut."""
    title: str
    cut_at: int | None
    """Documents are cut to this many tokens first; None if they stay whole."""
    tokens: int
    """Tokens after cutting."""
    slots: int

    def saved_by(self, packed: PackFigures) -> float:
        """Return the share of these slots that packs save for the same tokens; below 0 if packs take more."""
        return 1 - packed.slots_per_token / self.slots_per_token

    @property
    def padding_share(self) -> float:
        """Share of slots that hold padding."""
        return 1 - self.tokens / self.slots

    @property
    def slots_per_token(self) -> float:
        """Slots computed for each token; 1 without padding."""
        return self.slots / self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PackFigures:
    """The result of packing at one capacity in one way."""

    name: str
    """An identifier: of `vl.pack` the method, of `varlen pack` "pack_" and the method; else a loader or a peer."""
    title: str
    """The call or command, or the peer's policy."""
    kind: Kind
    method: Method
    overlong: Overlong
    documents: int
    """Documents that were packed: all, or a sample."""
    packs: int
    """Packs of these documents."""
    tokens: int
    """Tokens in these packs."""
    fill: float
    """Tokens over slots."""
    lost_tokens: int
    """Tokens truncated or dropped, counted over all documents."""
    lost_share: float
    """The same as a share of all tokens."""
    lost_targets: int | None
    """Supervised tokens of dropped documents; None if unknown (not given, or documents are truncated)."""
    cut_share: float
    """Share of the documents that are split or truncated."""
    dropped_share: float
    """Share of the documents that are dropped."""
    attention_imbalance: float
    """Largest over mean sum of squared piece lengths of a pack."""
    work_imbalance: float
    """Largest over mean total work of a pack, attention and the rest."""
    length_correlation: float
    """Correlation of lengths within packs: 0 for random packs, 1 if each holds one length."""

    @property
    def padding_share(self) -> float:
        """Share of slots that hold padding."""
        return 1 - self.fill

    @property
    def slots_per_token(self) -> float:
        """Slots computed for each token; 1 without padding."""
        return 1 / self.fill


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityFigures:
    """All figures of one capacity."""

    capacity: int
    overlong_documents: int
    """Documents longer than the capacity."""
    overlong_share: float
    """The same as a share of the documents that aren't empty."""
    truncation_share: float
    """Share of all tokens lost by truncating."""
    dropping_share: float
    """Share of all tokens lost by dropping overlong documents."""
    lower_bound: int
    """No packing of the measured documents has fewer packs, if only overlong ones are split."""
    packings: tuple[PackFigures, ...]
    """`varlen pack`, the loader and `vl.pack`, then the policies of peers."""

    def packing(self, name: str) -> PackFigures:
        """Return a packing by its name."""
        return next(packing for packing in self.packings if packing.name == name)

    def estimated_packs(self, row: PackFigures) -> int | None:
        """Return the packs of all documents, if a loader was measured on fewer, at the fill of these; else None.

        Peers' windows are a sample of their own, and stay as they were counted.
        """
        usual = self.packings[0]
        if row.kind != "loader" or row.documents >= usual.documents or not row.fill:
            return None
        return round(usual.tokens / (row.fill * self.capacity))


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFigures:
    """The documents of one file, or of all small ones together."""

    name: str
    documents: int
    """Empty ones included."""
    tokens: int
    tokens_share: float
    """Share of all tokens."""
    median: float
    longest: int
    overlong_documents: int
    """Documents longer than the advised capacity."""
    truncation_share: float
    """Share of its tokens beyond that capacity."""
    targets: int | None
    """Supervised tokens; None if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdviceFigures:
    """The advised settings, with reasons."""

    capacity: int
    method: Method
    """The method of `varlen pack`, or of `vl.pack` if only lengths are known."""
    packing: str
    """The name of the advised packing."""
    overlong: Overlong
    """"error" if no document is longer than the capacity."""
    call: str
    """The advice as a line of Python."""
    command: str
    """The advice as a command that packs the same data; empty if only lengths are known."""
    headline: str
    """The advice and its effect in one sentence."""
    why: str
    """The reasons in a few sentences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPicture:
    """One pack of the advised packing, for a picture."""

    capacity: int
    pieces: tuple[PieceFigures, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """The result of `inspect_lengths`."""

    name: str
    distribution: DistributionFigures
    padding: tuple[PaddingFigures, ...]
    capacities: tuple[CapacityFigures, ...]
    """Rising."""
    advice: AdviceFigures
    picture: PackPicture
    batch_documents: int
    """Documents of a padded batch."""
    packed_documents: int
    """Documents on which methods were measured: all, or a random sample in input order."""
    window_documents: int
    """Documents on which policies with windows were measured: all, or evenly spread windows."""
    window: int
    """Documents of such a window."""
    seed: int
    are_bytes: bool
    """Whether tokens are bytes, since no tokenizer was given."""
    sources: tuple[SourceFigures, ...] = ()
    """By falling tokens; none if all documents are of one file, or only lengths are known."""
    notes: tuple[str, ...] = ()
    """Sentences on what was not read."""

    def at(self, capacity: int) -> CapacityFigures:
        """Return the figures of a capacity."""
        return next(figures for figures in self.capacities if figures.capacity == capacity)

    @property
    def advised(self) -> PackFigures:
        """The figures of the advised packing."""
        return self.at(self.advice.capacity).packing(self.advice.packing)

    def lost_targets_share(self, packing: PackFigures) -> float | None:
        """Return the share of all supervised tokens that a packing loses; None if it is unknown."""
        whole = self.distribution.targets
        return packing.lost_targets / whole if whole and packing.lost_targets is not None else None

    @property
    def is_sampled(self) -> bool:
        """Whether packs were measured on a sample of the documents."""
        return self.packed_documents < self.distribution.documents - self.distribution.empty

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values, under the names of the fields, ratios included.

        Tuples are tuples still, which `json` writes as lists. `format` rises when a key changes its meaning.
        """
        tree = asdict(self)
        for values, padding in zip(tree["padding"], self.padding, strict=True):
            values["padding_share"] = padding.padding_share
            values["slots_per_token"] = padding.slots_per_token
            values["saved_share"] = padding.saved_by(self.advised)
        for values, at in zip(tree["capacities"], self.capacities, strict=True):
            for row, packing in zip(values["packings"], at.packings, strict=True):
                row["padding_share"] = packing.padding_share
                row["slots_per_token"] = packing.slots_per_token
                row["estimated_packs"] = at.estimated_packs(packing)
                row["lost_targets_share"] = self.lost_targets_share(packing)
        sizes = [piece.num_tokens for piece in self.picture.pieces]
        tree["picture"] |= {
            "documents": len(sizes),
            "free_slots": self.picture.capacity - sum(sizes),
            "packed_pairs": sum(size**2 for size in sizes),
            "padded_pairs": len(sizes) * max(sizes) ** 2,
        }
        return {"format": 2, **tree}


WINDOW = 1_000
"""Rows that TRL and LLaMA-Factory pack together: the default batch of `datasets.map`."""
MOST_WINDOWS = 200
"""Most windows on which a policy is measured; of more, evenly spread ones are taken."""
MOST_DOCUMENTS = 200_000
"""Most documents on which methods are measured; of more, a random sample in input order."""
MOST_PIECES = 2_000_000
"""Most pieces of the sample at the smallest capacity."""
REFUSED_PIECES = 20_000_000
"""Inputs with more pieces in too few documents for a sample are refused."""
GROUP, GROUP_DOCUMENTS = 100_000, 200
"""Rows that axolotl packs together, and its most documents of a pack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The documents that are packed, none of them empty."""

    lengths: Int32Array
    """int32: all that aren't empty."""
    targets: IntArray | None
    """int64: supervised tokens of the same documents."""
    ids: IntArray
    """int64: indices of the sampled documents in the given lengths."""
    sampled: Int32Array
    """int32: lengths of the sampled documents."""
    given: Given
    """The same, with empty documents if all are sampled, on which varlen's own packings are measured."""
    shuffled: Int32Array
    """int32: lengths of the sampled documents in random order."""
    windows: tuple[Int32Array, ...]
    """Windows of consecutive documents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A peer's default packing in varlen's terms."""

    name: str
    title: str
    method: Method
    overlong: Overlong
    parts: Callable[[Sample], Iterator[Int32Array]]
    """Yields the documents that are packed together."""
    max_documents: int | None = None


def _windows(sample: Sample) -> Iterator[Int32Array]:
    yield from sample.windows


def _groups(sample: Sample) -> Iterator[Int32Array]:
    for start in range(0, sample.shuffled.size, GROUP):
        yield sample.shuffled[start : start + GROUP]


def _at_once(sample: Sample) -> Iterator[Int32Array]:
    yield sample.sampled


# Filling one pack after another with the largest document that still fits is first-fit-decreasing: both place
# documents from long to short, each into the first pack with space.
POLICIES = (
    Policy(
        name="trl_bfd",
        title="best fit decreasing in windows of 1,000 rows, truncated (TRL's default)",
        method="best_fit_decreasing",
        overlong="truncate",
        parts=_windows,
    ),
    Policy(
        name="axolotl_multipack",
        title="first fit in shuffled order, longer documents dropped (axolotl's default)",
        method="first_fit",
        overlong="drop",
        parts=_groups,
        max_documents=GROUP_DOCUMENTS,
    ),
    Policy(
        name="llama_factory_knapsack",
        title="largest that fits in windows of 1,000 rows, longer dropped (LLaMA-Factory's default)",
        method="first_fit_decreasing",
        overlong="drop",
        parts=_windows,
    ),
    Policy(
        name="next_fit_drop",
        title="next fit in input order (as fast-axolotl), longer documents dropped",
        method="next_fit",
        overlong="drop",
        parts=_at_once,
    ),
)
_FIRST: tuple[Method, ...] = ("best_fit", "best_fit_decreasing", "balanced")
METHODS: tuple[Method, ...] = (*_FIRST, *sorted(set(get_args(Method)) - {*_FIRST}))
PACK_METHODS: tuple[Method, ...] = ("best_fit", "best_fit_decreasing", "balanced", "wrapped")
"""The measured methods of `varlen pack`; its others are similar, or for comparison with other packers."""
WITH_PACK, WITH_LENGTHS = "pack_", ""
"""Prefixes of names of packings: of `varlen pack`, and of `vl.pack`."""


def draw_sample(
    lengths: Int32Array,
    targets: IntArray | None,
    smallest_capacity: int,
    seed: int,
    parts: IntArray | None = None,
    bytes_a_token: int = BYTES_A_TOKEN,
) -> Sample:
    """Choose what is packed: all documents that hold a token, or as many as take a second or two.

    Args:
        lengths: int32 `[num_documents]`, empty ones included.
        targets: int64 `[num_documents]`, or None.
        parts: documents of each part of the data that is tokenized by itself, int64; None: it is one.
    """
    ids = np.flatnonzero(lengths)
    full = lengths[ids]
    rng = np.random.default_rng(seed)
    pieces = -(-full.astype(np.int64) // smallest_capacity)
    most = min(MOST_DOCUMENTS, max(WINDOW, full.size * MOST_PIECES // int(pieces.sum())))
    chosen = np.sort(rng.choice(full.size, most, replace=False)) if full.size > most else np.arange(full.size)
    sampled, cut = full[chosen], int(pieces[chosen].sum())
    if cut > REFUSED_PIECES:
        raise SettingError(
            f"capacity {smallest_capacity:,} would cut what is looked at into {cut:,} pieces, and "
            f"{REFUSED_PIECES:,} are the most that are looked at; raise capacity"
        )
    starts = np.arange(0, full.size, WINDOW)
    most_windows = max(1, min(MOST_WINDOWS, most // WINDOW))
    if starts.size > most_windows:
        starts = starts[: full.size // WINDOW]  # the last may hold a few documents only
        starts = starts[np.linspace(0, starts.size - 1, most_windows).astype(np.int64)]
    return Sample(
        lengths=full,
        targets=None if targets is None else targets[ids],
        ids=ids[chosen],
        sampled=sampled,
        given=Given(lengths=lengths, ids=np.arange(lengths.size), parts=parts, bytes_a_token=bytes_a_token)
        if most >= full.size
        else Given(lengths=sampled, ids=ids[chosen], parts=None, bytes_a_token=bytes_a_token),
        shuffled=rng.permutation(sampled),
        windows=tuple(full[start : start + WINDOW] for start in starts.tolist()),
    )


def measure_capacity(sample: Sample, capacity: int) -> CapacityFigures:
    """Pack a sample by every method and policy; losses are counted over all documents."""
    loss = _loss(sample, capacity)
    tokens = int(sample.lengths.sum(dtype=np.int64))
    packings = _measure_ours(sample, capacity, loss)
    packings += [_measure_policy(sample, capacity, policy, loss) for policy in POLICIES]
    pieces = pack(sample.sampled, capacity, "next_fit", "split").lengths
    return CapacityFigures(
        capacity=capacity,
        overlong_documents=loss.documents,
        overlong_share=loss.documents / sample.lengths.size,
        truncation_share=loss.truncated / tokens,
        dropping_share=loss.dropped / tokens,
        lower_bound=lower_bound(pieces, capacity),
        packings=tuple(packings),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loss:
    """Tokens lost at a capacity, over all documents."""

    documents: int
    truncated: int
    dropped: int
    dropped_targets: int | None


def _loss(sample: Sample, capacity: int) -> _Loss:
    longer = sample.lengths > capacity
    documents, dropped = int(longer.sum()), int(sample.lengths[longer].sum(dtype=np.int64))
    return _Loss(
        documents=documents,
        truncated=dropped - documents * capacity,
        dropped=dropped,
        dropped_targets=None if sample.targets is None else int(sample.targets[longer].sum()),
    )


def _measure_ours(sample: Sample, capacity: int, loss: _Loss) -> list[PackFigures]:
    """Pack as `varlen pack`, the loader and `vl.pack` do."""
    given, size = sample.given, sample.sampled.size
    measured: list[tuple[str, str, Kind, Method, Packed, int]] = []
    for method in PACK_METHODS:
        packed = by_pack(given, capacity, method, is_named=False)
        measured.append((WITH_PACK + method, f"varlen pack ({method})", "pack", method, packed, size))
    streamed = int(np.count_nonzero(given.streamed(capacity)))
    for name, packed, documents in (
        ("indexed", by_index(given, capacity), size),
        ("streaming", by_stream(given, capacity), streamed),
    ):
        title = f"vl.PackedLoader ({name})"
        measured.append((f"loader_{name}", title, "loader", "best_fit", packed, documents))
    for method in METHODS:
        title = f"vl.pack ({method})"
        measured.append(
            (WITH_LENGTHS + method, title, "method", method, by_lengths(given, capacity, method), size)
        )
    return [
        _figures(
            name=name,
            title=title,
            kind=kind,
            method=method,
            capacity=capacity,
            packings=[packed],
            sample=sample,
            loss=loss,
            documents=documents,
        )
        for name, title, kind, method, packed, documents in measured
    ]


def _measure_policy(sample: Sample, capacity: int, policy: Policy, loss: _Loss) -> PackFigures:
    parts = list(policy.parts(sample))
    packings = [
        pack(part, capacity, policy.method, policy.overlong, max_documents=policy.max_documents)
        for part in parts
    ]
    return _figures(
        name=policy.name,
        title=policy.title,
        kind="policy",
        method=policy.method,
        capacity=capacity,
        packings=[
            Packed(overlong=policy.overlong, lengths=packing.lengths, offsets=packing.offsets)
            for packing in packings
        ],
        sample=sample,
        loss=loss,
        documents=sum(part.size for part in parts),
    )


def _lost_by(overlong: Overlong, loss: _Loss) -> tuple[int, int | None]:
    """Return the tokens and supervised tokens that a policy loses; None where it isn't known."""
    lost: dict[Overlong, tuple[int, int | None]] = {
        "error": (0, 0),
        "split": (0, 0),
        "truncate": (loss.truncated, None if loss.truncated else 0),
        "drop": (loss.dropped, loss.dropped_targets),
    }
    return lost[overlong]


def _figures(
    *,
    name: str,
    title: str,
    kind: Kind,
    method: Method,
    capacity: int,
    packings: list[Packed],
    sample: Sample,
    loss: _Loss,
    documents: int,
) -> PackFigures:
    """Return the figures of packings of parts of the documents, as if they were one."""
    overlong = packings[0].overlong
    lengths = np.concatenate([packing.lengths for packing in packings])
    sizes = np.concatenate([np.diff(packing.offsets) for packing in packings])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    packs, tokens = sizes.size, int(lengths.sum(dtype=np.int64))
    wide = lengths.astype(np.float64)
    lost, targets = _lost_by(overlong, loss)
    cut = sum(packing.split_documents for packing in packings) / documents if documents else 0.0
    share = loss.documents / sample.lengths.size
    return PackFigures(
        name=name,
        title=title,
        kind=kind,
        method=method,
        overlong=overlong,
        documents=documents,
        packs=packs,
        tokens=tokens,
        fill=tokens / (packs * capacity) if packs else 1.0,
        lost_tokens=lost,
        lost_share=lost / int(sample.lengths.sum(dtype=np.int64)),
        lost_targets=targets,
        cut_share=cut if method == "wrapped" else 0.0 if overlong == "drop" else share,
        dropped_share=share if overlong == "drop" else 0.0,
        attention_imbalance=_imbalance(wide * wide, offsets),
        work_imbalance=_imbalance(DEFAULT_WORK[0] * wide + DEFAULT_WORK[1] * wide * wide, offsets),
        length_correlation=length_correlation(lengths, offsets) if packs else 0.0,
    )


def _imbalance(work: FloatArray, offsets: IntArray) -> float:
    """Return the work of the heaviest pack over the mean; 1 without work."""
    if offsets.size < 2:
        return 1.0
    packs = np.add.reduceat(work, offsets[:-1])
    return float(packs.max() / packs.mean())


# varlen's own packings of lengths.
#
# `varlen pack` and the loader pack documents in random order, window by window, and keep packs random samples;
# `vl.pack` takes all lengths at once, in the given order. Their packs differ, so each is measured by its own code.

STEP_PACKS = 8
"""Packs of a step of the measured loader, and lanes of streaming."""
MOST_STREAMED, MOST_STREAMED_PACKS = 10_000, 4_000
"""Most documents, and packs that they fill, on which streaming is measured, which is slow."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed:
    """A packing: pack p holds the pieces `offsets[p]:offsets[p + 1]`."""

    overlong: Overlong
    lengths: IntArray | Int32Array
    """`[pieces]`."""
    offsets: IntArray
    """int64 `[packs + 1]`."""
    document_ids: IntArray | None = None
    """int64 `[pieces]`: the index of each piece's document in the data, if known."""
    split_documents: int = 0

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Given:
    """The documents to pack, in the order of the data."""

    lengths: Int32Array
    """int32 `[documents]`, empty ones too."""
    ids: IntArray
    """int64 `[documents]`: the index of each in the data."""
    parts: IntArray | None
    """int64: documents of each separately tokenized part of the data; None for a single part."""
    bytes_a_token: int = BYTES_A_TOKEN
    """Approximate bytes per token in the files."""

    def streamed(self, capacity: int) -> Int32Array:
        """Return the documents on which streaming is measured: all, or evenly spread ones."""
        size, packs = self.lengths.size, int(self.lengths.sum(dtype=np.int64)) / capacity
        most = min(MOST_STREAMED, max(1, int(size * MOST_STREAMED_PACKS / packs))) if packs else size
        if size <= most:
            return self.lengths
        return self.lengths[np.linspace(0, size - 1, most).astype(np.int64)]


def by_pack(given: Given, capacity: int, method: Method, *, is_named: bool = True) -> Packed:
    """Pack as `varlen pack --method` does; with `is_named`, the result has document ids."""
    tokens = BlankTokens(given.lengths, given.parts)
    plan = PartPlans(tokens, PackSettings(capacity=capacity, method=method))
    found = [packing for packing in plan.packings() if packing.num_packs]
    sizes = np.concatenate([np.zeros(0, np.int64), *(np.diff(packing.offsets) for packing in found)])
    first = np.concatenate([[0], np.cumsum(tokens.documents)])
    located = [plan.located(packing.document_ids) for packing in found] if is_named else []
    return Packed(
        overlong=PackSettings(capacity=capacity).overlong,
        document_ids=np.concatenate(
            [np.zeros(0, np.int64), *(given.ids[first[shards] + numbers] for shards, numbers in located)]
        )
        if is_named
        else None,
        lengths=np.concatenate([np.zeros(0, np.int32), *(packing.lengths for packing in found)]),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        split_documents=plan.ledger.split_documents,
    )


def by_lengths(given: Given, capacity: int, method: Method) -> Packed:
    """Pack as `vl.pack(lengths, method=)` does, in the order of the data, and split overlong documents."""
    packing = pack(given.lengths, capacity, method, "split")
    return Packed(
        overlong="split",
        lengths=packing.lengths,
        offsets=packing.offsets,
        document_ids=given.ids[packing.document_ids],
        split_documents=packing.ledger.split_documents,
    )


def by_index(given: Given, capacity: int) -> Packed:
    """Pack as `vl.PackedLoader` does with a token store."""
    settings = _loader(capacity)
    lengths, offsets = indexed_packs(given.lengths, given.parts, settings)
    return Packed(overlong=settings.overlong, lengths=lengths, offsets=offsets)


def by_stream(given: Given, capacity: int) -> Packed:
    """Pack as `vl.PackedLoader` does in streaming."""
    settings = _loader(capacity)
    lengths, offsets = streamed_packs(given.streamed(capacity), settings, given.bytes_a_token)
    return Packed(overlong=settings.overlong, lengths=lengths, offsets=offsets)


def _loader(capacity: int) -> LoaderSettings:
    """Return a loader's default settings, for rank 0 of 1."""
    return LoaderSettings(capacity=capacity, global_batch_size=STEP_PACKS, dp_rank=0, dp_world_size=1)
