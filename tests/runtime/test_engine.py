"""`vl.SliceEngine`: a batch in slices has the loss and the gradients of the model on its documents one by one."""

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.distances import assert_same
from tests.support.rarely import examples
from tests.support.sliced import SIZES, take_gradients, tiny, tokens_of, uncut
from tests.support.sliced import one_gpu_plan as plan_of_slices
from tests.support.tiny_families import Wide
from tests.support.tiny_families import family as family_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import varlen as vl
from varlen.errors import DocumentsError, ModelError, PlanError, SettingError, VarlenError
from varlen.plan.check import check_plan
from varlen.plan.one_gpu import one_gpu_plan
from varlen.runtime import decoder
from varlen.runtime.step import run_step


def documents_of(lengths: list[int]) -> list[np.ndarray]:
    random = np.random.default_rng(7)
    return [random.integers(0, SIZES["vocab_size"], length).astype(np.int32) for length in lengths]


def batch_of(documents: list[np.ndarray], **settings: Any) -> vl.PackedBatch:
    packing = vl.pack([len(x) for x in documents], capacity=max(64, *(len(x) for x in documents)))
    return vl.collate(documents, packing, **settings)


def one_by_one(model: Any, batch: vl.PackedBatch, weighting: Any = "token") -> tuple[float, Any, list[float]]:
    """Loss, gradients and each document's mean loss of the uncut model."""
    model.set_attn_implementation("sdpa")
    weights = torch.as_tensor(batch.loss_weights(weighting)).double()
    total, means = torch.zeros((), dtype=torch.float64), []
    for row, places in enumerate(batch.segment_ids):
        for segment in range(places.max() + 1):
            at = np.flatnonzero(places == segment)
            ids = torch.as_tensor(batch.input_ids[row, at]).long()[None]
            labels = torch.as_tensor(batch.labels[row, at]).long()[1:]
            losses = torch.nn.functional.cross_entropy(
                model(input_ids=ids, use_cache=False).logits[0, :-1], labels, reduction="none"
            )
            means.append(losses[labels != -100].mean().item())
            total = total + (losses * weights[row, at][1:]).sum()
    total = total / weights.sum()
    total.backward()
    return total.item(), take_gradients(model), means


@given(
    st.lists(st.integers(2, 90), min_size=1, max_size=8),
    st.integers(1, 64),
    st.sampled_from(["none", "full"]),
    st.sampled_from(["rows", "flat"]),
)
@examples(10, 25)
def test_a_step_is_that_of_the_uncut_model(lengths, slice_tokens, recompute, layout):
    model, documents = tiny("llama"), documents_of(lengths)
    mask = [np.random.default_rng(len(x)).random(len(x)) < 0.7 for x in documents]
    for one in mask:
        one[1] = True
    batch = batch_of(documents, loss_mask=mask)
    loss, wanted, means = one_by_one(model, batch)
    batch = batch_of(documents, loss_mask=mask, layout=layout)

    stats = vl.SliceEngine(model, slice_tokens, recompute=recompute).step(batch, document_losses=True)

    assert stats.loss == pytest.approx(loss, rel=1e-12)
    assert stats.num_targets == batch.num_targets
    np.testing.assert_allclose(stats.document_losses, means, rtol=1e-11)
    assert_same(take_gradients(model), wanted)
    assert max(np.diff(stats.plan.forward.slice_offsets)) <= slice_tokens


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "gpt_oss"])
@pytest.mark.parametrize("settings", [{}, {"offload": "kv", "saved": "stage"}, {"recompute": "none"}])
def test_an_evaluation_is_the_loss_of_the_uncut_model_and_touches_no_gradient(family, settings, layout):
    layers = {"num_hidden_layers": 4} if family == "llama" else {}  # of which two wait in host memory
    model, documents = family_of(family, **layers), documents_of([50, 9, 31, 4])
    mask = [np.random.default_rng(len(x)).random(len(x)) < 0.7 for x in documents]
    for one in mask:
        one[1] = True
    batch = batch_of(documents, loss_mask=mask, layout=layout)
    engine = vl.SliceEngine(model, 16, **settings)
    with Wide():
        stats = engine.step(batch, document_losses=True)
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            found = engine.evaluate(batch, document_losses=True, log_probs=True)
            loss = engine.evaluate(batch).loss
        ids = torch.as_tensor(documents[0]).long()[None]
        model.set_attn_implementation("eager")
        logits = model(input_ids=ids, use_cache=False).logits[0]

    assert found.loss == loss == pytest.approx(stats.loss, rel=1e-12)
    assert found.num_targets == batch.num_targets
    np.testing.assert_allclose(found.document_losses, stats.document_losses, rtol=1e-12)
    assert ((found.log_probs != 0).numpy() == (batch.labels != -100)).all()
    flat = batch.input_ids.ravel()
    first = next(at for at in range(len(flat)) if (flat[at : at + 50] == documents[0]).all())
    wanted = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0] * torch.as_tensor(mask[0][1:])
    mine = found.log_probs.ravel()[first + 1 : first + 50]
    torch.testing.assert_close(mine, wanted.detach(), rtol=1e-9, atol=1e-12)
    assert_same({name: p.grad for name, p in model.named_parameters()}, before)


