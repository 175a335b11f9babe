"""Comparisons of plans that tests of reports and pages look at: small steps, planned and simulated for good."""

from functools import cache

import numpy as np

from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.report.plan import METHODS, compare, step_documents
from varlen.step_plan import Mesh

COST = CostModel(model=ModelShape.named("llama-2-7b"), hardware=Hardware.named("h100"))
LENGTHS = np.random.default_rng(0).lognormal(7.5, 1.3, 60).clip(16, 40_000).astype(np.int64)


@cache
def comparison(name="chats", dp=2, pp=2, documents=40, capacity=4_096, methods=METHODS, are_bytes=False):
    """A step of a few documents, some of them truncated, by all methods or some."""
    step = step_documents(LENGTHS, documents=documents, step=0, capacity=capacity, seed=0)
    cost = COST.replace(recompute="full")
    mesh = Mesh(dp=dp, pp=pp, tp=8)
    return compare(step, cost=cost, mesh=mesh, methods=methods, name=name, are_bytes=are_bytes)


@cache
def impossible():
    """A step that no plan holds: a model whose states alone are too large for one GPU."""
    step = step_documents(LENGTHS, documents=8, step=0, capacity=512, seed=None)
    cost = COST.replace(model=ModelShape.named("llama-2-70b"))
    return compare(step, cost=cost, mesh=Mesh(), methods=("packed", "micropack"))
