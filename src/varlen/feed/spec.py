"""Everything that a feed is built from, as frozen records that the trainer's process sends to the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from varlen.documents import memory
from varlen.documents.order import hashed
from varlen.documents.source import OnError, Source
from varlen.errors import SourceError
from varlen.feed.batches import BatchSettings
from varlen.feed.exchange import OpenExchange
from varlen.feed.indexed.stream import IndexedFeed, PackStream, PlanRequests
from varlen.feed.indexed.windows import PARTS_A_GROUP, Groups, Windows, WindowSettings, minimum_for
from varlen.feed.mixture.stream import MixedStream, MixSettings
from varlen.feed.protocol import Feed
from varlen.feed.streaming.feed import StreamingFeed, StreamingSettings
from varlen.files.losses import NO_LOSSES, Losses, total
from varlen.files.paths import Data, Format
from varlen.store.growing import PATIENCE_S, PartialStore
from varlen.store.open import JoinedTokens, open_tokens
from varlen.store.store import TokenStore
from varlen.store.tokens import TokenDocuments


class Spec(Protocol):
    """Builds a feed, in this process or another one."""

    def open(self, open_exchange: OpenExchange | None = None, held: Sequence[TokenDocuments] = ()) -> Feed:
        """Build the feed from documents that are open already; if `held` is empty, opens them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _TokensSpec:
    """What is the same for one set of documents that are tokens already, and for a mixture of them."""

    windows: WindowSettings
    batches: BatchSettings
    rank: int
    patience_s: float = PATIENCE_S
    """How long to wait for the next part of a store that is being written."""
    on_error: OnError = "raise"
    """What becomes of documents whose tokens can't be read."""
    split: str | None = None
    format: Format | None = None
    """As `open_tokens` takes them."""
    planned_ahead: int | None = None
    """How far ahead steps are planned; None: no plans."""

    def reopened(self, data: Data) -> TokenDocuments:
        """Open documents, which `open_tokens` takes."""
        return reopen_tokens(data, self.patience_s, self.on_error, split=self.split, format=self.format)

    def requests(self, open_exchange: OpenExchange | None) -> PlanRequests | None:
        """Return how the feed requests plans; None if it has no plans, or is only used for lookups."""
        if open_exchange is None or self.planned_ahead is None:
            return None
        return PlanRequests(open_exchange=open_exchange, ahead=self.planned_ahead)


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedSpec(_TokensSpec):
    """A feed of documents that are tokens already."""

    data: Data
    parts_a_group: int
    """Minimum number of the store's parts whose documents are shuffled together."""
    epochs: int | None
    num_ranks: int
    first_parts: int
    """Number of parts of the store in the first epoch; the same on all ranks."""
    only_plans: bool = False
    """Whether the exchange carries only plans, as the ranks can't reach each other."""

    def open(
        self, open_exchange: OpenExchange | None = None, held: Sequence[TokenDocuments] = ()
    ) -> IndexedFeed:
        """Build the feed."""
        (tokens,) = held or [self.reopened(self.data)]
        plans = self.requests(open_exchange)
        open_exchange = None if self.only_plans else open_exchange
        can_agree = open_exchange is not None or self.num_ranks == 1
        parts: Callable[[int], int] = lambda _: self.first_parts  # noqa: E731
        if can_agree and isinstance(tokens, TokenStore):
            parts = _PartsNow(tokens, self.first_parts, self.rank, open_exchange)
        windows = grouped(tokens, self.windows, self.parts_a_group)
        stream = PackStream(windows, self.epochs, parts)
        return IndexedFeed(stream, self.batches, self.rank, self.on_error, lambda: _losses_of(tokens), plans)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSpec(_TokensSpec):
    """A feed of a mixture of several sources of documents that are tokens already."""

    sources: tuple[Data, ...]
    mix: MixSettings

    def open(
        self, open_exchange: OpenExchange | None = None, held: Sequence[TokenDocuments] = ()
    ) -> IndexedFeed:
        """Build the feed; its exchange carries only plans, as all ranks know all lengths."""
        sets = held or list(map(self.reopened, self.sources))
        streams: list[PackStream] = []
        for number, (tokens, data) in enumerate(zip(sets, self.sources)):
            tokens.wait_for(tokens.num_parts)
            if tokens.documents.sum() == 0:
                raise SourceError(
                    f"{data} holds no document, and can't have a share of a mixture; leave it out"
                )
            windows = replace(self.windows, seed=_seed_of(self.windows.seed, number))
            epochs = self.mix.epochs if self.mix.until == "first" else None
            streams.append(PackStream(grouped(tokens, windows), epochs, grows=False))
        joined = JoinedTokens(sets)
        stream = MixedStream(joined, streams, self.windows, self.mix)
        losses = lambda: total(map(_losses_of, sets))  # noqa: E731
        plans = self.requests(open_exchange)
        return IndexedFeed(stream, self.batches, self.rank, self.on_error, losses, plans)


