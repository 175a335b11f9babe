"""A forest: rows that share prefixes, each shared token once, as flat arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.counts import many
from varlen.errors import SettingError
from varlen.types import Int32Array, IntArray, rebuilt


@dataclass(frozen=True, kw_only=True, slots=True)
class ForestLedger:
    """What folding has saved, and that no target was lost."""

    rows: int
    tokens_in: int
    """Of all rows as given."""
    merged_tokens: int
    """Of rows merged by prefix: those that are no prefix of another one, each whole."""
    tokens: int
    """Of the forest: each shared token once."""
    targets_in: int
    """Tokens of the rows that are to be predicted, counted from the mask; a row's first token never is."""
    targets: int
    """Occurrences of the forest."""

    @property
    def sharing(self) -> float:
        """Tokens of the rows over those of the forest: how many times fewer are computed; 1.0 without tokens."""
        return self.tokens_in / self.tokens if self.tokens else 1.0

    @property
    def merged_sharing(self) -> float:
        """The same of rows merged by prefix."""
        return self.tokens_in / self.merged_tokens if self.merged_tokens else 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forest:
    """Rows that share prefixes, as trees: what `vl.fold` returns. The arrays are read-only.

    Tokens stand depth first: a token is followed by what continues it, branch after branch, and trees by the first of
    their rows. A *segment* is a run of tokens between forks; a *tree* begins with a segment that follows none.

    Invariants: token k is visible to token q exactly if `k <= q < subtree_end[k]`; the tokens of row r are
    `token_ids[row_tokens[row_offsets[r]:row_offsets[r + 1]]]`.

    *Occurrences* are the targets of the rows: token `row_tokens[t]` is predicted after `row_tokens[t - 1]`, for each
    t of `targets`. A token may predict several next tokens, and the same one for several rows.
    """

    token_ids: Int32Array
    """int32 `[tokens]`."""
    position_ids: Int32Array
    """int32 `[tokens]`: position in every row that the token belongs to."""
    subtree_end: Int32Array
    """int32 `[tokens]`: one past the last token that continues it."""
    segment_offsets: IntArray
    """int64 `[segments + 1]`: segment s is the tokens from `segment_offsets[s]` up to `segment_offsets[s + 1]`."""
    segment_parents: Int32Array
    """int32 `[segments]`: the segment that it continues, -1 for the first of a tree."""
    segment_depths: Int32Array
    """int32 `[segments]`: segments before it, up to the first of its tree."""
    row_offsets: IntArray
    """int64 `[rows + 1]`: where the tokens of each row begin in `row_tokens`."""
    row_tokens: Int32Array
    """int32 `[tokens of all rows]`: which token of the forest each is."""
    row_groups: IntArray
    """int64 `[rows]`: the group of each row, as given, or a number for each name; 0 without groups."""
    targets: IntArray
    """int64 `[occurrences]`, rising: index into `row_tokens` of the predicted token."""
    columns: Mapping[str, npt.NDArray[Any]]
    """`[occurrences, ...]` each: the values at the predicted tokens."""
    token_columns: Mapping[str, npt.NDArray[Any]]
    """`[tokens, ...]` each: the values of the columns that tells tokens apart (`identity`)."""
    ledger: ForestLedger
    """Counts of `rows`, `tokens_in`, `tokens`, `merged_tokens` (of rows merged by prefix), `targets_in` and
    `targets`; and `sharing`, how many times fewer tokens are computed than in rows, beside `merged_sharing`, that of
    merged rows."""

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            getattr(self, name).flags.writeable = False
        for column in (*self.columns.values(), *self.token_columns.values()):
            column.flags.writeable = False

    __reduce__ = rebuilt  # arrays are read-only in another process too

    @property
    def num_tokens(self) -> int:
        """Tokens, each shared one once."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Rows as given."""
        return len(self.row_offsets) - 1

    @property
    def num_segments(self) -> int:
        """Segments."""
        return len(self.segment_parents)

    @property
    def num_trees(self) -> int:
        """Trees: segments that follow none."""
        return int(np.count_nonzero(self.segment_parents < 0))

    @property
    def num_targets(self) -> int:
        """Occurrences: targets of all rows."""
        return len(self.targets)

    @property
    def segment_positions(self) -> Int32Array:
        """int32 `[segments]`: position of the first token of each segment."""
        return self.position_ids[self.segment_offsets[:-1]]

    @property
    def tree_offsets(self) -> IntArray:
        """int64 `[trees + 1]`: tree t is the tokens from `tree_offsets[t]` up to `tree_offsets[t + 1]`."""
        begins = self.segment_offsets[:-1][self.segment_parents < 0]
        return np.append(begins, self.num_tokens)

    @property
    def target_rows(self) -> IntArray:
        """int64 `[occurrences]`: the row of each."""
        return np.searchsorted(self.row_offsets, self.targets, side="right") - 1

    def tokens_of(self, row: int) -> Int32Array:
        """Return which tokens of the forest a row is.

        Args:
            row: number of the row, as given to `vl.fold`.

        Returns:
            int32 `[tokens of the row]`, by positions.

        Raises:
            SettingError: there is no such row.
        """
        if not 0 <= row < self.num_rows:
            raise SettingError(f"row {row!r} is none of the {self.num_rows:,} rows of this forest")
        return self.row_tokens[self.row_offsets[row] : self.row_offsets[row + 1]]

    def __repr__(self) -> str:
        """Return one line: rows, trees, tokens and what sharing saves."""
        ledger, rows, trees = self.ledger, many(self.num_rows, "row"), many(self.num_trees, "tree")
        return (
            f"Forest({rows} in {trees}, {ledger.tokens_in:,} tokens folded to {ledger.tokens:,}, "
            f"{ledger.sharing:.2f}x fewer, {ledger.targets:,} targets)"
        )


_ARRAYS = (
    "token_ids",
    "position_ids",
    "subtree_end",
    "segment_offsets",
    "segment_parents",
    "segment_depths",
    "row_offsets",
    "row_tokens",
    "row_groups",
    "targets",
)


def as_forest(given: object, use: str) -> Forest:
    """Raise unless the argument is a Forest; other types are easily passed by mistake."""
    if isinstance(given, Forest):
        return given
    raise SettingError(f"{use} takes what vl.fold(rows) returned, and a {type(given).__name__} was given")
