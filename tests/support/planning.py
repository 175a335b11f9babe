"""Models, lengths and waits for tests of planning."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

import varlen as vl
from varlen.step_plan import PlanMethod

METHODS = get_args(PlanMethod)


def cost_of(model: str = "llama-2-7b", **settings: Any) -> vl.CostModel:
    return vl.CostModel(
        model=vl.ModelShape.named(model),
        **({"recompute": "full", "hardware": vl.Hardware.named("h100")} | settings),
    )


def long_cost_of(model: str = "llama-2-7b", **settings: Any) -> vl.CostModel:
    """The cost of a model without a limit of positions."""
    cost = cost_of(model, **settings)
    return cost.replace(model=replace(cost.model, max_positions=None))


def long_tailed(count: int, longest: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.minimum(np.exp(rng.normal(7.2, 1.4, count)).astype(np.int64) + 1, longest).astype(np.int32)


def until(holds: Callable[[], Any], seconds: float = 30.0) -> None:
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < seconds, "waited in vain"
        time.sleep(0.01)


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and wasn't waited for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