def test_an_evaluation_by_a_plan_of_a_mesh_is_that_of_one_gpu():
    model, batch = tiny("llama", num_hidden_layers=4), batch_of(documents_of([50, 9, 31, 4]))
    cost = vl.CostModel(model=vl.ModelShape.from_config(model.config), hardware=vl.Hardware.named("h100"))
    search = vl.Search(least_rows=4, merges=False)
    plan = vl.plan_step(batch.document_lengths, cost=cost, mesh=vl.Mesh(pp=2, dp=2), search=search)
    engine = vl.SliceEngine(model, 16)

    one, many = engine.evaluate(batch, log_probs=True), engine.evaluate(batch, plan, log_probs=True)

    assert many.loss == pytest.approx(one.loss, rel=1e-12)
    assert one.document_losses is None
    torch.testing.assert_close(many.log_probs, one.log_probs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("weighting", ["document", "longalign"])
def test_documents_may_weigh_alike(weighting):
    model = tiny("qwen3", head_dim=8)
    batch = batch_of(documents_of([50, 9, 31, 4]))
    loss, wanted, _ = one_by_one(model, batch, weighting)

    stats = vl.SliceEngine(model, 16, weighting=weighting).step(batch)

    assert stats.loss == pytest.approx(loss, rel=1e-6)  # weights are float32
    assert_same(take_gradients(model), wanted, most=1e-6)


def test_batches_of_a_step_add_up():
    model, documents = tiny("llama"), documents_of([40, 9, 31, 60])
    whole = batch_of(documents)
    _, wanted, _ = one_by_one(model, whole)
    halves = [
        replace(batch_of(some), step_num_targets=whole.num_targets) for some in (documents[:2], documents[2:])
    ]
    engine = vl.SliceEngine(model, 16)

    stats = [engine.step(half) for half in halves]

    assert sum(each.num_targets for each in stats) == whole.num_targets
    assert_same(take_gradients(model), wanted)


def test_a_plan_of_the_batch_is_run_and_the_attention_is_what_it_was():
    model, batch = tiny("llama", num_hidden_layers=4), batch_of(documents_of([50, 9, 31, 4]))
    _, wanted, _ = one_by_one(model, batch)
    cost = vl.CostModel(model=vl.ModelShape.from_config(model.config), hardware=vl.Hardware.named("h100"))
    search = vl.Search(least_rows=4, splits_backward=False, merges=False)
    plan = vl.plan_step(batch.document_lengths, cost=cost, mesh=vl.Mesh(pp=2, dp=2), search=search)

    stats = vl.SliceEngine(model).step(batch, plan)

    assert stats.plan is plan
    assert len(stats.places) == 4
    assert_same(take_gradients(model), wanted)
    assert model.config._attn_implementation == "sdpa"
    assert model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.isfinite().all()


@given(st.lists(st.integers(0, 200), max_size=30), st.integers(1, 99), st.sampled_from(["none", "full"]))
def test_plans_of_one_gpu_are_plans(lengths, slice_tokens, recompute):
    plan = one_gpu_plan(np.array(lengths, np.int32), slice_tokens, recompute=recompute)

    check_plan(plan)
    for packs in (plan.forward, plan.backward):
        rows = (
            np.add.reduceat(packs.stops - packs.starts, packs.slice_offsets[:-1]) if len(packs.starts) else []
        )
        assert max(rows, default=0) <= slice_tokens


def test_a_plan_of_other_documents_is_refused():
    engine, batch = vl.SliceEngine(tiny("llama"), 16), batch_of(documents_of([20, 9]))

    with pytest.raises(PlanError, match="of 3 documents and the batch holds 2"):
        engine.step(batch, one_gpu_plan(np.array([20, 9, 1], np.int32), 16))
    with pytest.raises(
        PlanError, match=r"document 1 of the batch has 9 tokens, and 8 in the plan \(1 of 2 differ\)"
    ):
        engine.step(batch, one_gpu_plan(np.array([20, 8], np.int32), 16))


@pytest.mark.parametrize(
    ("forward", "backward", "changes", "words"),
    [
        ([[(0, 0, 20)]], None, {}, "document 1 of 9 tokens has no forward slice"),
        ([[(0, 0, 20), (1, 0, 9)]], [[(0, 0, 20)]], {}, "document 1 of 9 tokens has no backward slice"),
        ([[(0, 0, 20), (1, 0, 9)]], [[(1, 0, 9), (0, 8, 20)]], {}, "backward slice 1, .* leaves tokens out"),
        ([[(0, 0, 20)], [(1, 0, 9)]], None, {"tasks": [0, 0, 1]}, "has 1 backward tasks .* 2 MicroPacks"),
        ([[(0, 0, 20)], [(1, 0, 9)]], None, {"splits_backward": True}, "has 0 weight-gradient tasks"),
        ([[(0, 0, 20)], [(1, 0, 11)]], None, {}, "tokens 0 to 11 of document 1, which has 9"),
        ([[(0, 0, 20)], [(2, 0, 9)]], None, {}, r"document_ids\[1\] is 2"),
    ],
)
def test_a_plan_that_leaves_something_out_is_refused_before_anything_runs(forward, backward, changes, words):
    model, batch = tiny("llama"), batch_of(documents_of([20, 9]))
    plan = plan_of_slices([20, 9], forward, backward, recompute="full", **changes)

    with pytest.raises(PlanError, match=words):
        vl.SliceEngine(model).step(batch, plan)
    with pytest.raises(PlanError, match=words):
        vl.SliceEngine(model, mesh=vl.Mesh(), rank=0).step(batch, plan)

    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_plan_of_more_chunks_than_layers_is_refused():
    batch, deep = batch_of(documents_of([20, 9])), tiny("llama", num_hidden_layers=4)
    cost = vl.CostModel(model=vl.ModelShape.from_config(deep.config), hardware=vl.Hardware.named("h100"))
    plan = vl.plan_step(batch.document_lengths, cost=cost, mesh=vl.Mesh(pp=4))

    with pytest.raises(PlanError, match=r"2 layers can't be cut into 4 chunks .* pp of at most 2"):
        vl.SliceEngine(tiny("llama")).step(batch, plan)


def test_batches_that_teach_nothing_or_a_first_token_are_refused():
    engine, documents = vl.SliceEngine(tiny("llama"), 16), documents_of([20, 9])

    with pytest.raises(DocumentsError, match="none of 29 tokens has a label"):
        engine.step(batch_of(documents, loss_mask=[np.zeros(20, bool), np.zeros(9, bool)]))
    wrong = batch_of(documents)
    labels = wrong.labels.copy()
    labels[0, 0] = 5
    with pytest.raises(DocumentsError, match=r"the first token of document 0 has a label \(1 of 2 "):
        engine.step(replace(wrong, labels=labels, num_targets=wrong.num_targets + 1))


def test_settings_that_make_no_sense_are_refused():
    model = tiny("llama")
    for tokens in (0, -3, True, 2.5, 2**31):
        with pytest.raises(SettingError, match=r"^slice_tokens must be a whole number (from|of at least) 1"):
            vl.SliceEngine(model, tokens)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="recompute='all'"):
        vl.SliceEngine(model, recompute="all")  # type: ignore[arg-type]
    part = replace(batch_of(documents_of([20, 9])), step_num_targets=999)
    with pytest.raises(SettingError, match="give the whole step as one batch"):
        vl.SliceEngine(model, weighting="document").step(part)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", [{}, {"mesh": vl.Mesh(), "rank": 0}])
