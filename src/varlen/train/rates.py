"""What a run's plans are priced by: hardware of a name or a file, or what this machine was measured to be, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel
from varlen.cost.named_hardware import MACHINES
from varlen.cost.saved import load_hardware, save_hardware
from varlen.cost.shape import ModelShape
from varlen.errors import SettingError
from varlen.runtime.calibrate import calibrate
from varlen.step_plan import Mesh
from varlen.train.settings import PlanSettings

MEASURED: Final = "hardware.json"
"""In a run's folder: rates that were measured for its plans."""
WIDE: Final = 2.0
"""Bytes of a row in float32 over those that a cost model counts."""
AUTOCAST: Final = 1.5
"""The same under autocast, which keeps what goes from layer to layer in float32: 1.25 without recomputation and 1.4
with it, as `test_train_plan_memory.py` counts them."""


def hardware_of(
    settings: PlanSettings,
    shape: ModelShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    folder: Path,
    say: Callable[[str], object],
) -> Hardware:
    """Return the hardware that plans are priced by.

    Args:
        settings: of the plans.
        shape: of the model, at whose widths kernels are measured.
        device: where the run computes.
        dtype: that it computes in.
        folder: of the run, which keeps what was measured: other rates would plan the steps of a resumed run anew.
        say: told what goes on.

    Raises:
        SettingError: no such name, no such file, or a file of something else.

    Cost: `settings.calibrate_s` seconds once, where nothing is named and the device isn't known.
    """
    named = settings.hardware
    if named != "auto":
        return _said(_named(named), say)
    card = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    known = next((name for name in MACHINES if name in card), None)
    if known is not None:
        there = float(torch.cuda.get_device_properties(device).total_memory)
        hardware = Hardware.named(known)
        return replace(hardware, memory_bytes=min(hardware.memory_bytes, there))
    kept = folder / MEASURED
    if kept.is_file():
        return _said(load_hardware(kept), say)
    say(
        f"measuring this machine's kernels for {settings.calibrate_s:g} s, for plans; plan.hardware names a file"
    )
    measured = calibrate(shape, device=device, dtype=dtype, budget_s=settings.calibrate_s).hardware
    folder.mkdir(parents=True, exist_ok=True)
    save_hardware(measured, kept)
    return _said(measured, say)


def _said(hardware: Hardware, say: Callable[[str], object]) -> Hardware:
    """Say how well rates predict, where it was measured."""
    if hardware.held_out:
        say(hardware.held_out)
    return hardware


def with_wide_rows(cost: CostModel, mesh: Mesh, times: float) -> CostModel:
    """Return a cost model that leaves room for rows of more bytes than those in half precision that it counts.

    Where states leave room for rows, it is that many times smaller, on the stage whose states are least. What is all
    in float32 also takes as many times longer on every link; under autocast keys and values are not, and links stay.

    Args:
        cost: of half precision.
        mesh: of the run.
        times: bytes of a row over those counted.
    """
    state = float(cost.memory(mesh).state_bytes.min())
    room = cost.limit_bytes - state
    if room <= 0 or times == 1:
        return cost
    smaller = (state + room / times) / cost.memory_fraction
    hardware = replace(cost.hardware, memory_bytes=smaller)
    if times == WIDE:
        links = {name: getattr(hardware, name) for name in ("intra", "inter", "host")}
        slower = {name: replace(link, bytes_per_s=link.bytes_per_s / times) for name, link in links.items()}
        hardware = replace(hardware, **slower)
    return cost.replace(hardware=hardware)


def _named(name: str) -> Hardware:
    """Hardware of a name or of a file.

    Raises:
        SettingError: there is none.
    """
    if Path(name).is_file():
        return load_hardware(name)
    if Path(name).suffix == ".json" or "/" in name:
        raise SettingError(
            f"plan.hardware {name}: there is no such file; varlen plan --calibrate --save makes one"
        )
    try:
        return Hardware.named(name)
    except SettingError as error:
        raise SettingError(f"plan.hardware: {error}; or the file of a calibration") from None
