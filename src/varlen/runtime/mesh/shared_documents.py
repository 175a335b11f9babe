"""Documents that data-parallel ranks share (DP-Merge): which rows this rank has, and what its group gathers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from varlen.attention.kernels import on_device
from varlen.cost.memory import AHEAD_TOKENS
from varlen.runtime.mesh.process_groups import Group
from varlen.step_plan import BACKWARD, FORWARD, MicroPacks, SliceKey, StepPlan
from varlen.types import Int32Array, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedDocument:
    """A document whose rows this rank has some of."""

    zigzag: ZigzagRows
    peers: Peers
    owners: torch.Tensor  # int32 `[tokens]`, on the model's device: the rank with each token's row
    indices: torch.Tensor  # int32 `[tokens]`: the row's index among that rank's
    ahead: frozenset[tuple[int, int]] = frozenset()
    """Pass and first token of the slices that are gathered ahead; see `gathered_ahead`."""
    kept: dict[int, Kept] = field(default_factory=dict)
    """By layer that has run a slice of the document."""
    gathers: dict[int, Gathers] = field(default_factory=dict)
    """By first token of the running task's slices that are gathered ahead."""

    @property
    def tokens(self) -> int:
        """Tokens of the document."""
        return len(self.owners)

    @property
    def rows(self) -> int:
        """Rows of this rank."""
        return self.zigzag.before(self.tokens)[self.peers.rank]

    def row_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return which of this rank's rows of the document are those of a slice: the first, and one past the last."""
        return self.zigzag.before(start)[self.peers.rank], self.zigzag.before(stop)[self.peers.rank]

    def own_rows(self, start: int, stop: int) -> OwnRows:
        """Return this rank's rows of a slice."""
        ranges = self.zigzag.ranges(self.peers.rank, start, stop)
        first, last = self.row_range(start, stop)
        return OwnRows(document=self, start=start, stop=stop, ranges=ranges, first=first, last=last)

    def begin(self, kind: int, start: int, visits: Sequence[Attended]) -> None:
        """Begin a task with a slice; without visits, which come in this order, nothing is gathered ahead."""
        self.gathers.pop(start, None)
        if visits and (kind, start) in self.ahead:
            self.gathers[start] = Gathers(deque(visits))


class Attended(NamedTuple):
    """A visit of a task to a layer: a call of its attention."""

    layer: int
    is_backward: bool


class Kept(NamedTuple):
    """What a layer keeps of a document's tokens."""

    none: tuple[torch.Tensor, torch.Tensor]  # keys and values of no token
    window: int | None  # how many tokens a token sees


@dataclass(slots=True, eq=False)
class Gathers:
    """The gathers of a slice in one task: that of the next visit begins before this one's attention."""

    visits: deque[Attended]  # those that come
    _coming: Callable[[], torch.Tensor] | None = None

    def arrive(self, visit: Attended) -> Callable[[], torch.Tensor] | None:
        """Return what waits for the gather that was begun for a visit; None if none was."""
        expected = self.visits.popleft()
        assert expected == visit, f"{visit} runs where {expected} was declared"
        coming, self._coming = self._coming, None
        return coming

    def begin(self, coming: Callable[[], torch.Tensor]) -> None:
        """Keep what waits for the gather of the next visit."""
        self._coming = coming