def test_a_step_where_gradients_are_off_is_refused(off, place):
    engine, batch = vl.SliceEngine(tiny("llama"), 16, **place), batch_of(documents_of([20, 9]))

    with off(), pytest.raises(SettingError, match=r"gradients, and they are off \(torch\.no_grad"):
        engine.step(batch)


@pytest.mark.parametrize("place", [{}, {"mesh": vl.Mesh(), "rank": 0}])
def test_what_is_no_packed_batch_and_no_plan_is_refused(place):
    model, batch = tiny("llama"), batch_of(documents_of([20, 9]))
    plan = one_gpu_plan(batch.document_lengths, 16)
    offsets = plan.forward.slice_offsets + np.int32([*[0] * plan.forward.num_micropacks, 1])
    calls: list[tuple[Any, Any, str]] = [
        ({"input_ids": torch.zeros(1, 4)}, None, "a batch of type dict; engine.step takes a PackedBatch"),
        (batch, "plan.npz", "plan=str; engine.step takes a StepPlan"),
        (batch, replace(plan, forward=replace(plan.forward, slice_offsets=offsets)), "forward.slice_offsets"),
        (
            replace(batch, plan=replace(plan, mesh=vl.Mesh(dp=2))),
            plan,
            "one rank, and engine.step got another plan",
        ),
    ]

    for no_batch, plan, words in calls:
        with pytest.raises(VarlenError, match=words):
            vl.SliceEngine(model, 16, **place).step(no_batch, plan)


