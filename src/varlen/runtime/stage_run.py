"""`StageRunner`: runs the tasks of one stage of one data-parallel rank in the order of the plan."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from varlen.errors import DeviceMemoryError
from varlen.runtime.chunk import ChunkStep, whole_documents
from varlen.runtime.clock import BytesMeter, Clock
from varlen.step_plan import BACKWARD, FORWARD, KINDS, WEIGHT, SliceKey, StepPlan
from varlen.types import FloatArray, Int32Array


class Transport(Protocol):
    """Sends outputs to the next chunk of layers and gradients to the one before.

    Messages are keyed by pass, MicroPack and receiver.
    """

    def send(self, kind: int, micropack: int, chunk: int, rows: torch.Tensor) -> None:
        """Send the rows of a MicroPack, without waiting for the receiver.

        Args:
            rows: `[1, rows, hidden]`: what layers made, or its gradient.
        """

    def expect(self, kind: int, micropack: int, chunk: int) -> None:
        """Begin to receive the rows of a MicroPack, which the next task takes."""

    def receive(self, kind: int, micropack: int, chunk: int) -> torch.Tensor:
        """Return the rows of a MicroPack, `[1, rows, hidden]`, once they have arrived."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TaskRun:
    """What the tasks of a stage took, in the order run."""

    kinds: npt.NDArray[np.uint8]  # uint8 `[num_tasks]`: FORWARD, BACKWARD or WEIGHT
    chunks: Int32Array  # int32 `[num_tasks]`: chunk of layers, among all
    micropacks: Int32Array  # int32 `[num_tasks]`: number within the rank's of that pass
    seconds: FloatArray
    """float64 `[num_tasks]`, waiting for what it takes included. Norm, head and loss run, forward and backward, at
    the start of backward tasks."""
    live_bytes: npt.NDArray[np.int64]
    """int64 `[num_tasks]`: bytes of tensors alive after each task; 0 where no meter was given."""
    peak_bytes: npt.NDArray[np.int64]  # int64 `[num_tasks]`: peak during each task


PASSES = ("forward", "backward", "weight gradients")  # names of the kinds of tasks in messages


