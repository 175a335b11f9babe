"""Runs with `[plan]` in one process: the loss curve of whole packs, exact resume, and what plans keep in memory."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.plan.accuracy import LENGTHS as CASES
from benchmarks.plan.accuracy import TARGET_BYTES, cases
from tests.support.rarely import IS_SOAK, mostly
from tests.support.sliced import tiny, tokens_of, with_gradients
from tests.support.tiny_families import SETTINGS
from tests.support.training import (
    EVEN,
    LLAMA,
    Notes,
    metrics_of,
    planned,
    planned_table,
    priced,
    rewound,
    run,
    same_end,
    same_weights,
    settings,
    start_ranks,
    start_training,
    use_float64,
    weights_of,
)

import varlen as vl
from varlen.errors import ModelError, PlanError, SettingError
from varlen.feed.plans import ahead_of
from varlen.model_families import FAMILIES
from varlen.plan.planner import Planner
from varlen.plan.serialize import plan_fingerprint
from varlen.runtime.clock import bytes_meter
from varlen.runtime.split import check_ranks
from varlen.runtime.step import run_step
from varlen.train import affordable as affordable_module
from varlen.train import plans as pricing
from varlen.train.affordable import affordable
from varlen.train.model import model_config
from varlen.train.optimizers import make_optimizer
from varlen.train.parallel import Ranks
from varlen.train.settings import OptimizerSettings
from varlen.train.trainer import train

STEPS = 200 if IS_SOAK else 60
LONG = {
    "run__steps": STEPS,
    "run__checkpoint_every": 0,
    "optimizer__learning_rate": 1e-3,
    "data__global_batch_size": 2,
}


@pytest.fixture(scope="module")
def plain(store, tmp_path_factory):
    """Many steps of whole packs, in float64."""
    output = tmp_path_factory.mktemp("plain") / "run"
    with pytest.MonkeyPatch.context() as patched:
        use_float64(patched.setattr)
        return output, run(store, output, None, **LONG).steps


@pytest.mark.parametrize("method", mostly(["micropack"], ["even", "micropack", "packed"]))
def test_many_steps_in_slices_have_the_loss_curve_of_whole_packs(
    store, hardware, plain, tmp_path, monkeypatch, method
):
    use_float64(monkeypatch.setattr)
    plan = EVEN if method == "even" else priced(hardware, method=method)

    ours = run(store, tmp_path / "run", plan, **LONG).steps

    assert (len(ours), ours[0].plan_method) == (STEPS, "sliced" if method == "even" else method)
    for one, other in zip(ours, plain[1], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-11)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-9)
        assert (one.tokens, one.supervised_tokens, one.fill) == (
            other.tokens,
            other.supervised_tokens,
            other.fill,
        )
    assert ours[-1].loss < ours[0].loss - 1
    for name, value in weights_of(plain[0]).items():
        torch.testing.assert_close(weights_of(tmp_path / "run")[name], value, rtol=0, atol=1e-8)


def test_only_the_first_step_waits_for_its_plan(store, hardware, tmp_path):
    output = tmp_path / "run"

    steps = run(store, output, priced(hardware), run__steps=40, run__checkpoint_every=0).steps

    later = [step.plan_wait_s for step in steps[1:]]
    # Beside other work on the machine a wait is longer, and still nothing beside making a plan.
    assert np.median(later) < steps[0].plan_wait_s / 20
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["plan_wait_s"] for line in lines] == [step.plan_wait_s for step in steps]
    assert sum("MicroPacks a rank" in line["plan_answered_by"] for line in lines) > 30
    assert all(0 < line["plan_simulated_s"] < 10 for line in lines)


def test_an_empty_table_is_enough(store, tmp_path):
    notes = run(store, tmp_path / "run", {})

    assert notes.overviews[0].plans == 'slices of up to 8,192 tokens, recompute "full"'
    assert {step.plan_simulated_s for step in notes.steps} == {None}
    assert not (tmp_path / "run/plans.json").exists()
    whole = run(store, tmp_path / "whole", None).steps  # in several micro-batches a step
    assert [step.tokens for step in notes.steps] == [step.tokens for step in whole]
    assert [step.loss for step in notes.steps] == pytest.approx([step.loss for step in whole], rel=1e-5)


@pytest.mark.soak
def test_documents_are_indexed_where_plans_need_their_lengths(store, tmp_path):
    source = {"data__source": str(store.parent / "chats.jsonl"), "data__cache": str(tmp_path / "cache")}

    documents = run(store, tmp_path / "documents", EVEN, **source).steps
    tokens = run(store, tmp_path / "tokens", EVEN).steps

    assert [step.loss for step in documents] == [step.loss for step in tokens]
    with pytest.raises(SettingError, match=r"index the documents \(varlen index\)"):
        run(store, tmp_path / "streamed", EVEN, **source, data__mode="streaming")


@pytest.mark.parametrize("plan", [EVEN, {"method": "micropack"}])
def test_going_on_from_any_checkpoint_ends_with_the_same_bits(store, hardware, tmp_path, plan):
    # The quick answer is the same plan here, so that bits don't depend on how fast plans come.
    plan = plan if plan is EVEN else priced(hardware, **plan, quick="micropack")
    run(store, tmp_path / "whole", plan)

    for step in (2, 4) if IS_SOAK else (2,):
        copy = rewound(tmp_path / "whole", step, tmp_path / f"from{step}")
        (copy / "plans.json").unlink(missing_ok=True)
        notes = run(store, copy, plan)
        assert notes.overviews[0].resumed_from == step
        if plan is EVEN:
            same_end(tmp_path / "whole", copy)
        same_weights(tmp_path / "whole", copy)


def test_steps_that_are_run_again_have_the_plans_that_they_had(store, hardware, tmp_path, monkeypatch):
    inner = Planner._first_available
    long = {"run__steps": 14, "run__keep": 20}

    def late(self, step, lengths):
        return self._plan_quickly(lengths) if step in (3, 4, 12) else inner(self, step, lengths)

    with monkeypatch.context() as slow:
        slow.setattr(Planner, "_first_available", late)
        run(store, tmp_path / "whole", priced(hardware), **long)

    def are_quick(output):
        return [line["plan_answered_by"].startswith("quick") for line in metrics_of(output)]

    assert are_quick(tmp_path / "whole")[3:5] == [True, True]
    again = rewound(tmp_path / "whole", 2, tmp_path / "again")
    run(store, again, priced(hardware), **long)
    same_end(tmp_path / "whole", again)

    lost = rewound(tmp_path / "whole", 2, tmp_path / "lost")
    (lost / "plans.json").unlink()
    run(store, lost, priced(hardware, deadline_s=60.0), **long)
    # A checkpoint says how those were planned that had been read; the file says it of those that were run, too.
    assert are_quick(lost)[3:5] == [True, True]
    assert metrics_of(lost)[:6] == metrics_of(tmp_path / "whole")[:6]
    assert metrics_of(lost) != metrics_of(tmp_path / "whole")


@pytest.mark.soak
def test_killed_at_any_call_on_the_disk_a_run_goes_on_with_the_same_bits(store, hardware, tmp_path):
    short = {"run__checkpoint_every": 1, "run__keep": 2, "run__steps": 3}
    plan = priced(hardware, quick="micropack")
    run(store, tmp_path / "whole", plan, **short)
    made = planned_table(store, tmp_path / "run", plan, **short)

    codes = []
    for kill_at in (3, 7, 12, 17, 22, None):
        process = start_training(made, kill_at)
        process.join(120)
        codes.append(process.exitcode)
        if process.exitcode == 0:
            break

    assert (codes[0], codes[-1]) == (-9, 0)
    assert len(codes) >= 4
    same_weights(tmp_path / "whole", tmp_path / "run")
    losses = [[line["loss"] for line in metrics_of(tmp_path / name)] for name in ("whole", "run")]
    assert losses[0] == losses[1]


def test_half_precision_goes_on_from_any_checkpoint_with_the_same_bits(store, tmp_path):
    half = {"run__precision": "bf16"}
    run(store, tmp_path / "whole", EVEN, **half)
    copy = rewound(tmp_path / "whole", 2, tmp_path / "again")

    run(store, copy, EVEN, **half)

    same_end(tmp_path / "whole", copy)
    weights = weights_of(copy)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in weights.values())


def test_ranks_that_divide_masters_train_as_one_process_and_go_on_as_one(store, hardware, tmp_path):
    half = {"run__precision": "bf16", "run__parallel": "ddp"}
    alone = run(store, tmp_path / "alone", EVEN, **half).steps
    made = planned_table(store, tmp_path / "run", priced(hardware), **half, run__steps=4)

    for process in start_ranks([made], 2, tmp_path):
        process.join(240)
        assert process.exitcode == 0, [path.read_text() for path in tmp_path.glob("rank*.txt")]
    later = run(store, tmp_path / "run", EVEN, **half)

    assert later.overviews[0].resumed_from == 4
    losses = [line["loss"] for line in metrics_of(tmp_path / "run")]
    assert losses == pytest.approx([step.loss for step in alone], rel=2e-3)
    run(store, tmp_path / "exact", EVEN)
    exact = weights_of(tmp_path / "exact")

    def far(name):
        return sum(
            (value - exact[key]).square().sum() for key, value in weights_of(tmp_path / name).items()
        ).sqrt()

    assert 0 < far("run") < 1.5 * far("alone")


def test_a_run_of_whole_packs_goes_on_in_slices_and_back(store, tmp_path):
    run(store, tmp_path / "whole", None)
    run(store, tmp_path / "mixed", None, run__steps=2)
    run(store, tmp_path / "mixed", EVEN, run__steps=4)
    run(store, tmp_path / "mixed", None)

    for name, value in weights_of(tmp_path / "whole").items():
        torch.testing.assert_close(weights_of(tmp_path / "mixed")[name], value, rtol=0, atol=2e-5)


def test_other_plans_after_a_stop_are_planned_anew(store, hardware, tmp_path):
    run(store, tmp_path / "run", priced(hardware))
    copy = rewound(tmp_path / "run", 2, tmp_path / "copy")

    notes = run(store, copy, priced(hardware, method="balanced"))

    assert {step.plan_method for step in notes.steps} <= {"balanced", "sliced"}


@pytest.mark.soak
def test_a_run_that_begins_again_on_other_data_is_planned_anew(store, hardware, tmp_path):
    run(store, tmp_path / "run", priced(hardware), run__steps=2)
    shutil.rmtree(tmp_path / "run/checkpoints")
    before = (tmp_path / "run/plans.json").read_bytes()

    notes = run(store, tmp_path / "run", priced(hardware), run__steps=2, data__seed=5)

    assert len(notes.steps) == 2
    assert (tmp_path / "run/plans.json").read_bytes() != before


def test_what_data_cost_is_measured_by_the_plans_of_the_steps(store, hardware, tmp_path, monkeypatch):
    ran = []
    inner = vl.SliceEngine.step
    monkeypatch.setattr(
        vl.SliceEngine,
        "step",
        lambda self, batch: ran.append(plan_fingerprint(batch.plan)) or inner(self, batch),
    )
    notes = Notes()
    given = planned(store, tmp_path / "run", priced(hardware), measure__exposed_data=True, measure__steps=3)
    summary = train(given, notes)

    assert summary.exposed.steps == 3
    assert ran[6:] == [ran[3], *ran[3:6]]  # of which the first is run once to warm up
    assert summary.totals.plan_wait_s == pytest.approx(sum(step.plan_wait_s for step in notes.steps[1:]))
    assert summary.totals.first_plan_s == notes.steps[0].plan_wait_s


def costs_asked(monkeypatch):
    """A list to which the cost models of runs are added."""
    asked, inner = [], pricing.cost_of

    def noted(*given, **named):
        asked.append(inner(*given, **named))
        return asked[-1]

    monkeypatch.setattr(pricing, "cost_of", noted)
    return asked


def test_plans_are_priced_as_the_engine_runs_them(store, hardware, tmp_path, monkeypatch):
    asked = costs_asked(monkeypatch)

    run(store, tmp_path / "run", priced(hardware), run__steps=1)

    assert [(cost.kernels, cost.exchange_overlap) for cost in asked] == [("eager", 0.0)]


def test_a_machine_is_measured_once_and_its_rates_are_kept(store, tmp_path):
    plan = {"method": "micropack", "calibrate_s": 0.5, "least_rows": 8}

    first = run(store, tmp_path / "run", plan, run__steps=2)
    kept = (tmp_path / "run/hardware.json").read_bytes()
    second = run(store, tmp_path / "run", plan, run__steps=3)

    assert "measuring this machine's kernels" in first.said[0]
    held_out, changed = second.said  # nothing is measured again
    assert held_out.startswith(
        "The rates of this machine's CPU predict shapes that they weren't fitted to within"
    )
    assert changed == "run.steps was 2 and is 3"
    assert (tmp_path / "run/hardware.json").read_bytes() == kept
    assert "rates of this machine's CPU" in second.overviews[0].plans


@pytest.mark.parametrize(
    ("plan", "changes", "words"),
    [
        (
            {"pp": 2},
            {},
            "plan.pp = 2 stages, and there is 1 process; start 2, or set a plan.pp that divides 1",
        ),
        (
            {"pp": 2, "cp": 3},
            {},
            "plan.pp = 2 stages of plan.cp = 3 processes each, and there is 1 process; start 6, or set a plan.pp and "
            "plan.cp whose product divides 1",
        ),
        (
            {"pp": 2, "cp": 3, "tp": 2},
            {},
            "plan.pp = 2 stages of plan.cp = 3 x plan.tp = 2 processes each, and there is 1 process; start 12, or "
            "set a plan.pp, plan.cp and plan.tp whose product divides 1",
        ),
        ({"slice_tokens": 8, "cp": 2}, {}, "and plan.cp = 2 needs one; leave one of them out"),
        ({"slice_tokens": 8, "tp": 2}, {}, "and plan.tp = 2 needs one; leave one of them out"),
        ({"cp": 0}, {}, "plan.cp must be at least 1"),
        ({"tp": 0}, {}, "plan.tp must be at least 1"),
        ({"pp": 0}, {}, "plan.pp must be at least 1"),
        ({"slice_tokens": 0}, {}, "plan.slice_tokens must be a whole number of tokens from 1"),
        (
            {"slice_tokens": 8, "hardware": "h100"},
            {},
            'and plan.hardware = "h100" needs one; leave one of them out',
        ),
        ({"slice_tokens": 8, "method": "packed"}, {}, 'and plan.method = "packed" needs one'),
        ({"hardware": "h1000"}, {}, "no hardware is called 'h1000'; nearest: h100"),
        ({"hardware": "none.json"}, {}, "there is no such file; varlen plan --calibrate --save makes one"),
        ({"method": "micropac"}, {}, 'plan.method must be "packed" or "balanced" or "sliced" or "micropack"'),
        ({"recompute": "selectiv"}, {}, "got 'selectiv'; the nearest is \"selective\""),
        ({"offload": "nvme"}, {}, 'plan.offload must be "auto" or "none" or "kv", got \'nvme\''),
        ({"merges": "no"}, {}, "plan.merges must be true or false, got 'no'"),
        ({"merge": False}, {}, "plan.merge is no setting; the nearest is plan.merges"),
        ({"merges": False, "method": "dynamic_cp"}, {}, 'set "balanced" for whole documents'),
        ({"merges": False, "quick": "dynamic_cp"}, {}, 'plan.quick = "dynamic_cp" shares documents'),
        ({"metod": "packed"}, {}, "plan.metod is no setting; the nearest is plan.method"),
        ({"learning_rate": 1.0}, {}, "the nearest is optimizer.learning_rate"),
        ({"memory_fraction": 1.5}, {}, "plan.memory_fraction must be at most 1"),
        ({"deadline_s": 0}, {}, "plan.deadline_s must be above 0"),
        ({"virtual_stages": 2}, {}, "virtual_stages=2 needs pp of at least 2"),
        ({}, {"model__attention": "eager"}, 'model.attention = "eager" and [plan]'),
    ],
)
def test_what_goes_not_together_is_refused_in_a_sentence(store, tmp_path, plan, changes, words):
    with pytest.raises(SettingError) as refused:
        run(store, tmp_path / "run", plan, **changes)

    assert words in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "sizes", "plan", "words"),
    [
        ("llama", {}, {"tp": 4}, "tp=4 doesn't divide the 4 query heads and 2 key heads of this llama model"),
        ("llama", {}, {"tp": 3}, "tp=3 doesn't divide the 4 query heads and 2 key heads of this llama model"),
        ("llama4_text", SETTINGS["llama4_text"], {"cp": 2}, "layers with chunks of 8 tokens don't attend to"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused_before_anything_is_measured(
    store, tmp_path, kind, sizes, plan, words
):
    model, said = tiny(kind, **sizes), []
    settings, ranks = planned(store, tmp_path / "run", plan), Ranks(world_size=12)
    with pytest.raises(ModelError, match=words) as early:
        pricing.plans_of(settings, model.config, ranks, said.append)
    with pytest.raises(ModelError) as late:
        check_ranks(model, vl.Mesh(**plan))  # as the engine does

    assert str(early.value) == str(late.value)
    assert not said


@pytest.mark.parametrize("is_known", [True, False])
def test_parameters_that_plans_do_not_count_are_said(store, hardware, tmp_path, monkeypatch, is_known):
    config, said = tiny("gpt_neox", hidden_size=128, intermediate_size=512, num_key_value_heads=4).config, []
    if not is_known:
        monkeypatch.delitem(FAMILIES, "gpt_neox")  # whose feed-forward part has two matrices, not three

    pricing.plans_of(planned(store, tmp_path / "run", priced(hardware)), config, Ranks(), said.append)

    words = r"plans count [\d,]+ parameters, and this gpt_neox model has [\d,]+: predicted times and memory are as"
    found = [sentence for sentence in said if re.match(words, sentence)]
    assert len(found) == (not is_known), said


def test_parameters_of_one_mesh_are_updated_together():
    held = [torch.nn.Parameter(torch.ones(sizes)) for sizes in ((2, 2), (2, 2), (2,), (2,))]
    held[1].device_mesh = held[2].device_mesh = (
        "tp"  # as a matrix and its bias, beside an embedding and a norm
    )

    given = OptimizerSettings(weight_decay=0.5)
    groups = make_optimizer(dict(zip("abcd", held)), given, torch.device("cpu")).param_groups

    assert [group["weight_decay"] for group in groups] == [0.5, 0.5, 0.0, 0.0]
    assert [[id(p) for p in group["params"]] for group in groups] == [[id(p)] for p in held]


def test_dropout_is_refused_before_anything_is_trained(store, tmp_path):
    with pytest.raises(ModelError, match="dropout"):
        run(store, tmp_path / "run", EVEN, model__settings=LLAMA)

    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.soak
@pytest.mark.parametrize("parallel", mostly(["fsdp"], ["fsdp", "ddp"]))
def test_half_precision_trains_in_slices_and_stays_near(store, tmp_path, parallel):
    half = {"run__precision": "bf16", "run__parallel": parallel}

    ours, theirs = (run(store, tmp_path / f"{n}", plan, **half).steps for n, plan in enumerate((EVEN, None)))
    exact = run(store, tmp_path / "exact", EVEN).steps

    assert ours[0].loss != exact[0].loss
    assert ours[-1].loss == pytest.approx(exact[-1].loss, rel=0.02)
    assert ours[-1].loss == pytest.approx(theirs[-1].loss, rel=0.02)
    assert all(value.dtype == torch.float32 for value in weights_of(tmp_path / "0").values())


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
        words = f'plan.recompute = "{recompute}" and plan.offload = "{offload}" limit what fits'
        with pytest.raises(PlanError, match=words):
            kept_by(least, recompute, offload)
    with pytest.raises(
        PlanError, match=r"would fit, or a mesh of cp=2; what divides a run is plan\.pp, plan\.cp, "
    ):
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


@pytest.mark.parametrize(
    ("precision", "seen"),
    [
        ({}, ("fp32", "float32")),
        (BF16, ("bf16", "masters")),
        (BF16 | {"run__parallel": "fsdp"}, ("bf16", "float32")),
    ],
)
def test_plans_know_how_wide_rows_and_weights_are(store, hardware, tmp_path, monkeypatch, precision, seen):
    asked = costs_asked(monkeypatch)

    run(store, tmp_path / "run", priced(hardware), **precision, run__steps=1)

    assert [(cost.precision, cost.states) for cost in asked] == [seen]


@pytest.mark.soak
@pytest.mark.parametrize("number", mostly([1], [0, 1]))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rows_take_the_bytes_that_plans_leave_them(number, precision):
    case = cases()[number]
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 8}
    model = tiny("llama", torch.float32 if precision == "fp32" else torch.bfloat16, **sizes)
    tokens, shape = tokens_of(CASES), vl.ModelShape.from_config(model.config)
    with_gradients(model)
    cost = vl.CostModel(model=shape, hardware=CARD, kernels="eager", precision=precision)
    cost = cost.as_planned(case.plan)
    counted = vl.simulate(case.plan, cost).peak_bytes - cost.memory(case.plan.mesh).state_bytes.max()
    with bytes_meter(torch.device("cpu")) as meter:
        step = run_step(model, tokens, case.plan, meter=meter)

    assert step.task_runs[0].peak_bytes.max() - TARGET_BYTES * len(tokens) == pytest.approx(counted, rel=0.02)


@pytest.mark.soak
def test_what_is_recomputed_and_offloaded_is_what_settings_say(store, hardware, tmp_path, monkeypatch):
    ran, inner = [], vl.SliceEngine.step

    def noted(self, batch, plan=None, **named):
        ran.append((batch.plan.recompute, batch.plan.offload))
        return inner(self, batch, plan, **named)

    deep = {"model__settings": {**LLAMA, "attention_dropout": 0.0, "num_hidden_layers": 4}, "run__steps": 2}
    whole = run(store, tmp_path / "whole", None, **deep).steps
    monkeypatch.setattr(vl.SliceEngine, "step", noted)
    kept = {"recompute": "selective", "offload": "kv"}
    for number, plan in enumerate((EVEN | kept, priced(hardware, **kept), priced(hardware))):
        notes = run(store, tmp_path / f"{number}", plan, **deep)

        assert [step.loss for step in notes.steps] == pytest.approx([step.loss for step in whole], rel=1e-5)
        assert 'recompute "selective", offload "kv"' in notes.overviews[0].plans or number == 2
    assert ran == 4 * [("selective", "kv")] + 2 * [("none", "none")]


def test_all_ranks_read_as_far_ahead_as_the_one_that_plans(store, tmp_path, hardware):
    still = {**LLAMA, "attention_dropout": 0.0}
    changes = {"model__settings": still, "plan__method": "micropack", "plan__hardware": hardware}
    made = settings(store, tmp_path / "run", **changes, plan__ahead=3)
    config = model_config(made.model, 256)
    first, other = (pricing.plans_of(made, config, Ranks(rank=rank, world_size=2), print) for rank in (0, 1))

    try:
        assert ahead_of(first.given) == ahead_of(other.given) == 3
        assert ahead_of(first.of_evaluation) == ahead_of(other.of_evaluation) == 0
    finally:
        first.given.close()
