"""imoneoi's MultipackDistributedBatchSampler by its own name: a pack of documents for each rank and step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from varlen.adapters.peers import as_replicas, raises_too
from varlen.arguments import as_count, as_seed
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import shuffled
from varlen.pack.steps import Fill, Steps, steps_of
from varlen.types import IntArray

__all__ = ["MultipackDistributedBatchSampler"]

_EPOCHS = 2**40  # distance between seeds, so that no seed's epoch equals another's


@raises_too(AssertionError, RuntimeError)
class MultipackDistributedBatchSampler(Sampler[IntArray]):
    """A batch is one rank's pack of a step: indices whose lengths add up to at most `batch_max_length`.

    Constructor and methods are those of imoneoi/multipack_sampler. It differs where that one goes wrong:

    - Nothing is dropped: there the documents that don't fill the last step are left out at every epoch.
    - It has a `len`, which needs no packing of its own and is the same on every rank.
    - A document longer than a pack is an error, or dropped and counted. There an epoch silently ends at the first.
    - Packs of a step are of about equal work, attention included; there they are of about equal length.
    - A seed's second epoch isn't the next seed's first.

    >>> lengths = [5, 2, 6, 3, 2, 7]
    >>> samplers = [MultipackDistributedBatchSampler(8, lengths, num_replicas=2, rank=rank) for rank in (0, 1)]
    >>> [len(sampler) for sampler in samplers]
    [2, 2]
    >>> sorted(int(index) for sampler in samplers for batch in sampler for index in batch)
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(
        self,
        batch_max_length: int,
        lengths: npt.ArrayLike,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        *,
        overlong: Literal["error", "drop"] = "error",
        fill: Fill = "repeat",
        balance_over: int = 4,
    ) -> None:
        """Take the settings; nothing is packed before the first look.

        Args:
            batch_max_length: tokens a pack can hold.
            lengths: `[documents]` tokens of every document of the data set.
            num_replicas: ranks; None asks torch.distributed.
            rank: this one; None asks torch.distributed.
            seed: of the order of documents, which is another at every epoch.
            overlong: documents longer than a pack: "error", or "drop" them and count them.
            fill: with fewer documents than ranks, a rank gets the shortest document again ("repeat"), or a batch
                without documents ("empty").
            balance_over: so many steps' packs are sorted by work, so that those of a step are about equal; 1 leaves
                them as they come.

        Raises:
            LengthsError: lengths that aren't whole numbers from 0.
            SettingError: a setting out of range.
        """
        self.batch_max_length = as_count(batch_max_length, "batch_max_length")
        self.lengths = as_lengths(lengths)
        self.num_replicas, self.rank = as_replicas(num_replicas, rank)
        self.seed = as_seed(seed)
        self.overlong = overlong
        self.fill = fill
        self.balance_over = balance_over
        self.epoch = 0
        self._indices: IntArray = np.empty(0, np.int64)
        self._steps: Steps | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; any setting makes the epoch be packed again."""
        if not name.startswith("_"):
            object.__setattr__(self, "_steps", None)
        object.__setattr__(self, name, value)

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch.

        Args:
            epoch: from 0.
        """
        self.epoch = as_count(epoch, "epoch", 0)
        self._steps = None

    @property
    def eff_total_used(self) -> int:
        """Tokens of this epoch's packs, over all ranks."""
        return self.steps.packed_tokens

    @property
    def eff_total_slots(self) -> int:
        """Slots of this epoch's packs, over all ranks."""
        return self.steps.num_packs * self.batch_max_length

    @property
    def steps(self) -> Steps:
        """Packs of this epoch on all ranks, and what was dropped, repeated and left empty."""
        if self._steps is None:
            key = (self.seed * _EPOCHS + self.epoch) % 2**64
            lengths = as_lengths(self.lengths)
            self._indices = shuffled(key, lengths.size)
            self._steps = steps_of(
                lengths[self._indices],
                self.batch_max_length,
                overlong=self.overlong,
                ranks=self.num_replicas,
                fill=self.fill,
                balance_over=self.balance_over,
                seed=key,
            )
        return self._steps

    def generate_batches(self, set_stats: bool = False) -> list[IntArray]:
        """Return this rank's batches, int64 `[documents]` each.

        Args:
            set_stats: changes nothing: efficiency is always that of this epoch.
        """
        del set_stats
        steps = self.steps
        indices, packs = self._indices[steps.documents], steps.packs[:, self.rank, 0]
        # Pack -1, an empty batch, begins where the last pack ends and ends where the first begins: an empty slice.
        begins, ends = (steps.offsets[packs + more].tolist() for more in (0, 1))
        return [indices[begin:end] for begin, end in zip(begins, ends)]

    def __iter__(self) -> Iterator[IntArray]:
        """Return an iterator over this rank's batches, int64 `[documents]` each."""
        return iter(self.generate_batches())

    def __len__(self) -> int:
        """Return the number of batches of this epoch, the same on every rank."""
        return len(self.steps.packs)

    def num_batches(self) -> int:
        """Return the number of batches of this epoch, the same on every rank."""
        return len(self)

    def efficiency(self) -> float:
        """Return tokens over slots of this epoch's packs, over all ranks; 0.0 without packs."""
        return self.eff_total_used / self.eff_total_slots if self.eff_total_slots else 0.0
