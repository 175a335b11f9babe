"""Documents that data-parallel ranks share: whose rows are whose, and the gradients of the uncut model from all."""

import copy
import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.runtime.side_by_side import (
    Holders,
    QueueTransport,
    Table,
    ThreadPeers,
    in_threads,
    plan_of,
    run_place,
    run_side_by_side,
)
from tests.support.distances import assert_same, largest
from tests.support.kernel_stand_ins import KERNELS
from tests.support.pipelines import LIBRARIES
from tests.support.random_plans import random_plan
from tests.support.ranks import as_ranks
from tests.support.rarely import examples, mostly
from tests.support.sliced import Slice, one_gpu_plan, take_gradients, tiny, tokens_of, uncut, with_gradients
from tests.support.tiny_families import Wide, family

from varlen.plan.check import check_plan
from varlen.runtime import attention
from varlen.runtime.clock import bytes_meter
from varlen.runtime.mesh import shared_documents as shared_documents_module
from varlen.runtime.mesh.shared_documents import gathered_ahead, groups_of, num_rows, shared_documents, zigzag
from varlen.runtime.stage_run import keys_of
from varlen.runtime.step import run_step
from varlen.step_plan import BACKWARD, FORWARD, Mesh, StepPlan

JOB = Path(__file__).parent / "merged_job.py"


