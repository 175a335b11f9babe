"""DocumentCache and RowStack: what a document's tasks on this stage store for its later tasks, by layer.

Keys and values of the whole document are in one buffer per layer, allocated once, so that slices neither copy nor
concatenate earlier ones. Their gradients are summed in further buffers while the document's slices run backward, last
to first. Layers' inputs are one tensor per forward slice. The backward pass releases all of these; the bytes
that this copies are linear in the document's length, for any number of slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from varlen.attention.rectangles import Pair
from varlen.runtime.clock import in_host_memory
from varlen.runtime.mesh.shared_documents import OwnRows, Ranges
from varlen.runtime.tree_slices import TreeSlice

FREE_SHARE: Final = 1 / 16
"""A buffer is copied into a smaller one once this share of it is free: all copies together are at most 15 times its
size, and at most a 16th is free but not released."""


@dataclass(slots=True)
class DocumentCache:
    """Keys and values of one document, and the gradients that its later slices have sent to them."""

    length: int
    pairs: dict[int, Pair] = field(default_factory=dict)  # keys and values by layer
    gradients: dict[int, Pair] = field(default_factory=dict)
    """By layer, in float32 or wider: of the tokens before the document's last slice, which runs backward first."""
    chunks: dict[int, DocumentCache] = field(default_factory=dict)
    """By first token: of layers that attend within chunks."""

    def chunk(self, first: int, width: int) -> DocumentCache:
        """Return the cache of a chunk of the document, for layers that attend within chunks."""
        return self.chunks.setdefault(first, DocumentCache(min(width, self.length - first)))

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """Keep a slice's keys and values, and return those of the document up to the slice's end.

        Args:
            key: `[1, key_heads, rows, dim]`.
        """
        if layer not in self.pairs:
            self.pairs[layer] = (
                _tokens(key, self.length, key.dtype),
                _tokens(value, self.length, value.dtype),
            )
        stop = start + key.shape[2]
        keys, values = self.pairs[layer]
        keys[:, :, start:stop] = key
        values[:, :, start:stop] = value
        return keys[:, :, :stop], values[:, :, :stop]

    def read(self, layer: int, stop: int) -> Pair:
        """Return the keys and values of the tokens before `stop`."""
        keys, values = self.pairs[layer]
        return keys[:, :, :stop], values[:, :, :stop]

    def earlier_gradients(self, layer: int, start: int) -> Pair | None:
        """Return the accumulated gradients of the tokens before a slice; None for a document's first slice.

        The first call, by the last slice, allocates them.
        """
        if start == 0:
            return None
        if layer not in self.gradients:
            pair = self.pairs[layer]
            wide = torch.promote_types(pair[0].dtype, torch.float32)
            keys, values = (_tokens(x, start, wide).zero_() for x in pair)
            self.gradients[layer] = (keys, values)
        keys, values = self.gradients[layer]
        return keys[:, :, :start], values[:, :, :start]

    def own_gradients(self, layer: int, start: int, stop: int) -> Pair | None:
        """Return the gradients that later slices have added for this slice's keys and values; None without any."""
        if layer not in self.gradients or self.gradients[layer][0].shape[2] < stop:
            return None
        keys, values = self.gradients[layer]
        return keys[:, :, start:stop], values[:, :, start:stop]

    def release(self, layer: int, start: int) -> None:
        """Release the memory of all tokens from `start` on, after the backward pass of a slice.

        Once `FREE_SHARE` of a buffer is free, the rest is copied into a smaller buffer, one layer at a time.
        """
        for held in (self.pairs, self.gradients):
            if start == 0:
                held.pop(layer, None)
            elif layer in held and held[layer][0].shape[2] - start >= FREE_SHARE * held[layer][0].shape[2]:
                keys, values = held.pop(layer)
                keys = contiguous_tokens(keys, start)  # releases the old keys before the values are copied
                held[layer] = keys, contiguous_tokens(values, start)


Ends = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedSlice:
    """The rows `start:stop` of a document, computed in one MicroPack."""

    cache: DocumentCache
    start: int
    stop: int
    own_rows: OwnRows | None = None  # this rank's rows, if ranks share the document

    @property
    def rows(self) -> int:
        """Tokens of the slice that this rank computes."""
        return self.stop - self.start if self.own_rows is None else self.own_rows.count

    @property
    def ranges(self) -> Ranges:
        """The ranges of these tokens."""
        return ((self.start, self.stop),) if self.own_rows is None else self.own_rows.ranges

    @property
    def ends(self) -> Ends:
        """Its rows, and the tokens of its document."""
        length = self.cache.length if self.own_rows is None else self.own_rows.document.tokens
        return [(self.rows, length)]


@dataclass(frozen=True, slots=True)
class WholeDocuments:
    """The rows of documents that are whole in one MicroPack: none of them needs a cache."""

    lengths: tuple[int, ...]
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", sum(self.lengths))

    @property
    def ranges(self) -> Ranges:
        """As `CachedSlice.ranges`, document by document."""
        return tuple((0, length) for length in self.lengths)

    @property
    def ends(self) -> Ends:
        """As `CachedSlice.ends`."""
        return [(length, length) for length in self.lengths]


