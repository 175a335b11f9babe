"""`calibrate`: measures this machine's kernels on a model's slices, as `Hardware` for planners.

Attention is measured over query rows and key lengths, layers without their attention over rows, both passes apart,
on the functions that run steps. Some shapes are held out: they show how well the tables predict what wasn't measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from varlen.attention.rules import LayerRules
from varlen.cost import kernels
from varlen.cost.fit import Samples, fit_curve, fit_table, mape
from varlen.cost.hardware import MACHINES, Hardware, Link
from varlen.cost.model import CostModel
from varlen.cost.rates import FORWARD_LAYER, INPUT_LAYER, WEIGHT_LAYER
from varlen.cost.shape import BACKWARD_RATIO, ModelShape
from varlen.counts import many
from varlen.errors import SettingError
from varlen.runtime.attention import attend
from varlen.runtime.clock import Clock
from varlen.runtime.decoder import DecoderParts
from varlen.runtime.kv_cache import CachedSlice, DocumentCache
from varlen.runtime.main_grads import add_from_autograd, gradient
from varlen.step_plan import Mesh
from varlen.types import FloatArray

FLOPS_BACKWARD: Final = 2.0  # FLOPs of backward matrix products, relative to forward


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """One held-out shape in one pass: what the fitted tables predict, beside what it took."""

    kind: str  # "attention" or "layer", the latter without its attention
    backward: bool
    rows: int
    keys: int  # 0 for a layer
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Calibration:
    """A machine's measured rates, and how well they predict shapes that weren't among them."""

    hardware: Hardware
    held_out: tuple[Predicted, ...]
    rounds: int  # how often each shape was run
    repeat_mape: float
    """The error of predicting one half of the rounds by the other, as a share: the machine's noise."""

    @property
    def mape_attention(self) -> float:
        """Mean absolute error of held-out attention, both passes, as a share of the measured time."""
        return _error(self.held_out, "attention")

    @property
    def mape_gemm(self) -> float:
        """Likewise of layers without their attention."""
        return _error(self.held_out, "layer")

    def table(self) -> list[dict[str, str | int | float]]:
        """Return a row for each held-out shape and pass: what, rows, keys, predicted, measured, error."""
        return [
            {
                "what": f"{row.kind} {'backward' if row.backward else 'forward'}",
                "rows": row.rows,
                "keys": row.keys,
                "predicted_s": row.predicted_s,
                "measured_s": row.measured_s,
                "error": row.error,
            }
            for row in self.held_out
        ]


