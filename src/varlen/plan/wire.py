"""What a planner's process is told: settings as JSON, of the project's own frozen dataclasses and nothing else."""

from __future__ import annotations

import base64
import dataclasses
import importlib
import json
from typing import Any

import numpy as np

from varlen.errors import SettingError

_OURS = "varlen."


def to_json(value: Any) -> str:
    """Return settings as text: numbers, words, arrays, tuples, mappings and dataclasses of varlen, in each other."""
    return json.dumps(_said(value), sort_keys=True)


def from_json(text: str) -> Any:
    """Return what `to_json` was given."""
    return _made(json.loads(text))


def _said(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": [value.dtype.str, list(value.shape), content]}
    kind = type(value)
    named = f"{kind.__module__}:{kind.__qualname__}"
    if dataclasses.is_dataclass(value) and named.startswith(_OURS):
        held = {
            field.name: _said(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init
        }
        return {"made": named, "fields": held}
    if isinstance(value, tuple) and hasattr(value, "_fields") and named.startswith(_OURS):
        return {"made": named, "fields": {name: _said(getattr(value, name)) for name in value._fields}}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_said(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_said(key), _said(one)] for key, one in value.items()]}
    raise SettingError(
        f"a {kind.__module__}.{kind.__qualname__} can't be handed to the process that plans; settings are numbers, "
        "words, arrays and dataclasses of varlen"
    )


def _made(said: Any) -> Any:
    if not isinstance(said, dict):
        return said
    if "array" in said:
        dtype, shape, content = said["array"]
        return np.frombuffer(base64.b64decode(content), np.dtype(dtype)).reshape(shape).copy()
    if "tuple" in said:
        return tuple(_made(one) for one in said["tuple"])
    if "list" in said:
        return [_made(one) for one in said["list"]]
    if "dict" in said:
        return {_made(key): _made(one) for key, one in said["dict"]}
    found = named(said["made"])
    return found(**{name: _made(one) for name, one in said["fields"].items()})


def named(name: str) -> Any:
    """Return what a module calls so."""
    module, _, inner = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in inner.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(f"{name!r} can't be found ({error}); write it as 'module:function'") from None
    return found
