"""Settings cross to the process that plans as text, and come out as they were."""

from __future__ import annotations

import numpy as np

from varlen.plan.assign import assign
from varlen.plan.serialize import from_json, named, to_json
from varlen.step_plan import Mesh


def test_settings_come_out_as_they_were() -> None:
    settings = {
        "mesh": Mesh(dp=4, pp=2),
        "few": (1, 2.5, None, True),
        3: ["word", float("inf")],
        "one": np.int64(7),
    }

    assert from_json(to_json(settings)) == settings


def test_arrays_keep_their_dtypes_and_shapes() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)

    back = from_json(to_json({"rates": array}))["rates"]

    assert back.dtype == array.dtype
    assert back.tolist() == array.tolist()


def test_equal_settings_are_equal_text() -> None:
    assert to_json(Mesh(dp=2)) == to_json(Mesh(dp=2)) != to_json(Mesh(dp=3))


def test_a_cost_model_comes_out_with_the_same_figures() -> None:
    from varlen.cost.hardware import Hardware
    from varlen.cost.model import CostModel
    from varlen.cost.shape import ModelShape

    cost = CostModel(model=ModelShape.named("llama-3-8b"), hardware=Hardware.named("h100"), recompute="full")

    assert from_json(to_json(cost)).fingerprint == cost.fingerprint


def test_a_function_is_found_by_its_name() -> None:
    assert named("varlen.plan.assign:assign") is assign
