"""PaddedSampler: even batches of whole, padded documents for a DataLoader, where a model can't pack."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.arguments import as_count, as_seed
from varlen.errors import StateError
from varlen.feed.settings import as_ranks, check_reader
from varlen.pack.api import DEFAULT_WORK, as_work
from varlen.pack.lengths import as_lengths
from varlen.pack.padded import PaddedSteps, padded_steps

_EPOCHS = 2**40  # distance between seeds, so that no seed's epoch is another's
_MOST = 2**31 - 1


class PaddedSampler:
    """Batches of whole documents, padded to the longest of each, for models whose documents no argument keeps apart.

    A batch sampler for PyTorch's DataLoader: it gives lists of indices. Every document comes once an epoch, all ranks
    get as many batches, and what they compute at once is of about equal work, attention included. Each epoch is a
    pure function of lengths and settings. Unlike with rows grouped by length, batches are bounded by padded tokens,
    so that short documents come many at a time.

    ::

        sampler = vl.PaddedSampler(lengths, max_tokens=16384, dp_rank=rank, dp_world_size=world_size)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collator, num_workers=2)

    >>> sampler = PaddedSampler([5, 2, 6, 3, 2, 7], max_tokens=12, window=6, shuffle=False)
    >>> len(sampler), list(sampler)
    (3, [[2, 0], [3, 1, 4], [5]])
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        max_tokens: int,
        max_rows: int | None = None,
        pad_to_multiple_of: int = 1,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        micro_batches: int = 1,
        window: int | None = None,
        work: tuple[float, float] = DEFAULT_WORK,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        """Take the settings; an epoch is computed at the first look.

        Args:
            lengths: `[documents]`, tokens of every document of the data set. Documents without any are left out.
            max_tokens: most tokens of a batch, padding included: its rows times its longest document.
            max_rows: most documents of a batch; None for no bound but that.
            pad_to_multiple_of: to which the collator rounds a batch's width up.
            dp_rank: this data-parallel rank; None in a job of one process.
            dp_world_size: number of such ranks.
            micro_batches: batches of a step on each rank (gradient accumulation).
            window: documents that are sorted by length together; None for some 64 batches a rank, at most a quarter
                of all. With more there is less padding, and batches differ less from one epoch to the next.
            work: of a token and of a squared token of a row, as in `vl.pack`; 6 · hidden size to 1 for encoders.
            shuffle: whether documents and steps come in another order each epoch.
            seed: of that order.

        Raises:
            LengthsError: lengths that aren't whole numbers from 0.
            OverlongDocumentError: a document longer than a batch.
            SettingError: a setting out of range, fewer documents than ranks times micro-batches, or several processes
                and no rank.
        """
        check_reader(is_ranked=dp_rank is not None)
        self._lengths = as_lengths(lengths)
        self._rank, ranks = as_ranks(dp_rank, dp_world_size)
        self._settings: dict[str, Any] = {
            "max_tokens": as_count(max_tokens, "max_tokens"),
            "max_rows": _MOST if max_rows is None else as_count(max_rows, "max_rows"),
            "multiple": as_count(pad_to_multiple_of, "pad_to_multiple_of"),
            "ranks": ranks,
            "micro_batches": as_count(micro_batches, "micro_batches"),
            "window": None if window is None else as_count(window, "window"),
            "work": as_work(work),
        }
        self._seed = as_seed(seed) if shuffle else None
        self.epoch = 0
        """The epoch of the batches, from 0."""
        self._start = self._given = 0
        self._known: tuple[int, PaddedSteps] | None = None
        _ = self.steps  # documents that don't fit are refused now

    @property
    def steps(self) -> PaddedSteps:
        """The batches of the epoch, with their share of padding and the imbalance of ranks."""
        if self._known is None or self._known[0] != self.epoch:
            seed = None if self._seed is None else (self._seed + self.epoch * _EPOCHS) % 2**64
            self._known = self.epoch, padded_steps(self._lengths, **self._settings, seed=seed)
        return self._known[1]

    @property
    def batch_sampler(self) -> PaddedSampler:
        """The sampler itself, where transformers' Trainer looks for it to set the epoch."""
        return self

    def __len__(self) -> int:
        """Return the batches of this rank in the whole epoch."""
        steps, micro_batches, _ = self.steps.batches.shape
        return int(steps * micro_batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the epoch, from the place that was loaded on; after a whole one, those of the next."""
        if self._given >= len(
            self
        ):  # not when the last is given out, as a trainer may be several batches behind
            self.set_epoch(self.epoch + 1)
        steps, start = self.steps, self._start
        mine = steps.batches[:, :, self._rank].reshape(-1)[start:]
        for number, batch in enumerate(mine.tolist(), start + 1):
            self._given = number
            yield steps.documents[steps.offsets[batch] : steps.offsets[batch + 1]].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch.

        Args:
            epoch: from 0.
        """
        self.epoch = as_count(epoch, "epoch", 0)
        self._start = self._given = 0

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the place in the data as a few numbers, the same on every rank.

        Args:
            batches: how many of this epoch the trainer has taken; None for those given out, which is more where a
                DataLoader's workers fetch ahead.

        Raises:
            SettingError: more batches than the epoch has.
        """
        taken = self._given if batches is None else as_count(batches, "batches", 0, len(self))
        return {
            "version": 1,
            "epoch": self.epoch,
            "batch": taken,
            "data": self._fingerprint(),
            **self._plain(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place: the next iteration gives the batches that come after it, the same as without a stop.

        Args:
            state: of `state_dict`, of a sampler of the same lengths and settings.

        Raises:
            StateError: a state of other lengths, ranks or settings.
        """
        mine = {"version": 1, "data": self._fingerprint(), **self._plain()}
        if not isinstance(state, Mapping) or not {"epoch", "batch", *mine} <= state.keys():
            raise StateError("this isn't a state of a PaddedSampler; pass what its state_dict() returned")
        changed = [name for name, value in mine.items() if state[name] != value]
        if changed:
            seen = ", ".join(f"{name} was {state[name]!r} and is {mine[name]!r}" for name in changed)
            raise StateError(
                f"the state is that of other data or settings ({seen}); make the sampler as it was, or begin an "
                "epoch with set_epoch"
            )
        self.set_epoch(state["epoch"])
        if not isinstance(state["batch"], int) or not 0 <= state["batch"] <= len(self):
            raise StateError(
                f"the state is at batch {state['batch']!r}, and epoch {self.epoch:,} has {len(self):,} on each rank"
            )
        self._start = self._given = state["batch"]

    def _plain(self) -> dict[str, Any]:
        return {**self._settings, "work": list(self._settings["work"]), "seed": self._seed}

    def _fingerprint(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self._lengths, "<i4").tobytes()).hexdigest()[:16]
