"""`ran_out`: what to say where a task found no memory: which one, of which documents, and how many rows would fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from varlen.errors import DeviceMemoryError
from varlen.runtime.mesh.shared_documents import Key

MARGIN = 0.9
"""Share of what is there that rows are advised to take: an allocator's blocks aren't all in use."""
NAMED = 4
"""Slices that a message names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Took:
    """Rows of a task that ran, and what it took."""

    rows: int
    bytes: int
    """The most alive at once during it beside what was alive before; 0 where no meter counted."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that there was no memory: on CUDA, on the CPU, or Python's own."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return not isinstance(error, DeviceMemoryError)
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def rows_that_fit(rows: int, ran: Sequence[Took], room: int) -> int:
    """Estimate how many rows of a MicroPack fit where `rows` did not; fewer than `rows`, 0 where not even one does.

    By bytes a row of the tasks that did run, where a meter counted them; else as many as the largest that did run;
    where none of fewer rows did, half.
    """
    counted = [each.bytes / each.rows for each in ran if each.bytes > 0]
    if counted and room > 0:
        return min(rows - 1, int(MARGIN * room / max(counted)))
    return max((each.rows for each in ran if each.rows < rows), default=rows // 2)


def ran_out(
    error: Exception, task: str, key: Key, ran: Sequence[Took], room: int, *, is_alone: bool
) -> DeviceMemoryError:
    """Return the error of a task that found no memory."""
    rows = sum(stop - start for _, start, stop in key)
    slices = ", ".join(f"{start:,}-{stop:,} of document {number}" for number, start, stop in key[:NAMED])
    more = f" and {len(key) - NAMED:,} more slices" if len(key) > NAMED else ""
    needed = re.search(r"[Tt]ried to allocate [\d.]+ ?\w+", str(error))
    said = f" ({needed[0][0].lower()}{needed[0][1:]})" if needed else ""
    fits = rows_that_fit(rows, ran, room)
    otherwise = (
        'what rows hold until their backward shrinks with recompute="full", saved="stage" or offload="kv"'
    )
    if fits:
        how = f"slice_tokens={fits}" if is_alone else "a smaller memory_fraction of vl.CostModel"
        way = f"MicroPacks of at most {fits:,} rows would fit, by estimate: plan with {how}; {otherwise}"
    else:
        way = f"no slice is short enough, since what is held already leaves no room for one row; {otherwise}"
    found = DeviceMemoryError(f"out of memory{said} in {task}, with {rows:,} rows: {slices}{more}; {way}")
    found.rows_that_fit = fits
    return found
