"""Measure a Packing: fill, distance to the lower bound, balance of work, losses, and randomness of its packs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from varlen.arguments import LARGEST
from varlen.errors import SettingError
from varlen.pack import kernels
from varlen.pack.api import DEFAULT_WORK, as_work, lower_bound
from varlen.pack.pieces import shuffled
from varlen.types import FloatArray, Int32Array, IntArray, Packing, as_packing

_SHUFFLES = 8
_SAMPLE = 200_000  # most pieces that the random comparison repacks; enough for a spread of about 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Measurements of one Packing."""

    num_packs: int
    lower_bound: int
    """Packs that no packing of the same pieces can go below."""
    num_tokens: int
    fill_ratio: float
    """Tokens over the slots of all packs."""
    mean_documents: float
    """Pieces in a pack, on average."""
    most_documents: int
    """Pieces in the pack that holds the most."""
    work_imbalance: float
    """Largest work of a pack over the mean: with one pack per rank, steps take this many times the balanced time."""
    truncated_tokens: int
    dropped_tokens: int
    length_correlation: float
    """Intraclass correlation of log length within packs: 0 if packs are random samples, 1 if every pack holds
    documents of one length. Packs sorted by length train worse at the same fill."""
    random_correlation: float
    """The same correlation for random packs: mean over eight shuffles of the documents, packed next-fit."""
    random_spread: float
    """Standard deviation over those shuffles."""

    @property
    def packs_over_bound(self) -> int:
        """Packs more than the lower bound."""
        return self.num_packs - self.lower_bound

    @property
    def distance_from_random(self) -> float:
        """`length_correlation` above that of random packs; around `random_spread` means random."""
        return self.length_correlation - self.random_correlation

    def __str__(self) -> str:
        """Return the measurements as a small table."""
        rows = (
            ("packs", f"{self.num_packs:,} (lower bound {self.lower_bound:,})"),
            ("fill", f"{100 * self.fill_ratio:.2f} %"),
            ("documents per pack", f"{self.mean_documents:.1f} on average, {self.most_documents:,} at most"),
            ("work, max / mean", f"{self.work_imbalance:.3f}"),
            ("tokens cut, dropped", f"{self.truncated_tokens:,}, {self.dropped_tokens:,}"),
            (
                "length correlation",
                f"{self.length_correlation:+.3f} (random packs: {self.random_correlation:+.3f} "
                f"± {self.random_spread:.3f})",
            ),
        )
        return "\n".join(f"{name:<20} {value}" for name, value in rows)


def score(packing: Packing, work: tuple[float, float] = DEFAULT_WORK) -> Score:
    """Measure a Packing.

    Args:
        packing: any.
        work: (a, b): a piece of s tokens is a·s + b·s² of work.

    Raises:
        SettingError: `work` is not two numbers of at least 0, or a packing made by hand has empty packs,
            pieces without tokens, or packs over the capacity.

    Cost: O(num_pieces log num_pieces); the random comparison repacks at most 200,000 pieces eight times.

    >>> import varlen as vl
    >>> print(vl.score(vl.pack([5, 2, 6, 3], capacity=8)))  # doctest: +ELLIPSIS
    packs                2 (lower bound 2)
    fill                 100.00 %
    documents per pack   2.0 on average, 2 at most
    work, max / mean     1.000
    tokens cut, dropped  0, 0
    length correlation   ...
    """
    as_packing(packing, "vl.score(packing)")
    linear, quadratic = as_work(work)
    lengths = packing.lengths
    _check_packs(packing)
    tokens = lengths.astype(np.float64)
    pack_work = packing.pack_sums(linear * tokens + quadratic * tokens * tokens)
    documents = np.diff(packing.offsets)
    whole = packing.method != "wrapped"
    slots = packing.slot_lengths
    bound = lower_bound(slots, packing.capacity) if whole else -(-int(slots.sum()) // packing.capacity)
    correlation = length_correlation(lengths, packing.offsets)
    random = _random_correlations(lengths, slots, packing.capacity)
    return Score(
        num_packs=packing.num_packs,
        lower_bound=bound,
        num_tokens=packing.num_tokens,
        fill_ratio=packing.fill_ratio,
        mean_documents=float(documents.mean()) if documents.size else 0.0,
        most_documents=int(documents.max(initial=0)),
        work_imbalance=float(pack_work.max() / pack_work.mean()) if pack_work.size else 1.0,
        truncated_tokens=packing.ledger.truncated,
        dropped_tokens=packing.ledger.dropped,
        length_correlation=correlation,
        random_correlation=float(random.mean()),
        random_spread=float(random.std(ddof=1)),
    )


def _check_packs(packing: Packing) -> None:
    """Raise if a packing has packs that `vl.pack` never makes, for which measurements make no sense."""
    empty = np.diff(packing.offsets) < 1
    short = packing.lengths < 1
    over = (
        np.zeros(0, np.bool_) if empty.any() else packing.pack_sums(packing.slot_lengths) > packing.capacity
    )
    for wrong, what in (
        (empty, "pack {} is empty"),
        (short, "piece {} has no token"),
        (over, "pack {} is over capacity"),
    ):
        if wrong.any():
            raise SettingError(
                f"{what.format(f'{int(np.argmax(wrong)):,}')} ({int(wrong.sum()):,} of {wrong.size:,} are); "
                "make packings with vl.pack, which never gives such a one"
            )


def length_correlation(lengths: npt.ArrayLike, offsets: npt.ArrayLike) -> float:
    """Return the intraclass correlation of log length within packs, by one-way analysis of variance."""
    values = np.log(np.asarray(lengths, dtype=np.float64))
    bounds = np.asarray(offsets, dtype=np.int64)
    sizes = np.diff(bounds).astype(np.float64)
    packs, pieces = sizes.size, values.size
    if packs < 2 or pieces <= packs:
        return 0.0
    values -= values.mean()
    sums = np.add.reduceat(values, bounds[:-1])
    between = float((sums * sums / sizes).sum())
    within = float((values * values).sum()) - between
    mean_between, mean_within = between / (packs - 1), max(within, 0.0) / (pieces - packs)
    size = (pieces - float((sizes * sizes).sum()) / pieces) / (packs - 1)
    spread = mean_between + (size - 1) * mean_within
    return (mean_between - mean_within) / spread if spread > 1e-12 else 0.0


def _random_correlations(lengths: Int32Array, slots: IntArray, capacity: int) -> FloatArray:
    """Return the correlation of the same pieces packed next-fit, for each of several shuffles."""
    sample = shuffled(0, lengths.size)[:_SAMPLE] if lengths.size > _SAMPLE else np.arange(lengths.size)
    pack_of, sizes = np.empty(sample.size, np.int32), np.ones(sample.size, np.int32)
    results = np.zeros(_SHUFFLES)
    for shuffle in range(_SHUFFLES):
        mixed = sample[shuffled(shuffle + 1, sample.size)]
        num_packs = kernels.next_fit(slots[mixed].astype(np.int32), sizes, capacity, LARGEST, pack_of)
        offsets = np.searchsorted(pack_of, np.arange(num_packs + 1))
        results[shuffle] = length_correlation(lengths[mixed], offsets)
    return results
