"""Messages between stages keep memory only until the other stage is known to have them."""

import weakref
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import varlen as vl
from varlen.runtime.mesh.channels import Channel, known_deliveries
from varlen.runtime.stage_run import keys_of
from varlen.step_plan import BACKWARD, FORWARD, KINDS, WEIGHT


class GlooWork:
    """Completed only once its `wait` has returned, as a send of gloo is."""

    def __init__(self):
        self._is_completed = False

    def is_completed(self):
        return self._is_completed

    def wait(self):
        self._is_completed = True


def sent(of, number):
    rows = torch.ones(1, 3, 4)
    of.send(number, rows)
    return weakref.ref(rows)


def test_rows_are_freed_when_the_next_message_is_sent_and_the_other_rank_has_them():
    group = SimpleNamespace(index=0, ranks=[0, 1], send=lambda tensor, other: GlooWork())
    waits = SimpleNamespace(check=lambda: None, waiting=lambda rank: nullcontext())
    of = Channel(group, torch.zeros(4), [3, 3, 3, 3], waits)
    alive = [sent(of, 0), sent(of, 1)]
    assert [each() is not None for each in alive] == [True, True]

    of.num_delivered = 1
    alive.append(sent(of, 2))
    assert [each() is not None for each in alive] == [False, True, True]

    of.num_delivered = 3
    alive.append(sent(of, 3))
    assert [each() is not None for each in alive] == [False, False, False, True]
    of.finish()
    assert alive[3]() is None


def counted_deliveries(plan, rank, stage, rows):
    """What `known_deliveries` returns, counted anew for each message."""
    pp, num_chunks = plan.mesh.pp, plan.mesh.num_chunks
    known = {}
    for other in range(pp):
        begin, end = plan.task_offsets[rank * pp + other : rank * pp + other + 2]
        tasks = plan.tasks[begin:end].tolist()
        for at, code in enumerate(tasks):
            kind, chunk, micropack = code % KINDS, code // KINDS * pp + other, tasks[:at].count(code)
            target = chunk + 1 if kind == FORWARD else chunk - 1
            if other == stage or kind == WEIGHT or not 0 <= target < num_chunks or target % pp != stage:
                continue
            if not rows[kind][micropack]:
                continue
            counts = {}
            for index, before in enumerate(tasks[: at + 1]):
                if before % KINDS != WEIGHT and not rows[before % KINDS][tasks[:index].count(before)]:
                    continue
                kind_before, into = before % KINDS, before // KINDS * pp + other
                source = into - 1 if kind_before == FORWARD else into + 1
                if kind_before != WEIGHT and 0 <= source < num_chunks and source % pp == stage:
                    counts[kind_before, into] = counts.get((kind_before, into), 0) + 1
            known[kind, target, micropack] = counts
    return known


@pytest.mark.parametrize(("pp", "virtual_stages"), [(2, 1), (4, 1), (2, 2), (3, 2)])
def test_a_message_from_a_stage_says_which_messages_that_stage_has(pp, virtual_stages):
    cost = vl.CostModel(
        model=vl.ModelShape.named("llama-2-7b"), hardware=vl.Hardware.named("h200"), recompute="full"
    )
    mesh = vl.Mesh(dp=2, pp=pp, virtual_stages=virtual_stages, tp=4)
    plan = vl.plan_step(np.arange(500, 9000, 300), cost=cost, mesh=mesh)
    for rank in range(mesh.dp):
        rows = {kind: [len(key) for key in keys_of(plan, kind, rank)] for kind in (FORWARD, BACKWARD)}
        for stage, is_empty in product(range(pp), (False, True)):
            for of_pass in rows.values():
                of_pass[1] = 0 if is_empty else 3
            found = known_deliveries(plan, rank, stage, rows)
            assert found == counted_deliveries(plan, rank, stage, rows)
            assert any(counts for counts in found.values())
