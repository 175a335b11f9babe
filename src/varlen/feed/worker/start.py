"""The worker that makes a loader's batches: a process or a thread, and behind it a device."""

from __future__ import annotations

from varlen.feed.opening import Opened
from varlen.feed.protocol import Worker
from varlen.feed.settings import LoaderSettings
from varlen.feed.worker.device import DeviceWorker
from varlen.feed.worker.process import ProcessWorker
from varlen.feed.worker.ring import slot_bytes
from varlen.feed.worker.thread import ThreadWorker


def hired(opened: Opened, settings: LoaderSettings) -> Worker:
    """Return the worker that settings ask for, started."""
    multiple = settings.pad_to_multiple_of if settings.layout == "flat" else 1
    positions = -(-settings.batch_sizes[1] * settings.capacity // multiple) * multiple
    worker: Worker
    if settings.worker == "process":
        size = slot_bytes(positions, has_weights=opened.has_weights)
        worker = ProcessWorker(opened.spec, settings.ring_slots, size, opened.exchanges)
    else:
        worker = ThreadWorker(opened.spec, settings.ring_slots, opened.exchanges)
    if settings.device is None:
        return worker
    try:
        return DeviceWorker(worker, settings.device)
    except BaseException:
        worker.close()
        raise