def _losses_of(tokens: TokenDocuments) -> Losses:
    """Return the losses recorded when tokens were made; none are known for files of other programs."""
    return tokens.losses if isinstance(tokens, TokenStore | PartialStore) else NO_LOSSES


def release(spec: Spec) -> None:
    """Release the rows in memory from which a feed was built."""
    if isinstance(spec, StreamingSpec):
        memory.release(spec.source.files)
    elif isinstance(spec, IndexedSpec):
        memory.release(spec.data)
    elif isinstance(spec, MixtureSpec):
        for data in spec.sources:
            memory.release(data)


def grouped(tokens: TokenDocuments, settings: WindowSettings, parts: int = PARTS_A_GROUP) -> Windows:
    """Return the windows of documents, in groups of at least `parts` parts that hold enough for whole windows."""
    minimum = minimum_for(settings.window, settings.capacity, settings.overlong, parts)
    return Windows(tokens, Groups(tokens, minimum), settings)


class _PartsNow:
    """Returns a store's number of parts at the beginning of an epoch: the minimum over the ranks."""

    def __init__(self, store: TokenStore, first: int, rank: int, open_exchange: OpenExchange | None) -> None:
        self._store, self._first, self._rank, self._open_exchange = store, first, rank, open_exchange

    def __call__(self, epoch: int) -> int:
        if epoch == 0:
            return self._first
        self._store.reread()
        if self._open_exchange is None:
            return self._store.num_parts
        counts = self._open_exchange().all(f"parts of epoch {epoch}", {self._rank: self._store.num_parts})
        return int(min(counts.values()))


def reopen_tokens(
    data: Data,
    patience_s: float = PATIENCE_S,
    on_error: OnError = "raise",
    *,
    split: str | None = None,
    format: Format | None = None,
) -> TokenDocuments:
    """Open documents that were tokens when their loader was made."""
    tokens = open_tokens(
        data, patience_s=patience_s, check_tokens=on_error == "raise", split=split, format=format
    )
    if tokens is None:
        raise SourceError(
            f"{data} held tokens when the loader was made, and doesn't any more; put them back, or "
            "make the loader again"
        )
    return tokens


def _seed_of(seed: int | None, number: int) -> int | None:
    """Return the seed of a source's own shuffle."""
    return None if seed is None else int(hashed(np.array([number]), seed)[0] >> np.uint64(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingSpec:
    """A feed that reads and tokenizes documents while training."""

    source: Source
    settings: StreamingSettings
    batches: BatchSettings
    rank: int

    def open(
        self, open_exchange: OpenExchange | None = None, held: Sequence[TokenDocuments] = ()
    ) -> StreamingFeed:
        """Build the feed."""
        assert not held, "streaming reads no tokens"
        return StreamingFeed(self.source, self.settings, self.batches, self.rank, open_exchange)
