"""What to choose, and why: a capacity, a method and a policy that follow from the figures.

The rules are few and stand here as numbers. A capacity is large enough if it cuts few documents; of those that
are, the smallest that packs well is taken, for its memory. A method must keep packs even where they wait for
each other, and random where that costs next to nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from varlen.counts import many
from varlen.report.inspected import (
    AdviceFigures,
    CapacityFigures,
    DistributionFigures,
    PackFigures,
    PaddingFigures,
)
from varlen.report.words import fill, share, times
from varlen.types import Method, Overlong

MOST_CUT = 0.01
"""Share of documents that a capacity may cut and still count as large enough."""
MOST_BEYOND = 0.05
"""Share of tokens that may lie beyond the capacity."""
LEAST_FILL = 0.98
"""Fill that a capacity must reach to be chosen for its smallness."""
MORE_PACKS = 0.005
"""Share of packs that a method may take more than the fullest, where it is better in another way."""
EVENER = 0.95
"""Packs are evener if the work of all, each as heavy as the heaviest, falls to this part."""
ALIKE = 0.1
"""Likeness of lengths within packs above that of shuffled documents, from which their order counts as sorted."""
CANDIDATES: tuple[Method, ...] = ("best_fit", "best_fit_decreasing", "balanced")
"""The methods that are advised; of equals, the first."""


def advise(
    capacities: tuple[CapacityFigures, ...],
    padding: tuple[PaddingFigures, ...],
    distribution: DistributionFigures,
    batch_documents: int,
    arguments: Sequence[str] = (),
) -> AdviceFigures:
    """Choose a capacity, a method and a policy, and say why.

    Args:
        capacities: what was measured, rising.
        padding: the ways of padding whole documents, for comparison.
        distribution: of the documents.
        batch_documents: of a padded batch.
        arguments: with which `varlen pack` would read the same documents and write them; none if it can't.
    """
    chosen = choose_capacity(capacities)
    method = choose_method(chosen)
    overlong: Overlong = "split" if chosen.overlong_documents else "error"
    packed = chosen.packing(method)
    random = next(way for way in padding if way.name == "random")
    policy = f', overlong="{overlong}"' if overlong != "error" else ""
    return AdviceFigures(
        capacity=chosen.capacity,
        method=method,
        overlong=overlong,
        call=f'vl.pack(lengths, capacity={chosen.capacity}, method="{method}"{policy})',
        command=pack_command(arguments, chosen.capacity, method, overlong) if arguments else "",
        headline=(
            f"Packed at {chosen.capacity:,} by {packed.title}: {fill(packed.fill)} full. Padded in random batches "
            f"of {batch_documents:,}: {share(1 - random.padding_share)} full."
        ),
        why=" ".join(
            [
                _why_capacity(capacities, chosen, distribution),
                _why_method(chosen, method),
                *_why_policy(chosen),
                f"Padded random batches compute {times(random.slots_per_token * packed.fill)} the positions of "
                "these packs.",
            ]
        ),
    )


def pack_command(arguments: Sequence[str], capacity: int, method: Method, overlong: Overlong) -> str:
    """Write a command that packs as chosen, to be pasted into a shell.

    >>> pack_command(["my chats.jsonl", "-o", "packed"], 2048, "best_fit", "split")
    "varlen pack 'my chats.jsonl' -o packed --capacity 2048 --method best_fit --overlong split"
    """
    policy = [] if overlong == "error" else ["--overlong", overlong]
    words = ["varlen", "pack", *arguments, "--capacity", str(capacity), "--method", method, *policy]
    return shlex.join(words)


def choose_capacity(capacities: tuple[CapacityFigures, ...]) -> CapacityFigures:
    """Return the smallest capacity that cuts few documents and packs well, or the one that comes nearest."""
    enough = [c for c in capacities if _is_enough(c)]
    for capacity in enough:
        if _fullest(capacity).fill >= LEAST_FILL:
            return capacity
    if enough:
        return max(enough, key=lambda c: _fullest(c).fill)
    return min(capacities, key=lambda c: (c.truncation_share, c.overlong_share))


def choose_method(capacity: CapacityFigures) -> Method:
    """Return, of methods that are full, the evenest if packs are much evener with it, or else the most random."""
    fullest = _fullest(capacity)
    full = [
        name for name in CANDIDATES if capacity.packing(name).packs <= fullest.packs * (1 + MORE_PACKS)
    ] or ["best_fit_decreasing"]
    first = min(full, key=lambda name: round(abs(capacity.packing(name).length_correlation) / ALIKE))
    evenest = min(full, key=lambda name: waiting(capacity.packing(name)))
    if waiting(capacity.packing(evenest)) <= EVENER * waiting(capacity.packing(first)):
        return evenest
    return first


def waiting(packing: PackFigures) -> float:
    """Return what packs cost that wait for each other: as many as there are, each as heavy as the heaviest.

    In units of the mean work of as many packs as the tokens would fill.
    """
    return packing.work_imbalance / packing.fill if packing.fill else packing.work_imbalance


def _is_enough(capacity: CapacityFigures) -> bool:
    return capacity.overlong_share <= MOST_CUT and capacity.truncation_share <= MOST_BEYOND


def _fullest(capacity: CapacityFigures) -> PackFigures:
    return max((capacity.packing(name) for name in CANDIDATES), key=lambda packing: packing.fill)


def _why_capacity(
    capacities: tuple[CapacityFigures, ...], chosen: CapacityFigures, distribution: DistributionFigures
) -> str:
    """Say why this capacity and not the next smaller."""
    cut = _cut(chosen, distribution)
    if not _is_enough(chosen):
        return (
            f"Of the capacities looked at, {chosen.capacity:,} cuts the least, and still {cut}; a larger one "
            "would cut fewer."
        )
    smaller = [c for c in capacities if c.capacity < chosen.capacity]
    if not smaller:
        return f"At {chosen.capacity:,}, the smallest capacity looked at, {cut}."
    below = smaller[-1]
    if not _is_enough(below):
        return (
            f"At {chosen.capacity:,}, {cut}; at {below.capacity:,} it would be "
            f"{share(below.overlong_share)} of the documents, with {share(below.truncation_share)} of the tokens "
            "beyond the cut."
        )
    return (
        f"At {chosen.capacity:,}, {cut}, and packs are {fill(_fullest(chosen).fill)} full; at "
        f"{below.capacity:,} at most {fill(_fullest(below).fill)}."
    )


def _cut(chosen: CapacityFigures, distribution: DistributionFigures) -> str:
    if not chosen.overlong_documents:
        return f"no document is cut (the longest has {distribution.longest:,} tokens)"
    longer = many(chosen.overlong_documents, "document is", "documents are")
    return f"{longer} longer ({share(chosen.overlong_share)})"


def _why_method(chosen: CapacityFigures, method: Method) -> str:
    """Say what the method brings over the others."""
    packed, fullest = chosen.packing(method), _fullest(chosen)
    others = [chosen.packing(name) for name in CANDIDATES if name != method]
    if method == "balanced":
        other = chosen.packing("best_fit_decreasing")
        likeness = (
            f"likeness of lengths within packs {packed.length_correlation:+.2f} against "
            f"{other.length_correlation:+.2f}"
        )
        if waiting(packed) > EVENER * waiting(other):
            return (
                f"{method} mixes lengths, so packs stay nearer to random samples than with {other.name} "
                f"({likeness}), at a fill of {fill(packed.fill)} against {fill(other.fill)}."
            )
        return (
            f"With {method} the heaviest pack does {times(packed.work_imbalance)} the mean work, with "
            f"{other.name} {times(other.work_imbalance)}; fill is {fill(packed.fill)} against "
            f"{fill(other.fill)}, {likeness}."
        )
    sorted_ = chosen.packing("best_fit_decreasing")
    if method == "best_fit":
        more = packed.packs / fullest.packs - 1
        shuffled = chosen.packing("axolotl_multipack").length_correlation
        likeness = f"likeness of lengths within packs {packed.length_correlation:+.2f}"
        order = (
            f"so shuffle the documents first: in this order neighbours are alike ({likeness}), and "
            "varlen pack shuffles by itself"
            if packed.length_correlation > shuffled + ALIKE
            else f"so they stay a random sample ({likeness}, sorted {sorted_.length_correlation:+.2f})"
        )
        return (
            f"{method} takes {share(more) + ' more' if more > 0 else 'no more'} packs than the fullest method and "
            f"fills them in input order, {order}."
        )
    worst = min(others, key=lambda other: other.fill)
    return (
        f"{method} makes the fullest packs: {fill(packed.fill)} against {fill(worst.fill)} with {worst.name}."
    )


def _why_policy(chosen: CapacityFigures) -> list[str]:
    """Say what splitting saves, where anything is longer than the capacity."""
    if not chosen.overlong_documents:
        return []
    return [
        f"Splitting what is longer loses nothing; truncating would lose {share(chosen.truncation_share)} of the "
        f"tokens, dropping {share(chosen.dropping_share)}."
    ]
