"""What a loader has done so far, and how long the trainer waited for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from varlen.feed.feed import BatchCounts, Ended, Worker
from varlen.files.losses import Losses
from varlen.types import Ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStats:
    """Counts of this rank since its loader was made, but for the ledger, which is of all ranks."""

    batches: int = 0
    """Taken by the trainer."""
    tokens: int = 0
    """Of documents in these batches, padding not counted."""
    positions: int = 0
    """Of these batches, padding counted."""
    targets: int = 0
    """Labels in them."""
    masked_packs: int = 0
    """Packs without any document, where the data ends, or ended before more epochs were asked for."""
    packs_without_targets: int = 0
    """Packs of documents that train nothing."""
    waited_s: float = 0.0
    """Time in which the trainer stood still for a batch, the first one's not counted."""
    first_s: float = 0.0
    """Time for which it stood still for the first one."""
    late: int = 0
    """Batches that it had to wait for, the first one not counted."""
    queued: int = 0
    """Sum over batches of those that were ready when one was taken."""
    copies: int = 0
    """Batches copied since the trainer held all slots of the ring."""
    restarts: int = 0
    """Workers that died and were replaced."""
    skipped: int = 0
    """Of documents in streaming: rows that couldn't be read, over all ranks, once however many epochs there are. Of
    tokens: pieces of documents that this rank couldn't read, and has masked in its batches, where they count as
    tokens; ranks add up."""
    losses: Losses
    """What the source holds that no token stands for, over all ranks: in streaming of all that was read since the
    loader was made, in each epoch anew; of a token store all that it lost when it was made."""
    ledger: Ledger
    """What became of the tokens of all windows begun since the loader was made, over all ranks."""

    @property
    def fill_ratio(self) -> float:
        """Tokens a position; 1.0 before the first batch."""
        return self.tokens / self.positions if self.positions else 1.0

    @property
    def readiness(self) -> float:
        """Share of batches that were there when they were asked for, the first one not counted."""
        return 1 - self.late / (self.batches - 1) if self.batches > 1 else 1.0

    @property
    def queue_depth(self) -> float:
        """Batches that were ready when one was taken, on the average."""
        return self.queued / self.batches if self.batches else 0.0


_OF_BATCHES = tuple(field.name for field in fields(BatchCounts))
MOST_NOTED = 64
"""Batches whose counts are added up at a time, by whoever notes them."""
Note = tuple[BatchCounts | None, float, int, int, Ledger | None, Losses | None]
"""Of a batch: what it holds, the seconds that it was waited for, the batches that were ready when it was asked for,
the pieces skipped, what became of tokens and what was lost, as `Made` has them."""


class Meter:
    """Adds up, cheaply: it runs in the trainer's process at every batch.

    After a step of the trainer nothing of this is in the processor's caches, where a dozen additions take as long as
    a loop over many batches. So a batch is only noted, and notes are added up some dozens at a time.
    """

    def __init__(self, say_cut: Callable[[Ledger], bool] | None = None) -> None:
        """Begin at nothing.

        Args:
            say_cut: told of what has become of tokens until it returns that it has said how many documents were
                longer than a pack; None: that was said before.
        """
        self._say_cut = say_cut
        names = [field.name for field in fields(LoaderStats) if field.name not in ("ledger", "losses")]
        self._counts: dict[str, float] = dict.fromkeys(names, 0)
        self._ledger, self._losses = Ledger(tokens_in=0, packed=0), Losses()
        self.noted: list[Note] = []
        """For whoever takes batches to append to; a call of its own would take longer."""

    def add_up(self) -> None:
        """Add up what was noted."""
        counts = self._counts
        for found, waited_s, ready, skipped, ledger, losses in self.noted:
            is_first = counts["batches"] == 0
            counts["batches"] += 1
            for name in _OF_BATCHES:
                counts[name] += getattr(found, name)
            counts["queued"] += ready
            counts["first_s" if is_first else "waited_s"] += waited_s
            counts["late"] += ready == 0 and not is_first
            counts["skipped"] += skipped
            self._enter(ledger, losses)
        self.noted.clear()

    def end(self, ended: Ended) -> None:
        """Enter what no batch has told."""
        self.add_up()
        self._enter(ended.ledger, ended.losses)

    def _enter(self, ledger: Ledger | None, losses: Losses | None) -> None:
        if ledger is not None:
            self._ledger = self._ledger.and_then(ledger)
            if self._say_cut is not None and self._say_cut(self._ledger):
                self._say_cut = None
        if losses is not None:
            self._losses += losses
            self._counts["skipped"] += losses.num_rows

    def stats(self, worker: Worker, before: Losses) -> LoaderStats:
        """Return what was entered so far, beside what the worker counts.

        Args:
            worker: makes the batches.
            before: what was lost when the tokens were made.
        """
        self.add_up()
        counted = {"copies": worker.copies, "restarts": worker.restarts}
        whole = {name: value if name.endswith("_s") else int(value) for name, value in self._counts.items()}
        return LoaderStats(
            **{**whole, **counted},  # type: ignore[arg-type]
            losses=before + self._losses,
            ledger=self._ledger,
        )