Slices = Sequence[CachedSlice | WholeDocuments | TreeSlice]
"""The rows of a MicroPack, one after the other; whole documents, if there are some, come first, as one entry. All are
of trees, or none is."""


class RowStack:
    """A layer's inputs for a document's rows, one tensor per forward slice; taken from the end."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []
        self._none: torch.Tensor | None = None

    def add(self, rows: torch.Tensor) -> None:
        """Keep the next rows.

        Args:
            rows: `[rows, hidden]`; it is not copied, and must not be modified.
        """
        self._pieces.append(rows)
        self._none = rows.new_empty(0, rows.shape[1]) if self._none is None else self._none

    def take(self, count: int) -> list[torch.Tensor]:
        """Remove the last `count` rows and return them as a list of tensors.

        The memory of a slice's rows is released when its first row is removed.
        """
        taken: list[torch.Tensor] = []
        while count:
            piece = self._pieces.pop()
            if len(piece) > count:
                self._pieces.append(piece[:-count])
                piece = piece[-count:]
            taken.append(piece)
            count -= len(piece)
        assert self._none is not None
        return taken[::-1] or [self._none]


def contiguous_tokens(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Copy the first tokens of `[1, heads, tokens, dim]`."""
    return _tokens(tokens, length, tokens.dtype).copy_(tokens[:, :, :length])


