"""`fold`: rows of tokens in, a Forest in which each shared prefix stands once out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.arguments import LARGEST
from varlen.errors import DocumentsError, SettingError
from varlen.forest import Forest, ForestLedger
from varlen.pack import kernels_fold as kernels
from varlen.ragged import Documents, Joined, as_whole, is_flat, join
from varlen.types import Int32Array, IntArray

_TOKEN_S = 3e-6  # upper estimate of what folding takes per token in Python
_LEAST_SLOTS = 16


def fold(
    rows: Documents,
    columns: Mapping[str, Any] | None = None,
    groups: npt.ArrayLike | None = None,
    loss_mask: Documents | None = None,
    identity: Collection[str] = (),
) -> Forest:
    """Fold rows that share prefixes into trees, in which each shared token stands once.

    Rollouts of one prompt, a row for each turn of an agent, turns of a chat whose template rewrites the earlier ones:
    trained as rows, the same prefix is computed many times. Log-probabilities, loss and gradients of the forest are
    those of every row alone, since a token sees exactly the tokens before it in its rows.

    Rows, columns and masks can each be a list of lists, arrays or tensors (one a row), a tuple (values, offsets), or
    an Arrow list array. If rows are a tuple, the others may be flat arrays that share its offsets, and are read so
    where there are as many tokens as rows.

    Args:
        rows: token ids. An empty row is counted, and holds nothing.
        columns: other values for each token (advantages, old log-probabilities), or one value for each row. Each
            occurrence of a target has those of its own row, at the predicted token.
        groups: `[rows]` numbers or names; rows of different groups share nothing. None is one group of all rows.
        loss_mask: a number or boolean for each token; where it is 0, the token isn't predicted. None predicts all
            tokens but the first of each row, which nothing precedes.
        identity: names of columns that must be equal, bit by bit, for two tokens to be one: routes of experts, an
            image, the policy that wrote them. Tokens that differ in one begin branches of their own.

    Returns:
        A Forest. Trees, and branches after a fork, stand in the order of their first rows; occurrences in the order
        of the rows given, by rising positions.

    Raises:
        DocumentsError: columns or masks that don't match the rows, values that are no token ids, or columns of
            `identity` that aren't given; the message names row and position.
        SettingError: more than 2^31 - 1 tokens.

    Cost: O(tokens); each token is compared once, and nothing is copied but the tokens of the forest and the values at
    targets.

    >>> import varlen as vl
    >>> forest = vl.fold([[1, 2, 3, 4], [1, 2, 5], [1, 2, 5, 6]])
    >>> forest.token_ids.tolist(), forest.subtree_end.tolist()
    ([1, 2, 3, 4, 5, 6], [6, 6, 4, 4, 6, 6])
    >>> forest.position_ids.tolist(), forest.tokens_of(2).tolist()
    ([0, 1, 2, 3, 2, 3], [0, 1, 4, 5])
    """
    if not hasattr(rows, "__iter__"):
        raise DocumentsError(f"rows must be lists of token ids, one a row; got {type(rows).__name__}")
    joined = as_whole(join(rows, "rows"), "rows")
    ids, offsets = _token_ids(joined), _offsets(joined.sizes)
    names, has_offsets = _as_mapping(columns), isinstance(rows, tuple)
    values = {
        name: _values(given, f"columns[{name!r}]", offsets, has_offsets=has_offsets)
        for name, given in names.items()
    }
    mask = _mask(loss_mask, offsets, has_offsets=has_offsets)
    identity = _as_names(identity, values)
    told_apart = _told_apart(identity, values, len(ids))
    row_groups, numbers = _groups(groups, len(offsets) - 1)
    with jit.sized(len(ids) * _TOKEN_S):
        segments, last = _grown(ids, told_apart, offsets, numbers)
        arrays, merged = _arranged(segments, last, ids, offsets)
        targets = np.empty(len(ids), np.int64)
        count = kernels.find_targets(offsets, mask, targets)
    targets = targets[:count].copy() if 2 * count < len(ids) else targets[:count]
    first_rows = np.zeros(len(arrays["token_ids"]), np.int64)
    if identity:
        first_rows[arrays["row_tokens"]] = np.arange(len(ids))
    return Forest(
        **arrays,
        row_offsets=offsets,
        row_groups=row_groups,
        targets=targets,
        columns={name: column[targets] for name, column in values.items()},
        token_columns={name: values[name][first_rows] for name in identity},
        ledger=ForestLedger(
            rows=len(offsets) - 1,
            tokens_in=len(ids),
            merged_tokens=merged,
            tokens=len(arrays["token_ids"]),
            targets_in=_count_targets(mask, offsets),
            targets=count,
        ),
    )


def _grown(
    ids: Int32Array, told_apart: Any, offsets: IntArray, groups: IntArray
) -> tuple[IntArray, Int32Array]:
    """Return the segments, in the order in which they begin, and one that each row ends in or before."""
    num_rows = len(offsets) - 1
    slots = max(1 << (4 * num_rows - 1).bit_length(), _LEAST_SLOTS) if num_rows else _LEAST_SLOTS
    segments, last = np.empty((2 * num_rows, 6), np.int64), np.empty(num_rows, np.int32)
    table = np.full(slots, -1, np.int32)
    count = kernels.grow(ids, told_apart, offsets, groups, table, segments, last)
    return segments[:count], last


def _arranged(
    segments: IntArray, last: Int32Array, ids: Int32Array, offsets: IntArray
) -> tuple[dict[str, Any], int]:
    """Return the arrays of a forest, depth first, and the tokens of its rows merged by prefix."""
    count = len(segments)
    order = np.empty(count, np.int64)
    if count:
        by_first = np.argsort(segments[:, kernels.FIRST], kind="stable")
        kernels.depth_first(segments, by_first, order)
    number = np.full(count + 1, -1, np.int32)  # its last entry stands for no segment
    number[order] = np.arange(count, dtype=np.int32)
    row, start, stop, parent, _, children = segments[order].T
    parents = number[np.maximum(parent, -1)]
    starts = np.ascontiguousarray(start)
    segment_offsets = _offsets(stop - start)
    tokens = int(segment_offsets[-1])
    depths = np.zeros(count, np.int32)
    written = {name: np.empty(tokens, np.int32) for name in ("token_ids", "position_ids", "subtree_end")}
    kernels.write_tokens(ids, offsets[row], starts, segment_offsets, parents, depths, *written.values())
    row_tokens = np.empty(len(ids), np.int32)
    kernels.write_places(offsets, number[last], starts, segment_offsets, parents, row_tokens)
    arrays = {
        **written,
        "segment_offsets": segment_offsets,
        "segment_parents": parents,
        "segment_depths": depths,
        "row_tokens": row_tokens,
    }
    return arrays, int(stop[children == 0].sum())


def _offsets(sizes: npt.NDArray[Any]) -> IntArray:
    """Return where each of several parts begins, and where the last ends."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _token_ids(joined: Joined) -> Int32Array:
    """Return token ids as int32, checked."""
    values = joined.values
    if values.size > LARGEST:
        raise SettingError(
            f"{values.size:,} tokens are more than one forest holds ({LARGEST:,}); fold the rows in parts, by groups"
        )
    if values.size and (int(values.min()) < 0 or int(values.max()) > LARGEST):
        wrong = (values < 0) | (values > LARGEST)
        row, position = place_of(_offsets(joined.sizes), int(np.argmax(wrong)))
        raise DocumentsError(
            f"row {row:,} has the token id {int(values[np.argmax(wrong)]):,} at position {position:,}; ids are from "
            f"0 to {LARGEST:,} ({int(wrong.sum()):,} of {values.size:,} tokens are outside). Where nothing is "
            "trained, loss_mask is 0"
        )
    return np.ascontiguousarray(values, np.int32)


