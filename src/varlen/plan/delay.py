"""Long documents held back until enough of them share a step: an option that changes the order of the data.

A step with one very long document waits for it on every rank; a step with as many as there are micro-batches runs
them side by side. This is the outlier delay of WLB-LLM (Wang et al. 2025, "WLB-LLM: Workload-Balanced 4D Parallelism
for Large Language Model Training", arXiv 2503.17924). Nothing does so unless it is asked to: a delayed document is
trained on some steps later than the loader had drawn it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import numpy.typing as npt

from varlen.errors import LengthsError, SettingError
from varlen.pack.lengths import as_count, as_lengths
from varlen.types import Int32Array, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Waiting:
    """Documents that are held back, the oldest first; read-only."""

    document_ids: IntArray
    """int64 `[num_waiting]`."""
    lengths: Int32Array
    """int32 `[num_waiting]`."""
    steps: Int32Array
    """int32 `[num_waiting]`: steps that each has been held back for."""

    def __post_init__(self) -> None:
        for field in fields(self):
            getattr(self, field.name).flags.writeable = False

    def __reduce__(self) -> tuple[partial[Waiting], tuple[()]]:
        """Pickle through the constructor, so that arrays are read-only in another process too."""
        return partial(Waiting, **{field.name: getattr(self, field.name) for field in fields(self)}), ()


def nobody() -> Waiting:
    """Return an empty queue: what the first step begins with."""
    none = np.zeros(0, np.int32)
    return Waiting(document_ids=np.zeros(0, np.int64), lengths=none, steps=none.copy())


def delay_step(
    document_ids: IntArray,
    lengths: Int32Array,
    waiting: Waiting,
    *,
    thresholds: npt.ArrayLike,
    count: int,
    most_steps: int,
) -> tuple[IntArray, Int32Array, Waiting]:
    """Decide which documents a step trains on, and which wait for the next.

    Documents of at least `thresholds[k]` and less than `thresholds[k + 1]` tokens wait in one line. When a line holds
    `count` of them, the oldest `count` go into the step; so does whoever has waited for `most_steps` steps.

    Args:
        document_ids: int64 `[num_documents]`, that the loader has drawn for this step.
        lengths: int32 `[num_documents]`.
        waiting: what the step before left.
        thresholds: `[num_lines]` tokens, rising.
        count: micro-batches of a step over all ranks, so that each has one of the long documents.
        most_steps: steps that a document is held back for at most.

    Returns:
        The step's documents, int64, and their lengths, int32: those that had waited, the oldest first, then the new
        ones in their order; and who waits now.

    Raises:
        LengthsError: lengths or thresholds that aren't whole numbers from 0, or thresholds that don't rise.
        SettingError: `count` or `most_steps` below 1.
    """
    bounds = _as_thresholds(thresholds)
    count, most_steps = as_count(count, "count"), as_count(most_steps, "most_steps")
    ids = np.concatenate([waiting.document_ids, np.asarray(document_ids, np.int64)])
    sizes = np.concatenate([waiting.lengths, as_lengths(lengths)])
    steps = np.concatenate([waiting.steps, np.full(len(lengths), -1, np.int32)]) + np.int32(1)
    line_of = np.searchsorted(bounds, sizes, side="right")
    is_now = (line_of == 0) | (steps >= most_steps)
    for line in range(1, bounds.size + 1):
        members = np.flatnonzero(line_of == line)
        is_now[members[: members.size // count * count]] = True
    later = ~is_now
    return (
        ids[is_now],
        sizes[is_now],
        Waiting(document_ids=ids[later], lengths=sizes[later], steps=steps[later]),
    )


def delay_outliers(
    lengths: npt.ArrayLike,
    step_offsets: IntArray,
    *,
    thresholds: npt.ArrayLike,
    count: int,
    most_steps: int = 8,
) -> tuple[IntArray, IntArray]:
    """Hold long documents back over a sequence of steps; the last step takes whoever still waits.

    Args:
        lengths: `[num_documents]` tokens of all documents, step after step.
        step_offsets: int64 `[num_steps + 1]`: step s was drawn as documents `step_offsets[s]:step_offsets[s + 1]`.
        thresholds: `[num_lines]` tokens from which documents wait, rising; one line an interval.
        count: micro-batches of a step over all ranks.
        most_steps: steps that a document is held back for at most.

    Returns:
        int64 `[num_documents]`, the documents in their new order, each once; and int64 `[num_steps + 1]` offsets of
        the steps among them.

    Raises:
        LengthsError: lengths or thresholds that aren't whole numbers from 0, or thresholds that don't rise.
        SettingError: `count` or `most_steps` below 1.

    Cost: O(num_documents) but for documents that wait, which are looked at once a step.

    >>> delay_outliers([9, 1, 1, 1, 9, 1], np.array([0, 2, 4, 6]), thresholds=[8], count=2)
    (array([1, 2, 3, 0, 4, 5]), array([0, 1, 3, 6]))
    """
    checked = as_lengths(lengths)
    waiting = nobody()
    steps = []
    for begin, end in zip(step_offsets[:-1].tolist(), step_offsets[1:].tolist()):
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


def _as_thresholds(thresholds: npt.ArrayLike) -> Int32Array:
    """Return thresholds as int32, checked.

    Raises:
        LengthsError: they don't rise.
        SettingError: there are none.
    """
    bounds = as_lengths(thresholds)
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
