"""A document of more work than a rank's share of a step, on one of two ranks and shared by both (DP-Merge)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import varlen as vl
from benchmarks.running.pipelines import MESH, compared, first_cost, measured
from benchmarks.running.processes import side_by_side
from benchmarks.running.steps import CAPACITY, CONFIG, LEAST_ROWS, SETS, Step, lengths_of, source_of
from varlen.plan.search import Search

ROUNDS = 5
DOCUMENTS = 12
RANKS = replace(MESH, dp=2, pp=1)


def planned(cost: vl.CostModel, documents: int = DOCUMENTS) -> list[Step]:
    """Plan steps of one longest document beside short ones: packed, in slices, and shared.

    Args:
        cost: seconds and bytes.
        documents: of each step, beside the long one.
    """
    found = []
    alone = Search(
        splits_backward=False, asymmetric=False, least_rows=LEAST_ROWS, repairs=False, merges=False
    )
    for name in SETS:
        short = np.minimum(lengths_of(name, documents), CAPACITY // 8)
        lengths = np.append(short, CAPACITY).astype(np.int32)
        given: dict[str, Any] = {"cost": cost, "mesh": RANKS}
        packed = vl.plan_step(lengths, method="packed", capacity=CAPACITY, **given)
        whole = vl.plan_step(lengths, search=alone, **given)
        shared = vl.plan_step(lengths, search=replace(alone, merges=True), **given)
        assert shared.num_merged == 1
        ways = {"packed, as users run it": packed, "on one rank": whole, "shared": shared}
        told = f"one of {CAPACITY:,} tokens beside {source_of(name)}"
        found += [Step(documents=told, method=way, plan=plan) for way, plan in ways.items()]
    return found


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    """Plan, run and compare."""
    found = planned(first_cost())
    return {"model": CONFIG, **compared(found, side_by_side(measured, RANKS.num_gpus, found, rounds))}
