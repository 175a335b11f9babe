"""Which shapes a calibration measures, and how often: cheapest first, as many as its seconds hold.

Nobody knows what a shape takes on a machine before it has run there. So a small set that rates can be fitted to is
run first, and is what a calibration takes at least. Shapes are then added level by level, each predicted from the
largest that has run, as long as all of them can be run a few times in the seconds that are left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Final, NamedTuple

import numpy as np
import torch

from varlen.cost.shape import ModelShape
from varlen.runtime.probes import Probe, ProbeKind, attention_probe, layer_probe, pairs_of, parts_of, run_once
from varlen.types import FloatArray

QUERY_ROWS: Final = (32, 64, 91, 128, 181, 256, 362, 512, 725, 1024, 2048, 4096, 8192)
"""Half octaves: multiples of the kernels' blocks, and others, as documents end anywhere."""
KEY_LENGTHS: Final = (128, 181, 256, 362, 512, 725, 1024, 1449, 2048, 2897, 4096, 8192, 16384, 32768, 65536)
LAYER_ROWS: Final = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
HELD_ROWS: Final = (50, 100, 150, 300, 430, 600, 850, 1700)
HELD_KEYS: Final = (150, 300, 600, 850, 1250, 1700, 3400, 6800, 13600)
DOCUMENTS: Final = (2, 4, 8)
"""How many whole documents stand for more rows than keys."""
LEAST_KEYS: Final = 512
LEAST_CELLS: Final = tuple(product((32, 91, 256), (128, 256, 512)))
"""Rows and keys of the least that attention's rates are fitted to; 256 rows of 128 keys are two documents."""
LEAST_HELD: Final = ((50, 150), (150, 300))
LEAST_ROWS: Final = 128
"""The least that a layer's rates are fitted to are 32 rows and these; 50 are held out."""
FEWEST_ROUNDS: Final = 2
"""Where the least takes longer than the budget; one half of the rounds is still compared with the other."""
LEAST_ROUNDS: Final = 5
"""As often all shapes are run again before more shapes are; `FEWEST_ROUNDS` where the least alone is too slow."""
MOST_ROUNDS: Final = 101
LAYER_SHARE: Final = 0.4
"""Of the seconds; the rest is for attention."""
SHORT_S: Final = 0.05
"""A first run that is shorter may have taken most of that to choose a kernel: like the very first of its kind, which
loads libraries, it says nothing yet."""
MARGIN: Final = 1.15
"""What a shape may take, times what the largest before it lets expect."""


