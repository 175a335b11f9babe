"""Random rows that share prefixes, and the values beside them."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

Rows = list[list[int]]


@st.composite
def rows_with_prefixes(draw: st.DrawFn) -> Rows:
    """Rows of few tokens, many of which begin alike: equal rows, prefixes of others, and empty ones among them."""
    rows: Rows = draw(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=10))
    for kept in draw(st.lists(st.integers(0, 8), max_size=4)):
        if rows:
            begun = rows[draw(st.integers(0, len(rows) - 1))][:kept]
            rows.append(begun + draw(st.lists(st.integers(0, 3), max_size=30)))
    return draw(st.permutations(rows))


def split(values: Any, rows: Rows) -> list[list[Any]]:
    """Values of all rows as a list for each."""
    bounds = np.cumsum([0, *map(len, rows)])
    return [list(values[a:b]) for a, b in zip(bounds, bounds[1:])]