def test_what_has_no_config_is_no_model():
    for model in (None, torch.nn.Linear(2, 2)):
        with pytest.raises(ModelError, match=f"slices don't run {type(model).__name__} models"):
            vl.SliceEngine(model)


@pytest.mark.parametrize(
    ("ids", "labels", "said"),
    [
        (
            [3, 61, 70_000],
            None,
            "token 1 of document 1 is id 61, and the model knows 0 to 60 (2 tokens are so)",
        ),
        ([3, 5, 4], [-100, 5, 61], "has label 61, and the model knows 0 to 60 (1 token is so)"),
    ],
)
def test_ids_that_the_model_does_not_know_are_named(ids, labels, said):
    documents = [np.array([1, 2], np.int32), np.array(ids, np.int32)]
    given = {} if labels is None else {"labels": [np.array([-100, 2]), np.array(labels)]}
    batch = vl.collate(documents, vl.pack([2, 3], capacity=8), **given)

    with pytest.raises(DocumentsError, match=re.escape(said)):
        vl.SliceEngine(tiny("llama")).step(batch)


def test_negative_ids_that_collate_did_not_see_are_named():
    batch = vl.collate(
        [np.array([1, 2], np.int32), np.array([3, 60, 4], np.int32)], vl.pack([2, 3], capacity=8)
    )
    batch = replace(batch, input_ids=np.where(batch.input_ids == 60, -1, batch.input_ids))

    with pytest.raises(DocumentsError, match=r"token 1 of document 1 is id -1, .* 0 to 60 \(1 token is so\)"):
        vl.SliceEngine(tiny("llama")).step(batch)


