"""Which documents a planned step holds: drawn as a loader would, truncated to the capacity, and counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from varlen.counts import many
from varlen.errors import SettingError
from varlen.types import Int32Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepDocuments:
    """The documents of one optimizer step."""

    lengths: Int32Array
    """int32 `[num_documents]`: after truncation, none of them 0."""
    capacity: int
    step: int
    truncated_documents: int
    truncated_tokens: int
    """Tokens that truncation lost."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, after truncation."""
        return int(self.lengths.sum(dtype=np.int64))


def step_documents(
    lengths: npt.NDArray[np.integer], *, documents: int, step: int, capacity: int, seed: int | None
) -> StepDocuments:
    """Take the documents of one step.

    Args:
        lengths: integers `[any]`: of all documents; those of 0 are left out.
        documents: of a step; the last one takes what is left.
        step: which one, from 0.
        capacity: tokens that a document is truncated to.
        seed: of the order; None: as given.

    Raises:
        SettingError: there is no such step, no document, or a seed below 0.
    """
    if documents < 1:
        raise SettingError(f"--documents must be at least 1, the documents of a step; got {documents}")
    if seed is not None and seed < 0:
        raise SettingError(f"--seed must be at least 0; got {seed}")
    given = np.asarray(lengths)
    if not given.size:
        raise SettingError("there is no document, and nothing to plan; is it the right file?")
    if not given.any():
        raise SettingError(
            f"every document is empty; there is nothing to plan ({many(given.size, 'length')}, all 0)"
        )
    given = given[given > 0]
    num_steps = -(-given.size // documents)
    if not 0 <= step < num_steps:
        raise SettingError(
            f"--step {step} isn't there: {many(given.size, 'document')}, {documents:,} a step, make "
            f"{many(num_steps, 'step')}, 0 to {num_steps - 1:,}"
        )
    order = np.arange(given.size) if seed is None else np.random.default_rng(seed).permutation(given.size)
    mine = given[order[step * documents : (step + 1) * documents]].astype(np.int64)
    kept = np.minimum(mine, capacity)
    return StepDocuments(
        lengths=kept.astype(np.int32),
        capacity=capacity,
        step=step,
        truncated_documents=int((mine > capacity).sum()),
        truncated_tokens=int((mine - kept).sum()),
    )
