"""Batches on an accelerator: copied from pinned slots on a separate stream, while the batch before is in use.

::

    worker ──► slot (pinned) ──copy stream──► tensors on the device ──► trainer's stream waits only for the copy
                 └ held until the copy has finished; then the slot is free again
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from varlen.batch.packed import PackedBatch, import_torch
from varlen.feed.protocol import Ended, Made, Worker
from varlen.feed.state import FeedState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sent:
    """A batch whose copy to the device has begun."""

    made: Made
    """The batch in host memory."""
    batch: PackedBatch
    """The batch on the device, valid after `event`."""
    event: Any
    """None if the copy is synchronous."""


class DeviceWorker:
    """Another worker's batches as tensors on a device; on CUDA, one batch is copied ahead of the trainer."""

    def __init__(self, worker: Worker, device: Any) -> None:
        torch = import_torch()
        self._worker, self._device = worker, torch.device(device)
        self._is_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._is_cuda else None
        self._coming: _Sent | None = None
        self._is_over, self._end = False, Ended()
        self._in_flight: deque[_Sent] = deque()
        """Batches whose slots the copy may still be reading."""
        self._pinned = self._pin()

    @property
    def ready(self) -> int:
        """Batches that can be taken now."""
        return self._worker.ready + (self._coming is not None)

    @property
    def restarts(self) -> int:
        """Number of workers that died and were replaced."""
        return self._worker.restarts

    @property
    def copies(self) -> int:
        """Batches copied because the trainer held all slots."""
        return self._worker.copies

    def start(self, state: FeedState) -> None:
        """Begin after a state; batches made before are dropped."""
        self._coming, self._is_over, self._end = None, False, Ended()
        self._worker.start(state)

    def take(self, deadline_s: float) -> tuple[Made | Ended, int]:
        """Return the next batch, or the end, and the number of batches that were ready; passes on errors."""
        ready = self.ready
        if self._coming is None and not self._is_over:
            self._coming = self._sent(deadline_s)
        sent, self._coming = self._coming, None
        if sent is None:
            return self._end, ready
        if self._is_cuda and self._worker.ready and not self._is_over:
            self._coming = self._sent(deadline_s)
        return replace(sent.made, batch=self._arrived(sent)), ready

    def _sent(self, deadline_s: float) -> _Sent | None:
        """Take a batch and start its copy; returns None at the end."""
        made, _ = self._worker.take(deadline_s)
        if isinstance(made, Ended):
            self._is_over, self._end = True, made
            return None
        if not self._is_cuda:
            return _Sent(made=made, batch=made.batch.to_torch(self._device), event=None)
        torch = import_torch()
        while self._in_flight and self._in_flight[0].event.query():
            self._in_flight.popleft()
        with torch.cuda.stream(self._stream):
            batch = made.batch.to_torch(self._device)
            event = torch.cuda.Event()
            event.record(self._stream)
        sent = _Sent(made=made, batch=batch, event=event)
        self._in_flight.append(sent)
        return sent

    def _arrived(self, sent: _Sent) -> PackedBatch:
        """Make the trainer's stream wait for the copy, and record its use of the tensors with the allocator."""
        if sent.event is not None:
            current = import_torch().cuda.current_stream(self._device)
            current.wait_event(sent.event)
            for tensor in _tensors(sent.batch):
                tensor.record_stream(current)
        return sent.batch

    def _pin(self) -> int:
        """Register the ring with the driver, so that copies from it are asynchronous; returns its address, or 0.

        Without registration, batches are the same, but copies block the trainer.
        """
        memory = getattr(self._worker, "memory", None)
        if not self._is_cuda or memory is None:
            return 0
        address, size = memory.__array_interface__["data"][0], memory.nbytes
        runtime: Any = import_torch().cuda.cudart()
        error = runtime.cudaHostRegister(address, size, 0)
        if int(error) != 0:
            _log.warning(
                "the loader's %s MB of shared memory can't be pinned (CUDA error %s): batches are the same, but "
                "copying them holds up the trainer; raise the limit of locked memory (ulimit -l)",
                f"{size / 1e6:,.0f}",
                int(error),
            )
            return 0
        return int(address)

    def closer(self) -> Callable[[], None]:
        """Return a function that ends the worker, without a reference to it."""
        return self._worker.closer()

    def close(self) -> None:
        """Wait for copies, unregister the ring, and close the worker."""
        if self._is_cuda:
            import_torch().cuda.current_stream(self._device).wait_stream(self._stream)
            self._stream.synchronize()  # type: ignore[union-attr]
        self._in_flight.clear()
        self._coming = None
        if self._pinned:
            runtime: Any = import_torch().cuda.cudart()
            runtime.cudaHostUnregister(self._pinned)
            self._pinned = 0
        self._worker.close()


def _tensors(batch: PackedBatch) -> list[Any]:
    """Return all device tensors of a batch."""
    values = [getattr(batch, field.name) for field in fields(batch) if field.name != "columns"]
    return [value for value in [*values, *batch.columns.values()] if hasattr(value, "record_stream")]
