"""Everything that makes a feed, in one frozen record: what the trainer's process hands to the one that works."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from varlen.feed.batches import BatchSettings
from varlen.feed.exchange import Exchanges
from varlen.feed.feed import Feed
from varlen.feed.groups import Groups
from varlen.feed.indexed import IndexedFeed
from varlen.feed.stream import PackStream
from varlen.feed.windows import Windows, WindowSettings
from varlen.source.store import open_store


class Spec(Protocol):
    """Makes a feed, in this process or in another one."""

    def open(self, exchanges: Exchanges | None = None) -> Feed:
        """Make it.

        Args:
            exchanges: how ranks tell each other what they know; None where they can't.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedSpec:
    """A feed out of a token store."""

    store: Path
    parts_a_group: int
    """Parts of the store whose documents are shuffled together."""
    windows: WindowSettings
    batches: BatchSettings
    epochs: int | None
    rank: int

    def open(self, exchanges: Exchanges | None = None) -> Feed:  # noqa: ARG002 - lengths are known everywhere
        """Make the feed.

        Raises:
            SourceError: the store can't be read.
        """
        store = open_store(self.store)
        stream = PackStream(Windows(store, Groups(store, self.parts_a_group), self.windows), self.epochs)
        return IndexedFeed(store, stream, self.batches, self.rank)