def place_of(offsets: IntArray, token: int) -> tuple[int, int]:
    """Return the row and the position of a token of all rows, for messages."""
    row = int(np.searchsorted(offsets, token, side="right")) - 1
    return row, token - int(offsets[row])


def _as_mapping(columns: object) -> Mapping[str, Any]:
    """Return columns by name, checked."""
    if columns is None:
        return {}
    if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns):
        raise SettingError(f"columns must be a mapping from names to values, got {type(columns).__name__}")
    if reserved := [name for name in columns if name in RESERVED]:
        raise SettingError(
            f"columns[{reserved[0]!r}] has a name that every occurrence has anyway ({', '.join(RESERVED)}); rename it"
        )
    return columns


RESERVED = ("row", "group", "position", "row_offsets")
"""Names of what an objective finds beside the columns that were given."""


def _values(given: Any, name: str, offsets: IntArray, *, has_offsets: bool) -> npt.NDArray[Any]:
    """Return the values of a column for each token of all rows, `[raw tokens, ...]`.

    `has_offsets`: whether rows were given flat, so that flat values may be those of tokens.
    """
    sizes = np.diff(offsets)
    if is_flat(given):
        return _spread_flat(_one_array(given, name), name, sizes, has_offsets=has_offsets)
    if not hasattr(given, "__iter__"):
        raise DocumentsError(
            f"{name} must have a value for each token, or one for each row; got {type(given).__name__}"
        )
    if (wide := _wide(given, name)) is not None:
        found, counts = wide
    else:
        found, counts, _ = join(given, name)
    _check_counts(counts, sizes, name)
    return found


