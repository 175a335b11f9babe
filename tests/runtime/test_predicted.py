"""Peak memory of steps as the engine runs them, every tensor counted, beside the simulator's word on their plans."""

import copy
import queue
import threading
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.side_by_side import PATIENCE_S, Table, ThreadPeers, in_threads, plan_of
from tests.support.rarely import mostly
from tests.support.sliced import Slice, tiny, tokens_of
from tests.support.step_plans import equal_plan
from torch.utils._python_dispatch import _disable_current_modes

import varlen as vl
from varlen.cost.memory import Saved
from varlen.plan.one_gpu import one_gpu_plan
from varlen.runtime.clock import Clock, TrackedBytes
from varlen.runtime.decoder import DecoderParts
from varlen.runtime.mesh.channels import Channels
from varlen.runtime.mesh.shared_documents import groups_of, shared_documents
from varlen.runtime.stage_run import StageRunner
from varlen.runtime.step import chunk_steps, layers_of, step_data
from varlen.simulate.schedules import interleaved, sliced, zero_bubble
from varlen.step_plan import BACKWARD, FORWARD, WEIGHT, Mesh, StepPlan
from varlen.types import FloatArray

NARROW = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
MODELS: dict[str, dict[str, int]] = {
    "GQA": {**NARROW, "num_key_value_heads": 2, "intermediate_size": 224, "num_hidden_layers": 5},
    "MHA": {**NARROW, "num_key_value_heads": 4, "intermediate_size": 172, "num_hidden_layers": 6},
    "wide": {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 896,
        "num_hidden_layers": 6,
        "vocab_size": 512,
    },
}
WAYS = [
    (recompute, saved, offload)
    for recompute, saved in (
        ("none", "layers"),
        ("selective", "layers"),
        ("full", "layers"),
        ("full", "stage"),
    )
    for offload in ("none", "kv")
]
HEADS = pytest.mark.parametrize("name", mostly(["GQA"], ["GQA", "MHA"]))
OFTEN = [
    ("none", "layers", "none"),
    ("selective", "layers", "kv"),
    ("full", "layers", "none"),
    ("full", "stage", "kv"),
]
EACH_WAY = pytest.mark.parametrize(("recompute", "saved", "offload"), mostly(OFTEN, WAYS))
MOST_AND_LEAST = pytest.mark.parametrize(
    ("recompute", "saved", "offload"), mostly([OFTEN[0], OFTEN[-1]], WAYS)
)
"""Everything kept, and as little as can be."""
ON_ONE = [(name, *held) for name in MODELS for held in (((600,), 100), ((500, 40, 160, 90, 60), 250))]


def check(name: str, plan: StepPlan, saved: Any, rel: float = 0.02) -> None:
    model = tiny("llama", torch.bfloat16, **MODELS[name])

    found, said = measured(model, plan, saved), predicted(model, plan, saved)

    for place, (one, other) in enumerate(zip(found.ravel().tolist(), said.ravel().tolist())):
        print(f"place {place}: measured {one:,.0f}, predicted {other:,.0f}, {other / one - 1:+.2%}")
    np.testing.assert_allclose(said, found, rtol=rel)


def pipelined(schedule: Any, count: int, slices: int, rows: int, mesh: Mesh, **settings: Any) -> StepPlan:
    """Documents of `slices` slices of `rows` each, in a closed-form order."""
    plan = equal_plan(schedule, count, mesh, slices=slices)
    passes = {
        each: replace(packs, starts=rows * packs.starts, stops=rows * packs.stops)
        for each, packs in (("forward", plan.forward), ("backward", plan.backward))
    }
    return replace(plan, lengths=rows * plan.lengths, **passes, **settings)


@EACH_WAY
@pytest.mark.parametrize(("name", "lengths", "slice_tokens"), mostly([ON_ONE[1]], ON_ONE))
def test_a_stage_holds_what_is_predicted(
    name: str, recompute: Any, saved: Any, offload: Any, lengths: tuple[int, ...], slice_tokens: int
) -> None:
    held = np.array(lengths, np.int32)
    check(name, one_gpu_plan(held, slice_tokens, recompute=recompute, offload=offload), saved)


@pytest.mark.parametrize("name", mostly(["MHA"], MODELS))
@EACH_WAY
@pytest.mark.parametrize(
    ("count", "slices", "rows"), [(5, 5, 100), pytest.param(3, 1, 250, marks=pytest.mark.soak)]
)
def test_two_stages_hold_what_is_predicted(
    name: str, recompute: Any, saved: Any, offload: Any, count: int, slices: int, rows: int
) -> None:
    schedule = sliced(2, count, slices)
    plan = pipelined(schedule, count, slices, rows, Mesh(pp=2), recompute=recompute, offload=offload)
    check(name, plan, saved)