def owner_of(token: int, slices: list[tuple[int, int]], num_ranks: int) -> int:
    """Whose a token's row is, read slowly: the chunk of what two cuts enclose, and who has that."""
    for start, stop in slices:
        for chunk in range(2 * num_ranks):
            first, last = (start + i * (stop - start) // (2 * num_ranks) for i in (chunk, chunk + 1))
            if first <= token < last:
                return min(chunk, 2 * num_ranks - 1 - chunk)
    raise AssertionError(token)


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    bounds = sorted({0, length, *draw(st.lists(st.integers(1, length), max_size=4))})
    return list(zip(bounds, bounds[1:]))


@given(st.data(), st.integers(1, 90), st.sampled_from([2, 4, 8]))
def test_rows_are_dealt_as_the_cuts_say(data, length, num_ranks):
    slices = data.draw(cuts(length))
    owners = [owner_of(token, slices, num_ranks) for token in range(length)]

    rows = zigzag([end for one in slices[::-1] for end in one], num_ranks)

    found, indices = rows.assignment()
    assert found.tolist() == owners
    assert indices.tolist() == [owners[:token].count(owner) for token, owner in enumerate(owners)]
    for start, stop in [(0, length), *data.draw(cuts(length))]:
        assert rows.before(stop) == [owners[:stop].count(rank) for rank in range(num_ranks)]
        for rank in range(num_ranks):
            ranges = rows.ranges(rank, start, stop)
            mine = [token for token in range(start, stop) if owners[token] == rank]
            assert [token for first, last in ranges for token in range(first, last)] == mine
            assert all(first < last for first, last in ranges)
            assert all(one[1] < other[0] for one, other in zip(ranges, ranges[1:]))


@pytest.mark.parametrize("start", [0, 64])
@pytest.mark.parametrize("stop", [64, 96, 128])
def test_every_rank_has_the_same_work_of_a_slice_of_either_pass(start, stop):
    rows = zigzag([0, 64, 128, 0, 96, 128], 4)

    shares = [rows.ranges(rank, start, stop) for rank in range(4)]

    assert len({sum(token for one in share for token in range(*one)) for share in shares}) == 1
    assert len({sum(last - first for first, last in share) for share in shares}) == 1


def rounds_of(draw: st.DrawFn, lengths: list[int], holders: Holders, dp: int) -> list[list[list[Slice]]]:
    """The MicroPacks of each rank, one of each in turn holding what is drawn for that turn."""
    queues = [[(d, a, b) for a, b in draw(cuts(length))] for d, length in enumerate(lengths)]
    ranks: list[list[list[Slice]]] = [[] for _ in range(dp)]
    while waiting := [d for d, queue in enumerate(queues) if queue]:
        chosen = draw(st.lists(st.sampled_from(waiting), min_size=1, max_size=4, unique=True))
        pieces = [queues[d].pop(0) for d in chosen]
        for rank in range(dp):
            ranks[rank].append(
                [piece for piece in pieces if 0 <= rank - holders[piece[0]][0] < holders[piece[0]][1]]
            )
    return ranks


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Documents shared by two and by four ranks and by none, several in a MicroPack, cut anywhere in both passes."""
    dp = draw(st.sampled_from([2, 4]))
    lengths, holders = [], []
    for number in range(draw(st.integers(1, 4))):
        num = draw(st.sampled_from([n for n in (1, 2, 4) if n <= dp])) if number else dp
        holders.append((draw(st.integers(0, dp // num - 1)) * num, num))
        lengths.append(draw(st.integers(2, 40 if num > 1 else 9)))
    forward = rounds_of(draw, lengths, holders, dp)
    if draw(st.booleans()):
        again = rounds_of(draw, lengths, holders, dp)
        backward = [list(reversed(packs)) for packs in again]
        return plan_of(lengths, holders, forward, backward, recompute="full")
    return plan_of(lengths, holders, forward, [list(reversed(packs)) for packs in forward])


def check(model: Any, plan: StepPlan) -> Any:
    check_plan(plan)
    lengths = plan.lengths.tolist()
    tokens = tokens_of(lengths)
    loss, wanted = uncut(model, tokens, [length for length in lengths if length])

    sides = run_side_by_side(model, tokens, plan)

    assert sides.loss == pytest.approx(loss, rel=1e-12)
    weight = 1 / sum(max(length - 1, 0) for length in lengths)
    assert sides.token_losses.sum().item() * weight == pytest.approx(loss, rel=1e-12)
    assert_same(sides.gradients, wanted)
    return sides


@given(plans())
@examples(8, 15)
def test_ranks_that_share_documents_add_up_to_the_uncut_model(plan):
    check(tiny("llama"), plan)


@given(plans(), st.sampled_from([1, 3, 9, 17]))
@examples(8, 15)
def test_windows_of_shared_documents_are_those_of_the_uncut_model(plan, window):
    check(tiny("mistral", sliding_window=window), plan)


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 2))
@examples(4, 10)
def test_shared_documents_go_through_pipelines(seed, pp, virtual):
    mesh = Mesh(dp=4, pp=pp, virtual_stages=virtual if pp > 1 else 1)
    plan = random_plan(seed, mesh=mesh)
    assume(plan.lengths.max(initial=0) > 1)

    sides = check(tiny("llama", num_hidden_layers=6), plan)

    for rank, transport in enumerate(sides.transports):
        packs = keys_of(plan, FORWARD, rank), keys_of(plan, BACKWARD, rank)
        for (kind, micropack, _), rows in transport.rows.items():
            assert rows == num_rows(packs[kind][micropack], sides.shared[rank])


@given(plans(), st.sampled_from([None, 3, 17]))
@examples(6, 12)
def test_shared_documents_may_wait_in_host_memory(plan, window):
    model = tiny("mistral", sliding_window=window, num_hidden_layers=3)
    check(model, replace(plan, offload="kv"))


def shared_by_two(cuts: list[tuple[int, int]], **settings: Any) -> StepPlan:
    """One document on two ranks."""
    rank: list[list[Slice]] = [[(0, a, b)] for a, b in cuts]
    return plan_of([cuts[-1][1]], [(0, 2)], [rank, rank], [rank[::-1], rank[::-1]], **settings)


def two_slices(**settings: Any) -> StepPlan:
    """A document of 40 tokens on two ranks."""
    return shared_by_two([(0, 20), (20, 40)], **settings)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_slice_that_follows_another_in_its_micropack_is_not_gathered_before_that_has_run(recompute):
    forward: list[list[Slice]] = [[(0, 0, 10)], [(0, 10, 14), (0, 14, 28)]]
    backward: list[list[Slice]] = [[(0, 14, 28), (0, 10, 14)], [(0, 0, 10)]]
    plan = plan_of([28], [(0, 2)], [forward] * 2, [backward] * 2, recompute=recompute)

    assert gathered_ahead(plan) == {(FORWARD, 0, 0), (BACKWARD, 0, 14), (BACKWARD, 0, 0)}
    check(tiny("llama", num_hidden_layers=3), plan)


def test_slices_of_fewer_tokens_than_chunks_leave_ranks_without_rows():
    tokens = [(token, token + 1) for token in range(7)]
    forward: list[list[Slice]] = [[(0, a, b)] for a, b in [*tokens, (7, 9), (9, 20)]]
    backward: list[list[Slice]] = [[(0, a, b)] for a, b in [(13, 20), (8, 13), (1, 8), (0, 1)]]
    ranks = range(4)

    for window in (None, 5):
        model = tiny("mistral", sliding_window=window)
        check(model, plan_of([20], [(0, 4)], [forward for _ in ranks], [forward[::-1] for _ in ranks]))
        apart = plan_of([20], [(0, 4)], [forward for _ in ranks], [backward for _ in ranks], recompute="full")
        check(model, apart)


def test_experts_of_a_rank_without_rows_learn_nothing():
    settings = {"num_local_experts": 4, "experts_implementation": "eager"}
    check(tiny("mixtral", **settings), shared_by_two([(0, 1), (1, 2), (2, 9)]))


def test_a_window_longer_than_a_block_of_rows_is_exact():
    check(
        tiny("mistral", sliding_window=100, num_hidden_layers=1),
        shared_by_two([(0, 3), (3, 1400), (1400, 1500)]),
    )


CUTS = [(0, 5), (5, 6), (6, 30)]
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 20,
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gemma2", {}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 20}),
    ],
)
def test_caps_sinks_and_positions_of_a_shared_document_are_those_of_one_rank(name, settings):
    model, tokens = family(name, **settings), tokens_of([30])
    with Wide():
        run_step(model, tokens, one_gpu_plan([30], [[(0, a, b)] for a, b in CUTS]))
    wanted = take_gradients(model)

    found = run_side_by_side(model, tokens, shared_by_two(CUTS), Wide).gradients

    assert found.keys() == wanted.keys()
    size = max(float(x.norm()) for x in wanted.values())
    assert largest(float((found[name] - x).norm()) for name, x in wanted.items()) < 1e-12 * size


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("window", [None, 7])
def test_kernels_of_whole_slices_are_handed_neighbouring_rows(name, window):
    model, holders = tiny("mistral", sliding_window=window), [(0, 2), (0, 1), (0, 1)]
    shared: list[list[Slice]] = [[(0, a, b)] for a, b in CUTS]
    forward = [[[(1, 0, 4), *shared[0], (2, 0, 3)], *shared[1:]], shared]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "chosen", lambda *_: KERNELS[name]())
        check(model, plan_of([30, 4, 3], holders, forward, [packs[::-1] for packs in forward]))


class Calls:
    """What each thread calls while a plan runs, in order, a letter a call.

    B and E: it begins a gather, and takes it. A: attention, in one direction. S: it sums gradients over ranks.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._of: dict[int, list[str]] = defaultdict(list)
        begin, reduce_scatter = ThreadPeers.begin_all_gather, ThreadPeers.reduce_scatter

        def begun(peers: ThreadPeers, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
            self._note("B")
            end = begin(peers, rows)
            return lambda: (self._note("E"), end())[1]

        patch.setattr(ThreadPeers, "begin_all_gather", begun)
        patch.setattr(ThreadPeers, "reduce_scatter", self._noting("S", reduce_scatter))
        for name in ("forward", "backward"):
            patch.setattr(attention.tiles, name, self._noting("A", getattr(attention.tiles, name)))

    def of_threads(self) -> set[str]:
        """What they called; attention of several ranges of rows is one call."""
        return {re.sub("A+", "A", "".join(calls)) for calls in self._of.values()}

    def _note(self, call: str) -> None:
        self._of[threading.get_ident()].append(call)

    def _noting(self, call: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **settings: Any) -> Any:
            self._note(call)
            return function(*given, **settings)

        return noted


FORWARD_0, FORWARD_1 = 3 * "BEA", "BBEEBA BEEBA BEEA"
GATHERED_AHEAD = {
    "none": [FORWARD_0, FORWARD_1, *2 * ["BEBAS EBAS EAS"]],
    "full": [FORWARD_0, FORWARD_1, "BBEEBA EBAS BEEBA EBAS BEEBA EAS", 3 * "BEBA EAS "],
}
"""Calls of two slices on three layers, forward and backward."""


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_keys_and_values_of_the_next_layer_are_gathered_while_this_ones_attention_runs(recompute, window):
    model, plan = tiny("mistral", num_hidden_layers=3, sliding_window=window), two_slices(recompute=recompute)
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        check(model, plan)

    assert calls.of_threads() == {"".join(GATHERED_AHEAD[recompute]).replace(" ", "")}


WHEN_IT_RUNS = {"none": [6 * "BEA", 6 * "BEAS"], "full": [6 * "BEA", 6 * "BEA BEAS "]}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("most", "settings"), [(19, {}), (40, {"offload": "kv"})])
def test_long_documents_and_those_in_host_memory_are_gathered_when_a_layer_runs(most, settings, recompute):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_documents_module, "AHEAD_TOKENS", most)
        calls = Calls(patch)
        check(tiny("llama", num_hidden_layers=3), two_slices(recompute=recompute, **settings))

    assert calls.of_threads() == {"".join(WHEN_IT_RUNS[recompute]).replace(" ", "")}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gathering_ahead_changes_no_bit(recompute):
    model, tokens = tiny("llama", torch.float32, num_hidden_layers=3), tokens_of([40])
    found = []
    for most in (0, 40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_documents_module, "AHEAD_TOKENS", most)
            found.append(run_side_by_side(model, tokens, two_slices(recompute=recompute)))

    assert found[0].loss == found[1].loss
    assert all(torch.equal(x, found[1].gradients[name]) for name, x in found[0].gradients.items())