def calibrate(
    model: ModelShape,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    budget_s: float = 20.0,
    progress: Callable[[float], object] | None = None,
    on_least: Callable[[float], object] = lambda _: None,
    machine: Machine | None = None,
) -> Calibration:
    """Measure this machine's kernels at a model's widths.

    Args:
        device: None: CUDA where there is a GPU, else the CPU.
        dtype: of weights and activations; None: bfloat16 on CUDA, float32 on the CPU.
        budget_s: seconds that the calibration may take.
        progress: called with the share of the budget that is used.
        on_least: called with the least seconds of a calibration, if `budget_s` is less.
        machine: runs and times the shapes; None: this machine.
    """
    if not 0 < budget_s < float("inf"):
        raise SettingError(f"budget_s={budget_s!r}; it must be above 0 seconds")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
    now = time.perf_counter if machine is None else machine.now
    began, reported = now(), 0.0

    def report(share: float) -> None:
        nonlocal reported
        if progress is not None and share > reported:
            progress(share)
            reported = share

    bench = Bench.of(
        model,
        device=where,
        dtype=kind,
        budget_s=budget_s,
        machine=machine,
        progress=lambda: report(min((now() - began) / budget_s, 0.99)),
        on_least=on_least,
    )
    bench.rounds.append(bench.first)
    taken = float(bench.first.sum())
    while len(bench.rounds) < FEWEST_ROUNDS or (
        len(bench.rounds) < MOST_ROUNDS and now() + MARGIN * taken <= began + budget_s
    ):
        before = now()
        bench.run_round()
        taken = now() - before
        report(min((now() - began) / budget_s, 0.99))
    report(1.0)
    return bench.calibration()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A calibration under way, for callers that measure something else between its rounds."""

    model: ModelShape
    device: torch.device
    dtype: torch.dtype
    machine: Machine
    probes: tuple[Probe, ...]
    num_held: int  # the last so many probes are held out
    first: FloatArray
    """float64 `[probes, 2]`: seconds of the runs by which shapes were chosen; of `rounds` only where it is added."""
    num_rounds: int  # rounds that the budget holds beside the first
    rounds: list[FloatArray] = field(default_factory=list)
    """Of each round float64 `[probes, 2]`: seconds, forward and backward."""

    @classmethod
    def of(
        cls,
        model: ModelShape,
        *,
        device: torch.device,
        dtype: torch.dtype,
        budget_s: float,
        machine: Machine | None = None,
        progress: Callable[[], object] = lambda: None,
        on_least: Callable[[float], object] = lambda _: None,
    ) -> Bench:
        """Choose shapes that the budget holds, and warm them up; see `calibrate`."""
        began = time.perf_counter() if machine is None else machine.now()
        if machine is None:
            _check_memory(model, device, dtype)
            machine = Machine.of(model, device, dtype)
        choice = choose(machine, began=began, budget_s=budget_s, on_least=on_least, progress=progress)
        order = choice.ordered()
        return cls(
            model=model,
            device=device,
            dtype=dtype,
            machine=machine,
            probes=tuple(choice.probes[case] for case in order),
            num_held=len(choice.held),
            first=np.stack([choice.passes[case] for case in order]),
            num_rounds=int(np.clip(choice.left_rounds(), FEWEST_ROUNDS - 1, MOST_ROUNDS)),
        )

    def run_round(self) -> None:
        """Time every probe once, in turns first to last and last to first."""
        self.rounds.append(run_round(self.probes, self.machine.run, is_back=len(self.rounds) % 2 == 1))

    def calibration(self) -> Calibration:
        """Fit the rates of the rounds so far."""
        rounds = np.stack(self.rounds)
        seconds, known = quiet(rounds), len(self.probes) - self.num_held
        hardware = _hardware(self, seconds[:known])
        apart = quiet(rounds[::2]), quiet(rounds[1::2] if len(rounds) > 1 else rounds)
        held = _predictions(self.model, hardware, self.probes[known:], seconds[known:])
        hardware = replace(hardware, held_out_errors=(_error(held, "attention"), _error(held, "layer")))
        return Calibration(
            hardware=hardware, held_out=tuple(held), rounds=len(rounds), repeat_mape=mape(*apart)
        )


def _error(held: Sequence[Predicted], kind: str) -> float:
    """Return the mean absolute error of held-out shapes of a kind, relative to the measured time."""
    rows = [row for row in held if row.kind == kind]
    return mape(np.array([row.predicted_s for row in rows]), np.array([row.measured_s for row in rows]))


def _check_memory(model: ModelShape, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a model one layer of which, with gradients, takes over half of the memory."""
    size = torch.finfo(dtype).bits // 8
    needed, there = 2 * size * _layer_parameters(model), _memory_bytes(device)
    if needed > there / 2:
        raise SettingError(
            f"one layer of {model.name or 'the model'} takes {needed / 1e9:.1f} GB with its gradients, over "
            f"half of the {there / 1e9:.1f} GB here; give the shape of one tensor-parallel GPU's share"
        )


def _layer_parameters(model: ModelShape) -> float:
    heads = 2 * model.heads + 2 * model.kv_heads
    return model.hidden * (heads * model.head_dim + 3 * max(8, round(model.active_ffn)))


