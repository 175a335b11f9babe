"""`Channels`: messages between the chunks of layers of different processes, one channel per pair and direction.

A channel carries its pass's MicroPacks in plan order, and those without rows send nothing: the plan determines both
ends. So messages need no names, and an order of tasks deadlocks only if the plan does. The message of the next task
is received while this task computes. No other receive begins, as NCCL's spin on the GPU until their message comes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from varlen.runtime.mesh.failures import PeerLostError, WaitReporter
from varlen.runtime.mesh.process_groups import Group, Groups
from varlen.runtime.mesh.shared_documents import SharedDocument, num_rows
from varlen.runtime.stage_run import keys_of
from varlen.step_plan import BACKWARD, FORWARD, KINDS, WEIGHT, StepPlan


class Channel:
    """One direction between two processes during one step."""

    def __init__(
        self, group: Group, like: torch.Tensor, rows: Sequence[int], wait_reporter: WaitReporter
    ) -> None:
        """Take the connection, and the rows of the pass.

        Args:
            like: `[hidden]`: of the dtype and on the device of what is sent.
        """
        self._group, self._like, self._wait_reporter = group, like, wait_reporter
        self._other = 1 - group.index
        self._rows = rows
        self._coming = deque((n, count) for n, count in enumerate(rows) if count)
        self._going = deque(n for n, _ in self._coming)
        self._into: torch.Tensor | None = None  # for the next message
        self._receiving: Any = None
        self._sent: deque[tuple[torch.Tensor, Any]] = deque()
        self._num_freed = 0
        self.num_delivered = 0
        """Messages that the other process is known to have; on a GPU 0, where their work says it."""

    def make_room(self) -> None:
        """Allocate the next message, if one is left."""
        self._into = self._like.new_empty(1, self._coming[0][1], len(self._like)) if self._coming else None

    def expect(self, micropack: int) -> None:
        """Begin to receive the rows of the next MicroPack, unless that has begun."""
        if self._rows[micropack] and self._receiving is None:
            assert self._coming[0][0] == micropack
            self._receiving = self._guarded(self._group.receive, self._into, self._other)

    def receive(self, micropack: int) -> torch.Tensor:
        """Return the rows of a MicroPack, `[1, rows, hidden]`, once they have arrived."""
        if not self._rows[micropack]:
            return self._like.new_empty(1, 0, len(self._like))
        self.expect(micropack)
        self._guarded(self._receiving.wait)
        if self._like.is_cuda:  # there the device waits, and the host goes on
            self._wait_reporter.watch(self._group.ranks[self._other], self._receiving)
        self._coming.popleft()
        rows, self._receiving = self._into, None
        assert rows is not None
        self.make_room()
        return rows

    def send(self, micropack: int, rows: torch.Tensor) -> None:
        """Begin to send the rows of the next MicroPack.

        Args:
            rows: `[1, rows, hidden]`.
        """
        if not self._rows[micropack]:
            return
        assert self._going.popleft() == micropack
        while self._sent:
            work = self._sent[0][1]
            if self._num_freed < self.num_delivered:
                self._guarded(work.wait)  # at once; gloo calls no message completed before
            elif not work.is_completed():
                break
            self._sent.popleft()
            self._num_freed += 1
        rows = rows.contiguous()
        self._sent.append((rows, self._guarded(self._group.send, rows, self._other)))

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        while self._sent:
            self._guarded(self._sent[0][1].wait)
            self._sent.popleft()

    def drop(self) -> None:
        """Forget what is under way, which holds the connection open."""
        self._into = self._receiving = None
        self._sent.clear()

    def _guarded(self, work: Any, *arguments: Any) -> Any:
        """Call something of the connection; a failure names the other rank."""
        self._wait_reporter.check()
        try:
            with self._wait_reporter.waiting(self._group.ranks[self._other]):
                return work(*arguments)
        except RuntimeError as error:
            raise PeerLostError(self._group.ranks[self._other], str(error)) from None


class Channels:
    """The channels of one process during one step; see `Transport`."""

    def __init__(
        self,
        groups: Groups,
        plan: StepPlan,
        like: torch.Tensor,
        wait_reporter: WaitReporter,
        shared: Mapping[int, SharedDocument] | None = None,
        *,
        is_forward_only: bool = False,
    ) -> None:
        """Allocate the first message of each channel that brings some.

        Args:
            like: `[hidden]`: of the dtype and on the device of what layers send to each other.
        """
        coordinate, pp = groups.coordinate, groups.coordinate.mesh.pp
        rows = {
            kind: [num_rows(key, shared or {}) for key in keys_of(plan, kind, coordinate.replica)]
            for kind in (FORWARD, BACKWARD)
        }
        self._of = {
            name: Channel(group, like, rows[name[0]], wait_reporter)
            for name, group in groups.channels.items()
            if name[0] == FORWARD or not is_forward_only
        }
        for (_, receiver), channel in self._of.items():
            if receiver % pp == coordinate.stage:
                channel.make_room()
        # NCCL says itself when a message is delivered, and there the host is ahead of what was received.
        self._known = (
            {} if like.is_cuda else known_deliveries(plan, coordinate.replica, coordinate.stage, rows)
        )

    def send(self, kind: int, micropack: int, chunk: int, rows: torch.Tensor) -> None:
        """Send rows, as `Transport.send`."""
        self._of[kind, chunk].send(micropack, rows)

    def expect(self, kind: int, micropack: int, chunk: int) -> None:
        """Begin to receive rows, as `Transport.expect`."""
        self._of[kind, chunk].expect(micropack)

    def receive(self, kind: int, micropack: int, chunk: int) -> torch.Tensor:
        """Return rows, as `Transport.receive`."""
        received = self._of[kind, chunk].receive(micropack)
        for name, count in self._known.get((kind, chunk, micropack), {}).items():
            if name in self._of:
                self._of[name].num_delivered = count
        return received

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        for channel in self._of.values():
            channel.finish()

    def drop(self) -> None:
        """Forget what is under way, which holds connections open."""
        for channel in self._of.values():
            channel.drop()


Name = tuple[int, int]
"""Of a channel: pass and receiving chunk."""


def known_deliveries(
    plan: StepPlan, rank: int, stage: int, rows: Mapping[int, Sequence[int]]
) -> dict[tuple[int, int, int], dict[Name, int]]:
    """Return how many messages of each channel another stage has received when it sends a message to this one.

    Args:
        plan: of the step.
        rank: data-parallel rank of the pipeline.
        stage: this one.
        rows: of each MicroPack, by pass; those without any aren't sent.

    Returns:
        By pass, receiving chunk and MicroPack of the message from the other stage: counts by channel to it.
    """
    pp, num_chunks = plan.mesh.pp, plan.mesh.num_chunks
    known: dict[tuple[int, int, int], dict[Name, int]] = {}
    for other in {(stage - 1) % pp, (stage + 1) % pp} - {stage}:
        begin, end = plan.task_offsets[rank * pp + other : rank * pp + other + 2].tolist()
        received, seen = Counter[Name](), Counter[int]()
        for code in plan.tasks[begin:end].tolist():
            kind, chunk, micropack = code % KINDS, code // KINDS * pp + other, seen[code]
            seen[code] += 1
            if kind == WEIGHT or not rows[kind][micropack]:
                continue
            source, target = (chunk - 1, chunk + 1) if kind == FORWARD else (chunk + 1, chunk - 1)
            if 0 <= source < num_chunks and source % pp == stage:
                received[kind, chunk] += 1
            if 0 <= target < num_chunks and target % pp == stage:
                known[kind, target, micropack] = dict(received)
    return known