LENGTHS = [20, 9]


class LowRank(nn.Module):
    """What a low-rank adapter puts in the place of a module: what that gives, and a product that learns."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        outputs = getattr(base_layer, "out_features", getattr(base_layer, "embedding_dim", 0))
        self.adapter = nn.Parameter(torch.full((outputs,), 0.5, dtype=torch.float64))

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight  # type: ignore[no-any-return]

    @property
    def bias(self) -> Any:
        return getattr(self.base_layer, "bias", None)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.base_layer(given) * self.adapter  # type: ignore[no-any-return]


class ModulesToSaveWrapper(nn.Module):
    """As peft's: a frozen module, and a copy that is used and learns."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original)})
        self.original_module = original.requires_grad_(False)

    def __getattr__(self, name: str) -> Any:
        if name in ("original_module", "modules_to_save") or name.startswith("_"):
            return super().__getattr__(name)
        return getattr(self.modules_to_save["default"], name)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.modules_to_save["default"](given)  # type: ignore[no-any-return]


def head_is(wrap: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.lm_head = wrap(model.lm_head)

    return change


def embedding_is(wrap: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.model.embed_tokens = wrap(model.model.embed_tokens)

    return change


def doubled(head: nn.Linear) -> nn.Linear:
    forward = head.forward
    head.forward = lambda given: 2 * forward(given)  # type: ignore[method-assign]
    return head


def is_stepped(model: Any) -> None:
    for parameter in model.model.layers.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)


WAYS_TO_BE_PASSED_BY: list[tuple[Callable[[Any], Any], str]] = [
    (embedding_is(LowRank), "the embedding of this llama model is a .*LowRank"),
    (
        lambda model: model.model.embed_tokens.weight.register_hook(lambda gradient: gradient * 0),
        "the embedding of this llama model has 1 hook",
    ),
    (
        lambda model: model.add_module("prompt", nn.Embedding(3, 32)),
        r"prompt\.weight stands outside of .* \(1 parameter that learns does\)",
    ),
    (is_stepped, r"layers\.0\..* hook that runs .* \(18 parameters have one\)"),
]


@pytest.mark.parametrize(("change", "words"), WAYS_TO_BE_PASSED_BY)
def test_what_a_step_would_pass_by_is_refused_before_anything_changes(change, words):
    model = tiny("llama")
    before = model.config._attn_implementation
    change(model)

    with pytest.raises(ModelError, match=words):
        vl.SliceEngine(model, 8)

    assert model.config._attn_implementation == before


def test_what_is_added_after_an_engine_was_made_is_refused_too():
    model, batch = tiny("llama"), batch_of(documents_of(LENGTHS))
    engine = vl.SliceEngine(model, 8)
    model.model.embed_tokens = LowRank(model.model.embed_tokens)

    with pytest.raises(ModelError, match="the embedding of this llama model"):
        engine.step(batch)


HEADS: list[Callable[[Any], Any]] = [
    head_is(LowRank),
    head_is(doubled),
    lambda model: nn.utils.parametrizations.weight_norm(model.lm_head),
    lambda model: model.lm_head.register_forward_hook(lambda *given: given[2].tanh()),
    lambda model: model.lm_head.weight.register_hook(lambda gradient: 2 * gradient),
]


@pytest.mark.parametrize(
    ("change", "tied"), [*((head, False) for head in HEADS), (HEADS[0], True), (HEADS[1], True)]
)
def test_a_head_with_an_adapter_or_a_hook_learns_as_in_the_uncut_model(change, tied, monkeypatch):
    monkeypatch.setattr(decoder, "HEAD_ROWS", 7)
    model = tiny("llama", tie_word_embeddings=tied)
    change(model)
    tokens = tokens_of(LENGTHS)
    loss, wanted = uncut(model, tokens, LENGTHS)
    plan = plan_of_slices(LENGTHS, [[(0, 0, 12)], [(0, 12, 20), (1, 0, 9)]], recompute="full")

    run = run_step(model, tokens, plan)

    assert run.loss == pytest.approx(loss, rel=1e-12)
    assert_same(take_gradients(model), wanted)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_adapters_within_layers_and_copies_of_the_ends_learn_as_in_the_uncut_model(recompute):
    model = tiny("llama")
    head_is(ModulesToSaveWrapper)(model)
    embedding_is(ModulesToSaveWrapper)(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("modules_to_save" in name)
    model.model.layers[1].mlp.down_proj = LowRank(model.model.layers[1].mlp.down_proj)
    tokens = tokens_of(LENGTHS)
    loss, wanted = uncut(model, tokens, LENGTHS)
    plan = plan_of_slices(LENGTHS, [[(0, 0, 12)], [(0, 12, 20), (1, 0, 9)]], recompute=recompute)

    run = run_step(model, tokens, plan)
    found = take_gradients(model)

    assert run.loss == pytest.approx(loss, rel=1e-12)
    assert sorted(found) == sorted(wanted)
    assert len(found) == 3
    assert_same(found, wanted)


def test_what_does_not_learn_and_hooks_that_are_run_are_no_reason_to_refuse():
    model, batch = tiny("llama"), batch_of(documents_of(LENGTHS))
    model.prompt = nn.Embedding(3, 32).requires_grad_(False)
    seen: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda *_: seen.append(1))
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(2))

    vl.SliceEngine(model, 8).step(batch)

    assert set(seen) == {1, 2}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradient_checkpointing_of_a_model_computes_nothing_twice(recompute):
    model = tiny("llama").train()
    rows: list[int] = []
    model.model.layers[1].mlp.register_forward_hook(lambda _, given, out: rows.append(out.shape[1]))
    batch = batch_of(documents_of([30, 11, 9]))
    engine = vl.SliceEngine(model, 16, recompute=recompute)

    engine.step(batch)
    plain, wanted = rows.copy(), take_gradients(model)
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    rows.clear()
    engine.step(batch)

    assert rows == plain
    assert sum(rows) == 50 * (2 if recompute == "full" else 1)
    assert_same(take_gradients(model), wanted)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_wrappers_that_slices_would_pass_by_are_named():
    model = tiny("llama")
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    with pytest.raises(ModelError, match="CheckpointWrapper, which computes them again"):
        vl.SliceEngine(model)

    flat = type("FullyShardedDataParallel", (torch.nn.Module,), {})()
    flat.module, flat.config = tiny("llama"), model.config
    with pytest.raises(ModelError, match=r"\(FSDP1\) .*fully_shard \(FSDP2\)"):
        vl.SliceEngine(flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_whole_step_on_top_of_gradients_is_warned_of_once(dtype):
    model = tiny("llama", dtype)
    engine, optimizer = vl.SliceEngine(model, 16), torch.optim.SGD(model.parameters())
    batch = batch_of(documents_of([30, 11]))
    part = vl.collate(documents_of([30]), vl.pack([30], capacity=32), step_num_targets=50)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for set_to_none in (True, False):
            engine.step(batch)
            optimizer.zero_grad(set_to_none=set_to_none)
        engine.step(part)
        engine.step(part)
        optimizer.zero_grad()
        engine.step(batch)
    with pytest.warns(UserWarning, match=r"both count alike.*zero_grad\(\).*step_num_targets"):
        engine.step(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step(batch)
