"""`TreeBatch`: trees of rows as arrays, what they predict, and what each token sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from varlen.batch.packed import Array, Layout, as_tensor, check_window, import_torch, on_host
from varlen.errors import NoSuchArrayError, SettingError
from varlen.types import IntArray

if TYPE_CHECKING:
    import torch

_OF_PACKED = (
    "labels",
    "shift_labels",
    "segment_ids",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "document_ids",
    "document_starts",
    "document_lengths",
    "document_targets",
    "dense_mask",
    "block_mask",
    "mask_function",
    "loss_scale",
    "loss_weights",
    "target_weights",
)
"""What a PackedBatch has, and trees don't."""
_TOKENS = ("input_ids", "position_ids", "targets")
_NUMBERS = (
    "subtree_end",
    "forest_tokens",
    "sources",
    "rows",
    "groups",
    "positions",
    "row_offsets",
    "row_lengths",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeBatch:
    """A batch of trees, what `vl.collate(forest, packing)` returns, in one of two layouts.

    `layout="rows"`: one row a pack, `[num_packs, capacity]`. `layout="flat"`: all in one row, `[1, num_tokens]`,
    rounded up to `pad_to_multiple_of`.

    Token k is visible to token q of the same row exactly if `k <= q < subtree_end[k]`; a window or a chunk of a layer
    is a condition on positions beside it. A token may have several targets, so there are no labels: `targets` are
    *occurrences*, each of which stands in one row that was given, at one position.
    """

    input_ids: Array
    """int32 `[rows, width]` (int64 after `to_torch`); `pad_id` at padding."""
    position_ids: Array
    """Same shape; the position in the rows given that the token belongs to, 0 at padding."""
    subtree_end: Array
    """int32, same shape: the column behind the last token that continues this one; at padding, the next column."""
    forest_tokens: Array
    """int32, same shape: which token of the forest stands here, -1 at padding; of a cut tree perhaps in several."""
    sources: Array
    """int64 `[num_targets]`: where each occurrence is predicted, in the flattened batch."""
    targets: Array
    """int32 `[num_targets]` (int64 after `to_torch`): the token id that each predicts. Occurrences are those of the
    rows given, in their order, by rising positions."""
    rows: Array
    """int64 `[num_targets]`: the row of each, as given to `vl.fold`."""
    groups: Array
    """int64 `[num_targets]`: the group of its row, 0 without groups."""
    positions: Array
    """int64 `[num_targets]`: the position of the predicted token in its row."""
    row_offsets: Array
    """int64 `[rows with targets + 1]`: occurrences of the same row stand together; where they begin."""
    row_lengths: Array
    """int64 `[rows with targets]`: tokens of these rows, whole."""
    columns: Mapping[str, Array] = field(default_factory=dict)
    """`[num_targets, ...]` each: the values beside the rows given, at the predicted tokens."""
    token_columns: Mapping[str, Array] = field(default_factory=dict)
    """`[rows, width, ...]` each: values of the columns that tell tokens apart, 0 at padding."""
    pack_ids: Array
    """int64 `[num_packs]`: which packs of the packing these are."""
    layout: Layout
    pad_id: int
    max_token_id: int
    """Largest token id in the batch, padding not counted; -1 without tokens."""
    num_tokens: int
    """Tokens, padding not counted."""
    step_num_targets: int
    """Occurrences of the whole step: all ranks, all batches."""

    @property
    def num_targets(self) -> int:
        """Occurrences in this batch."""
        return len(self.targets)

    def __getattr__(self, name: str) -> NoReturn:
        """Say what trees have in place of what a PackedBatch has."""
        if name in _OF_PACKED:
            raise NoSuchArrayError(
                f"a batch of trees has no `{name}`: a token may have several targets and several next tokens. "
                "`targets`, `sources` and `columns` are the occurrences, vl.log_probs(logits, batch) gives their "
                "log-probabilities, and `subtree_end` says what each token sees"
            )
        raise AttributeError(f"TreeBatch has no attribute {name!r}")

    def keys(self) -> NoReturn:
        """Refuse `model(**batch)`, which calls this.

        Raises:
            SettingError: always.
        """
        raise SettingError(
            "a TreeBatch is no mapping of a model's arguments, which differ by model; pass them by "
            "model(**model_inputs(batch, model)), from varlen.adapters.hf"
        )

    def objective_columns(self) -> dict[str, Array]:
        """Return what an objective finds beside log-probabilities.

        Returns:
            `columns`, and `row`, `group`, `position` `[num_targets]` and `row_offsets`.
        """
        beside = {"row": self.rows, "group": self.groups, "position": self.positions}
        return {**self.columns, **beside, "row_offsets": self.row_offsets}

    def visible(self, sliding_window: int | None = None, chunk: int | None = None) -> Array:
        """Return what each token sees, for reference and for kernels that take a mask; quadratic in the width.

        Args:
            sliding_window: see only tokens of this many last positions, the token's own included.
            chunk: see only tokens of the same chunk of so many positions.

        Returns:
            bool `[rows, width, width]`, True where column q may attend to column k; padding attends only to itself.
        """
        return visible(self.subtree_end, self.position_ids, sliding_window, chunk)

    def segments(self) -> TreeSegments:
        """Return the runs of tokens between forks, padding left out, in host memory.

        Returns:
            Arrays `[segments]` in flattened positions: `begins` and `ends` of each, `stops` behind its last
            descendant, `parents`, `depths`, and `positions` of first tokens.
        """
        return segments_of(
            on_host(self.subtree_end), on_host(self.position_ids), on_host(self.forest_tokens) >= 0
        )

    def to_torch(self, device: torch.device | str | None = None) -> TreeBatch:
        """Return the same batch as torch tensors; ids, positions and targets become int64.

        Args:
            device: where to put the tensors; None keeps them in host memory.
        """
        fields = {name: as_tensor(getattr(self, name), device, widen=True) for name in _TOKENS}
        fields |= {name: as_tensor(getattr(self, name), device, widen=False) for name in _NUMBERS}
        for name in ("columns", "token_columns"):
            of_kind = getattr(self, name)
            fields[name] = {key: as_tensor(value, device, widen=False) for key, value in of_kind.items()}
        return dataclasses.replace(self, **fields)

    def __repr__(self) -> str:
        """Return the shape, fill and number of targets."""
        rows, width = self.input_ids.shape
        fill = 100 * self.num_tokens / (rows * width) if rows * width else 100.0
        return (
            f"TreeBatch({self.layout} [{rows:,}, {width:,}], {self.num_tokens:,} tokens, {fill:.2f}% full, "
            f"{self.num_targets:,} targets)"
        )


def visible(subtree_end: Any, position_ids: Any, sliding_window: int | None, chunk: int | None) -> Any:
    """Return bool `[rows, width, width]` of numpy arrays or tensors; see `TreeBatch.visible`."""
    check_window(sliding_window)
    width = subtree_end.shape[1]
    if isinstance(subtree_end, np.ndarray):
        columns: Any = np.arange(width)
    else:
        columns = import_torch().arange(width, device=subtree_end.device)
    mask = (columns[None, :] <= columns[:, None])[None] & (columns[:, None] < subtree_end[:, None, :])
    queries, keys = position_ids[:, :, None], position_ids[:, None, :]
    if sliding_window is not None:
        mask = mask & (queries - keys < sliding_window)
    if chunk is not None:
        mask = mask & (queries // chunk == keys // chunk)
    return mask


@dataclass(frozen=True, slots=True)
class TreeSegments:
    """Runs of tokens between forks, in flattened positions, row by row and depth first."""

    begins: IntArray
    """int64 `[segments]`: first token."""
    ends: IntArray
    """int64 `[segments]`: one past the last token."""
    stops: IntArray
    """int64 `[segments]`: one past the last token that continues the segment: its descendants are `ends:stops`."""
    parents: IntArray
    """int64 `[segments]`: the segment that it continues, -1 for none."""
    depths: IntArray
    """int64 `[segments]`: segments before it on its path."""
    positions: IntArray
    """int64 `[segments]`: position of the first token."""


def segments_of(subtree_end: Any, position_ids: Any, is_token: Any) -> TreeSegments:
    """Find segments from what a batch says of each token; arrays are `[rows, width]`."""
    rows, width = subtree_end.shape
    ends = (subtree_end.astype(np.int64) + width * np.arange(rows)[:, None]).reshape(-1)
    positions, real = position_ids.reshape(-1).astype(np.int64), is_token.reshape(-1)
    begins_here = np.ones(ends.size, np.bool_)
    begins_here[1:] = (ends[1:] != ends[:-1]) | (positions[1:] != positions[:-1] + 1) | ~real[:-1]
    begins_here[:: max(width, 1)] = True
    begins = np.flatnonzero(begins_here & real)
    after = np.append(np.flatnonzero(begins_here | ~real), ends.size)
    stops = after[np.searchsorted(after, begins, side="right")]
    parents, depths = np.full(begins.size, -1, np.int64), np.zeros(begins.size, np.int64)
    path: list[int] = []
    for one, begin in enumerate(begins.tolist()):
        while path and ends[begins[path[-1]]] <= begin:
            path.pop()
        if path:
            parents[one] = path[-1]
        depths[one] = len(path)
        path.append(one)
    return TreeSegments(begins, stops, ends[begins], parents, depths, positions[begins])
