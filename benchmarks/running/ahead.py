"""What planning ahead costs a step: plans are made by another process while slices run, and steps wait for none.

The same steps run with a planner at work and with plans that were there before, in turns, on one core each.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np
import torch

import varlen as vl
from benchmarks.running.pipelines import batch_of, cost_of, decoder
from benchmarks.running.steps import LEAST_ROWS, lengths_of, source_of
from varlen.plan.search import Search

STEPS = 12
DOCUMENTS = 24
SET = "mix_pretrain_docs"


def run(num_steps: int = STEPS, documents: int = DOCUMENTS) -> dict[str, Any]:
    """Take steps with plans made ahead and with plans made before; seconds of both, and waited for plans."""
    torch.set_num_threads(1)
    cost, mesh = cost_of(vl.Hardware.named("h100")), vl.Mesh()
    lengths = [lengths_of(SET, documents, seed) for seed in range(num_steps)]
    search = Search(least_rows=LEAST_ROWS)
    given: dict[str, Any] = {"cost": cost, "mesh": mesh, "search": search}
    before = [vl.plan_step(each, **given) for each in lengths]
    engine, batches = vl.SliceEngine(decoder()), [batch_of(each) for each in lengths]
    engine.step(batches[0], before[0])
    apart: list[float] = []
    together: list[float] = []
    waited: list[float] = []
    answers: list[str] = []
    with vl.Planner(lengths, **given) as planner:
        for step in range(num_steps):
            begun = time.perf_counter()
            plan = planner.take(step)
            taken = time.perf_counter()
            engine.step(batches[step], plan)
            together.append(time.perf_counter() - taken)
            waited.append(taken - begun)
            answers.append("quick" if plan.answered_by.startswith("quick") else "ahead")
    for step in range(num_steps):
        begun = time.perf_counter()
        engine.step(batches[step], before[step])
        apart.append(time.perf_counter() - begun)
    return {
        "documents": source_of(SET),
        "steps": num_steps,
        "tokens": [int(each.sum()) for each in lengths],
        "first_wait_s": waited[0],
        "wait_s": median(waited[1:]),
        "longest_wait_s": max(waited[1:]),
        "step_s": median(together),
        "step_s_without_planner": median(apart),
        "wait_over_step": float(np.sum(waited[1:]) / np.sum(together[1:])),
        "answered": {word: answers.count(word) for word in ("ahead", "quick")},
    }