def _tokens(like: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate `[1, heads, length, dim]` with contiguous tokens, the layout of a model's projections."""
    _, heads, _, dim = like.shape
    return torch.empty(1, length, heads, dim, dtype=dtype, device=like.device).transpose(1, 2)


# `HostCache`: a document's keys, values and their gradients in host memory, with two layers' worth on the device.
#
# While one layer runs, the next layer's are fetched, so a task declares its order of layers in advance. On CUDA,
# copies run on a separate stream between pinned memory and two alternating buffers; on the CPU, the same steps are
# plain copies, so that tests there cover the results and the memory use.


class Visit(NamedTuple):
    """A layer that a task will run."""

    layer: int
    has_own: bool
    """Whether the task's own keys and values are fetched too, as the layer's forward isn't computed again."""
    is_backward: bool  # whether gradients of keys and values are accumulated


class HostLink:
    """Copies between a device and host memory, in the order of the calls."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def copy(self, into: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> Any:
        """Copy tensors after the computations queued so far; returns the argument of `wait`."""
        if self._stream is None:
            for target, source in zip(into, rows, strict=True):
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in zip(into, rows, strict=True):
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """Make later computations wait for a copy."""
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)

    def here(self, like: Pair, tokens: int, dtype: torch.dtype | None = None) -> Pair:
        """Allocate a pair on the device, with contiguous tokens."""
        keys, values = (
            torch.empty(
                1,
                tokens,
                x.shape[1],
                x.shape[3],
                dtype=x.dtype if dtype is None else dtype,
                device=self.device,
            ).transpose(1, 2)
            for x in like
        )
        return keys, values

    def there(self, like: Pair, tokens: int) -> Pair:
        """Allocate a pair in host memory, with contiguous tokens; pinned on CUDA."""
        keys, values = (
            self._empty((1, tokens, x.shape[1], x.shape[3]), x.dtype).transpose(1, 2) for x in like
        )
        return keys, values

    def sent(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory, complete when a later copy of this link is."""
        there = self._empty(rows.shape, rows.dtype)
        self.copy([there], [rows])
        if self._stream is not None:
            rows.record_stream(self._stream)
        return there

    def fetched(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device."""
        here = torch.empty_like(rows, device=self.device)
        self.wait(self.copy([here], [rows]))
        return here

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with in_host_memory():
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._stream is not None)


@dataclass(slots=True)
class _Near:
    """A device buffer for one layer at a time."""

    layer: int = -1
    pair: Pair | None = None  # keys and values of tokens up to the task's last row
    gradients: Pair | None = None
    gathered: int = 0  # number of tokens whose gradients are on the device
    copied: Any = None  # the last copy from or to the device


@dataclass(slots=True)
class HostCache(DocumentCache):
    """A `DocumentCache` with `pairs` and `gradients` in host memory, kept whole until the document is done."""

    link: HostLink = field(kw_only=True)
    _near: list[_Near] = field(default_factory=list, init=False)
    """Buffers of the running layer and of the one being fetched."""
    _visits: deque[Visit] = field(default_factory=deque, init=False)
    _start: int = field(default=0, init=False)
    _stop: int = field(default=0, init=False)
    _is_new: bool = field(default=False, init=False)

    def begin(self, start: int, stop: int, visits: Iterable[Visit], *, is_new: bool) -> None:
        """Begin a task."""
        self._near, self._visits = [_Near(), _Near()], deque(visits)
        self._start, self._stop, self._is_new = start, stop, is_new

    def end(self) -> None:
        """End a task: release its device buffers after all copies."""
        for near in self._near:
            self.link.wait(near.copied)
        self._near = []

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """Keep a slice's keys and values, as `DocumentCache.write`; recomputed ones stay on the device."""
        near, pair = self._arrive(layer, (key, value))
        stop = start + key.shape[2]
        for into, rows in zip(pair, (key, value)):
            into[:, :, start:stop] = rows
        if self._is_new:
            if layer not in self.pairs:
                self.pairs[layer] = self.link.there((key, value), self.length)
            near.copied = self.link.copy(_rows(self.pairs[layer], start, stop), _rows(pair, start, stop))
        return _rows(pair, 0, stop)

    def read(self, layer: int, stop: int) -> Pair:
        """Return keys and values, as `DocumentCache.read`."""
        return _rows(self._arrive(layer, self.pairs[layer])[1], 0, stop)

    def earlier_gradients(self, layer: int, start: int) -> Pair | None:
        """Return the accumulated gradients, as `DocumentCache.earlier_gradients`."""
        if start == 0:
            return None
        near, _ = self._arrive(layer, self.pairs[layer])
        if not near.gathered:
            for total in self._gradients(near, start):
                total[:, :, :start].zero_()
            near.gathered = start
        assert near.gradients is not None
        return _rows(near.gradients, 0, start)

    def own_gradients(self, layer: int, start: int, stop: int) -> Pair | None:
        """Return the gradients added by later slices, as `DocumentCache.own_gradients`."""
        near, _ = self._arrive(layer, self.pairs[layer])
        if near.gradients is None or near.gathered < stop:
            return None
        return _rows(near.gradients, start, stop)

    def release(self, layer: int, start: int) -> None:
        """Send the gradients of earlier tokens to host memory after a layer's backward.

        The slice's own memory there is released together with the whole document's.
        """
        if start == 0:
            self.pairs.pop(layer, None)
            self.gradients.pop(layer, None)
        elif start == self._start:  # else the task holds an earlier slice of the document
            near, _ = self._arrive(layer, self.pairs[layer])
            assert near.gradients is not None
            if layer not in self.gradients:
                self.gradients[layer] = self.link.there(near.gradients, start)
            near.copied = self.link.copy(
                _rows(self.gradients[layer], 0, start), _rows(near.gradients, 0, start)
            )

    def _arrive(self, layer: int, like: Pair) -> tuple[_Near, Pair]:
        """Return a layer's part on the device, and begin to fetch that of the next."""
        near, after = self._near
        if near.layer != layer:
            visit = self._visits.popleft()
            assert visit.layer == layer, f"layer {layer} runs where {visit.layer} was declared"
            near, after = self._near = [after, near]
            if near.layer != layer:
                self._fetch(near, visit, like)
            self.link.wait(near.copied)
            if self._visits and self._visits[0].layer in self.pairs:
                self._fetch(after, self._visits[0], self.pairs[self._visits[0].layer])
        assert near.pair is not None
        return near, near.pair

    def _fetch(self, near: _Near, visit: Visit, like: Pair) -> None:
        """Begin to fetch a layer's part into the memory of a layer that has run."""
        near.layer, near.gathered = visit.layer, 0
        if near.pair is None or any(_is_other(x, y) for x, y in zip(near.pair, like)):
            self.link.wait(near.copied)
            near.pair, near.gradients = self.link.here(like, self._stop), None
        known = self._stop if visit.has_own else self._start
        into, rows = [], []
        if known:
            into, rows = [*_rows(near.pair, 0, known)], [*_rows(self.pairs[visit.layer], 0, known)]
        if visit.is_backward and visit.layer in self.gradients:
            totals = self._gradients(near, self._stop)
            into += _rows(totals, 0, self._stop)
            rows += _rows(self.gradients[visit.layer], 0, self._stop)
            near.gathered = self._stop
        if into:
            near.copied = self.link.copy(into, rows)

    def _gradients(self, near: _Near, tokens: int) -> Pair:
        if near.gradients is None or near.gradients[0].shape[2] < tokens:
            assert near.pair is not None
            self.link.wait(near.copied)
            near.gradients = self.link.here(
                near.pair, tokens, torch.promote_types(near.pair[0].dtype, torch.float32)
            )
        return near.gradients


class HostRows(RowStack):
    """As `RowStack`, in host memory."""

    def __init__(self, link: HostLink) -> None:
        super().__init__()
        self._link = link

    def add(self, rows: torch.Tensor) -> None:
        """Send the next rows to host memory."""
        super().add(self._link.sent(rows))

    def take(self, count: int) -> list[torch.Tensor]:
        """Remove the last `count` rows, and return copies on the device."""
        return [self._link.fetched(piece) for piece in super().take(count)]


def _rows(pair: Pair, start: int, stop: int) -> Pair:
    return pair[0][:, :, start:stop], pair[1][:, :, start:stop]


def _is_other(held: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether memory of one layer can't serve another, with other heads or another dtype."""
    return (held.shape[1], held.shape[3], held.dtype) != (wanted.shape[1], wanted.shape[3], wanted.dtype)
