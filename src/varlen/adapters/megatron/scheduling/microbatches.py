"""The noun of this folder: micro-batches of one global batch, as many on every data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from varlen.types import FloatArray, IntArray

Groups = list[list[list[int]]]
"""As Megatron-Core passes them: for each micro-batch, for each rank of data and context parallelism, sample ids."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Microbatches:
    """What each data-parallel rank runs in one step.

    Micro-batch m of rank r has number `m * dp_size + r` and holds the samples `ids[offsets[number]:offsets[number +
    1]]`, packed into one row. All ranks have as many, and none is empty but the dummies.
    """

    ids: IntArray
    """int64 `[samples]`: sample ids; in a dummy that repeats a sample, its id again."""
    offsets: IntArray
    """int64 `[num_microbatches * dp_size + 1]`."""
    dummies: IntArray
    """int64 `[any]`, rising: numbers of micro-batches that run only so that no rank waits in a collective: their loss
    must be masked. There are some only where a step has fewer samples than micro-batches."""
    work: FloatArray
    """float64 `[num_microbatches * dp_size]`: a·s + b·s², summed over the samples of each."""
    dp_size: int
    """Data-parallel ranks."""
    cp_size: int
    """Context-parallel ranks that share each micro-batch."""
    lower_bound: float
    """No division of these samples over these ranks has a smaller makespan: the mean work of a rank, or that of the
    sample with the most work where it is more."""
    seqlen_sum: int
    """Σs over the step's samples, dummies not counted: what Megatron-Core computes FLOPs from, exactly."""
    seqlen_squared_sum: int
    """Σs² over the step's samples, dummies not counted."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of each rank."""
        return (len(self.offsets) - 1) // self.dp_size

    @property
    def is_dummy(self) -> npt.NDArray[np.bool_]:
        """Whether each micro-batch is a dummy: bool `[num_microbatches, dp_size]`."""
        found = np.zeros(len(self.offsets) - 1, np.bool_)
        found[self.dummies] = True
        return found.reshape(-1, self.dp_size)

    @property
    def rank_work(self) -> FloatArray:
        """Work of each rank in the whole step: float64 `[dp_size]`."""
        total: FloatArray = self.work.reshape(-1, self.dp_size).sum(axis=0)
        return total

    @property
    def makespan(self) -> float:
        """Work of the step where ranks wait for each other at every micro-batch: Σ over them of the heaviest."""
        return float(self.work.reshape(-1, self.dp_size).max(axis=1, initial=0).sum())

    def samples(self, microbatch: int, dp_rank: int) -> IntArray:
        """Return the sample ids of one micro-batch.

        Args:
            microbatch: from 0 to `num_microbatches - 1`.
            dp_rank: from 0 to `dp_size - 1`.
        """
        number = microbatch * self.dp_size + dp_rank
        return self.ids[self.offsets[number] : self.offsets[number + 1]]

    def to_lists(self) -> Groups:
        """Return `[num_microbatches][dp_size * cp_size]` lists of ids, as Megatron-Core's schedulers do.

        The ranks of context parallelism that share a micro-batch stand next to each other.
        """
        packs = [pack.tolist() for pack in np.split(self.ids, self.offsets[1:-1])]
        return [
            [list(pack) for pack in packs[first : first + self.dp_size] for _ in range(self.cp_size)]
            for first in range(0, len(self.offsets) - 1, self.dp_size)
        ]
