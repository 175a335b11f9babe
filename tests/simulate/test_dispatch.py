"""The dispatcher: its reference on random pipelines, 1F1B where costs are equal, and the simulator's times."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import simulate_dispatch as reference_dispatch
from tests.support.rarely import examples
from tests.support.step_plans import durations_of, memory_of, random_plan

from varlen.simulate import kernels
from varlen.simulate.api import run_plan
from varlen.simulate.dispatch import Pipeline, dispatch
from varlen.simulate.graph import last_forwards
from varlen.simulate.memory import plan_bytes
from varlen.step_plan import Mesh

BYTES = ("forward_peaks", "forward_left", "backward_peaks", "backward_left", "waiting")


def pipeline(
    stages: int, forward: Any, backward: Any, weight: Any = None, *, chunks: int | None = None, **more: Any
) -> Pipeline:
    chunks = chunks or stages
    wide = [np.broadcast_to(np.asarray(a, float), (chunks, np.size(a))).copy() for a in (forward, backward)]
    mf, mb = wide[0].shape[1], wide[1].shape[1]
    given = {
        "weight": np.broadcast_to(
            np.zeros(mb) if weight is None else np.asarray(weight, float), (chunks, mb)
        ).copy(),
        "send_forward": np.zeros(mf),
        "send_backward": np.zeros(mb),
        "after": np.arange(mb, dtype=np.int32),
        "forward_peaks": np.ones((1, chunks, mf)),
        "forward_left": np.ones((1, chunks, mf)),
        "backward_peaks": np.zeros((1, chunks, mb)),
        "backward_left": -np.ones((1, chunks, mb)),
        "waiting": np.zeros((1, chunks, mb)),
        "begins": np.zeros((1, stages)),
        "limits": np.full(stages, 1e9),
        "splits": weight is not None,
    }
    return Pipeline(forward=wide[0], backward=wide[1], **(given | more))


@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 7), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_kernel_and_reference_choose_the_same_tasks(data, stages, virtual, count, splits, forward_first):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    chunks = stages * virtual
    lasts = np.minimum(np.arange(count) + rng.integers(0, 3, count), count - 1)
    is_empty = rng.integers(0, 4, count) == 0
    ranks = data.draw(st.integers(1, 3))
    made = pipeline(
        stages,
        np.zeros(count),
        np.zeros(count),
        np.zeros(count) if splits else None,
        chunks=chunks,
        after=np.where(is_empty, -1, np.maximum.accumulate(lasts)).astype(np.int32),
        send_forward=rng.integers(0, 2, count).astype(float),
        send_backward=rng.integers(0, 2, count).astype(float),
        begins=rng.integers(0, 2, (ranks, stages)).astype(float),
        **{name: rng.integers(0, 5, (ranks, chunks, count)).astype(float) for name in BYTES},
        limits=rng.integers(4, 60, stages).astype(float),
    )
    scale = data.draw(st.sampled_from([1.0, 0.1]))  # tenths round as they add up
    for array in (made.forward, made.backward, made.weight):
        array[:] = rng.integers(0, 5, array.shape) * scale
    made.backward_left[:] *= -1
    for array in (*(getattr(made, name) for name in BYTES), made.begins, made.limits):
        array *= scale
    given = [getattr(made, name) for name in Pipeline.__dataclass_fields__ if name != "splits"]
    answers = []
    limit_s = data.draw(st.sampled_from([np.inf, *(scale * part * count for part in (1, 4, 9, 16))]))
    for home in (kernels, reference_dispatch):
        for tries in (1, 2, 4):
            took, codes, peaks = home.dispatch(*given, splits, forward_first, limit_s, tries)
            answers.append((took, codes.tolist(), peaks.tolist()))
    assert answers[:3] == answers[3:]


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("count", [1, 3, 8, 20])
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 1.0), (1.0, 2.0), (3.0, 8.0)])
def test_equal_costs_take_what_1f1b_takes(stages, count, forward, backward):
    made = dispatch(pipeline(stages, np.full(count, forward), np.full(count, backward)))

    assert made.makespan_s == (count + stages - 1) * (forward + backward)


@pytest.mark.parametrize("stages", [2, 4, 6])
def test_equal_costs_split_take_what_zb_h1_takes(stages):
    for count in range(stages, 3 * stages):
        ones = np.ones(count)
        made = dispatch(pipeline(stages, ones, ones, ones))

        assert made.makespan_s == 3 * count + stages - 1


def test_a_backward_waits_for_the_end_of_its_documents():
    made = dispatch(pipeline(1, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], after=np.array([2, 2, 2], np.int32)))

    assert made.codes[0].tolist() == [0, 0, 0, 1, 1, 1]
    assert made.peaks_bytes[0] == 3


def test_an_empty_backward_waits_for_no_forward():
    made = dispatch(pipeline(1, [5.0, 5.0], [0.0, 1.0], after=np.array([-1, 0], np.int32)))

    assert made.makespan_s == 11
    assert made.codes[0].tolist() == [1, 0, 1, 0]


def test_memory_holds_forwards_back_and_then_stops_them():
    free = dispatch(pipeline(2, np.ones(6), np.full(6, 2.0)))
    held = dispatch(pipeline(2, np.ones(6), np.full(6, 2.0), limits=np.array([1.0, 1.0])))
    none = dispatch(pipeline(2, np.ones(6), np.full(6, 2.0), limits=np.array([0.5, 1.0])))

    assert free.makespan_s == 21
    assert held.makespan_s > free.makespan_s
    assert held.peaks_bytes.tolist() == [1, 1]
    assert none.makespan_s == math.inf


def test_two_chunks_on_a_stage_shorten_the_filling():
    plain = dispatch(pipeline(4, np.full(8, 2.0), np.full(8, 4.0)))
    woven = dispatch(pipeline(4, np.full(8, 1.0), np.full(8, 2.0), chunks=8))

    assert plain.makespan_s == 66
    assert (8 * 2 + 3) * 3 <= woven.makespan_s < plain.makespan_s


def test_forward_first_runs_all_forwards_that_memory_holds_before_a_backward():
    for limit, expected in ((1e9, "FFFFBBBB"), (3.0, "FFFBFBBB")):
        made = dispatch(pipeline(1, np.ones(4), np.ones(4), limits=np.array([limit])), forward_first=True)

        assert "".join("FBW"[code] for code in made.codes[0]) == expected


@pytest.mark.parametrize("splits", [False, True])
def test_what_takes_no_longer_than_asked_is_the_same_and_what_takes_longer_is_given_up(splits):
    rng = np.random.default_rng(5)
    made = pipeline(
        3, rng.random(9), 2 * rng.random(9), rng.random(9) if splits else None, limits=np.full(3, 4.0)
    )
    whole = dispatch(made)

    enough = dispatch(made, limit_s=whole.makespan_s)
    short = dispatch(made, limit_s=0.999 * whole.makespan_s)

    assert enough.codes.tolist() == whole.codes.tolist()
    assert enough.makespan_s == whole.makespan_s
    assert 0.999 * whole.makespan_s < short.makespan_s <= whole.makespan_s * (1 + 1e-9)
    assert short.codes.size == 0


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 2), st.booleans(), st.integers(1, 6))
@examples(20)
def test_a_dispatched_order_is_simulated_as_it_was_made(seed, pp, virtual, splits, num_documents):
    random = np.random.default_rng(seed)
    mesh = Mesh(pp=pp, virtual_stages=virtual if pp > 1 else 1)
    plan = random_plan(seed, mesh, splits, num_documents)
    chunks, ahead, back = mesh.num_chunks, plan.forward.num_micropacks, plan.backward.num_micropacks
    forward, backward = random.integers(0, 9, (chunks, ahead)), random.integers(0, 9, (chunks, back))
    weight = random.integers(0, 9, (chunks, back)) * splits
    sends = {"send_forward": random.integers(0, 3, ahead), "send_backward": random.integers(0, 3, back)}
    seconds = durations_of(plan, forward, backward, weight, latency_s=1.0, **sends)
    bytes_of = {"held_bytes": 5.0, "gradient_bytes": 2.0, "passing_bytes": 3.0, "kept_for_weight_bytes": 4.0}
    memory = memory_of(plan, **bytes_of)
    taken = plan_bytes(plan, memory)
    pipeline = Pipeline(
        forward=seconds.forward,
        backward=seconds.backward,
        weight=seconds.weight,
        send_forward=seconds.send_forward + seconds.latency_s,
        send_backward=seconds.send_backward + seconds.latency_s,
        after=last_forwards(plan).astype(np.int32),
        **{name: each[np.newaxis] for name, each in taken._asdict().items() if name != "begins"},
        begins=taken.begins,
        limits=np.full(pp, np.inf),
        splits=splits,
    )

    made = dispatch(pipeline)

    ordered = dataclasses.replace(
        plan,
        tasks=made.codes.ravel(),
        task_offsets=(np.arange(pp + 1) * made.codes.shape[1]).astype(np.int32),
    )
    timeline = run_plan(ordered, seconds, memory, contention=False)
    assert timeline.makespan_s == made.makespan_s
    assert timeline.peaks_bytes[0] == pytest.approx(made.peaks_bytes)
