"""Values of settings: each of its kind, however a configuration writes it."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from typing import Any

from varlen.adapters.megatron.config.settings import Kind

GRAPH_SCOPES = ("", "full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
"""Parts that CUDA graphs hold, by their numbers in Megatron Core 0.16's `CudaGraphScope`, which is what YAML has."""
EXPECTED: dict[Kind, str] = {
    "size": "a whole number of 1 or more",
    "count": "a whole number of 0 or more",
    "integer": "a whole number",
    "flag": "true or false",
    "text": "a name",
    "sizes": "a list of whole numbers of 1 or more",
    "words": "a name, or a list of names",
    "one or each": "a name, or a list of names",
    "number": "a number",
    "path": "a path",
}


def as_kind(value: Any, kind: Kind) -> Any:
    """Return a value as one of its kind; raises TypeError, which names nothing, where it is none."""
    return _READERS[kind](value)


def _integer(value: Any, least: int | None = None) -> int:
    if isinstance(value, bool):
        raise TypeError
    number = operator.index(value)
    if least is not None and number < least:
        raise TypeError
    return number


def _flag(value: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError


def _text(value: Any) -> str:
    word = _word(value)
    if word is None:
        raise TypeError
    return word


def _word(value: Any) -> str | None:
    """Return a name, an enumeration's member by its own; None for anything else."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping) and "_target_" in value:
        arguments = value.get("_args_")
        if isinstance(arguments, Sequence) and len(arguments) == 1:
            (number,) = arguments
            if isinstance(number, int) and 0 < number < len(GRAPH_SCOPES):
                return GRAPH_SCOPES[number]
            return number if isinstance(number, str) else None
        return None
    return value if isinstance(value, str) else None


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (Sequence, Set)) and not isinstance(value, bytes):
        return tuple(_text(part).rsplit(".", 1)[-1] for part in value)
    return (_text(value),)


def _one_or_each(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(_text(part) for part in value)
    return _text(value)


def _sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)):
        raise TypeError
    return tuple(_integer(part, 1) for part in value)


def _number(value: Any) -> float:
    if isinstance(value, Sequence) and not isinstance(
        value, (str, bytes)
    ):  # one for each kind of balancing loss: any of them counts
        return max((_number(part) for part in value), default=0.0)
    if isinstance(value, (bool, str)):
        raise TypeError
    return float(value)


def _path(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError
    return path


_READERS: dict[Kind, Any] = {
    "size": lambda value: _integer(value, 1),
    "count": lambda value: _integer(value, 0),
    "integer": _integer,
    "flag": _flag,
    "text": _text,
    "sizes": _sizes,
    "words": _words,
    "one or each": _one_or_each,
    "number": _number,
    "path": _path,
}
