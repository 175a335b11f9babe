"""Models, lengths and waits for tests of planning."""

import time
from collections.abc import Callable
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


def long_tailed(count: int, longest: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.minimum(np.exp(rng.normal(7.2, 1.4, count)).astype(np.int64) + 1, longest).astype(np.int32)


def until(holds: Callable[[], Any], seconds: float = 30.0) -> None:
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < seconds, "waited in vain"
        time.sleep(0.01)
