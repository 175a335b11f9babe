"""The kinds of tasks in a simulated step: those of a plan, and the messages and collectives between them."""

from __future__ import annotations

from typing import Final

SEND_FORWARD: Final = 3
"""The output of a chunk of layers goes to the stage that holds the next chunk."""
SEND_BACKWARD: Final = 4
"""The gradient of a chunk's input goes to the stage that holds the chunk before."""
GRADIENT_SYNC: Final = 5
"""Data-parallel ranks add up their gradients, once a step."""
GATHER: Final = 6
"""Data-parallel ranks gather a chunk's parameters, or scatter its gradients (`sharding="parameters"`)."""
KIND_NAMES: Final = (
    "forward",
    "backward",
    "weight gradients",
    "send forward",
    "send backward",
    "gradient sync",
    "gather parameters",
)
"""What each kind is called, by its number: FORWARD, BACKWARD and WEIGHT of `varlen.step_plan`, then those above."""
