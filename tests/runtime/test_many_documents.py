"""Documents that are whole in one MicroPack: exact beside cut ones, without a cache, and launched together."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.distances import assert_same
from tests.support.kernel_stand_ins import KERNELS
from tests.support.rarely import mostly
from tests.support.sliced import Slice, one_gpu_plan, take_gradients, tiny, tokens_of, uncut, with_gradients
from tests.support.tiny_families import SETTINGS, Wide
from torch.utils._python_dispatch import TorchDispatchMode

from varlen.attention.kernels import Lengths, Qkv
from varlen.attention.rules import LayerRules
from varlen.cost.memory import Saved
from varlen.cost.rates import LAYER_LAUNCHES, SLICE_LAUNCHES
from varlen.runtime import attention
from varlen.runtime.clock import bytes_meter
from varlen.runtime.decoder import DecoderParts
from varlen.runtime.kv_cache import DocumentCache
from varlen.runtime.stage_run import StageRunner
from varlen.runtime.step import run_stages, run_step, step_data
from varlen.step_plan import StepPlan

ALLOCATIONS = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
    torch.ops.aten.detach,
    torch.ops.aten._unsafe_view,
)


class Launches(TorchDispatchMode):
    """Counts operations that launch a kernel on a GPU: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view and function.overloadpacket not in ALLOCATIONS
        return function(*args, **(kwargs or {}))


class OneLaunch:
    """Stands in for a kernel of whole slices; a pass of it is as many operations as it has outputs."""

    has_softcap = True

    def forward(self, given: Qkv, lengths: Lengths, rules: LayerRules) -> Any:
        query = given.query
        return torch.zeros_like(query), query.new_zeros(query.shape[1], query.shape[0])

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Any, lengths: Lengths, rules: LayerRules
    ) -> Qkv:
        return Qkv(*(torch.zeros_like(x) for x in given))


def launches(plan: StepPlan, saved: Saved = "layers") -> list[float]:
    """A layer's launches in each task of a step: those of five layers, less those of three."""
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "chosen", lambda *_: OneLaunch())
        for layers in (3, 5):
            model = with_gradients(tiny("llama", torch.float32, num_hidden_layers=layers))
            of_tasks, run_next = [], StageRunner.run_next
            with Launches() as counted, patch.context() as inner:

                def noted(
                    runner: StageRunner, run: Any = run_next, of: Any = of_tasks, all_: Any = counted
                ) -> None:
                    before = all_.count
                    run(runner)
                    of.append(all_.count - before)

                inner.setattr(StageRunner, "run_next", noted)
                run_step(model, tokens_of(plan.lengths.tolist()), plan, saved=saved)
            counts.append(np.array(of_tasks))
    return ((counts[1] - counts[0]) / 2).tolist()  # type: ignore[no-any-return]


