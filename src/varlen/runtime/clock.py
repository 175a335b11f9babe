"""When tasks begin and end, and how many bytes of tensors are alive meanwhile, on CPU and on CUDA."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from varlen.runtime.main_grads import local
from varlen.types import FloatArray

_IN_HOST_MEMORY: ContextVar[bool] = ContextVar("_IN_HOST_MEMORY", default=False)


@contextlib.contextmanager
def in_host_memory() -> Iterator[None]:
    """Count what is allocated within as host memory, even if the device is the CPU."""
    before = _IN_HOST_MEMORY.set(True)
    try:
        yield
    finally:
        _IN_HOST_MEMORY.reset(before)


class Clock:
    """Marks in time. On CUDA they are events in the stream, so that marking never waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Remember this moment."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> FloatArray:
        """Return the time between neighbouring marks, float64 `[marks - 1]`; on CUDA, waits for the last."""
        pairs = zip(self._marks, self._marks[1:])
        if not self._is_cuda:
            return np.array([stop - start for start, stop in pairs], np.float64)
        torch.cuda.synchronize()
        return np.array([start.elapsed_time(stop) / 1e3 for start, stop in pairs], np.float64)


class CudaBytes:
    """Bytes of tensors on the current CUDA device, as its allocator counts them."""

    def __enter__(self) -> CudaBytes:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin_peak(self) -> None:
        """Forget the highest count so far."""
        torch.cuda.reset_peak_memory_stats()

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return torch.cuda.memory_allocated()

    @property
    def peak(self) -> int:
        """The most bytes alive at once since `begin_peak`."""
        return torch.cuda.max_memory_allocated()


class TrackedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of storages that were made since it was entered and are alive; a shared storage counts once.

    It looks at what every operation returns, backward passes among them, so it sees tensors and not what a kernel
    uses within one call; operations take several times as long, so nothing is timed while it is on. What was made
    `in_host_memory` is counted apart. Storages that are resized, as FSDP2 resizes those of gathered parameters, count
    with their new size.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """Bytes alive now."""
        self.peak = 0
        """The most bytes alive at once since `begin_peak`."""
        self.host_live = 0
        """Bytes alive now in host memory."""
        self.host_peak = 0
        """The most bytes ever alive there at once."""
        self._sizes: dict[int, int] = {}
        """Bytes of storages, by number."""

    def begin_peak(self) -> None:
        """Forget the highest count so far."""
        self.peak = self.live

    def __enter__(self) -> TrackedBytes:
        super().__enter__()  # type: ignore[no-untyped-call]
        _watch_resizes(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _METERS.remove(self)
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {
            local(x).untyped_storage()._cdata
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = local(tensor).untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._sizes:
                    self._count(storage)
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        number, is_on_host = storage._cdata, _IN_HOST_MEMORY.get()
        self._sizes[number] = storage.nbytes()
        self._add(storage.nbytes(), is_on_host)

        def died() -> None:
            self._add(-self._sizes.pop(number), is_on_host)

        weakref.finalize(storage, died).atexit = False

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage with its new size."""
        if storage._cdata in self._sizes:
            before, self._sizes[storage._cdata] = self._sizes[storage._cdata], storage.nbytes()
            self._add(storage.nbytes() - before, False)

    def _add(self, size: int, is_on_host: bool) -> None:
        if is_on_host:
            self.host_live += size
            self.host_peak = max(self.host_peak, self.host_live)
        else:
            self.live += size
            self.peak = max(self.peak, self.live)


_METERS: list[TrackedBytes] = []  # those that are entered, in all threads


def _watch_resizes(meter: TrackedBytes) -> None:
    """Tell meters of resized storages, of which no operation tells."""
    resize: Any = torch.UntypedStorage.resize_
    if not hasattr(resize, "tells_meters"):

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resized: torch.UntypedStorage = resize(storage, size)
            for each in tuple(_METERS):
                each.resized(storage)
            return resized

        resize_and_tell.tells_meters = True  # type: ignore[attr-defined]
        torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[method-assign, assignment]
    _METERS.append(meter)


BytesMeter = CudaBytes | TrackedBytes


def bytes_meter(device: torch.device) -> BytesMeter:
    """Return what counts the bytes of tensors on a device, to be entered around the work."""
    return CudaBytes() if device.type == "cuda" else TrackedBytes()
