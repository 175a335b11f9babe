"""The dispatcher and the simulator agree: the order that one makes takes the other as long, and as many bytes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rarely import examples
from tests.support.step_plans import durations_of, memory_of, random_plan

from varlen.simulate.api import run_plan
from varlen.simulate.dispatch import Pipeline, dispatch
from varlen.simulate.graph import last_forwards
from varlen.simulate.memory import plan_bytes
from varlen.step_plan import Mesh


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 2), st.booleans(), st.integers(1, 6))
@examples(20)
def test_a_dispatched_order_is_simulated_as_it_was_made(
    seed: int, pp: int, virtual: int, splits: bool, num_documents: int
) -> None:
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