class StageRunner:
    """One stage of one data-parallel rank during one step."""

    def __init__(
        self,
        plan: StepPlan,
        rank: int,
        stage: int,
        chunks: Sequence[ChunkStep],
        transport: Transport,
        *,
        clock: Clock,
        meter: BytesMeter | None = None,
        is_forward_only: bool = False,
    ) -> None:
        """Prepare the tasks.

        Args:
            is_forward_only: whether tasks of the backward pass are left out.
        """
        begin, end = plan.task_offsets[rank * plan.mesh.pp + stage :][:2].tolist()
        self._codes: list[int] = plan.tasks[begin:end].tolist()
        if is_forward_only:
            self._codes = [code for code in self._codes if code % KINDS == FORWARD]
        self._packs = [keys_of(plan, kind, rank) for kind in (FORWARD, BACKWARD)]
        self._pp, self._stage, self._last = plan.mesh.pp, stage, plan.mesh.num_chunks - 1
        self._chunks, self._transport, self._clock, self._meter = chunks, transport, clock, meter
        self._rank, self._is_single_gpu = rank, plan.mesh.num_gpus == 1
        self._left = np.bincount(self._codes, minlength=KINDS * len(chunks))  # tasks, by code
        self._live_at_first = meter.live if meter is not None else 0
        self._done = np.zeros(KINDS * len(chunks), np.int32)
        self._run: list[tuple[int, int, int, int, int]] = []

    @property
    def next_task(self) -> tuple[int, int, int] | None:
        """Kind, chunk of all and MicroPack of the task that comes next; None where all are done."""
        return self._task(len(self._run))

    def _task(self, number: int) -> tuple[int, int, int] | None:
        """Return the task that comes next, or the one after it; None where there is none."""
        if number >= len(self._codes):
            return None
        code = self._codes[number]
        done = int(self._done[code]) + self._codes[len(self._run) : number].count(code)
        return code % KINDS, code // KINDS * self._pp + self._stage, done

    def needs(self, ahead: int = 0) -> tuple[int, int, int] | None:
        """Return the message that a task waits for: kind, MicroPack, chunk; None where it waits for none.

        Args:
            ahead: 0 for the next task, 1 for the one after it.
        """
        task = self._task(len(self._run) + ahead)
        if task is None:
            return None
        kind, chunk, micropack = task
        if kind == WEIGHT or not self._packs[kind][micropack]:
            return None
        return None if chunk == (0 if kind == FORWARD else self._last) else (kind, micropack, chunk)

    def run_next(self) -> None:
        """Run the next task; one of a MicroPack without slices does nothing, and is waited for by none."""
        task = self.next_task
        assert task is not None
        kind, chunk, micropack = task
        if self._meter is not None:
            self._meter.begin_peak()
        key = self._packs[min(kind, BACKWARD)][micropack]
        self._clock.mark()
        try:
            step = self._chunks[chunk // self._pp]
            layers = step.layers
            self._left[code := self._codes[len(self._run)]] -= 1
            is_final = len(self._run) == len(self._codes) - 1
            with step.units.task(step.events(kind), is_last=not self._left[code], is_final=is_final):
                needed, expected = self.needs(), self.needs(1)
                given = None if needed is None else self._transport.receive(*needed)
                if expected is not None:
                    self._transport.expect(*expected)
                if key:
                    self._compute(kind, chunk, micropack, key, given)
        except Exception as error:
            where = f"MicroPack {micropack}, layers {layers.start}-{layers.stop - 1}"
            error.add_note(f"in stage {self._stage} of pipeline {self._rank}, {PASSES[kind]}, {where}")
            if is_out_of_memory(error):
                named = f"{PASSES[kind]} of {where}, of stage {self._stage} of pipeline {self._rank}"
                took, room = self._took(kind, chunk), self._room()
                raise ran_out(error, named, key, took, room, is_single_gpu=self._is_single_gpu) from error
            raise
        self._clock.mark()
        live, peak = (self._meter.live, self._meter.peak) if self._meter is not None else (0, 0)
        self._run.append((kind, chunk, micropack, live, peak))
        self._done[self._codes[len(self._run) - 1]] += 1

    def _took(self, kind: int, chunk: int) -> list[Took]:
        """Return rows and bytes of the tasks of a pass and chunk that have run."""
        before, took = self._live_at_first, []
        for each, at, micropack, live, peak in self._run:
            key = self._packs[min(each, BACKWARD)][micropack]
            rows = sum(stop - start for _, start, stop in key)
            if (each, at) == (kind, chunk) and rows:
                took.append(Took(rows=rows, bytes=peak - before if self._meter is not None else 0))
            before = live
        return took

    def _room(self) -> int:
        """Return free bytes when the task began, judged by the highest peak so far; 0 without a meter."""
        if self._meter is None:
            return 0
        before = self._run[-1][3] if self._run else self._live_at_first
        return max([self._meter.peak, *(peak for *_, peak in self._run)]) - before

    def _compute(
        self, kind: int, chunk: int, micropack: int, key: SliceKey, given: torch.Tensor | None
    ) -> None:
        step = self._chunks[chunk // self._pp]
        if kind == WEIGHT:
            step.weight(key)
            return
        if kind == FORWARD:
            rows = step.forward(key, given)
            if chunk < self._last:
                self._transport.send(kind, micropack, chunk + 1, rows)
        else:
            gradient = step.backward(key, given)
            if gradient is not None:
                self._transport.send(kind, micropack, chunk - 1, gradient)

    def task_run(self) -> TaskRun:
        """Return what the tasks took; on CUDA, waits for the last."""
        columns = np.array(self._run, np.int64).reshape(-1, 5).T
        return TaskRun(
            kinds=columns[0].astype(np.uint8),
            chunks=columns[1].astype(np.int32),
            micropacks=columns[2].astype(np.int32),
            seconds=self._clock.seconds()[::2],
            live_bytes=columns[3].copy(),
            peak_bytes=columns[4].copy(),
        )


def keys_of(plan: StepPlan, kind: int, rank: int) -> list[SliceKey]:
    """Return a rank's MicroPacks of a pass as tuples of their slices, in the order in which their rows stand.

    It is the same in both passes, since graphs are found by their slices, and rows come behind those that they attend
    to; a plan lists the slices of a document in the order of the pass, last to first in the backward one. Documents
    that are whole come first, those that share their MicroPacks in both passes side by side, and then the slices that
    begin their documents: kernels compute neighbours of either kind in one call.

    Args:
        kind: FORWARD or BACKWARD.
    """
    packs, whole = plan.forward if kind == FORWARD else plan.backward, whole_documents(plan)
    first, last = packs.rank_offsets[rank : rank + 2].tolist()
    bounds = packs.slice_offsets[first : last + 1].tolist()
    columns = (packs.document_ids, packs.starts, packs.stops)
    rows = list(zip(*(column[bounds[0] : bounds[-1]].tolist() for column in columns)))
    packed = [rows[start - bounds[0] : stop - bounds[0]] for start, stop in zip(bounds, bounds[1:])]

    def place(piece: tuple[int, int, int]) -> tuple[float, bool, tuple[int, int, int]]:
        return whole.get(piece[0], math.inf), piece[1] > 0, piece

    return [tuple(sorted(pack, key=place)) for pack in packed]


# `ran_out`: the error of a task that ran out of memory: which task, which documents, and how many rows would fit.

MARGIN = 0.9  # share of free memory to advise, as allocators don't fill all blocks
NAMED = 4  # slices named in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Took:
    """Rows of a task that ran, and what it took."""

    rows: int
    bytes: int  # peak minus what was alive before; 0 without a meter


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
    error: Exception, task: str, key: SliceKey, ran: Sequence[Took], room: int, *, is_single_gpu: bool
) -> DeviceMemoryError:
    """Return the error of a task that found no memory."""
    rows = sum(stop - start for _, start, stop in key)
    slices = ", ".join(f"{start:,}-{stop:,} of document {number}" for number, start, stop in key[:NAMED])
    more = f" and {len(key) - NAMED:,} more slices" if len(key) > NAMED else ""
    needed = re.search(r"[Tt]ried to allocate [\d.]+ ?\w+", str(error))
    attempt = f" ({needed[0][0].lower()}{needed[0][1:]})" if needed else ""
    fits = rows_that_fit(rows, ran, room)
    otherwise = (
        'what rows hold until their backward shrinks with recompute="full", saved="stage" or offload="kv"'
    )
    if fits:
        how = f"slice_tokens={fits}" if is_single_gpu else "a smaller memory_fraction of vl.CostModel"
        way = f"MicroPacks of at most {fits:,} rows would fit, by estimate: plan with {how}; {otherwise}"
    else:
        way = f"no slice is short enough, since what is held already leaves no room for one row; {otherwise}"
    found = DeviceMemoryError(f"out of memory{attempt} in {task}, with {rows:,} rows: {slices}{more}; {way}")
    found.rows_that_fit = fits
    return found
