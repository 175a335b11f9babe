"""Everything that makes a feed, in one frozen record: what the trainer's process hands to the one that works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from varlen.errors import SourceError
from varlen.feed.batches import BatchSettings
from varlen.feed.exchange import Exchanges
from varlen.feed.feed import Feed
from varlen.feed.groups import Groups
from varlen.feed.indexed import IndexedFeed
from varlen.feed.stream import PackStream
from varlen.feed.streaming import StreamingFeed, StreamingSettings
from varlen.feed.windows import Windows, WindowSettings
from varlen.source.files import Data
from varlen.source.open_tokens import open_tokens
from varlen.source.source import Source


class Spec(Protocol):
    """Makes a feed, in this process or in another one."""

    def open(self, exchanges: Exchanges | None = None) -> Feed:
        """Make it.

        Args:
            exchanges: how ranks tell each other what they know; None where they can't.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedSpec:
    """A feed out of documents that are tokens already."""

    data: Data
    """As `open_tokens` takes it."""
    parts_a_group: int
    """Parts of the store whose documents are shuffled together."""
    windows: WindowSettings
    batches: BatchSettings
    epochs: int | None
    rank: int

    def open(self, exchanges: Exchanges | None = None) -> IndexedFeed:  # noqa: ARG002 - all know all lengths
        """Make the feed.

        Raises:
            SourceError: the store can't be read.
        """
        tokens = open_tokens(self.data)
        if tokens is None:
            raise SourceError(f"{self.data} held tokens when the loader was made, and doesn't any more")
        stream = PackStream(Windows(tokens, Groups(tokens, self.parts_a_group), self.windows), self.epochs)
        return IndexedFeed(tokens, stream, self.batches, self.rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingSpec:
    """A feed straight from documents."""

    source: Source
    settings: StreamingSettings
    batches: BatchSettings
    rank: int

    def open(self, exchanges: Exchanges | None = None) -> StreamingFeed:
        """Make the feed.

        Args:
            exchanges: how ranks tell each other what they know; None where they can't.

        Raises:
            SettingError: sizes that don't divide each other.
            SourceError: a table can't be read.
        """
        return StreamingFeed(self.source, self.settings, self.batches, self.rank, exchanges)
