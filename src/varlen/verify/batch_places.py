"""Places: the first of many positions at which something is wrong, and a finding that names it."""

from __future__ import annotations

import numpy as np

from varlen.verify.batch_reading import BoolArray
from varlen.verify.batch_report import Finding, Kind, Level


def finding(
    kind: Kind,
    level: Level,
    what: str,
    fix: str,
    places: BoolArray | None = None,
    place: str = "",
) -> Finding:
    """Make a finding of all places at which something is wrong.

    Args:
        kind: of finding.
        level: of finding.
        what: happens.
        fix: for it.
        places: bool `[rows, width]` or `[entries]`, true where it is wrong; None where it has no place.
        place: what stands before the row and column, or, without places, the place itself.
    """
    if places is None:
        return Finding(kind=kind, level=level, what=what, where=place, fix=fix)
    first = int(np.argmax(places))
    row, column = divmod(first, places.shape[-1]) if places.ndim == 2 else (None, first)
    spot = f"row {row:,}, column {column:,}" if row is not None else f"index {column:,}"
    count = int(places.sum())
    where = f"{place} {spot}" + (f", and {count - 1:,} more" if count > 1 else "")
    return Finding(
        kind=kind, level=level, what=what, where=where, fix=fix, count=count, row=row, column=column
    )
