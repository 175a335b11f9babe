"""Gather single rows, as readers find them, into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from varlen.files.losses import Losses
from varlen.files.rows import Fault, Rows, place

# A row's number, its size, and its values by column; or why it can't be read; or None where it is blank.
Found = tuple[int, int, list[Any] | str | None]


class Lost(str):
    """Why more than a row can't be read, and what is lost."""

    losses: Losses

    @classmethod
    def of(cls, why: str, losses: Losses) -> Lost:
        """Attach the losses to the message."""
        lost = cls(why)
        lost.losses = losses
        return lost


BATCH_SIZE = 1 << 20  # bytes or characters of rows that fill a batch
_MOST_ROWS = 4096
_RECORD = Losses(records=1)


def gather(
    rows_found: Iterable[Found],
    *,
    names: Sequence[str],
    path: str,
    unit: str,
    base: Callable[[], int] = int,  # returns 0
    most_rows: int = _MOST_ROWS,
    count_faults: bool = False,
    size: int = BATCH_SIZE,
) -> Iterator[Rows]:
    """Yield rows in batches of about as many bytes; if reading fails, the rows before come first."""
    taken: list[list[Any]] = []
    numbers: list[int] = []
    faults: list[Fault] = []
    filled = 0

    def rows() -> Rows:
        columns = {name: [values[index] for values in taken] for index, name in enumerate(names)}
        return Rows(columns=columns, numbers=numbers, path=path, unit=unit, base=base, faults=tuple(faults))

    try:
        for number, more, values in rows_found:
            filled += more
            if isinstance(values, list):
                taken.append(values)
                numbers.append(number)
            elif values is not None:
                at = base() + number
                losses = values.losses if isinstance(values, Lost) else _RECORD
                faults.append(Fault(where=place(path, unit, at), why=str(values), number=at, losses=losses))
            count = len(numbers) + len(faults) if count_faults else len(numbers)
            if filled >= size or count >= most_rows:
                yield rows()
                taken, numbers, faults, filled = [], [], [], 0
    except Exception:  # the rows before it are complete
        if numbers or faults:
            yield rows()
        raise
    if numbers or faults:
        yield rows()
