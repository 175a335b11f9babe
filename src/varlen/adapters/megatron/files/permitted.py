"""The names that a pickle of packed rows may hold, and what each stands for: plain values, and nothing is called."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.errors import SourceError

PERMITTED: dict[tuple[str, str], str] = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
    ("collections", "OrderedDict"): "OrderedDict",
}
for _module in ("numpy.core", "numpy._core"):
    PERMITTED[f"{_module}.multiarray", "_reconstruct"] = "_reconstruct"
    PERMITTED[f"{_module}.multiarray", "scalar"] = "scalar"
    PERMITTED[f"{_module}.numeric", "_frombuffer"] = "_frombuffer"

_KINDS = {"O", "b", "b1", *(f"{kind}{width}" for kind in "iu" for width in (1, 2, 4, 8))}
Refuse = Callable[[str], SourceError]


class UnfitError(Exception):
    """What stands in a pickle doesn't fit together; who reads it says where."""


class Dtype:
    """A kind of numbers, or of objects."""

    __slots__ = ("is_swapped", "kind")

    def __init__(self, kind: str) -> None:
        self.kind, self.is_swapped = kind, False

    def numbers(self) -> np.dtype[Any]:
        """Return it as numpy's own; raises UnfitError for objects."""
        if self.kind == "O":
            raise UnfitError
        return np.dtype(self.kind).newbyteorder(">" if self.is_swapped else "<")


class Array:
    """An array in the making; `content` is a flat array of numbers, or the list of an array of objects."""

    __slots__ = ("content", "shape")

    def __init__(self) -> None:
        self.content: Any = None
        self.shape: tuple[int, ...] = (0,)


def reduce(name: str, arguments: list[Any], refuse: Refuse) -> Any:
    """Return what a call of a permitted name stands for."""
    if name == "dtype":
        kind = str(arguments[0])
        kind = "O" if kind in ("O", "O8", "O4", "|O") else kind.lstrip("|<>=")
        if kind not in _KINDS:
            raise refuse(f"numbers of the kind {kind!r}")
        return Dtype(kind)
    if name == "_reconstruct" and arguments[0] == "ndarray":
        return Array()
    if name == "scalar":
        kind, content = arguments
        return int(np.frombuffer(_as_bytes(content), dtype=_numbers(kind), count=1)[0])
    if name == "encode":
        if len(arguments) != 2 or arguments[1] != "latin1":
            raise UnfitError
        return str(arguments[0]).encode("latin1")
    if name == "_frombuffer":
        buffer, kind, shape, _ = arguments
        array = Array()
        _fill(array, shape, np.frombuffer(_as_bytes(buffer), dtype=_numbers(kind)))
        return array
    if name == "OrderedDict" and not arguments:
        return {}
    raise refuse(f"a call of {name}")


def build(target: Array | Dtype, state: list[Any], refuse: Refuse) -> None:
    """Give a kind of numbers its byte order, or an array its content."""
    if isinstance(target, Dtype):
        if any(part is not None for part in state[2:5]) or state[1] not in ("<", ">", "|", "="):
            raise refuse("numbers with fields")
        target.is_swapped = state[1] == ">"
        return
    _, shape, kind, _, content = state
    if isinstance(kind, Dtype) and kind.kind == "O":
        target.shape, target.content = tuple(shape), content
        return
    _fill(target, shape, np.frombuffer(_as_bytes(content), dtype=_numbers(kind)))


def _numbers(kind: Any) -> np.dtype[Any]:
    if not isinstance(kind, Dtype):
        raise UnfitError
    return kind.numbers()


def _as_bytes(content: Any) -> bytes:
    if not isinstance(content, bytes):
        raise UnfitError
    return content


def _fill(array: Array, shape: Any, content: npt.NDArray[Any]) -> None:
    """Give an array its numbers, as many as its shape says."""
    sizes = tuple(int(size) for size in shape)
    if math.prod(sizes) != len(content):
        raise UnfitError
    array.shape, array.content = sizes, content
