"""Hardware as a JSON file, so that a machine is measured once."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from varlen.cost.hardware import Hardware, Link, RateCurve, RateTable
from varlen.errors import SettingError
from varlen.regular import read_regular
from varlen.types import FloatArray

FORMAT: Final = "varlen hardware 1"
_LINKS: Final = ("intra", "inter", "host")
_ERRORS: Final = "held_out_errors"
_PLAIN: Final = tuple(
    field.name
    for field in fields(Hardware)
    if field.name not in (*_LINKS, "attention", "gemm", "gemm_backward")
)


def save_hardware(hardware: Hardware, path: str | Path) -> None:
    """Write hardware to a JSON file, every number to its last digit."""
    forward, backward = hardware.attention
    record: dict[str, Any] = {"format": FORMAT}
    record |= {name: getattr(hardware, name) for name in _PLAIN}
    for name in _LINKS:
        link: Link = getattr(hardware, name)
        record[name] = {"latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
    record["attention"] = {"forward": _arrays(forward), "backward": _arrays(backward)}
    record["gemm"] = _arrays(hardware.gemm)
    record["gemm_backward"] = None if hardware.gemm_backward is None else _arrays(hardware.gemm_backward)
    path, text = Path(path), json.dumps(record, indent=1) + "\n"
    if path.exists() and not path.is_file():  # a pipe or a device
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_hardware(path: str | Path) -> Hardware:
    """Read what `save_hardware` wrote."""
    try:
        record = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(
            f"{path} can't be read as hardware: {error}; measure it by varlen plan --calibrate"
        ) from None
    if not isinstance(record, Mapping) or record.get("format") != FORMAT:
        seen = record.get("format") if isinstance(record, Mapping) else type(record).__name__
        raise SettingError(
            f"{path} is of format {seen!r}, not {FORMAT!r}; measure it by varlen plan --calibrate"
        )
    record = {_ERRORS: None, **record}  # files of 0.1.0 don't say it
    expected = {"format", *_PLAIN, *_LINKS, "attention", "gemm", "gemm_backward"}
    if set(record) != expected:
        raise SettingError(
            f"{path} lacks {sorted(expected - set(record))} and has unknown {sorted(set(record) - expected)}; "
            "measure it by varlen plan --calibrate"
        )
    try:
        return _hardware(record)
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from None


def _hardware(record: Mapping[str, Any]) -> Hardware:
    """The record as hardware."""
    attention, back = _object(record, "attention", ("forward", "backward")), record["gemm_backward"]
    given: dict[str, Any] = {name: record[name] for name in _PLAIN}
    given |= {name: Link(**_object(record, name, _names(Link))) for name in _LINKS}
    return Hardware(
        **given,
        attention=(_table(attention, "forward"), _table(attention, "backward")),
        gemm=_curve(record, "gemm"),
        gemm_backward=None if back is None else _curve(record, "gemm_backward"),
    )


def _table(within: Mapping[str, Any], name: str) -> RateTable:
    """A table; null is a hole."""
    arrays = _object(within, name, _names(RateTable))
    return RateTable(**{column: _floats(values) for column, values in arrays.items()})


def _curve(within: Mapping[str, Any], name: str) -> RateCurve:
    """A curve; null is a hole."""
    arrays = _object(within, name, _names(RateCurve))
    return RateCurve(**{column: _floats(values) for column, values in arrays.items()})


def _names(kind: type[Link | RateTable | RateCurve]) -> tuple[str, ...]:
    """What an object of the file holds that becomes one of these."""
    return tuple(field.name for field in fields(kind))


def _object(within: Mapping[str, Any], name: str, names: tuple[str, ...]) -> Mapping[str, Any]:
    """A part of the file, with these names and no others."""
    found = within[name]
    if not isinstance(found, Mapping) or set(found) != set(names):
        seen = f"holds {sorted(found)}" if isinstance(found, Mapping) else f"is {json.dumps(found)[:40]}"
        raise SettingError(
            f"{name} {seen}; it must be an object of {', '.join(names)}. Measure it by varlen plan --calibrate"
        )
    return found


def _floats(values: Any) -> FloatArray:
    """Numbers of a JSON list, null as NaN."""
    try:
        return np.array(values, np.float64)
    except (ValueError, TypeError, OverflowError) as error:  # rows of different lengths, objects
        raise SettingError(f"a rate table is ragged or holds words: {error}") from None


def _arrays(rates: RateTable | RateCurve) -> dict[str, Any]:
    """The arrays of a table or a curve as lists."""
    return {field.name: getattr(rates, field.name).tolist() for field in fields(rates)}
