"""Megatron: packing ahead, rows in random order and batches, beside megatron-bridge; round trips with it."""

from __future__ import annotations

from benchmarks import megatron_collating, megatron_fixtures, megatron_offline, megatron_reading
from benchmarks.step import Step


def steps() -> list[Step]:
    """Return what this section measures; round trips first, as what isn't equal isn't worth a race."""
    parts = (megatron_fixtures, megatron_offline, megatron_reading, megatron_collating)
    return [step for part in parts for step in part.steps()]
