"""Advise a capacity, a method and a policy, with reasons.

The thresholds are below. Advice is never worse than the default of the same entry point (`varlen pack` or `vl.pack`):
another method is advised only if it takes no more packs, mixes lengths no worse and waits no longer for the
heaviest pack, and is clearly better in one of these; a smaller capacity only if it cuts no more documents and
computes no more slots.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from inspect import signature

from varlen.counts import many
from varlen.offline.pack import PackSettings
from varlen.pack.api import pack
from varlen.report.inspection_figures import (
    WITH_LENGTHS,
    WITH_PACK,
    AdviceFigures,
    CapacityFigures,
    DistributionFigures,
    PackFigures,
    PaddingFigures,
)
from varlen.report.page import fill, share, times
from varlen.types import Method, Overlong

MOST_CUT = 0.01
"""A capacity is large enough if it cuts at most this share of documents …"""
MOST_BEYOND = 0.05
"""… and at most this share of tokens lies beyond it."""
LEAST_FILL = 0.98
"""The smallest capacity with this fill is chosen."""
FEWER_PACKS = 0.005
"""Share of packs that a method must save to be clearly better."""
EVENER = 0.95
"""Ratio of `waiting` at which a method is clearly better."""
ALIKE = 0.1
"""Difference of length correlation that counts."""
CANDIDATES: tuple[Method, ...] = ("best_fit", "best_fit_decreasing", "balanced")
"""The methods that may be advised; of equals, the first."""
DEFAULT_CAPACITY = 4096
"""The default of `varlen pack`."""
DEFAULTS: dict[str, Method] = {
    WITH_PACK: PackSettings(capacity=1).method,
    WITH_LENGTHS: signature(pack).parameters["method"].default,
}
"""The default method of each entry point."""


def advise(
    capacities: tuple[CapacityFigures, ...],
    padding: tuple[PaddingFigures, ...],
    distribution: DistributionFigures,
    batch_documents: int,
    arguments: Sequence[str] = (),
) -> AdviceFigures:
    """Choose a capacity, a method and a policy, and say why."""
    chosen = choose_capacity(capacities)
    entry_point = WITH_PACK if arguments else WITH_LENGTHS
    method, of_lengths = choose_method(chosen, entry_point), choose_method(chosen, WITH_LENGTHS)
    overlong: Overlong = "split" if chosen.overlong_documents else "error"
    packed = chosen.packing(entry_point + method)
    random, buckets = (next(way for way in padding if way.name == name) for name in ("random", "buckets"))
    policy = f', overlong="{overlong}"' if overlong != "error" else ""
    why = [
        f"Padding is {share(random.padding_share)} of the slots of random batches of {batch_documents:,}, "
        f"{share(buckets.padding_share)} of batches grouped by length, and {share(packed.padding_share)} of packs "
        f"by {packed.title}.",
        _why_capacity(capacities, chosen, distribution, entry_point),
        _why_method(chosen, entry_point, method),
        *_why_policy(chosen),
        *([_of_lengths(chosen, of_lengths)] if arguments else []),
    ]
    return AdviceFigures(
        capacity=chosen.capacity,
        method=method,
        packing=packed.name,
        overlong=overlong,
        call=f'vl.pack(lengths, capacity={chosen.capacity}, method="{of_lengths}"{policy})',
        command=pack_command(arguments, chosen.capacity, method, overlong) if arguments else "",
        headline=headline(
            chosen.capacity, batch_documents, random.saved_by(packed), buckets.saved_by(packed)
        ),
        why=" ".join(why),
    )


def headline(capacity: int, batch_documents: int, of_random: float, of_grouped: float) -> str:
    """Say how many slots packing saves.

    >>> headline(64, 8, -0.5, -0.2)
    'Packing at 64 takes 50.0 % more slots than random batches of 8, and 20.0 % more than batches grouped by length.'
    """
    is_fewer = of_random >= 0
    random = (
        f"saves {share(of_random)} of the slots of"
        if is_fewer
        else f"takes {share(-of_random)} more slots than"
    )
    if of_grouped >= 0:
        grouped = f"{share(of_grouped)} of those of" if is_fewer else f"saves {share(of_grouped)} of those of"
    else:
        grouped = f"takes {share(-of_grouped)} more than" if is_fewer else f"{share(-of_grouped)} more than"
    return (
        f"Packing at {capacity:,} {random} random batches of {batch_documents:,}, and {grouped} batches grouped by "
        "length."
    )


def pack_command(arguments: Sequence[str], capacity: int, method: Method, overlong: Overlong) -> str:
    """Write the shell command that packs as advised.

    >>> pack_command(["my chats.jsonl", "-o", "packed"], 2048, "best_fit", "split")
    "varlen pack 'my chats.jsonl' -o packed --capacity 2048 --method best_fit --overlong split"
    """
    policy = [] if overlong == "error" else ["--overlong", overlong]
    words = ["varlen", "pack", *arguments, "--capacity", str(capacity), "--method", method, *policy]
    return shlex.join(words)


def choose_capacity(capacities: tuple[CapacityFigures, ...]) -> CapacityFigures:
    """Return the smallest capacity that cuts few documents and packs well, or the one that comes nearest.

    If the default capacity was measured and is large enough, a smaller one must not be worse.
    """
    enough = [c for c in capacities if _is_enough(c)]
    default = next((c for c in enough if c.capacity == DEFAULT_CAPACITY), None)
    if default is not None:
        enough = [c for c in enough if c.capacity >= DEFAULT_CAPACITY or _costs_nothing(c, default)]
    for capacity in enough:
        if _usual(capacity).fill >= LEAST_FILL or capacity is default:
            return capacity
    if enough:
        return max(enough, key=lambda c: _usual(c).fill)
    return min(capacities, key=lambda c: (c.truncation_share, c.overlong_share))


def _costs_nothing(smaller: CapacityFigures, default: CapacityFigures) -> bool:
    """Whether a smaller capacity cuts no more documents than the default, and computes no more slots."""
    slots = [_usual(at).packs * at.capacity for at in (smaller, default)]
    return smaller.overlong_documents <= default.overlong_documents and slots[0] <= slots[1]


def choose_method(capacity: CapacityFigures, entry_point: str) -> Method:
    """Return the default method, or one that is clearly better in one way and worse in none."""
    default = capacity.packing(entry_point + DEFAULTS[entry_point])
    better = [name for name in CANDIDATES if _is_better(capacity.packing(entry_point + name), default)]
    if not better:
        return DEFAULTS[entry_point]

    def rank(name: Method) -> tuple[int, float]:
        packing = capacity.packing(entry_point + name)
        return round(abs(packing.length_correlation) / ALIKE), waiting(packing)

    return min(better, key=rank)


def _is_better(packing: PackFigures, default: PackFigures) -> bool:
    """Whether packs are fewer, more mixed or more even than the default's, and worse in none of these."""
    likeness, usual = abs(packing.length_correlation), abs(default.length_correlation)
    is_worse = (
        packing.packs > default.packs or likeness > usual + ALIKE or waiting(packing) > waiting(default)
    )
    return not is_worse and (
        packing.packs <= default.packs * (1 - FEWER_PACKS)
        or likeness <= usual - ALIKE
        or waiting(packing) <= EVENER * waiting(default)
    )


