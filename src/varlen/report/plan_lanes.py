"""What a page draws of a timeline, as flat arrays: all of it, or the slowest ranks where that would be too much."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.simulate.timeline import Timeline
from varlen.step_plan import KINDS, MicroPacks
from varlen.types import Int32Array, IntArray

MOST_TASKS = 150_000
"""Tasks that a page draws smoothly; a plan of more is cut down to its slowest ranks."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lanes:
    """The part of a timeline that is drawn: whole ranks, with all their stages."""

    timeline: Timeline
    ranks: Int32Array
    """int32 `[num_shown]`: data-parallel ranks, rising."""
    tasks: IntArray
    """int64 `[num_tasks]`: tasks of these ranks, by row (rank, then stage) and then by start."""
    row_offsets: Int32Array
    """int32 `[num_shown * pp + 1]`: tasks of each row."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank is shown."""
        return len(self.ranks) == self.timeline.plan.mesh.dp

    @property
    def said(self) -> str:
        """What is shown where that isn't all, else ""."""
        if self.is_whole:
            return ""
        dp = self.timeline.plan.mesh.dp
        which = "the one that finishes last" if len(self.ranks) == 1 else "those that finish last"
        return f"Shown: {len(self.ranks):,} of {dp:,} ranks, {which}; the figures are of all."

    def to_json(self) -> dict[str, Any]:
        """Return the arrays as the page's script reads them: base64, little-endian."""
        timeline, plan = self.timeline, self.timeline.plan
        pp = plan.mesh.pp
        rows = (self.ranks[:, None] * pp + np.arange(pp)).ravel()
        passes = [_Shown.of(plan.forward, self.ranks), _Shown.of(plan.backward, self.ranks)]
        packs, of_backward = timeline.micropacks[self.tasks], timeline.backward_of[self.tasks]
        numbers = [shown.numbers(packs) for shown in passes]
        memory = timeline.memory_offsets
        points, memory_offsets = _ranges(memory[rows], memory[rows + 1])
        return {
            "pp": pp,
            "numChunks": plan.mesh.num_chunks,
            "ranks": self.ranks.tolist(),
            "makespan": float(timeline.makespan_s),
            "busy": (timeline.busy_s / timeline.makespan_s)[self.ranks].ravel().round(4).tolist(),
            "peaks": timeline.peaks_bytes[self.ranks].ravel().astype(float).tolist(),
            "rowOffsets": _text(self.row_offsets, "<i4"),
            "kinds": _text(timeline.kinds[self.tasks], "<u1"),
            "chunks": _text(timeline.chunks[self.tasks].clip(0, 255), "<u1"),
            "micropacks": _text(np.where(of_backward, numbers[1], numbers[0]), "<i4"),
            "ofBackward": _text(of_backward, "<u1"),
            "starts": _text(timeline.starts_s[self.tasks], "<f4"),
            "stops": _text(timeline.stops_s[self.tasks], "<f4"),
            "works": _text(timeline.work_s[self.tasks], "<f4"),
            "limit": float(timeline.memory_limit_bytes),
            "memoryOffsets": _text(memory_offsets, "<i4"),
            "memoryTimes": _text(timeline.memory_times_s[points], "<f4"),
            "memoryBytes": _text(timeline.memory_bytes[points], "<f4"),
            "lengths": _text(plan.lengths, "<i4"),
            "sharers": _text(plan.num_ranks, "<i4"),
            "passes": [shown.to_json() for shown in passes],
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Shown:
    """The MicroPacks of one pass that shown ranks run, numbered anew."""

    packs: MicroPacks
    rank_offsets: Int32Array
    pack_ids: IntArray
    local: IntArray
    """int64 `[num_micropacks]`: the new number of each, -1 where it isn't shown."""

    @classmethod
    def of(cls, packs: MicroPacks, ranks: Int32Array) -> _Shown:
        """Take the MicroPacks of some ranks."""
        ids, offsets = _ranges(packs.rank_offsets[ranks], packs.rank_offsets[ranks + 1])
        local = np.full(max(packs.num_micropacks, 1), -1, np.int64)
        local[ids] = np.arange(len(ids))
        return cls(packs=packs, rank_offsets=offsets, pack_ids=ids, local=local)

    def numbers(self, packs: Int32Array) -> IntArray:
        """Return the new numbers of MicroPacks, -1 for what is none of this pass or isn't shown."""
        known = (packs >= 0) & (packs < len(self.local))
        return np.where(known, self.local[np.where(known, packs, 0)], -1)

    def to_json(self) -> dict[str, str]:
        """Return the arrays as the page's script reads them."""
        packs = self.packs
        slices, offsets = _ranges(packs.slice_offsets[self.pack_ids], packs.slice_offsets[self.pack_ids + 1])
        return {
            "rankOffsets": _text(self.rank_offsets, "<i4"),
            "offsets": _text(offsets, "<i4"),
            "documents": _text(packs.document_ids[slices], "<i4"),
            "starts": _text(packs.starts[slices], "<i4"),
            "stops": _text(packs.stops[slices], "<i4"),
        }


def lanes(timeline: Timeline, most_tasks: int = MOST_TASKS) -> Lanes:
    """Choose what is drawn of a timeline: every rank, or as many of the slowest as have at most so many tasks.

    Args:
        timeline: of a plan.
        most_tasks: that may be drawn; one rank is drawn even where it has more.
    """
    dp, pp = timeline.plan.mesh.dp, timeline.plan.mesh.pp
    tasks_of = np.bincount(timeline.ranks, minlength=dp)
    ranks = np.arange(dp, dtype=np.int32)
    if tasks_of.sum() > most_tasks:
        ends, computes = np.zeros(dp), timeline.kinds < KINDS
        np.maximum.at(ends, timeline.ranks[computes], timeline.stops_s[computes])
        slowest = np.argsort(-ends, kind="stable")
        fitting = int(np.searchsorted(np.cumsum(tasks_of[slowest]), most_tasks, side="right"))
        ranks = np.sort(slowest[: max(fitting, 1)]).astype(np.int32)
    place = np.full(dp, -1, np.int64)
    place[ranks] = np.arange(len(ranks))
    row_of = place[timeline.ranks] * pp + timeline.stages
    shown = np.flatnonzero(place[timeline.ranks] >= 0)
    tasks = shown[np.lexsort((timeline.starts_s[shown], row_of[shown]))]
    counts = np.bincount(row_of[shown], minlength=len(ranks) * pp)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return Lanes(timeline=timeline, ranks=ranks, tasks=tasks.astype(np.int64), row_offsets=offsets)


def _ranges(starts: npt.NDArray[Any], stops: npt.NDArray[Any]) -> tuple[IntArray, Int32Array]:
    """Return the numbers of several ranges one after another, int64, and where each begins, int32 `[ranges + 1]`."""
    counts = (stops - starts).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    numbers = (
        np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts) + np.repeat(starts.astype(np.int64), counts)
    )
    return numbers, offsets.astype(np.int32)


def _text(values: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values).astype(dtype).tobytes()).decode("ascii")
