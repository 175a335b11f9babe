"""What plans of runs keep in memory: what settings allow, what a card holds, and how wide a run's rows are."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.plan_accuracy import LENGTHS as CASES
from benchmarks.plan_accuracy import cases, predicted_bytes
from tests.support.planned_runs import EVEN, priced, run, write_hardware
from tests.support.rarely import mostly
from tests.support.sliced import tiny, tokens_of
from tests.support.training import LLAMA, write_store

import varlen as vl
from varlen.errors import PlanError
from varlen.runtime.clock import bytes_meter
from varlen.runtime.step import run_step
from varlen.train import plans as affordable_module
from varlen.train import plans as planned_module
from varlen.train.plans import AUTOCAST, WIDE, affordable, with_wide_rows

BF16 = {"run__precision": "bf16"}
CARD = vl.Hardware.named("h100")
BIG = vl.CostModel(
    model=vl.ModelShape.named("llama-3-8b"),
    hardware=replace(CARD, memory_bytes=1e12),
    kernels="eager",
    memory_fraction=1.0,
)
LENGTHS = np.array([30_000], np.int32)
ONCE = vl.Search(repairs=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def hardware(tmp_path_factory):
    return write_hardware(tmp_path_factory.mktemp("hardware") / "slow.json")


def small_enough(recompute, offload="none"):
    """A card that just holds a plan of these."""
    cost = BIG.replace(recompute=recompute, offload=offload)
    plan = vl.plan_step(LENGTHS, cost=cost, mesh=vl.Mesh(), search=ONCE)
    return BIG.replace(
        hardware=replace(CARD, memory_bytes=1.001 * vl.simulate(plan, cost).peak_bytes), recompute="none"
    )


def kept_by(cost, recompute, offload, mesh=None, **search):
    """What a step recomputes and offloads by these settings."""
    job = {"mesh": mesh or vl.Mesh(), "method": "micropack", "search": vl.Search(**search)}
    plan = affordable(LENGTHS, cost=cost, recompute=recompute, offload=offload, **job)
    return plan.recompute, plan.offload


def test_more_is_recomputed_and_offloaded_where_memory_is_short():
    assert kept_by(BIG, "auto", "auto") == ("none", "none")
    assert kept_by(small_enough("selective"), "auto", "auto") == ("selective", "none")
    assert kept_by(small_enough("full"), "auto", "auto") == ("full", "none")
    least = BIG.replace(hardware=replace(CARD, memory_bytes=160e9))
    assert kept_by(least, "auto", "auto") == ("full", "kv")


def test_what_settings_say_of_recomputation_and_offloading_is_kept():
    least = BIG.replace(hardware=replace(CARD, memory_bytes=160e9))

    for recompute in ("none", "selective", "full"):
        assert kept_by(BIG, recompute, "auto") == (recompute, "none")
        assert kept_by(BIG, recompute, "kv") == (recompute, "kv")
    assert kept_by(BIG, "auto", "kv") == ("none", "kv")
    assert kept_by(least, "full", "auto") == ("full", "kv")
    for recompute, offload in (("auto", "none"), ("selective", "auto"), ("full", "none")):
        words = f'plan.recompute = "{recompute}" and plan.offload = "{offload}" hold less than "auto"'
        with pytest.raises(PlanError, match=words):
            kept_by(least, recompute, offload)
    with pytest.raises(PlanError, match=r"would fit, or a mesh of cp=2; a run has neither cp nor tp: "):
        kept_by(BIG.replace(hardware=replace(CARD, memory_bytes=150e9)), "auto", "auto")


def test_offloading_that_is_faster_is_left_where_settings_forbid_it(monkeypatch):
    inner, asked = affordable_module.plan_step, []

    def offloads(lengths, *, cost, search, **job):
        asked.append((cost.recompute, search.repairs))
        cost = cost.replace(offload="kv") if search.repairs else cost
        return inner(lengths, cost=cost, search=search, **job)

    monkeypatch.setattr(affordable_module, "plan_step", offloads)

    assert kept_by(BIG, "auto", "auto") == ("none", "kv")
    assert kept_by(BIG, "auto", "none") == ("none", "none")
    assert asked == [("none", True), ("none", True), ("none", False)]


def test_ranks_share_a_document_that_none_holds_alone():
    mesh, card = vl.Mesh(dp=2), replace(CARD, memory_bytes=104e9)
    job = {"mesh": mesh, "method": "micropack", "recompute": "auto", "offload": "auto"}
    cost = BIG.replace(hardware=card)

    plan = affordable(LENGTHS, cost=cost, search=vl.Search(), **job)

    assert plan.num_ranks.tolist() == [2]
    with pytest.raises(
        PlanError, match=r"too many for the 1 rank that may share it .* plan\.merges = true would let"
    ):
        affordable(LENGTHS, cost=cost, search=vl.Search(merges=False), **job)


def test_rows_of_more_bytes_leave_less_room_for_them():
    mesh = vl.Mesh(dp=2, pp=2, sharding="none")
    state = BIG.memory(mesh).state_bytes

    wide = with_wide_rows(BIG, mesh, WIDE).memory(mesh)

    assert state.min() < state.max()
    assert wide.limit_bytes - state.min() == pytest.approx((1e12 - state.min()) / 2)
    assert with_wide_rows(BIG, mesh, 1.0) is BIG
    latency_s, row_s = BIG.send_s(mesh)
    assert with_wide_rows(BIG, mesh, WIDE).send_s(mesh) == pytest.approx((latency_s, 2 * row_s))
    assert with_wide_rows(BIG, mesh, AUTOCAST).send_s(mesh) == (latency_s, row_s)
    full = BIG.replace(memory_fraction=1e-3)
    assert with_wide_rows(full, mesh, WIDE) is full


@pytest.mark.parametrize(
    ("precision", "times"), [({}, WIDE), (BF16, AUTOCAST), (BF16 | {"run__parallel": "fsdp"}, 1.0)]
)
def test_plans_know_how_wide_rows_are(store, hardware, tmp_path, monkeypatch, precision, times):
    seen, inner = [], planned_module.with_wide_rows

    def noted(cost, mesh, times):
        seen.append(times)
        return inner(cost, mesh, times)

    monkeypatch.setattr(planned_module, "with_wide_rows", noted)

    run(store, tmp_path / "run", priced(hardware), **precision, run__steps=1)

    assert seen == [times]


@pytest.mark.parametrize("number", mostly([1], [0, 1]))
def test_rows_take_no_more_bytes_than_plans_leave_them(number):
    case = cases()[number]
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 8}
    model, tokens = tiny("llama", torch.float32, **sizes), tokens_of(CASES)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    counted = predicted_bytes(vl.ModelShape.from_config(model.config), case.plan)

    for autocast, times in ((nullcontext(), WIDE), (torch.autocast("cpu", torch.bfloat16), AUTOCAST)):
        with bytes_meter(torch.device("cpu")) as meter, autocast:
            step = run_step(model, tokens, case.plan, meter=meter)

        assert 0.7 * times < step.places[0].peak_bytes.max() / counted < times


def test_what_is_recomputed_and_offloaded_is_what_settings_say(store, hardware, tmp_path, monkeypatch):
    ran, inner = [], vl.SliceEngine.step

    def noted(self, batch, plan=None, **named):
        ran.append((plan.recompute, plan.offload))
        return inner(self, batch, plan, **named)

    deep = {"model__settings": {**LLAMA, "attention_dropout": 0.0, "num_hidden_layers": 4}, "run__steps": 2}
    whole = run(store, tmp_path / "whole", None, **deep).steps
    monkeypatch.setattr(vl.SliceEngine, "step", noted)
    kept = {"recompute": "selective", "offload": "kv"}
    for number, plan in enumerate((EVEN | kept, priced(hardware, **kept), priced(hardware))):
        notes = run(store, tmp_path / f"{number}", plan, **deep)

        assert [step.loss for step in notes.steps] == pytest.approx([step.loss for step in whole], rel=1e-5)
        assert 'recompute "selective", offload "kv"' in notes.plans[0].plans or number == 2
    assert ran == 4 * [("selective", "kv")] + 2 * [("none", "none")]
