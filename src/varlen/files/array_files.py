"""Arrays that numpy wrote to files of their own, mapped: whatever is damaged or none is an error of a few kinds."""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from varlen.errors import SourceError
from varlen.regular import open_regular

_PARSES = 10
"""Of a header, before its failure is believed."""
_MAGIC = b"\x93NUMPY"


def map_array(path: Path) -> Any:
    """Map an array that numpy wrote.

    A header that promises more than there is takes no memory, as nothing is read. numpy parses it as Python, and
    CPython before 3.11.8 fails at that now and then where another thread parses something at the same time
    (github.com/python/cpython/issues/106905): it is asked again.
    """
    with open(path, "rb", opener=open_regular) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise SourceError("it is no array of numpy's")
    for _ in range(_PARSES):
        try:
            return _loaded(path)
        except SystemError:
            continue
    return _loaded(path)


def _loaded(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (
        EOFError,
        OverflowError,
        SyntaxError,
        TokenError,
        TypeError,
        MemoryError,
        RecursionError,
    ) as error:
        raise SourceError(str(error) or type(error).__name__) from error
