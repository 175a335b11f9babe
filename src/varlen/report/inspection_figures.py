"""The figures of an inspection as plain, frozen data: what its table, its page and its JSON all show."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from varlen.report.demo import PieceFigures
from varlen.types import Method, Overlong

Kind = Literal["pack", "loader", "method", "policy"]
"""What packs: `varlen pack`, `vl.PackedLoader`, a method of `vl.pack`, or what a peer does by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BinFigures:
    """Documents of lengths that are half an octave apart, counted."""

    low: int
    """Shortest length of the bin, in tokens."""
    high: int
    """Longest length of the bin."""
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributionFigures:
    """How long the documents are; empty ones are counted once and left out of everything else."""

    documents: int
    """As given, empty ones included."""
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
    """Supervised tokens; None where they aren't known."""
    targets_share: float | None
    histogram: tuple[BinFigures, ...]
    """Half octaves from the shortest to the longest document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddingFigures:
    """What one way of padding would compute; every document once, none packed."""

    name: str
    """A word for programs: "random", "maximum" or "buckets", with "_cut" where documents are cut."""
    title: str
    cut_at: int | None
    """Documents are cut to this many tokens first; None where they stay whole."""
    tokens: int
    """Tokens that are left after cutting."""
    slots: int

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
    """What came out of packing at one capacity in one way."""

    name: str
    """Of `vl.pack` the method, of `varlen pack` "pack_" and the method; else a word for a loader or a peer."""
    title: str
    """What a user would write, or what a peer does."""
    kind: Kind
    method: Method
    overlong: Overlong
    documents: int
    """Documents that were packed to measure this: all, or a sample of them."""
    packs: int
    """Packs that those documents took."""
    tokens: int
    """Tokens that stand in those packs."""
    fill: float
    """Tokens over slots."""
    lost_tokens: int
    """Tokens truncated or dropped, counted over all documents."""
    lost_share: float
    """The same as a share of all tokens."""
    lost_targets: int | None
    """Supervised tokens of dropped documents; None where unknown: not given, or truncated anywhere."""
    cut_share: float
    """Share of the documents that are cut, into pieces or short."""
    dropped_share: float
    """Share of the documents that are left out whole."""
    attention_imbalance: float
    """Largest over mean sum of squared piece lengths of a pack."""
    work_imbalance: float
    """Largest over mean total work of a pack, attention and the rest."""
    length_correlation: float
    """Likeness of lengths within packs: 0 for random packs, 1 where each holds one length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityFigures:
    """Everything about one capacity."""

    capacity: int
    overlong_documents: int
    """Documents longer than it."""
    overlong_share: float
    """The same as a share of the documents that aren't empty."""
    truncation_share: float
    """Share of all tokens that truncating at this capacity would lose."""
    dropping_share: float
    """Share of all tokens in documents longer than it, which dropping would lose."""
    lower_bound: int
    """Packs that the measured documents need, split where they are longer than a pack and cut nowhere else."""
    packings: tuple[PackFigures, ...]
    """Those of `varlen pack`, of the loader and of `vl.pack`, then the policies of peers."""

    def packing(self, name: str) -> PackFigures:
        """Return a packing by its name."""
        return next(packing for packing in self.packings if packing.name == name)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdviceFigures:
    """What to choose, and why; every word follows from the figures."""

    capacity: int
    method: Method
    """Of `varlen pack`; where only lengths are known, of `vl.pack`."""
    packing: str
    """The name of the packing that this is."""
    overlong: Overlong
    """"error" where no document is longer than the capacity."""
    call: str
    """The choice as a line of Python."""
    command: str
    """The choice as a command that packs the same data; empty where only lengths are known."""
    headline: str
    """The choice, and what it brings, in one sentence."""
    why: str
    """The reasons in a few sentences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPicture:
    """One pack of the advised packing, to be drawn."""

    capacity: int
    pieces: tuple[PieceFigures, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """All that `inspect_lengths` found."""

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
    """Documents that methods were measured on: all of them, or a random sample in input order."""
    window_documents: int
    """Documents that policies with windows were measured on: all, or evenly spread windows."""
    window: int
    """Documents of such a window."""
    seed: int
    are_bytes: bool
    """Whether tokens are bytes, since no tokenizer was given."""

    def at(self, capacity: int) -> CapacityFigures:
        """Return the figures of a capacity."""
        return next(figures for figures in self.capacities if figures.capacity == capacity)

    @property
    def advised(self) -> PackFigures:
        """The figures of the packing that is advised."""
        return self.at(self.advice.capacity).packing(self.advice.packing)

    @property
    def is_sampled(self) -> bool:
        """Whether packs were measured on some of the documents only."""
        return self.packed_documents < self.distribution.documents - self.distribution.empty

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values, under the names of the fields, ratios included.

        Tuples are tuples still, which `json` writes as lists. `format` rises when a key changes its meaning.
        """
        tree = asdict(self)
        for values, padding in zip(tree["padding"], self.padding, strict=True):
            values["padding_share"] = padding.padding_share
            values["slots_per_token"] = padding.slots_per_token
        return {"format": 2, **tree}
