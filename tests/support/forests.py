"""Random rows that share prefixes, and the values beside them."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

Rows = list[list[int]]
VOCABULARY = 60


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


def agents(seed: int = 3, rollouts: int = 3, turns: int = 3) -> tuple[Rows, Rows]:
    """A row for each turn of rollouts that begin alike and rewrite their history; one twice, a prefix, one token."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, VOCABULARY, 9).tolist()
    rows = []
    for _ in range(rollouts):
        history = list(system)
        for _ in range(turns):
            said = rng.integers(0, VOCABULARY, int(rng.integers(1, 6))).tolist()
            rows.append(history + said)
            kept = said if rng.random() > 0.4 else said[len(said) // 2 :]
            history = history + kept + rng.integers(0, VOCABULARY, int(rng.integers(1, 4))).tolist()
    rows += [rows[0], [5], rows[1][:5]]
    return rows, [[int(rng.random() > 0.3) for _ in row] for row in rows]


def row_by_row(model: Any, rows: Rows, masks: Rows) -> torch.Tensor:
    """Log-probabilities of all targets, of every row alone."""
    found = []
    for row, mask in zip(rows, masks):
        at = [position for position in range(1, len(row)) if mask[position]]
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
        found.append(torch.log_softmax(logits, -1)[[p - 1 for p in at], [row[p] for p in at]])
    return torch.cat(found)
