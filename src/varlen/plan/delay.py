"""Long documents held back until enough of them share a step: an option that changes the order of the data.

A step with one very long document waits for it on every rank; a step with as many as there are micro-batches runs
them side by side. This is the outlier delay of WLB-LLM (Wang et al. 2025, "WLB-LLM: Workload-Balanced 4D Parallelism
for Large Language Model Training", arXiv 2503.17924). Nothing does so unless it is asked to: a delayed document is
trained on some steps later than it was drawn for. Whoever draws documents asks, `vl.plan_step` and `vl.PackedLoader`
never do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from varlen.arguments import as_count
from varlen.errors import LengthsError, SettingError, StateError
from varlen.pack.lengths import as_lengths
from varlen.types import Int32Array, IntArray

VERSION: Final = 1


def _no_lengths() -> Int32Array:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Waiting:
    """Documents that are held back, the oldest first; nobody by default; read-only."""

    document_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 `[num_waiting]`."""
    lengths: Int32Array = field(default_factory=_no_lengths)
    """int32 `[num_waiting]`."""
    steps: Int32Array = field(default_factory=_no_lengths)
    """int32 `[num_waiting]`: steps that each has been held back for."""

    def __post_init__(self) -> None:
        for each in fields(self):
            getattr(self, each.name).flags.writeable = False

    def __reduce__(self) -> tuple[partial[Waiting], tuple[()]]:
        """Pickle through the constructor, so that arrays are read-only in another process too."""
        return partial(Waiting, **{each.name: getattr(self, each.name) for each in fields(self)}), ()

    def state_dict(self) -> dict[str, Any]:
        """Return who waits, as JSON can hold it: it belongs into the checkpoint, beside where the data stands."""
        return {"version": VERSION} | {each.name: getattr(self, each.name).tolist() for each in fields(self)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Waiting:
        """Return who waited.

        Args:
            state: of `state_dict`, perhaps back from JSON.

        Raises:
            StateError: it is no such state.
        """
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            raise StateError(f"this is no state of vl.Waiting of version {VERSION}: {str(state)[:80]}")
        try:
            held = {name: as_lengths(state[name]).copy() for name in ("lengths", "steps")}
            ids = np.array(state["document_ids"])
        except (KeyError, ValueError, LengthsError) as error:
            raise StateError(f"this is no state of vl.Waiting: {type(error).__name__} {error}") from None
        sizes = [ids.size, held["lengths"].size, held["steps"].size]
        if ids.ndim != 1 or not _are_ids(ids) or len(set(sizes)) > 1:
            raise StateError(
                f"the state names {sizes[0]:,} documents, {sizes[1]:,} lengths and {sizes[2]:,} steps; they must "
                "be as many, and whole numbers below 2^63. It was changed; load it as it was saved"
            )
        return cls(document_ids=ids.astype(np.int64), **held)


def delay_step(
    document_ids: npt.ArrayLike,
    lengths: npt.ArrayLike,
    waiting: Waiting,
    *,
    thresholds: npt.ArrayLike,
    count: int,
    most_steps: int = 8,
) -> tuple[IntArray, Int32Array, Waiting]:
    """Decide which documents a step trains on, and which wait for the next.

    Documents of at least `thresholds[k]` and less than `thresholds[k + 1]` tokens wait in one line. When a line
    holds `count` of them, the oldest `count` go into the step; so does whoever has waited for `most_steps` steps.
    Where that would leave a step with nobody, those drawn for it go.

    It is a pure function: ranks that call it alike agree, and `waiting`, which is all there is to remember, goes into
    checkpoints by `Waiting.state_dict`.

    Args:
        document_ids: whole numbers `[num_documents]`, drawn for this step; a number may come again later.
        lengths: `[num_documents]` tokens.
        waiting: what the step before left; `Waiting()` before the first.
        thresholds: `[num_lines]` tokens from which documents wait, rising; one line an interval.
        count: micro-batches of a step over all ranks, so that each has one of the long documents.
        most_steps: steps that a document is held back for at most.

    Returns:
        The step's documents, int64, and their lengths, int32: those that had waited, the oldest first, then the new
        ones in their order; and who waits now. Behind the last step, take whoever `waiting` names.

    Raises:
        LengthsError: lengths or thresholds that aren't whole numbers from 0, thresholds that don't rise, or another
            number of documents than of lengths.
        SettingError: `count` or `most_steps` below 1, no threshold, or a `waiting` that is something else.

    >>> ids, lengths, waiting = delay_step(
    ...     [7, 8], [90, 5], Waiting(), thresholds=[80], count=2
    ... )
    >>> ids.tolist(), waiting.document_ids.tolist()
    ([8], [7])
    """
    if not isinstance(waiting, Waiting):
        raise SettingError(
            f"waiting is a {type(waiting).__name__}; pass vl.Waiting() before the first step, then what the step "
            "before returned, or vl.Waiting.from_state(state)"
        )
    bounds = _as_thresholds(thresholds)
    count, most_steps = as_count(count, "count"), as_count(most_steps, "most_steps")
    new_ids, new_lengths = np.asarray(document_ids), as_lengths(lengths)
    if new_ids.shape != new_lengths.shape or not _are_ids(new_ids):
        raise LengthsError(
            f"document_ids must be {new_lengths.size:,} whole numbers below 2^63, one a length; got {new_ids.dtype} "
            f"of shape {new_ids.shape}"
        )
    ids = np.concatenate([waiting.document_ids, new_ids.astype(np.int64)])
    sizes = np.concatenate([waiting.lengths, new_lengths])
    steps = np.concatenate([waiting.steps, np.full(new_ids.size, -1, np.int32)]) + np.int32(1)
    line_of = np.searchsorted(bounds, sizes, side="right")
    is_now = (line_of == 0) | (steps >= most_steps)
    for line in range(1, bounds.size + 1):
        members = np.flatnonzero(line_of == line)
        is_now[members[: members.size // count * count]] = True
    if not is_now.any():
        is_now[waiting.document_ids.size :] = True
    later = ~is_now
    return (
        ids[is_now],
        sizes[is_now],
        Waiting(document_ids=ids[later], lengths=sizes[later], steps=steps[later]),
    )


def delay_outliers(
    lengths: npt.ArrayLike,
    step_offsets: npt.ArrayLike,
    *,
    thresholds: npt.ArrayLike,
    count: int,
    most_steps: int = 8,
) -> tuple[IntArray, IntArray]:
    """Hold long documents back over a sequence of steps; the last step takes whoever still waits.

    Args:
        lengths: `[num_documents]` tokens of all documents, step after step.
        step_offsets: whole numbers `[num_steps + 1]`: step s was drawn as the documents from `step_offsets[s]` to
            the next.
        thresholds: `[num_lines]` tokens from which documents wait, rising; one line an interval.
        count: micro-batches of a step over all ranks.
        most_steps: steps that a document is held back for at most.

    Returns:
        int64 `[num_documents]`, the documents in their new order, each once; and int64 `[num_steps + 1]` offsets of
        the steps among them. It is the same whenever it is called: a resumed run needs no state but its step.

    Raises:
        LengthsError: lengths or thresholds that aren't whole numbers from 0, thresholds that don't rise, or offsets
            that don't go from 0 to the number of documents.
        SettingError: `count` or `most_steps` below 1, or no threshold.

    Cost: O(num_documents) but for documents that wait, which are looked at once a step.

    >>> delay_outliers([9, 1, 1, 1, 9, 1], [0, 2, 4, 6], thresholds=[8], count=2)
    (array([1, 2, 3, 0, 4, 5]), array([0, 1, 3, 6]))
    """
    checked = as_lengths(lengths)
    offsets = _as_offsets(step_offsets, checked.size)
    waiting = Waiting()
    steps = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        ids, _, waiting = delay_step(
            np.arange(begin, end),
            checked[begin:end],
            waiting,
            thresholds=thresholds,
            count=count,
            most_steps=most_steps,
        )
        steps.append(ids)
    if steps:
        steps[-1] = np.concatenate([steps[-1], waiting.document_ids])
    sizes = np.array([ids.size for ids in steps], np.int64)
    return np.concatenate([np.zeros(0, np.int64), *steps]), np.concatenate([[0], np.cumsum(sizes)])


def _as_offsets(step_offsets: npt.ArrayLike, num_documents: int) -> IntArray:
    """Return offsets as int64, checked."""
    offsets = np.asarray(step_offsets)
    if (
        offsets.ndim != 1
        or offsets.dtype.kind not in "iu"
        or offsets.size < 1
        or (np.diff(offsets.astype(np.int64)) < 0).any()
        or (offsets[0], offsets[-1]) != (0, num_documents)
    ):
        raise LengthsError(
            f"step_offsets must be whole numbers that rise from 0 to {num_documents:,}, the number of documents; got "
            f"{str(offsets)[:80]}"
        )
    return offsets.astype(np.int64)


def _are_ids(ids: npt.NDArray[Any]) -> bool:
    """Whether they are whole numbers that int64 holds."""
    if not ids.size:
        return True
    return ids.dtype.kind in "iu" and bool(ids.max() <= np.iinfo(np.int64).max)


def _as_thresholds(thresholds: npt.ArrayLike) -> Int32Array:
    """Return thresholds as int32, checked."""
    try:
        bounds = as_lengths(thresholds)
    except LengthsError as error:
        raise LengthsError(f"thresholds are lengths from which documents wait: {error}") from None
    if not bounds.size:
        raise SettingError("thresholds is empty; give at least one length from which documents wait")
    falling = np.flatnonzero(np.diff(bounds) <= 0)
    if falling.size:
        first = int(falling[0])
        raise LengthsError(
            f"threshold {bounds[first + 1]:,} stands after {bounds[first]:,} ({falling.size} of {bounds.size} don't "
            "rise); give them in rising order, each once"
        )
    return bounds