def waiting(packing: PackFigures) -> float:
    """Return the cost of packs that wait for the heaviest one, over that of full packs of mean work."""
    return packing.work_imbalance / packing.fill if packing.fill else packing.work_imbalance


def _is_enough(capacity: CapacityFigures) -> bool:
    return capacity.overlong_share <= MOST_CUT and capacity.truncation_share <= MOST_BEYOND


def _usual(capacity: CapacityFigures) -> PackFigures:
    """Return the packing of `varlen pack` by default."""
    return capacity.packing(WITH_PACK + DEFAULTS[WITH_PACK])


def _why_capacity(
    capacities: tuple[CapacityFigures, ...],
    chosen: CapacityFigures,
    distribution: DistributionFigures,
    entry_point: str,
) -> str:
    """Return why this capacity was chosen, and not the next smaller one."""
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
    here, there = (at.packing(entry_point + DEFAULTS[entry_point]) for at in (chosen, below))
    also = f", and {share(below.overlong_share)} cut" if below.overlong_documents else ""
    return (
        f"At {chosen.capacity:,}, {cut}, and packs are {fill(here.fill)} full; at {below.capacity:,} they would be "
        f"{fill(there.fill)} full{also}."
    )


def _cut(chosen: CapacityFigures, distribution: DistributionFigures) -> str:
    if not chosen.overlong_documents:
        return f"no document is cut (the longest has {distribution.longest:,} tokens)"
    longer = many(chosen.overlong_documents, "document is", "documents are")
    return f"{longer} longer ({share(chosen.overlong_share)})"


def _why_method(chosen: CapacityFigures, entry_point: str, method: Method) -> str:
    """Compare the method with the default, or the default with an alternative."""
    packed, default = (
        chosen.packing(entry_point + method),
        chosen.packing(entry_point + DEFAULTS[entry_point]),
    )
    if packed is default:
        return _why_default(chosen, entry_point)
    return (
        f"{method} is better here than {default.method}, the default, all in all: {many(packed.packs, 'pack')} "
        f"against {default.packs:,}, likeness of lengths within packs {packed.length_correlation:+.2f} against "
        f"{default.length_correlation:+.2f}, the heaviest pack {times(packed.work_imbalance)} the mean work against "
        f"{times(default.work_imbalance)}."
    )


def _why_default(chosen: CapacityFigures, entry_point: str) -> str:
    """Describe the default method of an entry point."""
    packed = chosen.packing(entry_point + DEFAULTS[entry_point])
    if entry_point == WITH_PACK:
        sorted_ = chosen.packing(entry_point + "best_fit_decreasing")
        return (
            f"best_fit, the default, takes documents in random order, so that packs stay a random sample of them "
            f"(likeness of lengths within packs {packed.length_correlation:+.2f}; sorted, with best_fit_decreasing, "
            f"{sorted_.length_correlation:+.2f} and {many(sorted_.packs, 'pack')} against {packed.packs:,})."
        )
    other, shuffled = chosen.packing(entry_point + "best_fit"), _usual(chosen)
    return (
        f"best_fit_decreasing, the default, takes {many(packed.packs, 'pack')}, of documents alike in length "
        f"(likeness {packed.length_correlation:+.2f}); best_fit takes {other.packs:,}, in the order of the lengths "
        f"({other.length_correlation:+.2f}), and varlen pack, which shuffles, {shuffled.packs:,} "
        f"({shuffled.length_correlation:+.2f})."
    )


def _of_lengths(chosen: CapacityFigures, method: Method) -> str:
    """Describe the packing that the line of Python makes; that of the command differs."""
    packed = chosen.packing(WITH_LENGTHS + method)
    return (
        f"vl.pack, in the order of the lengths, takes {many(packed.packs, 'pack')} by {method}, with a likeness of "
        f"{packed.length_correlation:+.2f}."
    )


def _why_policy(chosen: CapacityFigures) -> list[str]:
    """Return a sentence on what splitting saves; none if no document is longer than the capacity."""
    if not chosen.overlong_documents:
        return []
    return [
        f"Splitting what is longer loses nothing; truncating would lose {share(chosen.truncation_share)} of the "
        f"tokens, dropping {share(chosen.dropping_share)}."
    ]