def test_ranks_gather_ahead_where_no_rank_has_another_long_slice():
    """Of document 0 on four ranks, of which the first two also share others."""
    holders = [(0, 4), (0, 2), (0, 2), (3, 1)]
    of_both = [[(0, 0, 8), (1, 0, 4)], [(0, 8, 20), (1, 4, 11)], [(0, 20, 31), (2, 0, 30)]]
    of_others = [[(0, 0, 8)], [(0, 8, 20)], [(0, 20, 31)]]
    alone = [[(0, 0, 8), (3, 0, 90)], *of_others[1:]]
    forward = [of_both, of_both, of_others, alone]
    plan = plan_of([31, 11, 30, 90], holders, forward, [packs[::-1] for packs in forward])

    assert gathered_ahead(plan) == {(kind, 0, 0) for kind in (FORWARD, BACKWARD)}


def live_bytes(plan: StepPlan) -> list[list[int]]:
    """Bytes alive on each of two ranks after each task, in float32."""
    model, tokens, table = tiny("llama", torch.float32), tokens_of(plan.lengths.tolist()), Table(2)
    found: list[list[int]] = [[], []]

    def run(rank: int) -> None:
        mine = with_gradients(copy.deepcopy(model))
        shared = shared_documents(plan, rank, {(0, 2): ThreadPeers(table, rank)}, tokens.device)
        with bytes_meter(tokens.device) as meter:
            *_, told = run_place(mine, tokens, plan, rank, 0, QueueTransport(), shared, meter)
        found[rank] += told.live_bytes.tolist()

    in_threads(run, 2, [table])
    return found


