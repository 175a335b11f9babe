"""A loader with plans gives each rank the documents that the plan of a step deals to it, and nothing else."""

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.random_plans import random_plan

import varlen as vl
from varlen.documents.source import open_source
from varlen.errors import PlanError, SettingError, StalledError, StateError
from varlen.feed import exchange, opening
from varlen.feed.exchange import PLAN
from varlen.feed.indexed.stream import _with_next
from varlen.feed.plans import Plans, PlansOfAnotherRank
from varlen.offline.index import index_source
from varlen.step_plan import StepPlan
from varlen.store.store import TokenStore

SETTINGS: dict[str, Any] = {"capacity": 256, "global_batch_size": 16, "seed": 2, "worker": "thread"}
Piece = tuple[int, int, bytes]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    random = np.random.default_rng(1)
    rows = ["".join(map(chr, random.integers(32, 126, n))) for n in random.integers(1, 400, 150)]
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    return path


@pytest.fixture(scope="module")
def store(texts: Path) -> Path:
    index_source(open_source(texts, "bytes"), texts.parent / "store")
    return texts.parent / "store"


def plans_of(dp: int) -> Callable[[int, Any], StepPlan]:
    """Plans by dice; some documents are shared."""
    return lambda step, lengths: random_plan(step + 100 * dp, mesh=vl.Mesh(dp=dp), lengths=lengths.tolist())


def pieces_of(batch: vl.PackedBatch) -> list[Piece]:
    ends = np.cumsum(batch.document_lengths)
    tokens = batch.input_ids.ravel()
    return [
        (int(number), int(start), tokens[end - length : end].tobytes())
        for number, start, length, end in zip(
            batch.document_ids, batch.document_starts, batch.document_lengths, ends
        )
    ]


@contextmanager
def ranks(store: Path, dp: int, plan: Any = None, **settings: Any) -> Iterator[list[vl.PackedLoader]]:
    given = SETTINGS | settings | {"plan": plan or plans_of(dp)}
    with ExitStack() as stack:
        yield [
            stack.enter_context(vl.PackedLoader(store, **given, dp_rank=rank, dp_world_size=dp))
            for rank in range(dp)
        ]


def whole_steps(store: Path, **settings: Any) -> list[list[Piece]]:
    with vl.PackedLoader(store, **SETTINGS | settings, layout="flat") as loader:
        return [pieces_of(batch) for batch in loader]