def whole(count: int, rows: int = 1024) -> tuple[list[int], list[Slice]]:
    """So many documents, and a MicroPack of all of them."""
    return [rows // count] * count, [(number, 0, rows // count) for number in range(count)]


@pytest.mark.parametrize("offload", mostly(["none"], ["none", "kv"]))
@pytest.mark.parametrize(
    ("recompute", "saved"),
    [("none", "layers"), ("selective", "layers"), ("full", "layers"), ("full", "stage")],
)
def test_a_layer_launches_as_much_for_512_documents_as_for_one(recompute, saved, offload):
    found = []
    for count in (1, 64, 512):
        lengths, pack = whole(count)
        plan = one_gpu_plan(lengths, [pack], recompute=recompute)
        found.append(launches(replace(plan, offload=offload), saved))

    assert found[0] == found[1] == found[2]
    if saved == "layers":
        forward, backward = found[0]
        assert forward == LAYER_LAUNCHES[0]
        again = {"none": 0, "selective": 6, "full": LAYER_LAUNCHES[0]}[recompute]
        assert backward == LAYER_LAUNCHES[1] + again


def test_documents_whole_in_other_micropacks_of_the_backward_pass_launch_as_much_too():
    found = []
    for count in (8, 512):
        lengths, pack = whole(count)
        half = len(pack) // 2
        backward = [pack[half // 2 : half + half // 2], pack[: half // 2] + pack[half + half // 2 :]]
        found.append(launches(one_gpu_plan(lengths, [pack[:half], pack[half:]], backward, recompute="full")))

    assert found[0] == found[1]


def test_slices_with_earlier_tokens_launch_what_the_cost_model_prices():
    found = []
    for count in (2, 4):
        packs: list[list[Slice]] = [[(d, 32 * i, 32 * i + 32) for d in range(count)] for i in range(3)]
        tasks = launches(one_gpu_plan([96] * count, packs))
        found.append((sum(tasks[1:3]) / 2, sum(tasks[3:5]) / 2))

    for more, fewer, priced in zip(found[1], found[0], SLICE_LAUNCHES):
        assert (more - fewer) / 2 == pytest.approx(priced, rel=0.1)


LENGTHS = [30, 7, 1, 4, 12, 9, 5]
MIXED: list[list[Slice]] = [
    [(0, 0, 13), (1, 0, 7), (2, 0, 1), (4, 0, 5)],
    [(3, 0, 4), (0, 13, 30), (4, 5, 12), (5, 0, 9), (6, 0, 5)],
]
# Document 1 is whole in the forward pass alone, 4 in the backward pass alone; 2 and 3 come together there.
OTHERWISE: list[list[Slice]] = [
    [(6, 0, 5), (0, 20, 30), (1, 3, 7), (3, 0, 4), (2, 0, 1)],
    [(4, 0, 12), (5, 0, 9), (1, 0, 3), (0, 0, 20)],
]
WAYS: list[tuple[Any, float, Any, Any]] = [
    ("none", 1.0, "layers", None),
    ("selective", 1.0, "layers", None),
    ("full", 1.0, "layers", None),
    ("full", 1.0, "layers", OTHERWISE),
    ("full", 1.0, "stage", OTHERWISE),
    ("full", 0.5, "stage", None),
]


@pytest.mark.parametrize("offload", mostly(["kv"], ["none", "kv"]))
@pytest.mark.parametrize(("recompute", "share", "saved", "backward"), mostly(WAYS[1::2], WAYS))
@pytest.mark.parametrize("kernel", ["by_scores", None])
@pytest.mark.parametrize("family", mostly(["phi3"], ["llama", "phi3", "mistral", "deepseek_v3"]))
def test_whole_and_cut_documents_together_are_exact(
    family, kernel, recompute, share, saved, backward, offload, monkeypatch
):
    settings: dict[str, Any] = {**SETTINGS.get(family, {}), "num_hidden_layers": 3}
    model = tiny(family, **settings | ({"sliding_window": 9} if family == "mistral" else {}))
    tokens = tokens_of(LENGTHS)
    plan = one_gpu_plan(LENGTHS, MIXED, backward, recompute=recompute)
    if kernel is not None:
        monkeypatch.setattr(attention, "chosen", lambda *_: KERNELS[kernel]())

    with Wide():  # routers of deepseek_v3 multiply in float32
        loss, wanted = uncut(model, tokens, LENGTHS)
        run = run_step(model, tokens, replace(plan, recompute_share=share, offload=offload), saved=saved)

    assert run.loss == pytest.approx(loss, rel=1e-12)
    assert_same(take_gradients(model), wanted)


def test_whole_documents_have_no_cache(monkeypatch):
    made = []
    write = DocumentCache.write
    monkeypatch.setattr(
        DocumentCache, "write", lambda cache, *given: made.append(cache) or write(cache, *given)
    )

    run_step(tiny("llama"), tokens_of(LENGTHS), one_gpu_plan(LENGTHS, MIXED, OTHERWISE, recompute="full"))

    assert {cache.length for cache in made} == {30, 7, 12}


@pytest.mark.parametrize("kernel", ["by_scores", None])
def test_whole_and_cut_documents_are_evaluated(kernel, monkeypatch):
    model, tokens = tiny("llama"), tokens_of(LENGTHS)
    plan = one_gpu_plan(LENGTHS, MIXED, OTHERWISE, recompute="full")
    loss, _ = uncut(model, tokens, LENGTHS)
    if kernel is not None:
        monkeypatch.setattr(attention, "chosen", lambda *_: KERNELS[kernel]())

    run = run_stages(
        model,
        DecoderParts.of(model),
        step_data(plan, tokens, None),
        plan,
        keeps_losses=True,
        is_forward_only=True,
    )

    assert run.loss == pytest.approx(loss, rel=1e-12)


def test_a_fused_projection_does_not_stay_alive_for_its_values():
    model, tokens, held = tiny("phi3", torch.float32), tokens_of([256]), []
    for cuts in ([(0, 0, 256)], [(0, 0, 128), (0, 128, 256)]):
        with bytes_meter(tokens.device) as meter:
            run = run_step(model, tokens, one_gpu_plan([256], [[cut] for cut in cuts]), meter=meter)
        held.append(int(run.task_runs[0].live_bytes[len(cuts) - 1]))

    assert held[0] == pytest.approx(held[1], rel=0.001)