def test_a_rank_keeps_its_own_rows_alone_and_gives_them_back():
    inputs, pairs = 512 * 2 * 32 * 4, 512 * 2 * (2 * 2 * 8) * 4
    data = 3 * 512 * 8  # labels, weights and losses of all tokens
    cuts = [(at, at + 128) for at in range(0, 512, 128)]

    for live in live_bytes(shared_by_two(cuts, recompute="full")):
        assert live[3] == pytest.approx(data + (inputs + pairs) / 2, rel=0.02)
        # Half of the rows are left, and gradients of their keys and values are there.
        assert live[5] == pytest.approx(data + (inputs + 2 * pairs) / 4, rel=0.02)
        assert live[-1] == pytest.approx(data, abs=2000)


def test_more_slices_keep_no_more():
    few, many = (
        live_bytes(shared_by_two([(at, at + step) for at in range(0, 512, step)]))[0][512 // step - 1]
        for step in (256, 16)
    )

    assert many < 1.05 * few


def test_groups_are_asked_for_in_an_order_in_which_none_waits_for_another():
    holders = [(0, 2), (0, 4), (2, 2), (3, 1), (0, 2)]
    empty: list[list[list[Slice]]] = [[] for _ in range(4)]
    plan = plan_of([9] * 5, holders, empty, empty)

    assert [groups_of(plan, rank) for rank in range(4)] == 2 * [[(0, 4), (0, 2)]] + 2 * [[(0, 4), (2, 2)]]


@pytest.mark.parametrize("num_ranks", mostly([2], [2, 4]))
def test_processes_that_share_documents_add_up_to_the_uncut_model(num_ranks):
    said = json.loads(as_ranks(JOB, ranks=num_ranks, libraries=LIBRARIES))

    assert [set(step["sizes"]) for step in said] == 2 * [{1, 2, num_ranks}]
    for step in said:
        assert step["loss"] < 1e-12
        assert step["gradients"] < 1e-12
