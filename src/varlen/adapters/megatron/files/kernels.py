"""The kernel that reads a pickle's numbers; `tests/oracles/megatron_files.py` defines what it returns."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from varlen.jit import compiled


@compiled
def number_run(data: NDArray[np.uint8], start: int, values: NDArray[np.int32]) -> tuple[int, int]:
    """Read the numbers that stand one after the other in a pickle, until another opcode or the end."""
    count, at = 0, start
    while count < len(values) and at < len(data):
        code = data[at]
        if code == 0x88 or code == 0x89:
            size = 0
        elif code == 0x4B:
            size = 1
        elif code == 0x4D:
            size = 2
        elif code == 0x4A:
            size = 4
        else:
            break
        if at + size >= len(data):
            break
        if size == 0:
            values[count] = 1 if code == 0x88 else 0
        else:
            value = np.uint32(0)
            for byte in range(size):
                value |= np.uint32(data[at + 1 + byte]) << np.uint32(8 * byte)
            values[count] = np.int32(value)
        count += 1
        at += 1 + size
    return count, at