def _spread_flat(
    flat: npt.NDArray[Any], name: str, sizes: IntArray, *, has_offsets: bool
) -> npt.NDArray[Any]:
    """Return flat values, of rows or of tokens, for each token."""
    tokens, is_of_rows = int(sizes.sum()), len(flat) == len(sizes)
    # There may be as many tokens as rows, some of which have none; see `fold`.
    if len(flat) == tokens and (has_offsets or not is_of_rows):
        return flat
    if is_of_rows:
        repeated: npt.NDArray[Any] = np.repeat(flat, sizes)
        return repeated
    raise DocumentsError(
        f"{name} has {len(flat):,} values for {tokens:,} tokens in {len(sizes):,} rows; give one for each token, or "
        "one for each row"
    )


def _one_array(given: Any, name: str) -> npt.NDArray[Any]:
    """Return flat values as an array of numbers."""
    if nulls := getattr(given, "null_count", 0):
        raise DocumentsError(f"{name} hold {nulls:,} nulls in place of values; fill or drop them first")
    try:
        array = np.asarray(given.cpu() if hasattr(given, "cpu") else given)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DocumentsError(f"{name} can't be read as an array: {error}") from None
    if array.dtype.kind not in "biuf":
        raise DocumentsError(f"{name} must hold numbers or booleans, got dtype {array.dtype}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _wide(given: Any, name: str) -> tuple[npt.NDArray[Any], IntArray] | None:
    """Return values and counts where each token has several values; None where each has one."""
    if not isinstance(given, list) or not any(getattr(part, "ndim", 1) > 1 for part in given):
        return None
    parts = [_one_array(part, name) for part in given]
    filled = [row for row, part in enumerate(parts) if part.size or part.ndim > 1] or [0]
    shape = parts[filled[0]].shape[1:]
    if wrong := [row for row in filled if parts[row].shape[1:] != shape]:
        raise DocumentsError(
            f"{name}: a token of row {wrong[0]:,} has values of shape {list(parts[wrong[0]].shape[1:])}, and one of "
            f"row {filled[0]:,} of {list(shape)}; give all tokens the same"
        )
    counts = np.array([len(part) if part.ndim else 0 for part in parts], np.int64)
    return np.concatenate([parts[row] for row in filled]), counts


def _check_counts(counts: IntArray, sizes: IntArray, name: str) -> None:
    """Require as many values as tokens in every row."""
    if len(counts) != len(sizes):
        raise DocumentsError(f"{name}: {len(counts):,} rows of values for {len(sizes):,} rows of tokens")
    if (wrong := counts != sizes).any():
        row = int(np.argmax(wrong))
        raise DocumentsError(
            f"{name}: row {row:,} has {counts[row]:,} values for {sizes[row]:,} tokens; one a token is needed, from "
            f"position 0 on ({int(wrong.sum()):,} of {len(sizes):,} rows don't match)"
        )


def _mask(given: Any, offsets: IntArray, *, has_offsets: bool) -> npt.NDArray[np.uint8]:
    """Return which tokens are predicted, `[raw tokens]`; empty where all are."""
    if given is None:
        return np.empty(0, np.uint8)
    values = _values(given, "loss_mask", offsets, has_offsets=has_offsets)
    if values.ndim != 1:
        raise DocumentsError(
            f"loss_mask must have one value for each token, got {list(values.shape[1:])} of them"
        )
    trained: npt.NDArray[np.uint8] = np.not_equal(values, 0).view(np.uint8)
    return trained


def _count_targets(mask: npt.NDArray[np.uint8], offsets: IntArray) -> int:
    """Count what is to be predicted, from the mask alone."""
    begins = offsets[:-1][np.diff(offsets) > 0]
    if not mask.size:
        return int(offsets[-1]) - len(begins)
    return int(np.count_nonzero(mask)) - int(np.count_nonzero(mask[begins]))


def _as_names(identity: Any, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of columns, checked."""
    if isinstance(identity, str):
        raise SettingError(f"identity must be names of columns, in a list; got the text {identity!r}")
    if not hasattr(identity, "__iter__"):
        raise SettingError(f"identity must be names of columns, in a list; got {type(identity).__name__}")
    names = tuple(identity)
    for name in names:
        if not isinstance(name, str) or name not in values:
            known = ", ".join(map(repr, values)) or "none are given"
            raise DocumentsError(f"identity names {name!r}, which is none of the columns ({known})")
    return names


def _told_apart(
    identity: Collection[str], values: Mapping[str, npt.NDArray[Any]], tokens: int
) -> npt.NDArray[np.uint8]:
    """Return the bytes of the columns that must be equal, uint8 `[raw tokens, bytes]`."""
    if not identity or not tokens:
        return np.empty((tokens, 0), np.uint8)
    parts = [np.ascontiguousarray(values[name]).reshape(tokens, -1).view(np.uint8) for name in identity]
    return np.ascontiguousarray(np.concatenate(parts, axis=1))


def _groups(given: Any, num_rows: int) -> tuple[IntArray, IntArray]:
    """Return the group of each row: as given or a number for each name, and numbered from 0."""
    if given is None or not num_rows:
        return np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    try:
        array = np.asarray(given.cpu() if hasattr(given, "cpu") else given)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DocumentsError(f"groups can't be read as one number or name for each row: {error}") from None
    if array.shape != (num_rows,) or array.dtype.kind not in "biuUSO":
        raise DocumentsError(
            f"groups must be a whole number or a name for each of the {num_rows:,} rows; got {array.dtype} of shape "
            f"{list(array.shape)}"
        )
    try:
        _, numbers = np.unique(array, return_inverse=True)
    except TypeError as error:
        raise DocumentsError(f"groups must all be numbers, or all be names: {error}") from None
    numbers = numbers.astype(np.int64)
    if array.dtype == np.uint64 and int(array.max()) >= 2**63:
        row = int(np.argmax(array >= 2**63))
        raise DocumentsError(
            f"row {row:,} has the group {int(array[row]):,}, outside of int64; number the groups, or give names"
        )
    return (array.astype(np.int64) if array.dtype.kind in "biu" else numbers), numbers
