"""One way to run a step that a simulator can score: the MicroPacks of both passes, and how tasks are ordered."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from varlen.step_plan import MicroPacks
from varlen.types import Int32Array

Schedule = Literal["one_f_one_b", "interleaved", "zero_bubble", "dispatch"]
"""How the tasks of a stage are ordered: a fixed schedule, or as the dispatcher finds them ready."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidate:
    """A StepPlan that has no order of tasks yet; read-only."""

    forward: MicroPacks
    backward: MicroPacks
    first_ranks: Int32Array
    """int32 `[num_documents]`: as in `StepPlan`."""
    num_ranks: Int32Array
    """int32 `[num_documents]`: as in `StepPlan`."""
    splits_backward: bool = False
    schedule: Schedule = "dispatch"
    label: str = ""
    """Which settings made it, for people: `"capacity 65,536, equal counts, long first"`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