def _memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _hardware(bench: Bench, seconds: FloatArray) -> Hardware:
    """Fit all rates; those that one device can't measure come from the maker, or are assumed."""
    probes, device = bench.probes[: len(seconds)], bench.device
    tables = [fit_table(_samples("attention", probes, seconds, back)) for back in (0, 1)]
    curves = [fit_curve(_samples("layer", probes, seconds, back)) for back in (0, 1)]
    known = next((m for name, m in MACHINES.items() if name.upper() in _device_name(device).upper()), None)
    copied = _copied_bytes_per_s(device)
    assumed = Link(latency_s=2e-5, bytes_per_s=copied / 4)
    links = (
        (assumed,) * 3
        if known is None
        else tuple(
            Link(latency_s=latency, bytes_per_s=rate)
            for latency, rate in (known.intra, known.inter, known.host)
        )
    )
    peak = max(float(cells.max()) for cells in [x.tflops for x in tables] + [x.tflops for x in curves])
    return Hardware(
        name=_device_name(device),
        source=(
            f"measured on {datetime.now(UTC).date()}: {_device_name(device)}, torch {torch.__version__}, "
            f"{str(bench.dtype).removeprefix('torch.')}, {many(torch.get_num_threads(), 'thread')}, "
            f"{many(len(bench.rounds), 'round')}; links between GPUs weren't measured: "
            + ("assumed, a quarter of a memory copy's rate" if known is None else "the maker's figures")
        ),
        memory_bytes=_memory_bytes(device),
        memory_bytes_per_s=copied,
        gpus_per_node=max(1, torch.cuda.device_count()) if device.type == "cuda" else 1,
        peak_tflops=peak if known is None else known.peak_tflops,
        attention=(tables[0], tables[1]),
        gemm=curves[0],
        gemm_backward=curves[1],
        launch_s=0.0,  # stands in the curves, whose seconds have a part that no row changes
        intra=links[0],
        inter=links[1],
        host=links[2],
        measured_heads=bench.model.heads,
    )


def _samples(kind: str, probes: Sequence[Probe], seconds: FloatArray, back: int) -> Samples:
    chosen = [i for i, probe in enumerate(probes) if probe.kind == kind]
    ratio = (1.0, BACKWARD_RATIO if kind == "attention" else FLOPS_BACKWARD)[back]
    return Samples(
        rows=np.array([probes[i].rows for i in chosen], np.float64),
        keys=np.array([probes[i].keys or 1 for i in chosen], np.float64),
        flops=np.array([probes[i].flops * ratio for i in chosen]),
        seconds=seconds[chosen, back],
    )


def _predictions(
    model: ModelShape, hardware: Hardware, probes: Sequence[Probe], seconds: FloatArray
) -> list[Predicted]:
    """Return the tables' predictions for held-out probes, by the kernel that planners call."""
    cost = CostModel(model=model, hardware=hardware)
    rates = cost.rates(Mesh())._replace(attention_flops=0.0, windowed_flops=0.0, linear_flops=0.0)
    found = []
    for probe, measured in zip(probes, seconds):
        if probe.kind == "attention":
            isolated = rates._replace(attention_flops=4.0 * model.heads * model.head_dim)
        else:
            isolated = rates._replace(linear_flops=probe.flops / probe.rows)
        stop = probe.keys or probe.rows
        begin, end, one = (np.array([x], np.int32) for x in (stop - probe.rows, stop, 1))
        priced: FloatArray = kernels.price(np.array([0, 1], np.int32), begin, end, one, isolated)[0]
        passes = (priced[FORWARD_LAYER], priced[INPUT_LAYER] + priced[WEIGHT_LAYER])
        for back, predicted in enumerate(passes):
            found.append(
                Predicted(
                    kind=probe.kind,
                    backward=bool(back),
                    rows=probe.rows,
                    keys=probe.keys,
                    predicted_s=float(predicted),
                    measured_s=float(measured[back]),
                )
            )
    return found


