"""Delay long documents until there are enough of them for one step: an option that changes the order of the data.

All ranks wait for a single very long document; with one in every micro-batch, they run in parallel. This is the
outlier delay of WLB-LLM (Wang et al. 2025, "WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model
Training", arXiv 2503.17924). Since a delayed document is trained some steps later, `vl.plan_step` and
`vl.PackedLoader` never do it by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from varlen.arguments import as_count
from varlen.errors import LengthsError, SettingError, StateError, reading_state
from varlen.pack.lengths import as_lengths
from varlen.types import Int32Array, IntArray, rebuilt

VERSION: Final = 1


def _no_lengths() -> Int32Array:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Waiting:
    """Delayed documents, the oldest first; none by default; read-only."""

    document_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 `[num_waiting]`."""
    lengths: Int32Array = field(default_factory=_no_lengths)
    """int32 `[num_waiting]`."""
    steps: Int32Array = field(default_factory=_no_lengths)
    """int32 `[num_waiting]`: number of steps for which each has been delayed."""

    def __post_init__(self) -> None:
        for each in fields(self):
            getattr(self, each.name).flags.writeable = False

    __reduce__ = rebuilt  # arrays are read-only in another process too

    def state_dict(self) -> dict[str, Any]:
        """Return the documents for a JSON checkpoint, to be stored with the state of the data."""
        return {"version": VERSION} | {each.name: getattr(self, each.name).tolist() for each in fields(self)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Waiting:
        """Return the documents of a state.

        Args:
            state: what `state_dict` returned, perhaps back from JSON.

        Raises:
            StateError: this is no such state.
        """
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            raise StateError(
                f"this is no state of vl.Waiting of version {VERSION}: {str(state)[:80]}; load what state_dict "
                "returned, or begin with vl.Waiting()"
            )
        with reading_state("vl.Waiting"):
            held = {name: as_lengths(state[name]).copy() for name in ("lengths", "steps")}
            ids = np.array(state["document_ids"])
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

    Documents of at least `thresholds[k]` and less than `thresholds[k + 1]` tokens wait in one queue. When a queue
    holds `count` of them, the oldest `count` go into the step, as do those that have waited for `most_steps` steps.
    If that left the step empty, all documents drawn for it go.

    This is a pure function: ranks that call it with the same arguments agree, and its only state is `waiting`, which
    `Waiting.state_dict` saves in checkpoints.

    Args:
        document_ids: whole numbers `[num_documents]`, drawn for this step; a number may come again later.
        lengths: `[num_documents]` tokens.
        waiting: the documents that the step before left; `Waiting()` before the first.
        thresholds: `[num_queues]` tokens from which documents wait, rising; one queue for each interval.
        count: micro-batches of a step over all ranks, so that each gets one of the long documents.
        most_steps: most steps for which a document is delayed.

    Returns:
        The step's documents, int64, and their lengths, int32: those that had waited, the oldest first, then the new
        ones in order; and the documents that wait now. After the last step, train on those that still wait.

    Raises:
        LengthsError: lengths or thresholds that aren't whole numbers from 0, thresholds that don't rise, or another
            number of documents than of lengths.
        SettingError: `count` or `most_steps` below 1, no threshold, or a `waiting` of another type.

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
    queue_of = np.searchsorted(bounds, sizes, side="right")
    is_now = (queue_of == 0) | (steps >= most_steps)
    for queue in range(1, bounds.size + 1):
        queued = np.flatnonzero(queue_of == queue)
        is_now[queued[: queued.size // count * count]] = True
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
    """Delay long documents over a sequence of steps; the last step takes all that still wait.

    Args:
        lengths: `[num_documents]` tokens of all documents, step after step.
        step_offsets: whole numbers `[num_steps + 1]`: step s has the documents from `step_offsets[s]` to the next.
        thresholds: `[num_queues]` tokens from which documents wait, rising; one queue for each interval.
        count: micro-batches of a step over all ranks.
        most_steps: most steps for which a document is delayed.

    Returns:
        int64 `[num_documents]`, the documents in their new order, each once; and int64 `[num_steps + 1]` offsets of
        the steps among them. The result is deterministic, so a resumed run needs only the number of its step.

    Raises:
        LengthsError: lengths or thresholds that aren't whole numbers from 0, thresholds that don't rise, or offsets
            that don't go from 0 to the number of documents.
        SettingError: `count` or `most_steps` below 1, or no threshold.

    Cost: O(num_documents), plus the number of waiting documents for each step.

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
    """Return validated offsets as int64."""
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
    """Whether these are whole numbers within int64."""
    if not ids.size:
        return True
    return ids.dtype.kind in "iu" and bool(ids.max() <= np.iinfo(np.int64).max)


def _as_thresholds(thresholds: npt.ArrayLike) -> Int32Array:
    """Return validated thresholds as int32."""
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