class Span(NamedTuple):
    """Neighbouring tokens that are gathered for a slice."""

    start: int
    stop: int
    first: int  # first of this rank's rows of the document among them
    last: int  # one past the last
    width: int  # most tokens of one rank
    shifts: torch.Tensor
    """int64 `[ranks]`: added to a row's index among a rank's, it gives that among all gathered rows."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnRows:
    """The rows of a slice that this rank computes; there may be none, and it takes part all the same."""

    document: SharedDocument
    start: int  # of the slice
    stop: int
    ranges: Ranges  # tokens of the rows
    first: int  # the slice's first among this rank's rows of the document
    last: int  # one past the slice's last
    _spans: dict[tuple[int, int], Span] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Rows of the slice on this rank."""
        return self.last - self.first

    @property
    def gathers(self) -> Gathers | None:
        """The task's gathers of the slice, if they begin ahead."""
        return self.document.gathers.get(self.start)

    def spans(self, window: int | None, *, is_backward: bool) -> list[Span]:
        """Return the tokens that a visit of a layer gathers, one after the other.

        If gathers begin ahead, those before the slice are apart in the forward pass: they are known earlier.
        """
        first = 0 if window is None else max(0, self.start - window + 1)
        is_apart = self.gathers is not None and not is_backward and first < self.start
        ends = [first, self.start, self.stop] if is_apart else [first, self.stop]
        return [self._span(*pair) for pair in itertools.pairwise(ends)]

    def known(self, visit: Attended) -> Span | None:
        """Return the tokens that can be gathered ahead of a visit; None if there are none, or they aren't known."""
        if visit.layer not in self.document.kept:
            return None  # the document's first slice runs
        span = self.spans(self.document.kept[visit.layer].window, is_backward=visit.is_backward)[0]
        return span if visit.is_backward or span.stop <= self.start else None

    def _span(self, start: int, stop: int) -> Span:
        """Work out a span, once a slice."""
        if (start, stop) not in self._spans:
            rows, rank = self.document.zigzag, self.document.peers.rank
            firsts, stops = (np.array(rows.before(token)) for token in (start, stop))
            width = int((stops - firsts).max())
            shifts = np.arange(rows.num_ranks) * width - firsts
            there = on_device(torch.from_numpy(shifts), self.document.owners.device)
            self._spans[start, stop] = Span(start, stop, int(firsts[rank]), int(stops[rank]), width, there)
        return self._spans[start, stop]

    def order(self, span: Span) -> torch.Tensor:
        """Return where each token of a span is among what ranks give, int64 `[tokens]`.

        It is made anew in each layer, from 8 bytes a token of the document: kept for every slice, it would grow with
        the square of the document.
        """
        owners, indices = (x[span.start : span.stop] for x in (self.document.owners, self.document.indices))
        return span.shifts[owners] + indices


def shared_documents(
    plan: StepPlan, dp_rank: int, peers: Mapping[tuple[int, int], Peers], device: torch.device
) -> dict[int, SharedDocument]:
    """Return the documents of a plan that a data-parallel rank shares, at one stage.

    Cost: O(tokens of these documents), and 8 bytes each on the device.
    """
    found, by_document = {}, dict[int, list[tuple[int, int]]]()
    for kind, document, start in gathered_ahead(plan):
        by_document.setdefault(document, []).append((kind, start))
    for document in np.flatnonzero(plan.num_ranks > 1).tolist():
        first, size = int(plan.first_ranks[document]), int(plan.num_ranks[document])
        if first <= dp_rank < first + size:
            rows = zigzag(_cuts_of(plan, dp_rank, document), size)
            owners, indices = (on_device(torch.from_numpy(x), device) for x in rows.assignment())
            found[document] = SharedDocument(
                zigzag=rows,
                peers=peers[first, size],
                owners=owners,
                indices=indices,
                ahead=frozenset(by_document.get(document, ())),
            )
    return found


def gathered_ahead(plan: StepPlan) -> set[tuple[int, int, int]]:
    """Return the slices whose keys and values ranks gather while the layer before runs: pass, document, first token.

    All ranks find the same. A MicroPack has at most one, so that the keys and values of one slice in one layer are
    what gathering ahead takes: the longest shared one, which ends within `AHEAD_TOKENS`, if the others end before
    half of it on every rank. In the forward pass, a slice that follows another one of its document is none: the
    tokens before it aren't known before its MicroPack has run the layer.
    """
    found = set()
    for kind, packs in ((FORWARD, plan.forward), (BACKWARD, plan.backward)):
        shared, is_ahead = _ahead_on_ranks(packs, plan.num_ranks[packs.document_ids] > 1)
        if kind == FORWARD:
            is_ahead &= ~_follows(packs, shared)
        keys = list(zip(packs.document_ids[shared].tolist(), packs.starts[shared].tolist()))
        elsewhere = {key for key, is_here in zip(keys, is_ahead.tolist()) if not is_here}
        found |= {(kind, *key) for key in set(keys) - elsewhere}
    return found