def _copied_bytes_per_s(device: torch.device) -> float:
    """Measure how fast memory is read and written, by copies of 64 MiB."""
    source = torch.zeros(2**24, device=device)
    into = torch.empty_like(source)
    copy = Probe(
        kind="layer",
        rows=1,
        flops=1.0,
        prepare=lambda: None,
        forward=lambda _: into.copy_(source),
        backward=lambda _: None,
    )
    best = min(float(run_once(copy, device)[0]) for _ in range(LEAST_ROUNDS))
    return 2 * source.nbytes / best


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine's CPU"


# Which shapes a calibration measures, and how often: cheapest first, as many as its seconds hold.
#
# The time of a shape isn't known before it has run on the machine. So the smallest set that rates can be fitted to
# runs first, and is the least that a calibration takes. Shapes are then added level by level, with times predicted
# from the largest that has run, as long as all of them can run a few times in the seconds that are left.

QUERY_ROWS: Final = (32, 64, 91, 128, 181, 256, 362, 512, 725, 1024, 2048, 4096, 8192)
"""Half octaves: multiples of the kernels' blocks, and others, as documents end anywhere."""
KEY_LENGTHS: Final = (128, 181, 256, 362, 512, 725, 1024, 1449, 2048, 2897, 4096, 8192, 16384, 32768, 65536)
LAYER_ROWS: Final = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
HELD_ROWS: Final = (50, 100, 150, 300, 430, 600, 850, 1700)
HELD_KEYS: Final = (150, 300, 600, 850, 1250, 1700, 3400, 6800, 13600)
DOCUMENTS: Final = (2, 4, 8)  # numbers of whole documents in probes with more rows than keys
LEAST_KEYS: Final = 512
LEAST_CELLS: Final = tuple(product((32, 91, 256), (128, 256, 512)))
"""Rows and keys of the least that attention's rates are fitted to; 256 rows of 128 keys are two documents."""
LEAST_HELD: Final = ((50, 150), (150, 300))
LEAST_ROWS: Final = 128  # the least that a layer's rates are fitted to are 32 rows and these; 50 are held out
FEWEST_ROUNDS: Final = 2  # if even the smallest set exceeds the budget; halves of the rounds are compared
LEAST_ROUNDS: Final = 5  # rounds that must fit before shapes are added; else `FEWEST_ROUNDS`
MOST_ROUNDS: Final = 101
LAYER_SHARE: Final = 0.4  # share of the seconds for layers; the rest is for attention
SHORT_S: Final = 0.05
"""A first run that is shorter may have taken most of that to choose a kernel: like the very first of its kind, which
loads libraries, it says nothing yet."""
MARGIN: Final = 1.2  # a shape or a round may take this times the seconds predicted from earlier ones


