"""What the kernels of these files must return, in plain Python that a reader believes at once."""

import numpy as np
from numpy.typing import NDArray


def number_run(data: NDArray[np.uint8], start: int, values: NDArray[np.int32]) -> tuple[int, int]:
    """Read the numbers that stand one after the other in a pickle, until another opcode or the end.

    Args:
        data: the pickle.
        start: where to begin.
        values: takes them; as many are read at most as it holds.

    Returns:
        How many there are, and where what follows begins. A number that is cut off is left.
    """
    count, at = 0, start
    while count < len(values) and at < len(data):
        code = int(data[at])
        if code in (0x88, 0x89):  # NEWTRUE, NEWFALSE
            size, value = 0, 0x89 - code
        elif code == 0x4B:  # BININT1
            size, value = 1, -1
        elif code == 0x4D:  # BININT2
            size, value = 2, -1
        elif code == 0x4A:  # BININT
            size, value = 4, -1
        else:
            break
        if at + size >= len(data):
            break
        if size:
            value = int.from_bytes(data[at + 1 : at + 1 + size].tobytes(), "little", signed=size == 4)
        values[count] = value
        count += 1
        at += 1 + size
    return count, at