def _ahead_on_ranks(
    packs: MicroPacks, is_shared: npt.NDArray[np.bool_]
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return which slices are shared, and whether the rank's MicroPack lets each be gathered ahead."""
    shared = np.flatnonzero(is_shared)
    pack, stops = packs.micropack_of_slice[shared], packs.stops[shared].astype(np.int64)
    longest = np.zeros(packs.num_micropacks, np.int64)
    np.maximum.at(longest, pack, stops)
    near = np.bincount(pack, 2 * stops > longest[pack], minlength=packs.num_micropacks)
    return shared, (stops == longest[pack]) & (near[pack] == 1) & (stops <= AHEAD_TOKENS)


def _follows(packs: MicroPacks, slices: IntArray) -> npt.NDArray[np.bool_]:
    """Return which of some slices follow another one of their document in the same MicroPack."""
    keys = np.stack([packs.micropack_of_slice[slices], packs.document_ids[slices], packs.starts[slices]])
    order = np.lexsort(keys[::-1])
    found = np.zeros(len(slices), np.bool_)
    found[order[1:]] = (keys[:2, order[1:]] == keys[:2, order[:-1]]).all(0)
    return found


def own_tokens(key: SliceKey, shared: Mapping[int, SharedDocument]) -> SliceKey:
    """Return the tokens of a MicroPack whose rows this rank computes, as slices; one empty slice if none."""
    if not any(document in shared for document, _, _ in key):
        return key
    found = []
    for document, start, stop in key:
        if document in shared:
            ranges = shared[document].zigzag.ranges(shared[document].peers.rank, start, stop)
            found += [(document, *own) for own in ranges]
        else:
            found.append((document, start, stop))
    return tuple(found) or ((key[0][0], 0, 0),)


def rows_of(key: SliceKey, shared: Mapping[int, SharedDocument]) -> SliceKey:
    """Return a MicroPack's slices, counted in this rank's rows of each document; slices without rows stay."""
    return tuple((d, *shared[d].row_range(a, b)) if d in shared else (d, a, b) for d, a, b in key)


def num_rows(key: SliceKey, shared: Mapping[int, SharedDocument]) -> int:
    """Return how many rows of a MicroPack this rank computes: those of what stages send each other; may be 0."""
    return sum(stop - start for _, start, stop in rows_of(key, shared))


def with_idle_row(hidden: torch.Tensor) -> torch.Tensor:
    """Append a row of zeros to no rows, since layers need at least one.

    A rank without rows of a MicroPack still runs the layers, because its peers gather from it in each. The row's
    gradient is 0, and it adds 0 to the gradients of parameters.

    Args:
        hidden: `[1, 0, hidden]`.
    """
    return torch.cat([hidden, hidden.new_zeros(1, 1, hidden.shape[2])], 1)


def _cuts_of(plan: StepPlan, dp_rank: int, document: int) -> list[int]:
    """Return where a document's slices on a data-parallel rank begin and end, in both passes.

    All ranks that share the document cut it alike.
    """
    cuts = [0, int(plan.lengths[document])]
    for packs in (plan.forward, plan.backward):
        first, last = packs.slice_offsets[packs.rank_offsets[dp_rank : dp_rank + 2]].tolist()
        at = first + np.flatnonzero(packs.document_ids[first:last] == document)
        cuts += [*packs.starts[at].tolist(), *packs.stops[at].tolist()]
    return cuts


# The rows of a shared document by rank of its group, in zigzag.
#
# Later rows attend to more keys and cost more. So each stretch between two cuts is divided into 2 * num_ranks chunks,
# and rank r takes chunk r and chunk 2 * num_ranks - 1 - r, which gives all ranks equal work (Llama 3's context
# parallelism; Grattafiori et al. 2024, arXiv 2407.21783, §3.3.2). Rows stay on their rank for the whole step, so the
# cuts of both passes are used together: a slice of either pass is a sequence of whole stretches.

Ranges = tuple[tuple[int, int], ...]  # tokens `[start, stop)` of a document, ascending, not adjacent


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ZigzagRows:
    """The rows of one document, dealt to a group of ranks.

    Each rank's rows, in token order, are numbered from 0, so those before any token come first.
    """

    starts: IntArray
    """int64 `[num_chunks]`: the first token of each chunk; chunks follow each other, and some may be empty."""
    stops: IntArray  # int64 `[num_chunks]`
    owners: IntArray  # int64 `[num_chunks]`: the rank of each chunk within the group
    num_ranks: int

    def before(self, token: int) -> list[int]:
        """Return how many rows of each rank stand before a token.

        Cost: O(chunks), which are `2 * num_ranks` a stretch.
        """
        rows = np.clip(token - self.starts, 0, self.stops - self.starts)
        return np.bincount(self.owners, weights=rows, minlength=self.num_ranks).astype(np.int64).tolist()  # type: ignore[no-any-return]

    def ranges(self, rank: int, start: int, stop: int) -> Ranges:
        """Return the tokens of a slice whose rows a rank computes, neighbours joined; any slice of either pass."""
        firsts, lasts = np.maximum(self.starts, start), np.minimum(self.stops, stop)
        mine = (self.owners == rank) & (firsts < lasts)
        found: list[tuple[int, int]] = []
        for first, last in zip(firsts[mine].tolist(), lasts[mine].tolist()):
            if found and found[-1][1] == first:
                first = found.pop()[0]
            found.append((first, last))
        return tuple(found)

    def assignment(self) -> tuple[Int32Array, Int32Array]:
        """Return where the row of each token is: its rank, and its index among that rank's; both int32 `[tokens]`."""
        sizes = self.stops - self.starts
        owners, indices = np.repeat(self.owners, sizes), np.zeros(int(sizes.sum()), np.int32)
        for rank in range(self.num_ranks):
            mine = owners == rank
            indices[mine] = np.arange(np.count_nonzero(mine), dtype=np.int32)
        return owners.astype(np.int32), indices


def zigzag(cuts: Iterable[int], num_ranks: int) -> ZigzagRows:
    """Deal the rows of a document, whose slices begin and end at the cuts, to ranks in zigzag.

    >>> rows = zigzag([0, 8, 12], 2)
    >>> rows.ranges(0, 0, 12), rows.ranges(1, 0, 12)
    (((0, 2), (6, 9), (11, 12)), ((2, 6), (9, 11)))
    """
    ends = np.array(sorted(set(cuts)), np.int64)
    parts = np.arange(2 * num_ranks + 1)
    bounds = ends[:-1, np.newaxis] + parts * np.diff(ends)[:, np.newaxis] // (2 * num_ranks)
    owners = np.minimum(parts[:-1], parts[:-1][::-1])
    return ZigzagRows(
        starts=bounds[:, :-1].ravel(),
        stops=bounds[:, 1:].ravel(),
        owners=np.tile(owners, len(ends) - 1),
        num_ranks=num_ranks,
    )


# `Peers`: the ranks that share a document, and how they exchange its keys and values.


class Peers(Protocol):
    """A group of neighbouring data-parallel ranks at one stage. All of them call the same, in the same order."""

    @property
    def rank(self) -> int:
        """This process's rank within the group, from 0; not its data-parallel rank."""

    @property
    def size(self) -> int:
        """Ranks of the group."""

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what every rank gives, `[size, ...]`.

        Args:
            rows: `[...]`, of one shape and dtype on all ranks.
        """

    def begin_all_gather(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin `all_gather`, and return what waits for its result."""

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of what they have for this one, `[...]`.

        Args:
            parts: `[size, ...]`: for each rank, of one shape and dtype on all ranks.
        """


class ProcessPeers:
    """Peers in processes of their own; on CUDA they have a communicator of their own.

    On the CPU, every rank sends its part directly to every other: as many bytes as gloo's collectives move, and three
    times as fast as gloo's reduce-scatter.
    """

    def __init__(
        self, group: Group, waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._group, self._waiting = group, waiting
        self._rank, self._size = group.index, group.size

    @property
    def rank(self) -> int:
        """As `Peers.rank`."""
        return self._rank

    @property
    def size(self) -> int:
        """As `Peers.size`."""
        return self._size

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """As `Peers.all_gather`."""
        return self.begin_all_gather(rows)()

    def begin_all_gather(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """As `Peers.begin_all_gather`; other collectives of the group may begin before it is waited for."""
        rows = rows.contiguous()
        out = rows.new_empty(self._size, *rows.shape)
        if rows.is_cuda:
            works = [self._group.backend._allgather_base(out.flatten(0, 1), rows)]
        else:
            others = [(self.rank + turn) % self.size for turn in range(1, self.size)]
            works = [self._group.receive(out[other], other) for other in others]
            works += [self._group.send(rows, other) for other in others]
            out[self.rank].copy_(rows)
        return partial(self._all_there, works, rows, out)

    def _all_there(self, works: Sequence[Any], rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return what was gathered once it is there; until then the rows that are sent are kept alive."""
        with self._waiting():
            for work in works:
                work.wait()
        return out

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """As `Peers.reduce_scatter`; from the CPU, parts are overwritten."""
        return self.begin_reduce_scatter(parts)()

    def begin_reduce_scatter(self, parts: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin `reduce_scatter`, and return what waits for the sum; ranks wait in the order in which they began."""
        parts = parts.contiguous()
        out = parts.new_empty(parts.shape[1:])
        if parts.is_cuda:
            works = [self._group.backend._reduce_scatter_base(out, parts.flatten(0, 1))]
        else:
            works = self._turn(1, parts, out) if self.size > 1 else []
        return partial(self._end, works, parts, out)

    def _end(self, works: Sequence[Any], parts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return a sum once it is there; until then its parts are kept alive."""
        with self._waiting():
            for work in works:
                work.wait()
            if not parts.is_cuda:
                self._add_in_turn(parts, out)
        return out

    def _add_in_turn(self, parts: torch.Tensor, out: torch.Tensor) -> None:
        """Add this rank's part and those that come in later turns to that of the first turn."""
        if self.size == 1:
            out.copy_(parts[0])
            return
        out.add_(parts[self.rank])
        for turn in range(2, self.size):
            into = parts[
                (self.rank + turn - 1) % self.size
            ]  # has been sent, so that no more memory is needed
            for work in self._turn(turn, parts, into):
                work.wait()
            out.add_(into)

    def _turn(self, turn: int, parts: torch.Tensor, into: torch.Tensor) -> list[Any]:
        """Begin a turn: a pair of ranks meets in one alone, so that sums under way don't mix."""
        after, before = (self.rank + turn) % self.size, (self.rank - turn) % self.size
        return [self._group.receive(into, before), self._group.send(parts[after], after)]


def peers_of(
    plan: StepPlan,
    dp_rank: int,
    group_of: Callable[[int, int], Group],
    waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[tuple[int, int], Peers]:
    """Return the groups in which a rank shares documents of a plan, by first data-parallel rank and size.

    All processes of a stage call it before they run the plan. A group is created by its members alone. Groups are
    aligned, so of two groups with a common rank one contains the other; all ranks create the larger one first, so
    that they don't deadlock.
    """
    return {key: ProcessPeers(group_of(*key), waiting) for key in groups_of(plan, dp_rank)}


def groups_of(plan: StepPlan, dp_rank: int) -> list[tuple[int, int]]:
    """Return the groups in which a rank shares documents: first rank and size of each, the largest first."""
    first, size = plan.first_ranks, plan.num_ranks
    mine = (size > 1) & (first <= dp_rank) & (dp_rank < first + size)
    pairs = set(zip(first[mine].tolist(), size[mine].tolist()))
    return sorted(pairs, key=lambda pair: -pair[1])