class Case(NamedTuple):
    """One shape that can be measured; also the key under which its seconds are kept."""

    kind: ProbeKind
    rows: int
    keys: int  # 0 for a layer

    @property
    def work(self) -> float:
        """What its seconds grow with: pairs of attention, rows of a layer."""
        return pairs_of(self.rows, self.keys) if self.kind == "attention" else float(self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What shapes are run on, and the clock that measures them."""

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


@dataclass(kw_only=True, slots=True)
class Choice:
    """Shapes chosen so far, each of which has run."""

    machine: Machine
    deadline: float  # by the machine's clock
    progress: Callable[[], object]
    num_again: int = LEAST_ROUNDS  # how often all chosen shapes are to run again
    probes: dict[Case, Probe] = field(default_factory=dict)
    passes: dict[Case, FloatArray] = field(default_factory=dict)  # seconds of a run: forward, backward
    seconds: dict[Case, float] = field(default_factory=dict)  # of both passes
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
        same_kind = [case_ for case_ in self.seconds if case_.kind == case.kind]
        largest = max(same_kind, key=lambda case_: case_.work)
        by_work = self.seconds[largest] * case.work / largest.work
        return MARGIN * max(by_work, min(self.seconds[case_] for case_ in same_kind))

    def fits(self, known: Iterable[Case], held: Iterable[Case]) -> bool:
        """Return whether shapes can be added, and all run `num_again` times, before the deadline."""
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
) -> Choice:
    """Choose what a budget holds, and run each shape of it once or twice."""
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
    return choice


Level = tuple[list[Case], list[Case]]  # shapes to fit, and shapes held out


def attention_levels() -> list[Level]:
    """Return the smallest set, then what each longer document adds."""

    def cases(cells: Iterable[tuple[int, int]]) -> list[Case]:
        return [Case("attention", rows, keys) for rows, keys in cells]

    levels: list[Level] = [(cases(LEAST_CELLS), cases(LEAST_HELD))]
    below = 0
    for index, longest in enumerate(KEY_LENGTHS):
        if longest < LEAST_KEYS:
            continue
        cells, held = cells_of(KEY_LENGTHS[: index + 1]), []
        most = max(rows for rows, _ in cells)
        for turn, keys in enumerate(HELD_KEYS):
            rows = [count for count in HELD_ROWS if count <= min(keys, most)]
            if below < keys < longest:  # several rows over all keys, not the same ones
                held += [(rows[(2 * turn + 1) % len(rows)], keys), (rows[-1 - turn % 2], keys)]
        levels.append((cases(cells), cases(held)))
        below = longest
    return levels


def cells_of(keys: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return rows and keys of a grid: the last rows of a document, a whole document, or several."""
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


# Probes: one kernel's worth of work each, forward and backward, timed side by side in rounds.
#
# Whatever else runs on a machine slows a probe down for a while and never speeds it up. Probes therefore take turns,
# and `quiet` returns the lower quartile over the rounds.

QUIET = 0.25  # quantile of a probe's rounds that is reported
ProbeKind = Literal["attention", "layer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Work of one size that a machine is measured with."""

    kind: ProbeKind  # attention alone, or a layer without its attention
    rows: int
    keys: int = 0
    """Of attention: up to as many rows as keys are the last rows of one document, more are whole documents."""
    flops: float  # of the forward matrix products
    prepare: Callable[[], Any]  # makes a run's inputs; not timed
    forward: Callable[[Any], Any]
    backward: Callable[[Any], object]


def quiet(rounds: npt.NDArray[np.float64]) -> FloatArray:
    """Return each probe's lower quartile over the rounds, one of its measured times, to exclude noise."""
    return np.quantile(rounds, QUIET, axis=0, method="lower")


def run_round(
    probes: Sequence[Probe], run: Callable[[Probe], FloatArray], *, is_back: bool = False
) -> FloatArray:
    """Time every probe once, and return seconds of both passes, float64 `[probes, 2]`."""
    taken = np.zeros((len(probes), 2))
    for index in reversed(range(len(probes))) if is_back else range(len(probes)):
        taken[index] = run(probes[index])
    return taken


AHEAD_CYCLES: Final = 5_000_000  # of a GPU, about 3 ms: longer than the host takes to launch a layer's passes


def run_once(probe: Probe, device: torch.device) -> FloatArray:
    """Run one probe, and return the seconds of both passes, float64 `[2]`.

    On a GPU these are seconds of the device, with both passes queued before it begins, as they are within a step. A
    layer of few rows runs for less time than the host takes to launch it; its pass takes the host's time.
    """
    given, clock, host = probe.prepare(), Clock(device), Clock(torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    clock.mark()
    host.mark()
    made = probe.forward(given)
    clock.mark()
    host.mark()
    probe.backward(made)
    clock.mark()
    host.mark()
    taken = clock.seconds()
    return np.maximum(taken, host.seconds()) if probe.kind == "layer" and device.type == "cuda" else taken


def pairs_of(rows: int, keys: int) -> float:
    """Return the pairs of a query and a key that `attention_probe` computes.

    >>> pairs_of(2, 3), pairs_of(6, 3)
    (5.0, 12.0)
    """
    before = max(keys - rows, 0)
    return max(1, rows // keys) * (keys * (keys + 1) - before * (before + 1)) / 2


def attention_probe(
    model: ModelShape, rows: int, keys: int, device: torch.device, dtype: torch.dtype
) -> Probe:
    """Return attention of the last `rows` of a document of `keys` tokens, or of `rows / keys` whole documents."""
    spans = [(keys - rows, keys)] if rows <= keys else [(0, keys)] * (rows // keys)
    rows = sum(stop - start for start, stop in spans)
    scale = model.head_dim**-0.5

    def random(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, model.head_dim, device=device, dtype=dtype).transpose(1, 2)

    query, key, value = leaves = [
        random(rows, heads).requires_grad_() for heads in (model.heads, model.kv_heads, model.kv_heads)
    ]
    gradient = random(rows, model.heads)
    earlier = (random(keys, model.kv_heads), random(keys, model.kv_heads))
    wide = torch.promote_types(dtype, torch.float32)
    sent = (torch.zeros_like(earlier[0], dtype=wide), torch.zeros_like(earlier[1], dtype=wide))

    def prepare() -> list[CachedSlice]:
        for leaf in leaves:
            leaf.grad = None
        slices = []
        for start, stop in spans:
            cache = DocumentCache(stop)
            cache.pairs[0] = earlier
            if start:  # as in the middle of a document, where later slices have run backward already
                cache.gradients[0] = sent
            slices.append(CachedSlice(cache=cache, start=start, stop=stop))
        return slices

    return Probe(
        kind="attention",
        rows=rows,
        keys=keys,
        flops=4.0 * model.heads * model.head_dim * pairs_of(rows, keys),
        prepare=prepare,
        forward=lambda slices: attend(query, key, value, slices, layer=0, rules=LayerRules(scale)),
        backward=lambda out: out.backward(gradient),
    )


def parts_of(model: ModelShape, device: torch.device, dtype: torch.dtype) -> DecoderParts:
    """Return one layer of a model's widths with random weights, its attention taken out.

    A Llama layer stands for every family. The width of its feed-forward part is that of a token's active experts, and
    latent attention has as many heads of the same width. Gradients exist already, so that backward passes add to them
    as they do in a step.
    """
    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=max(8, round(model.active_ffn)),
        num_hidden_layers=1,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=8,
        tie_word_embeddings=True,
    )
    AttentionInterface.register(_ABSENT, _absent_attention)
    with torch.device(device):
        decoder = LlamaForCausalLM._from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    parts = DecoderParts.of(decoder)
    decoder.set_attn_implementation(_ABSENT)
    add_from_autograd(decoder.parameters())
    for parameter in decoder.parameters():
        gradient(parameter)
    return parts


def layer_probe(parts: DecoderParts, rows: int) -> Probe:
    """Return a layer without its attention: projections, norms, rotary positions, the feed-forward part."""
    weight = parts.embedding.weight
    hidden = torch.randn(1, rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
    by_output = torch.randn_like(hidden)
    piece = [CachedSlice(cache=DocumentCache(rows), start=0, stop=rows)]
    positions = parts.positions(piece, hidden)
    matrices = sum(p.numel() for p in parts.layers[0].parameters() if p.ndim == 2)
    return Probe(
        kind="layer",
        rows=rows,
        flops=2.0 * matrices * rows,
        prepare=lambda: hidden.detach().requires_grad_(),
        forward=lambda given: parts.run_layer(0, given, positions, piece),
        backward=lambda out: out.backward(by_output),
    )


_ABSENT = "varlen_no_attention"


class _Absent(torch.autograd.Function):
    """Return queries unchanged, and gradients for keys and values, at no cost."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        ctx.key_heads = key.shape[1]
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, gradient[:, : ctx.key_heads], gradient[:, : ctx.key_heads]


def _absent_attention(
    _module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    out: torch.Tensor = _Absent.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2), None
