"""What one run is asked to train, and what each of its steps reports; plain data that crosses processes."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from varlen.train.demo.corpus import Documents
from varlen.train.demo.orders import Order
from varlen.train.demo.settings import DemoSettings, LayoutName


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """What to train, and how to lay it out; plain data, so that another process can take it."""

    layout: LayoutName
    order: Order
    documents: Documents
    validation: Documents
    vocab_size: int
    seed: int
    """Of the initial weights."""
    settings: DemoSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step: what it computed, and what that took."""

    loss: float
    """Mean over targets, in nats, before the step's update."""
    num_tokens: int
    num_targets: int
    num_slots: int
    seconds: Seconds
    """From the documents' tokens to the updated weights: layout, forward, backward and optimizer."""


# What a run took: seconds on the wall, of CPU in user and system mode, and the most memory it held.

_KILOBYTE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Time that passed, and time that the CPU worked for this process, all threads together."""

    wall_s: float = 0.0
    user_s: float = 0.0
    """In the program's own code."""
    system_s: float = 0.0
    """In the kernel, above all allocating memory (page faults)."""

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            wall_s=self.wall_s + other.wall_s,
            user_s=self.user_s + other.user_s,
            system_s=self.system_s + other.system_s,
        )

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(
            wall_s=self.wall_s - other.wall_s,
            user_s=self.user_s - other.user_s,
            system_s=self.system_s - other.system_s,
        )


def now() -> Seconds:
    """Read the clocks of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Seconds(wall_s=time.perf_counter(), user_s=usage.ru_utime, system_s=usage.ru_stime)


def current_bytes() -> int:
    """Return the memory that this process holds now (on macOS, the most it ever held)."""
    return _status_bytes("VmRSS") or peak_bytes()


def peak_bytes() -> int:
    """Return the most memory that this process held since it started, or since `reset_peak`."""
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maximum if sys.platform == "darwin" else maximum * _KILOBYTE


def reset_peak() -> None:
    """Start the search for the peak anew where the system allows it (Linux); else leave it as it is."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def _status_bytes(field: str) -> int | None:
    """Read a size from Linux's account of this process; None elsewhere."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * _KILOBYTE
    return None
