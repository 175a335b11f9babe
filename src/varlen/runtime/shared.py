"""Documents that data-parallel ranks share (DP-Merge): which rows this rank has, and what its group gathers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from varlen.runtime.dealing import Dealing, Ranges, deal
from varlen.runtime.peers import Peers
from varlen.step_plan import StepPlan

Key = tuple[tuple[int, int, int], ...]
"""A MicroPack as its slices: document, start, stop."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedDocument:
    """A document whose rows this rank has some of."""

    dealing: Dealing
    peers: Peers
    owners: torch.Tensor
    """int32 `[tokens]`, on the model's device: who has the row of each token."""
    places: torch.Tensor
    """int32 `[tokens]`: its place among that rank's rows."""

    @property
    def tokens(self) -> int:
        """Of the document."""
        return len(self.owners)

    @property
    def rows(self) -> int:
        """Rows of this rank."""
        return self.dealing.before(self.tokens)[self.peers.rank]

    def kept(self, start: int, stop: int) -> tuple[int, int]:
        """Return which of this rank's rows of the document are those of a slice: the first, and one past the last.

        Args:
            start: of the slice.
            stop: of the slice.
        """
        return self.dealing.before(start)[self.peers.rank], self.dealing.before(stop)[self.peers.rank]

    def share(self, start: int, stop: int) -> Share:
        """Return this rank's share of a slice.

        Args:
            start: of the slice.
            stop: of the slice.
        """
        ranges = self.dealing.ranges(self.peers.rank, start, stop)
        first, last = self.kept(start, stop)
        return Share(document=self, start=start, stop=stop, ranges=ranges, first=first, last=last)


class Span(NamedTuple):
    """The tokens that are gathered for a slice: neighbours, up to its end."""

    start: int
    stop: int
    first: int
    """Of this rank's rows of the document, the first among them."""
    width: int
    """The most of them that one rank has."""
    shifts: torch.Tensor
    """int64 `[ranks]`: what makes a place among a rank's rows one among all that are gathered."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Share:
    """The rows of a slice that this rank computes; there may be none, and it takes part all the same."""

    document: SharedDocument
    start: int
    """Of the slice."""
    stop: int
    ranges: Ranges
    """Their tokens."""
    first: int
    """Of this rank's rows of the document, the first of the slice."""
    last: int
    """One past the last."""
    spans: dict[int | None, Span] = field(default_factory=dict)
    """By window."""

    @property
    def rows(self) -> int:
        """How many."""
        return self.last - self.first

    def span(self, window: int | None) -> Span:
        """Return which tokens are gathered, worked out once a slice.

        Args:
            window: tokens that a row sees at most; None for all.
        """
        if window not in self.spans:
            dealing, rank = self.document.dealing, self.document.peers.rank
            start = 0 if window is None else max(0, self.start - window + 1)
            firsts, stops = (np.array(dealing.before(token)) for token in (start, self.stop))
            width = int((stops - firsts).max())
            shifts = np.arange(dealing.num_ranks) * width - firsts
            on_device = torch.from_numpy(shifts).to(self.document.owners.device)
            self.spans[window] = Span(start, self.stop, int(firsts[rank]), width, on_device)
        return self.spans[window]

    def order(self, span: Span) -> torch.Tensor:
        """Return where each token of a span is among what ranks give, int64 `[tokens]`.

        It is made anew in each layer, from 8 bytes a token of the document: kept for every slice, it would grow with
        the square of the document.

        Args:
            span: by `span`.
        """
        owners, places = (x[span.start : span.stop] for x in (self.document.owners, self.document.places))
        return span.shifts[owners] + places


def shared_documents(
    plan: StepPlan, rank: int, groups: Mapping[tuple[int, int], Peers], device: torch.device
) -> dict[int, SharedDocument]:
    """Return the documents of a plan that a rank shares, at one stage.

    Args:
        plan: of the step.
        rank: data-parallel.
        groups: that it shares them with, by first rank and size; by `PeerGroups.of`.
        device: of the model.

    Cost: O(tokens of these documents), and 8 bytes each on the device.
    """
    found = {}
    for document in np.flatnonzero(plan.num_ranks > 1).tolist():
        first, size = int(plan.first_ranks[document]), int(plan.num_ranks[document])
        if first <= rank < first + size:
            dealing = deal(_cuts_of(plan, rank, document), size)
            owners, places = (torch.from_numpy(x).to(device) for x in dealing.places())
            found[document] = SharedDocument(
                dealing=dealing, peers=groups[first, size], owners=owners, places=places
            )
    return found


def tokens_of(key: Key, shared: Mapping[int, SharedDocument]) -> Key:
    """Return which tokens' rows of a MicroPack this rank computes, as slices; one of no token if there are none.

    Args:
        key: the MicroPack.
        shared: by `shared_documents`.
    """
    if not any(document in shared for document, _, _ in key):
        return key
    found = []
    for document, start, stop in key:
        if document in shared:
            ranges = shared[document].dealing.ranges(shared[document].peers.rank, start, stop)
            found += [(document, *own) for own in ranges]
        else:
            found.append((document, start, stop))
    return tuple(found) or ((key[0][0], 0, 0),)


def rows_of(key: Key, shared: Mapping[int, SharedDocument]) -> Key:
    """Return where a MicroPack's slices are among the rows that this rank keeps of their documents.

    A slice of which it has no row is there too, as long as 0.

    Args:
        key: the MicroPack.
        shared: by `shared_documents`.
    """
    return tuple((d, *shared[d].kept(a, b)) if d in shared else (d, a, b) for d, a, b in key)


def num_rows(key: Key, shared: Mapping[int, SharedDocument]) -> int:
    """Return how many rows of a MicroPack this rank computes: those of what stages send each other; may be 0.

    Args:
        key: the MicroPack.
        shared: by `shared_documents`.
    """
    return sum(stop - start for _, start, stop in rows_of(key, shared))


def with_idle_row(hidden: torch.Tensor) -> torch.Tensor:
    """Return `[1, 1, hidden]` for no row, `[1, 0, hidden]`: layers can't be run on none.

    A rank that has no row of a MicroPack runs them all the same, since its peers gather from it in each. The row is
    0, as is its gradient, and so is what it adds to those of parameters.

    Args:
        hidden: `[1, 0, hidden]`.
    """
    return torch.cat([hidden, hidden.new_zeros(1, 1, hidden.shape[2])], 1)


def _cuts_of(plan: StepPlan, rank: int, document: int) -> list[int]:
    """Where a document's slices on a rank begin and end, in both passes; those of its group are cut alike."""
    cuts = [0, int(plan.lengths[document])]
    for packs in (plan.forward, plan.backward):
        first, last = packs.slice_offsets[packs.rank_offsets[rank : rank + 2]].tolist()
        at = first + np.flatnonzero(packs.document_ids[first:last] == document)
        cuts += [*packs.starts[at].tolist(), *packs.stops[at].tolist()]
    return cuts
