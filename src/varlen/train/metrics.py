"""The metrics of every step, one line of JSON each, in a file that reads as if the run had never been stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from varlen.cost.hardware import MACHINES
from varlen.cost.shape import ModelShape, adapter_flops, step_flops
from varlen.errors import SettingError, VarlenError
from varlen.files.ours import is_there, open_own

_OUT = "move it away, name another log.metrics, or choose another run.output"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step, over all ranks."""

    step: int
    """From 1."""
    loss: float
    """Mean over the step's targets, in nats, before its update."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Without padding."""
    supervised_tokens: int
    fill: float
    """Tokens over the slots of all packs."""
    total_tokens: int
    """Of all steps so far."""
    epoch: int | None
    """From 0; None where the loader has no epochs."""
    position: dict[str, Any]
    """The loader's position after the step."""
    tokens_per_s: float
    """Effective: tokens without padding, over the step's seconds."""
    data_wait_s: float
    """Longest wait of a rank for its batches; on a GPU, of the host, which runs ahead of it."""
    step_s: float
    """On the slowest rank, waiting included."""
    mfu: float | None = None
    """FLOPs of the model over the peak of all devices. What is computed again isn't counted; of an adapter's run, nor
    are gradients of frozen weights. None where the peak or the model's shape isn't known."""
    peak_bytes: int | None = None
    """Most memory that tensors took on a GPU; None on CPUs."""
    plan_method: str | None = None
    """Method of the plan; None here and below where steps aren't planned."""
    plan_answered_by: str | None = None
    """Which candidate of the method won; begins with "quick" where the plan made ahead wasn't ready."""
    plan_wait_s: float | None = None
    """Longest wait of a rank for the plan."""
    plan_simulated_s: float | None = None
    """Seconds of the step by the cost model, without the optimizer; None without a cost model."""

    @property
    def is_quick(self) -> bool:
        """Whether the step's plan wasn't ready in time."""
        return (self.plan_answered_by or "").startswith("quick")


class Utilization:
    """Counts the FLOPs of steps, and compares them with what the devices could do at most."""

    def __init__(
        self,
        config: Any,
        device: torch.device,
        peak_tflops: float | None,
        *,
        adapter_parameters: int = 0,
        backward_share: float = 1.0,
    ) -> None:
        """Take what is trained, and where.

        Args:
            config: the model's configuration.
            device: of this process.
            peak_tflops: its peak, where that is given.
            adapter_parameters: parameters of the adapter that alone is trained; 0 for none.
            backward_share: see `adapter_flops`.
        """
        self._peak = peak_tflops or _peak_tflops(device)
        self._adapter = (adapter_parameters, backward_share)
        self._shape: ModelShape | None = None
        if self._peak is not None:
            with suppress(VarlenError):  # a model whose shape isn't known has no count
                self._shape = ModelShape.from_config(config)

    def flops(self, lengths: Sequence[Any]) -> float:
        """Return the FLOPs of a step's documents, forward and backward; 0 where they aren't counted."""
        if self._shape is None or not lengths:
            return 0.0
        every = [np.asarray(each.cpu() if isinstance(each, torch.Tensor) else each) for each in lengths]
        if self._adapter[0]:
            return adapter_flops(self._shape, np.concatenate(every), *self._adapter)
        return step_flops(self._shape, np.concatenate(every)).model

    def mfu(self, flops: float, seconds: float, world_size: int) -> float | None:
        """Return the share of the devices' peak."""
        if self._peak is None or self._shape is None or seconds <= 0:
            return None
        return flops / (seconds * world_size * self._peak * 1e12)


def _peak_tflops(device: torch.device) -> float | None:
    """Return the manufacturer's figure for dense bf16 of a known card."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).lower().replace("-", " ").split()
    known = next((name for name in MACHINES if name in words), None)
    return None if known is None else MACHINES[known].peak_tflops


class MetricsFile:
    """A file of lines in the order of steps, which the first rank writes."""

    def __init__(self, path: Path, after: int, kind: type[Any] = StepMetrics) -> None:
        """Open the file, and cut off lines of steps after `after`; `seen` is the last step that it held, or -1.

        Args:
            path: of the file.
            after: the last step whose lines stay.
            kind: dataclass of a line; its first field is `step`.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_own(path, _OUT)
            try:
                end, self.seen = _end_of(self._file, path, after, kind)
            except BaseException:
                self._file.close()
                raise
            self._file.truncate(end)
            self._file.seek(end)
        except OSError as error:
            raise SettingError(
                f"{path} can't be written: {error.strerror}; choose another run.output"
            ) from None

    def write(self, line: Any) -> None:
        """Add a line."""
        self._file.write(json.dumps(asdict(line)).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Flush the file to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_lines(path: Path, kind: type[Any] = StepMetrics) -> None:
    """Refuse a file that no run wrote, before anything is built."""
    if not is_there(path):
        return
    try:
        with open_own(path, _OUT) as file:
            _end_of(file, path, 0, kind)
    except OSError as error:
        raise SettingError(f"{path} can't be written: {error.strerror}; {_OUT}") from None


def _end_of(file: IO[bytes], path: Path, after: int, kind: type[Any]) -> tuple[int, int]:
    """Return the end of the last whole line of a step up to `after`, and the step of the last whole line."""
    end, seen = 0, -1
    is_before = True
    for number, line in enumerate(file, start=1):
        step = _step_of(line, kind)
        if step is None and (line.endswith(b"\n") or not _is_torn(line)):
            shown = line[:40].decode(errors="replace").strip()
            raise SettingError(
                f"{path} holds lines that aren't of varlen's steps (line {number:,}: {shown!r}); {_OUT}"
            )
        is_before = is_before and step is not None and step <= after and line.endswith(b"\n")
        end += len(line) if is_before else 0
        seen = seen if step is None else step
    return end, seen


def _step_of(line: bytes, kind: type[Any]) -> int | None:
    """Return the step of a line, by the fields that every version writes; None if it is no line of a step."""
    names = {field.name for field in fields(kind)}
    ever = {field.name for field in fields(kind) if field.default is MISSING}
    try:
        found = json.loads(line)
        return int(found["step"]) if ever <= found.keys() <= names else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _is_torn(line: bytes) -> bool:
    """Return whether bytes without a line end are the beginning of a step's line, as a power cut may leave it."""
    begun = line.rstrip(b"\0")
    return begun.startswith(_BEGIN) or _BEGIN.startswith(begun)


_BEGIN = b'{"step": '
