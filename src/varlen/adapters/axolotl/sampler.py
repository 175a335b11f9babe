"""axolotl's MultipackBatchSampler by its own name: batches of packs, each pack a list of indices."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler, SequentialSampler

from varlen.adapters.peers import as_num_replicas, raises_too
from varlen.arguments import as_count
from varlen.errors import LengthsError
from varlen.pack.lengths import as_lengths
from varlen.pack.steps import Fill, Steps, steps_of
from varlen.types import IntArray

_log = logging.getLogger(__name__)
Batches = list[list[list[int]]]
"""Batches of packs of indices, in axolotl's form."""
_STEPS_AT_ONCE = 256
"""Steps whose batches become lists at a time."""


@raises_too(AssertionError)
class MultipackBatchSampler(BatchSampler):
    """Batches of packs of documents, as axolotl 0.19's sampler of this name gives them.

    Constructor and results are the same: each batch is a list of `batch_size` packs, each pack a list of indices
    into the data set whose lengths add up to at most `batch_max_len`. It differs where that one goes wrong:

    - `len` is the number of batches that come, always. There it is the least of four packings, and what is beyond
      it is cut off.
    - Packs are taken apart until they make whole steps, so that nothing is dropped. Only where documents are too few
      for that does `drop_last=True`, the default, leave some out, and they are counted and logged.
    - The number of batches is a multiple of `num_replicas`, so that ranks that take turns, as accelerate deals
      them, have equally many. There accelerate starts over with the first documents.
    - A document longer than a pack is an error, or dropped and counted. There it becomes a pack of its own that is
      overfull.
    - The whole epoch is packed at once, best fit in the order of the sampler, not first fit in groups, and in one
      process; `group_size`, `num_processes`, `safe_mode`, `mp_start_method`, `num_count_samples` and
      `packing_efficiency_estimate` are taken and change nothing.

    A sampler that gives another order at every look, such as torch's RandomSampler, is asked once per epoch, and all
    ranks must ask one in the same state. Every epoch has a packing of its own, so its `len` is that epoch's.
    Documents of length 0 stand in no pack, and are counted.

    >>> sampler = MultipackBatchSampler(range(5), batch_size=1, batch_max_len=8, lengths=[5, 2, 6, 3, 2], bin_size=9)
    >>> len(sampler), list(sampler)
    (3, [[[0, 1]], [[2, 4]], [[3]]])
    """

    def __init__(
        self,
        sampler: Iterable[int],
        batch_size: int,
        batch_max_len: int,
        lengths: npt.ArrayLike,
        bin_size: int | None,
        packing_efficiency_estimate: float = 1.0,
        drop_last: bool = True,
        num_count_samples: int = 4,
        sequential: bool = False,
        group_size: int = 100_000,
        num_processes: int | None = None,
        safe_mode: bool = True,
        mp_start_method: str | None = "fork",
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        overlong: Literal["error", "drop"] = "error",
        fill: Fill = "repeat",
        balance_over: int = 1,
        **_: Any,
    ) -> None:
        """Take the settings; nothing is packed before the first look.

        Args:
            sampler: gives the indices of an epoch; its `set_epoch` is called where it has one.
            batch_size: packs of a batch.
            batch_max_len: tokens a pack can hold.
            lengths: `[documents]` tokens of every document of the data set.
            bin_size: most documents of a pack; None or 0 for no limit.
            packing_efficiency_estimate: changes nothing.
            drop_last: leave the last step out where documents are too few to fill it, and count them.
            num_count_samples: changes nothing.
            sequential: keep documents in the sampler's order (next fit).
            group_size: changes nothing.
            num_processes: changes nothing.
            safe_mode: changes nothing.
            mp_start_method: changes nothing.
            num_replicas: ranks that the batches are dealt to; None asks torch.distributed.
            rank: give this rank's batches alone; None gives those of all, step after step, rank after rank, for
                accelerate to deal.
            overlong: documents longer than a pack: "error", or "drop" them and count them.
            fill: with fewer documents than ranks, a rank gets the shortest document again ("repeat"), or a batch
                without packs ("empty").
            balance_over: so many steps are made of packs of about equal work each; 1 evens out the ranks within
                each step.

        Raises:
            LengthsError: lengths that aren't whole numbers from 0.
            SettingError: a setting out of range.
        """
        self.sampler: Any = sampler  # torch's own constructor would ask for more than iterables
        self.batch_size = as_count(batch_size, "batch_size")
        self.batch_max_len = as_count(batch_max_len, "batch_max_len")
        self.lengths = as_lengths(lengths)
        self.bin_size = bin_size
        self.packing_efficiency_estimate = packing_efficiency_estimate
        self.drop_last = drop_last
        self.num_count_samples = num_count_samples
        self.sequential = sequential
        self.group_size = group_size
        self.num_processes = num_processes
        self.safe_mode = safe_mode
        self.mp_start_method = mp_start_method
        self.num_replicas = as_num_replicas(num_replicas)
        self.rank = None if rank is None else as_count(rank, "rank", 0, self.num_replicas - 1)
        self.overlong = overlong
        self.fill = fill
        self.balance_over = balance_over
        self.epoch = 0
        self._indices: IntArray = np.empty(0, np.int64)
        self._steps: Steps | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Write a setting; the epoch is packed anew by it."""
        if not name.startswith("_"):
            object.__setattr__(self, "_steps", None)
        object.__setattr__(self, name, value)

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, also in the sampler of indices.

        Args:
            epoch: from 0.
        """
        self.epoch = as_count(epoch, "epoch", 0)
        self._steps = None
        notify = getattr(self.sampler, "set_epoch", None)
        if notify is not None:
            notify(epoch)

    @property
    def total_tokens_used(self) -> int:
        """Tokens of this epoch's packs, over all ranks."""
        return self.steps.packed_tokens

    @property
    def total_token_slots(self) -> int:
        """Slots of this epoch's packs, over all ranks."""
        return self.steps.num_packs * self.batch_max_len

    @property
    def steps(self) -> Steps:
        """Packs of this epoch, and what was dropped, repeated and left empty."""
        if self._steps is None:
            self._indices = self._order()
            self._steps = steps_of(
                as_lengths(self.lengths)[self._indices],
                self.batch_max_len,
                method="next_fit" if self.sequential else "best_fit",
                overlong=self.overlong,
                max_documents=self.bin_size or None,
                ranks=self.num_replicas,
                packs_per_batch=self.batch_size,
                drop_last=self.drop_last,
                fill=self.fill,
                balance_over=self.balance_over,
                seed=self.epoch,
                in_order=self.sequential,
            )
            report(self._steps, self.epoch)
        return self._steps

    def _order(self) -> IntArray:
        """Indices of the epoch, as the sampler gives them."""
        given = self.sampler
        if isinstance(given, range):
            order: IntArray = np.arange(given.start, given.stop, given.step)
        elif isinstance(given, SequentialSampler):
            order = np.arange(len(given))
        else:
            order = np.fromiter(given, np.int64)
        wrong = (order < 0) | (order >= len(self.lengths))
        if wrong.any():
            raise LengthsError(
                f"the sampler gives index {order[np.argmax(wrong)]:,}, and there are {len(self.lengths):,} lengths "
                f"({int(wrong.sum()):,} of {order.size:,} indices have none); pass the lengths of the whole data set"
            )
        return order

    def __len__(self) -> int:
        """Return the number of batches of this epoch: one rank's, or of all where `rank` is None."""
        steps = self.steps
        return len(steps.packs) * (self.num_replicas if self.rank is None else 1)

    def __iter__(self) -> Iterator[list[list[int]]]:  # type: ignore[override]
        """Yield the batches of this epoch; each is made when its turn comes."""
        steps = self.steps
        taken = steps.packs if self.rank is None else steps.packs[:, self.rank : self.rank + 1]
        for start in range(0, len(taken), _STEPS_AT_ONCE):
            yield from self._batches(steps, taken[start : start + _STEPS_AT_ONCE])

    def _batches(self, steps: Steps, taken: IntArray) -> Batches:
        """Batches of some steps as lists: indices are converted all at once, at a fifth of the time."""
        packs = taken.reshape(-1)
        is_full = bool((packs >= 0).all())
        held = packs if is_full else packs[packs >= 0]
        low = int(steps.offsets[held.min()]) if held.size else 0
        high = int(steps.offsets[held.max() + 1]) if held.size else 0
        indices = self._indices[steps.documents[low:high]].tolist()
        begins, ends = ((steps.offsets[packs + more] - low).tolist() for more in (0, 1))
        lists = [indices[begin:end] for begin, end in zip(begins, ends)]
        if self.batch_size == 1 and is_full:
            return [[pack] for pack in lists]
        batches = [lists[at : at + self.batch_size] for at in range(0, len(lists), self.batch_size)]
        if is_full:
            return batches
        counts = (taken >= 0).sum(axis=-1).reshape(-1).tolist()  # in a batch, packs come before empty places
        return [batch[:count] for batch, count in zip(batches, counts)]

    def generate_batches(self, set_stats: bool = False) -> Batches:
        """Return all batches of this epoch as a list.

        Args:
            set_stats: changes nothing: efficiency is always that of this epoch.
        """
        del set_stats
        return list(self)

    def efficiency(self) -> float:
        """Return tokens over slots of this epoch's packs, over all ranks; 0.0 without packs."""
        return self.total_tokens_used / self.total_token_slots if self.total_token_slots else 0.0

    def gather_efficiency(self) -> float:
        """Return `efficiency()`, which is the same on every rank."""
        return self.efficiency()

    def gather_len_batches(self, num: int) -> int:
        """Return the number, which is the same on every rank.

        Args:
            num: batches of this rank.
        """
        return num


def report(steps: Steps, epoch: int) -> None:
    """Log what an epoch leaves out, gives twice, or leaves empty."""
    if steps.dropped_documents:
        _log.warning(
            "epoch %d leaves out %s documents of %s tokens, which are longer than a pack or asked for by drop_last",
            epoch,
            f"{steps.dropped_documents:,}",
            f"{steps.dropped_tokens:,}",
        )
    if steps.repeated_documents or steps.empty_batches:
        _log.warning(
            "epoch %d has fewer documents than batches: %s given twice, %s batches empty; use fewer ranks, or "
            'choose with fill="repeat" or "empty"',
            epoch,
            f"{steps.repeated_documents:,}",
            f"{steps.empty_batches:,}",
        )