@HEADS
@MOST_AND_LEAST
def test_documents_that_begin_while_others_end_hold_what_is_predicted(
    name: str, recompute: Any, saved: Any, offload: Any
) -> None:
    plan = pipelined(sliced(2, 9, 3), 9, 3, 120, Mesh(pp=2), recompute=recompute, offload=offload)
    check(name, plan, saved)


@MOST_AND_LEAST
def test_chunks_in_turn_hold_what_is_predicted(recompute: Any, saved: Any, offload: Any) -> None:
    mesh = Mesh(pp=2, virtual_stages=2)
    plan = pipelined(interleaved(2, 2, 4), 4, 1, 200, mesh, recompute=recompute, offload=offload)
    check("GQA", plan, saved)


@HEADS
@MOST_AND_LEAST
def test_weight_gradients_apart_hold_what_is_predicted(
    name: str, recompute: Any, saved: Any, offload: Any
) -> None:
    settings = {"recompute": recompute, "offload": offload, "splits_backward": True}
    check(name, pipelined(zero_bubble(2, 3), 3, 1, 300, Mesh(pp=2), **settings), saved)


@HEADS
@MOST_AND_LEAST
@pytest.mark.parametrize(("ranks", "count"), [(2, 5), pytest.param(4, 2, marks=pytest.mark.soak)])
def test_ranks_that_share_a_document_hold_what_is_predicted(
    name: str, recompute: Any, saved: Any, offload: Any, ranks: int, count: int
) -> None:
    cuts: list[list[Slice]] = [[(0, *each)] for each in pairwise(range(0, 1601, 1600 // count))]
    plan = plan_of([1600], [(0, ranks)], [cuts] * ranks, [cuts[::-1]] * ranks, recompute=recompute)
    check(name, replace(plan, offload=offload), saved)


@HEADS
@pytest.mark.parametrize("offload", mostly(["kv"], ["none", "kv"]))
@pytest.mark.parametrize("share", mostly([0.5], [0.2, 0.5, 0.8]))
def test_layers_some_of_which_are_computed_again_hold_what_is_predicted(
    name: str, offload: Any, share: float
) -> None:
    plan = one_gpu_plan(np.array([1000], np.int32), 125, recompute="full", offload=offload)
    check(name, replace(plan, recompute_share=share), "layers", 0.005)


def by_dice(random: Random, lengths: list[int]) -> list[list[Slice]]:
    """MicroPacks of slices of documents, each cut anywhere, mixed anyhow, in their order."""
    chains = []
    for document, length in enumerate(lengths):
        inner = {60 * random.randrange(1, length // 60) for _ in range(random.randrange(6))}
        chains.append([(document, *each) for each in pairwise(sorted({0, length, *inner}))])
    packs: list[list[Slice]] = []
    while any(chains):
        if taken := [chain.pop(0) for chain in chains if chain and random.random() < 0.6]:
            packs.append(taken)
    return packs


@pytest.mark.parametrize(("ranks", "stages"), mostly([(2, 1)], [(1, 1), (2, 1), (1, 2)]))
@pytest.mark.parametrize("weights", mostly(["apart and late"], ["at once", "apart", "apart and late"]))
@pytest.mark.parametrize("seed", mostly([6], range(20)))  # it misses nothing of what is counted
def test_any_cuts_of_both_passes_hold_what_is_predicted(
    seed: int, weights: str, ranks: int, stages: int
) -> None:
    random = Random(seed)
    lengths = [random.choice([600, 1200, 1800]) for _ in range(random.randrange(1, 4))]
    passes = by_dice(random, lengths), by_dice(random, lengths)[::-1]
    cuts = ([each] * ranks for each in passes)
    plan = plan_of(lengths, [(0, ranks)] * len(lengths), *cuts, recompute="full")
    backward = {"at once": [BACKWARD], "apart": [BACKWARD, WEIGHT], "apart and late": [BACKWARD]}[weights]
    tasks = [FORWARD] * len(passes[0]) + backward * len(passes[1])
    tasks += [WEIGHT] * len(passes[1]) * (weights == "apart and late")
    plan = replace(
        plan,
        tasks=np.tile(np.array(tasks, np.uint8), ranks * stages),
        task_offsets=np.arange(ranks * stages + 1, dtype=np.int32) * len(tasks),
        mesh=Mesh(dp=ranks, pp=stages),
        splits_backward=weights != "at once",
    )
    saved, offload = random.choice(["layers", "stage"]), random.choice(["none", "kv"])
    check(random.choice(["GQA", "wide"]), replace(plan, offload=offload), saved, 0.01)


@pytest.mark.parametrize("name", mostly(["GQA"], MODELS))
def test_cuts_of_the_backward_pass_alone_hold_what_is_predicted(name: str) -> None:
    forward: list[list[Slice]] = [[(0, 0, 500)], [(0, 500, 700), (1, 0, 300)], [(0, 700, 1000)]]
    backward: list[list[Slice]] = [[(0, 850, 1000)], [(0, 300, 850)], [(0, 0, 300), (1, 0, 300)]]
    plan = plan_of([1000, 300], [(0, 1), (0, 1)], [forward], [backward], recompute="full")
    check(name, plan, "layers")


H100 = vl.Hardware.named("h100")


TOLD = {}


class Pipe:
    """One direction between two threads, which has sent a message once it was told of it."""

    def __init__(self) -> None:
        self._going: queue.Queue[torch.Tensor] = queue.Queue()

    def send(self, rows: torch.Tensor, _: int) -> Any:
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            self._going.put(rows.clone())
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    def receive(self, rows: torch.Tensor, _: int) -> Any:
        def wait() -> None:
            with _disable_current_modes():  # type: ignore[no-untyped-call]
                rows.copy_(self._going.get(timeout=PATIENCE_S))

        return SimpleNamespace(wait=wait)


class End:
    """A stage's end of a pipe, as channels know groups."""

    index, ranks = 0, (0, 1)

    def __init__(self, pipe: Pipe) -> None:
        self.send, self.receive = pipe.send, pipe.receive


def measured(model: Any, plan: StepPlan, saved: Saved = "layers") -> FloatArray:
    """The most bytes of tensors on each stage of each rank beside parameters, gradients and tokens, `[dp, pp]`."""
    mesh, tokens = plan.mesh, tokens_of(plan.lengths.tolist())
    tables = {
        (stage, *group): Table(group[1])
        for rank in range(mesh.dp)
        for group in groups_of(plan, rank)
        for stage in range(mesh.pp)
    }
    models = [copy.deepcopy(model) for _ in range(mesh.dp * mesh.pp)]
    for parameter in (p for each in models for p in each.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    pipes: dict[Any, Pipe] = defaultdict(Pipe)
    guard, peaks = threading.Lock(), np.zeros((mesh.dp, mesh.pp))
    TOLD.clear()

    def run(number: int) -> None:
        rank, stage = divmod(number, mesh.pp)
        mine = models[number]
        groups: dict[tuple[int, int], Any] = {
            (first, size): ThreadPeers(tables[stage, first, size], rank - first)
            for first, size in groups_of(plan, rank)
        }
        with TrackedBytes() as meter:
            parts, data = DecoderParts.of(mine), step_data(plan, tokens, None)
            shared = shared_documents(plan, rank, groups, tokens.device)
            chunks = chunk_steps(parts, layers_of(mine, mesh), data, plan, shared=shared, saved=saved)
            before = meter.live
            with guard:
                ends = {
                    (kind, takes): End(pipes[rank, kind, takes])
                    for kind, step in ((FORWARD, 1), (BACKWARD, -1))
                    for takes in range(mesh.num_chunks)
                    if 0 <= takes - step < mesh.num_chunks
                    and stage in ((takes - step) % mesh.pp, takes % mesh.pp)
                }
            seat = SimpleNamespace(mesh=mesh, stage=stage, dp_rank=rank)
            here: Any = SimpleNamespace(seat=seat, channels=ends)
            lookout: Any = SimpleNamespace(waiting=nullcontext)
            like = torch.empty(mine.config.hidden_size, dtype=mine.dtype)
            wires = Channels(here, plan, like, lookout, shared)
            clock = Clock(tokens.device)
            place = StageRunner(plan, rank, stage, chunks[stage :: mesh.pp], wires, clock=clock, meter=meter)
            while place.next_task:
                place.run_next()
            TOLD[rank, stage] = (place.told(), before)
            peaks[rank, stage] = place.told().peak_bytes.max(initial=0) - before

    in_threads(run, len(models), list(tables.values()))
    return peaks


def predicted(model: Any, plan: StepPlan, saved: Saved = "layers") -> FloatArray:
    """The simulator's peaks beside states, float64 `[dp, pp]`."""
    shape = vl.ModelShape.from_config(model.config)
    cost = vl.CostModel(model=shape, hardware=H100, kernels="eager", saved=saved)
    return vl.simulate(plan, cost).peaks_bytes - cost.as_planned(plan).memory(plan.mesh).state_bytes