class Case(NamedTuple):
    """One shape that can be measured; also the key under which its seconds are kept."""

    kind: ProbeKind
    rows: int
    keys: int
    """0 for a layer."""

    @property
    def work(self) -> float:
        """What its seconds grow with: pairs of attention, rows of a layer."""
        return pairs_of(self.rows, self.keys) if self.kind == "attention" else float(self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What shapes are run on, and the clock that says how long."""

    make: Callable[[Case], Probe]
    run: Callable[[Probe], FloatArray]
    """Runs a probe once, and returns the seconds of both passes, float64 `[2]`."""
    now: Callable[[], float] = time.perf_counter

    @classmethod
    def of(cls, model: ModelShape, device: torch.device, dtype: torch.dtype) -> Machine:
        """Return this machine, with one layer of a model's widths on it."""
        parts = parts_of(model, device, dtype)

        def make(case: Case) -> Probe:
            if case.kind == "layer":
                return layer_probe(parts, case.rows)
            return attention_probe(model, case.rows, case.keys, device, dtype)

        return cls(make=make, run=lambda probe: run_once(probe, device))


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What is measured."""

    probes: tuple[Probe, ...]
    """What is held out comes last."""
    num_held: int
    first: FloatArray
    """float64 `[probes, 2]`: seconds of the run that each was chosen by, a round of its own."""
    num_rounds: int
    """How many more rounds the seconds that are left hold."""
    least_s: float
    """About what the smallest set takes, from the beginning of all."""


@dataclass(kw_only=True, slots=True)
class Choice:
    """Shapes chosen so far, each of which has run."""

    machine: Machine
    deadline: float
    """When all is to be over, by the machine's clock."""
    progress: Callable[[], object]
    num_again: int = LEAST_ROUNDS
    """How often what is chosen is to be run again."""
    probes: dict[Case, Probe] = field(default_factory=dict)
    passes: dict[Case, FloatArray] = field(default_factory=dict)
    """Seconds of a run, forward and backward."""
    seconds: dict[Case, float] = field(default_factory=dict)
    """Of both together."""
    held: set[Case] = field(default_factory=set)

    @property
    def once_s(self) -> float:
        """Seconds of a round."""
        return sum(self.seconds.values())

    def seconds_of(self, kind: ProbeKind) -> float:
        """Seconds of a round that go to one kind."""
        return sum(taken for case, taken in self.seconds.items() if case.kind == kind)

    def add(self, known: Iterable[Case], held: Iterable[Case]) -> None:
        """Make and run shapes, cheapest first."""
        apart = set(held)
        self.held |= apart
        for case in sorted({*known, *apart} - set(self.seconds), key=lambda case: case.work):
            probe = self.probes[case] = self.machine.make(case)
            taken = self.machine.run(probe)
            if taken.sum() < SHORT_S or case.kind not in {one.kind for one in self.seconds}:
                taken = self.machine.run(probe)
            self.passes[case], self.seconds[case] = taken, float(taken.sum())
            self.progress()

    def predicted(self, case: Case) -> float:
        """Return the seconds that a run of a shape may take, by the largest of its kind that has run."""
        kin = [one for one in self.seconds if one.kind == case.kind]
        largest = max(kin, key=lambda one: one.work)
        by_work = self.seconds[largest] * case.work / largest.work
        return MARGIN * max(by_work, min(self.seconds[one] for one in kin))

    def fits(self, known: Iterable[Case], held: Iterable[Case]) -> bool:
        """Say whether shapes can be added, and all run a few times, before the deadline."""
        more = {case: self.predicted(case) for case in {*known, *held} - set(self.seconds)}
        tried = sum(taken * (1 if taken >= SHORT_S else 2) for taken in more.values())
        rounds = self.num_again * (self.once_s + sum(more.values()))
        return self.machine.now() + tried + rounds <= self.deadline

    def left_rounds(self) -> float:
        """Return how many rounds the time until the deadline holds."""
        return (self.deadline - self.machine.now()) / max(self.once_s, 1e-9)

    def ordered(self) -> list[Case]:
        """Return all shapes, what is held out last, attention before layers."""
        return sorted(self.probes, key=lambda case: (case in self.held, case))


def choose(
    machine: Machine,
    *,
    began: float,
    budget_s: float,
    on_least: Callable[[float], object] = lambda _: None,
    progress: Callable[[], object] = lambda: None,
) -> Chosen:
    """Choose what a budget holds, and run each shape of it once or twice.

    Args:
        machine: what shapes run on.
        began: when the budget began, by the machine's clock.
        budget_s: seconds.
        on_least: called with the seconds that the smallest set takes, where they are over the budget.
        progress: called after each shape.
    """
    choice = Choice(machine=machine, deadline=began + budget_s, progress=progress)
    attention, layers = attention_levels(), layer_levels()
    choice.add(*attention.pop(0))
    choice.add(*layers.pop(0))
    least_s = machine.now() - began + (FEWEST_ROUNDS - 1) * choice.once_s
    if least_s > budget_s:
        on_least(least_s)
    if choice.left_rounds() < LEAST_ROUNDS:
        choice.num_again = FEWEST_ROUNDS
    while attention or layers:
        for_layers = choice.seconds_of("layer") < LAYER_SHARE * choice.once_s
        fitting = [
            levels
            for levels in ((layers, attention) if for_layers else (attention, layers))
            if levels and choice.fits(*levels[0])
        ]
        if not fitting:
            break
        choice.add(*fitting[0].pop(0))
    order = choice.ordered()
    return Chosen(
        probes=tuple(choice.probes[case] for case in order),
        num_held=len(choice.held),
        first=np.stack([choice.passes[case] for case in order]),
        num_rounds=int(np.clip(choice.left_rounds(), FEWEST_ROUNDS - 1, MOST_ROUNDS)),
        least_s=least_s,
    )


Level = tuple[list[Case], list[Case]]
"""What is fitted to, and what is held out."""


def attention_levels() -> list[Level]:
    """Return the smallest set, then what each longer document adds."""

    def cases(cells: Iterable[tuple[int, int]]) -> list[Case]:
        return [Case("attention", rows, keys) for rows, keys in cells]

    levels: list[Level] = [(cases(LEAST_CELLS), cases(LEAST_HELD))]
    below = 0
    for place, longest in enumerate(KEY_LENGTHS):
        if longest < LEAST_KEYS:
            continue
        cells, held = cells_of(KEY_LENGTHS[: place + 1]), []
        most = max(rows for rows, _ in cells)
        for turn, keys in enumerate(HELD_KEYS):
            rows = [count for count in HELD_ROWS if count <= min(keys, most)]
            if below < keys < longest:  # several rows over all keys, not the same ones
                held += [(rows[(2 * turn + 1) % len(rows)], keys), (rows[-1 - turn % 2], keys)]
        levels.append((cases(cells), cases(held)))
        below = longest
    return levels


def cells_of(keys: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return rows and keys of a whole grid: the last rows of a document, whole ones, several whole ones."""
    most = keys[-1] / 2
    last = [(r, k) for r, k in product(QUERY_ROWS, keys) if r <= min(k, most)]
    return last + [(count * k, k) for count, k in product(DOCUMENTS, keys[::2]) if count * k <= most]


def layer_levels() -> list[Level]:
    """Return the smallest set, then what each larger number of rows adds."""

    def cases(rows: Iterable[int]) -> list[Case]:
        return [Case("layer", count, 0) for count in rows]

    levels: list[Level] = [(cases((32, LEAST_ROWS)), cases(HELD_ROWS[:1]))]
    below = HELD_ROWS[0]
    for most in LAYER_ROWS:
        if most != LEAST_ROWS:
            held = [count for count in HELD_ROWS if below < count < max(most, LEAST_ROWS)]
            levels.append((cases((most,)), cases(held)))
            below = max(most, LEAST_ROWS)
    return levels