@pytest.mark.parametrize(("dp", "worker"), [(1, "thread"), (3, "thread"), (4, "process")])
def test_shares_of_a_step_are_its_documents_each_on_the_ranks_of_its_plan(store, dp, worker):
    wanted = whole_steps(store)

    with ranks(store, dp, worker=worker) as loaders:
        for number, (step, *shares) in enumerate(zip(wanted, *loaders, strict=True)):
            plan = shares[0].plan
            assert plan is not None
            assert plan.lengths.tolist() == [len(tokens) // 4 for _, _, tokens in step]
            for rank, share in enumerate(shares):
                here = np.flatnonzero(plan.documents_of(rank))
                assert pieces_of(share) == [step[n] for n in here]
                assert share.step_num_targets == sum(len(tokens) // 4 - 1 for _, _, tokens in step)
                assert share.layout == "flat"
            assert {loader.step for loader in loaders} == {number + 1}


def test_from_any_step_any_number_of_ranks_goes_on_with_the_same_steps(store):
    wanted = [sorted(step) for step in whole_steps(store, epochs=2)]

    def rest(dp: int, state: Any) -> list[list[Piece]]:
        with ranks(store, dp, epochs=2) as loaders:
            for loader in loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
            return [
                sorted({piece for share in shares for piece in pieces_of(share)})
                for shares in zip(*loaders, strict=True)
            ]

    with ranks(store, 2, epochs=2) as loaders:
        for number, shares in enumerate(zip(*loaders, strict=True)):
            assert len(shares) == 2
            state = vl.merge_states([loader.state_dict() for loader in loaders])
            if number % 3 == 1:
                assert rest(1 + number % 4, state) == wanted[number + 1 :]
    with vl.PackedLoader(store, **SETTINGS, epochs=2) as loader:  # and so a loader without plans, of rows
        loader.load_state_dict(state)
        assert list(loader) == []


def test_each_rank_reads_its_own_tokens_and_its_ring_holds_its_own(store, monkeypatch):
    read: list[int] = []
    inner = TokenStore.gather

    def noted(self: Any, shards: Any, documents: Any, starts: Any, lengths: Any) -> Any:
        read.append(int(lengths.sum()))
        return inner(self, shards, documents, starts, lengths)

    monkeypatch.setattr(TokenStore, "gather", noted)
    for rank in (0, 5):
        read.clear()
        with vl.PackedLoader(store, **SETTINGS, dp_rank=rank, dp_world_size=8, plan=plans_of(8)) as loader:
            own = sum(int(batch.plan.lengths[batch.plan.documents_of(rank)].sum()) for batch in loader)
        assert sum(read) == own

    settings = SETTINGS | {"worker": "process", "capacity": 8192}
    with (
        vl.PackedLoader(store, **settings) as whole,
        vl.PackedLoader(store, **settings, dp_rank=1, dp_world_size=8, plan=plans_of(8)) as share,
    ):
        size = share._worker.memory.nbytes / whole._worker.memory.nbytes
        assert size <= 1.5 / 8

    with ranks(store, 8) as loaders, ranks(store, 8, worker="process") as others:
        size = others[1]._worker._shared.ring.slot_bytes  # larger shares go with their messages
        wanted = list(loaders[1])
        assert max(batch.num_tokens for batch in wanted) * 16 > size
        assert [pieces_of(batch) for batch in others[1]] == [pieces_of(batch) for batch in wanted]


def test_plans_by_step_are_taken_by_step(store):
    with ranks(store, 2) as loaders:
        plans = [shares[0].plan for shares in zip(*loaders, strict=True)]

    for given in (plans, dict(enumerate(plans))):
        with ranks(store, 2, given) as loaders:
            assert [batch.plan for batch in loaders[1]] == plans
    with ranks(store, 2, plans[:2]) as loaders:
        next(loaders[0])
        next(loaders[0])
        with pytest.raises(PlanError, match="no plan of step 2 among the 2 that were given"):
            next(loaders[0])


REFUSED = [
    ({"micro_batch_size": 2}, plans_of(1), SettingError, "a step with a plan is one batch a rank"),
    ({}, vl.Planner([], mesh=vl.Mesh()), SettingError, "make the planner without lengths"),
    ({}, 3, SettingError, "plan=int; it takes plans by step"),
    (
        {"dp_rank": 0, "dp_world_size": 2},
        partial(vl.Planner, mesh=vl.Mesh()),
        SettingError,
        "no process group",
    ),
    ({}, lambda step, lengths: 5, PlanError, "given for step 0 is a int"),
    ({}, plans_of(2), PlanError, "is for dp=2, and the loader has dp_world_size=1"),
    (
        {},
        lambda step, lengths: plans_of(1)(step, lengths[1:]),
        PlanError,
        "of .* documents with .* and the step holds",
    ),
    ({}, lambda step, lengths: 1 // 0, PlanError, "planning failed with ZeroDivisionError"),
]


@pytest.mark.parametrize(("settings", "plan", "kind", "words"), REFUSED)
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_what_cannot_be_planned_is_refused(store, settings, plan, kind, words, worker):
    plan = plan() if isinstance(plan, partial) else plan
    with (
        pytest.raises(kind, match=words),
        vl.PackedLoader(store, **SETTINGS | settings | {"worker": worker}, plan=plan) as loader,
    ):
        next(loader)
    if isinstance(plan, vl.Planner):
        plan.close()


@pytest.mark.parametrize("given", [lambda step, lengths: 5, lambda step, lengths: 1 // 0])
def test_ranks_that_wait_for_a_plan_get_its_fault(given):
    job = torch.distributed.HashStore()
    plans = [Plans(given, rank=rank, num_ranks=2, job=job, name="a", patience_s=0.1) for rank in (0, 1)]
    first, second = (one.opening(None)(0).all(PLAN, {0: (0, [1], {})})[0] for one in plans)

    assert first == second
    assert first["error"] == "PlanError"


@pytest.mark.parametrize("ahead", [2, 3])
def test_ranks_that_read_ahead_by_other_numbers_of_steps_do_not_meet(store, monkeypatch, ahead):
    job = torch.distributed.HashStore()
    monkeypatch.setattr(opening, "job_store", lambda: job)
    of_one_process_each = SimpleNamespace(count=lambda: itertools.repeat(0))
    monkeypatch.setattr(exchange, "itertools", of_one_process_each)

    def made(rank: int, ahead: int) -> vl.PackedLoader:
        settings = SETTINGS | {"deadline_s": 1.0, "plan": PlansOfAnotherRank(ahead)}
        return vl.PackedLoader(store, **settings, dp_rank=rank, dp_world_size=2)

    with ThreadPoolExecutor(2) as pool, ExitStack() as closing:
        first, second = pool.submit(made, 0, 2), pool.submit(made, 1, ahead)
        for loader in (first, second):
            if ahead == 2:
                closing.enter_context(loader.result())
            else:
                with pytest.raises(StalledError, match="have other settings"):
                    loader.result()


def test_streams_have_no_plans(texts):
    with pytest.raises(SettingError, match=r"varlen index"):
        vl.PackedLoader(texts, "bytes", **SETTINGS, plan=plans_of(1))


def test_a_state_holds_the_plans_of_steps_that_were_read_and_not_taken(store):
    def other(step: int, lengths: Any) -> StepPlan:
        return plans_of(2)(step + 7, lengths)

    with ranks(store, 2) as loaders:
        next(loaders[0])
        while loaders[0]._worker.ready < 2:
            pass
        state = loaders[0].state_dict()
        behind = loaders[1].state_dict()
        wanted = [batch.plan for batch in loaders[0]]
    assert {"1", "2"} <= set(state["plans"]["choices"])
    assert "0" not in state["plans"]["choices"]

    with ranks(store, 2) as loaders:
        loaders[0].load_state_dict(state)
        again = [batch.plan for batch in loaders[0]]
    assert [plan.tasks.tolist() for plan in again] == [plan.tasks.tolist() for plan in wanted]

    with ranks(store, 2, other) as loaders:
        loaders[0].load_state_dict(state)
        with pytest.raises(StateError, match="step 1 was read by another plan than"):
            next(loaders[0])
        del state["plans"]
        loaders[0].load_state_dict(state)
        next(loaders[0])

    with pytest.raises(StateError, match="differ in step"):
        vl.merge_states([state, behind])
    changed = {"belongs_to": "given, dp=2", "choices": {"1": ["slow", ""]}}
    with ranks(store, 2) as loaders:
        for plans, words in ((changed, "was planned 'slow'"), ([5], "no state of a loader's plans")):
            with pytest.raises(StateError, match=words):
                loaders[0].load_state_dict({**state, "plans": plans})
        assert loaders[0].step == 0


def test_states_of_ranks_are_merged_with_all_plans_that_any_of_them_knows():
    states = [
        {"step": 3, "plans": {"belongs_to": "x", "choices": c}}
        for c in ({"3": ["quick", "a"]}, {"4": ["planned", "b"]})
    ]

    assert vl.merge_states(states)["plans"]["choices"] == {"3": ["quick", "a"], "4": ["planned", "b"]}
    states[1]["plans"] = {"belongs_to": "x", "choices": {"3": ["quick", "c"]}}
    with pytest.raises(StateError, match="another plan of step 3"):
        vl.merge_states(states)


def test_a_planner_gets_the_lengths_of_coming_steps_from_the_loader(store):
    model = vl.ModelShape.named("llama-7b")
    cost = vl.CostModel(model=model, hardware=vl.Hardware.named("h200"))
    planner = vl.Planner(cost=cost, mesh=vl.Mesh(), ahead=3)
    asked: list[set[int]] = []
    inner = planner.supply
    planner.supply = lambda lengths: asked.append(set(lengths)) or inner(lengths)  # type: ignore[method-assign, func-returns-value]

    with vl.PackedLoader(store, **SETTINGS, plan=planner) as loader:
        planned = [batch.plan.lengths.tolist() for batch in loader]
        last = len(planned) - 1
        assert planned == [loader.lengths(step).tolist() for step in range(last + 1)]
        assert asked == [set(range(step, min(step + 3, last) + 1)) for step in range(last + 1)]

    with pytest.raises(SettingError, match="the planner is closed"):
        planner.take(0)


def test_an_error_of_a_step_that_is_looked_at_early_is_raised_in_its_place():
    def items() -> Iterator[int]:
        yield from range(3)
        raise ValueError("4")

    found = _with_next(items(), 2)
    assert [next(found) for _ in range(3)] == [(0, [1, 2]), (1, [2]), (2, [])]
    with pytest.raises(ValueError, match="4"):
        next(found)
    assert list(_with_next(iter(range(2)), 0)) == [(0, []), (1, [])]
