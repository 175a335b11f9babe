"""`ChunkStep`: one chunk of layers during a step, and what it keeps of documents between the passes.

A layer either keeps its graph from forward to backward, so both passes are cut alike; or it is recomputed, from its
own input or from that of the chunk, so backward slices may be cut elsewhere. Neighbouring layers that keep their
graphs form one graph.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from varlen.attention.kernels import on_device
from varlen.cost.memory import LAYERS_ON_DEVICE, Saved
from varlen.errors import PlanError
from varlen.runtime.attention import chunk_width
from varlen.runtime.casting import lowered, uncast, ungraphed
from varlen.runtime.decoder import EMBEDDING, DecoderParts, Positions, Targets
from varlen.runtime.forest_inputs import StepForest
from varlen.runtime.kv_cache import (
    CachedSlice,
    DocumentCache,
    HostCache,
    HostLink,
    HostRows,
    RowStack,
    Slices,
    Visit,
    WholeDocuments,
)
from varlen.runtime.main_grads import add_product
from varlen.runtime.mesh.shared_documents import Attended, SharedDocument, own_tokens, rows_of, with_idle_row
from varlen.runtime.objective import Objective
from varlen.runtime.tree_slices import TreeCache
from varlen.step_plan import BACKWARD, FORWARD, WEIGHT, Offload, SliceKey, StepPlan
from varlen.types import IntArray

Leaf = tuple[torch.Tensor, torch.Tensor]  # input and output of a graph
Event = tuple[Literal["gather", "release", "reduce"], int]  # a call of `Units`


class Units:
    """What is done with a unit's parameters around its work; here nothing. See `DecoderParts.unit` for its number."""

    def task(
        self,
        events: Sequence[Event],  # noqa: ARG002
        *,
        is_last: bool,  # noqa: ARG002
        is_final: bool,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Return the context of a task that makes these calls in this order; without rows it makes none.

        Args:
            is_last: whether no later task of the same kind runs these layers.
            is_final: whether it is the stage's last task.
        """
        return nullcontext()

    def gather(self, unit: int) -> None:
        """Called before a unit's weights are read."""

    def release(self, unit: int) -> None:
        """Called after a unit's weights were read."""

    def reduce(self, unit: int) -> None:
        """Called when a task has added all that it adds to a unit's gradients."""


AS_THEY_ARE = Units()


def _reading(units: Iterable[int]) -> list[Event]:
    """Return the calls around work that reads the weights of units, one after the other."""
    return [event for unit in units for event in (("gather", unit), ("release", unit))]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepData:
    """The tokens of a step, and what is learned from them."""

    input_ids: torch.Tensor  # int64 `[num_tokens]`: documents end to end
    labels: torch.Tensor  # int64 `[num_tokens]`: the next token of each; -100 for none
    weights: torch.Tensor
    """float32 or wider `[num_tokens]`: of each token's loss in the step's; 0 where nothing is learned."""
    offsets: npt.NDArray[np.int64]  # int64 `[num_documents + 1]`: where documents begin
    scale: float = 1.0
    """Power of two by which gradients are multiplied until all are there: see `loss_scale`."""
    forest: StepForest | None = None
    """Where documents are trees: what tokens see, and their targets, of which `labels` and `weights` then are."""
    objective: Objective | None = None
    """A function of log-probabilities, in place of weights."""

    def targets(self, key: SliceKey) -> tuple[Targets, IntArray]:
        """Return what a MicroPack's rows predict, and which targets of the step these are."""
        parts = [(int(self.offsets[d]) + start, int(self.offsets[d]) + stop) for d, start, stop in key]
        if self.forest is None:
            return Targets(self.rows(key, self.labels)), np.concatenate([np.arange(*part) for part in parts])
        return self.forest.targets(parts, self.labels)

    def weights_of(self, key: SliceKey, numbers: IntArray) -> torch.Tensor:
        """Return the weights of a MicroPack's targets, of which `targets` gave the numbers."""
        if self.forest is None:
            return self.rows(key, self.weights)
        return self.weights[on_device(torch.from_numpy(numbers), self.weights.device)]

    def rows(self, key: SliceKey, of: torch.Tensor) -> torch.Tensor:
        """Return the entries of a flat `[num_tokens]` that belong to a MicroPack's rows."""
        parts = [of[int(self.offsets[d]) + start : int(self.offsets[d]) + stop] for d, start, stop in key]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


_GAIN = 16  # times that a MicroPack's gradients are those of the mean over its rows; float16 ends at 65,504


def loss_scale(plan: StepPlan, num_targets: int) -> float:
    """Return a power of two that keeps gradients in float16 from underflowing.

    The longer a step is, the smaller are the gradients of the mean over its targets; scaled, those of a MicroPack
    depend on its own rows alone (Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740, §3.2).
    """
    lengths = plan.forward.stops - plan.forward.starts
    rows = np.bincount(plan.forward.micropack_of_slice, lengths).max(initial=1.0)
    return 2.0 ** max(0, math.floor(math.log2(num_targets * min(1.0, _GAIN / rows))))


def whole_documents(plan: StepPlan) -> dict[int, int]:
    """Return the documents that are whole in one MicroPack of each pass and aren't shared by ranks.

    Each has a number, and documents that are in the same MicroPacks have the same.
    """
    passes = plan.forward, plan.backward
    counts = [np.bincount(packs.document_ids, minlength=len(plan.lengths)) for packs in passes]
    whole = np.flatnonzero((counts[0] == 1) & (counts[1] == 1) & (plan.num_ranks == 1))
    places = np.zeros((2, len(plan.lengths)), np.int64)
    for of_pass, packs in zip(places, passes):
        of_pass[packs.document_ids] = packs.micropack_of_slice
    numbers = places[0] * plan.backward.num_micropacks + places[1]
    return dict(zip(whole.tolist(), numbers[whole].tolist()))


@dataclass(slots=True)
class _Document:
    """What is stored of a document between its tasks, or of whole documents that are in the same MicroPacks."""

    cache: DocumentCache | None  # None for whole documents
    inputs: dict[int, RowStack] = field(default_factory=dict)
    """By layer whose input is stored: `[tokens, hidden]` into it."""
    forward_to: int = 0  # tokens that have run forward
    backward_from: int = -1  # tokens that haven't run backward; -1 before the first backward slice

    def takes_turn(self, start: int, stop: int, length: int, kind: int) -> bool:
        """Note that a slice runs, and return whether it goes on from the one before."""
        if kind == FORWARD:
            expected, self.forward_to = self.forward_to == start, stop
        else:
            left = length if self.backward_from < 0 else self.backward_from
            expected, self.backward_from = self.forward_to == length and left == stop, start
        return expected


class ChunkStep:
    """One chunk of layers during one step; MicroPacks run forward in one order and backward in another."""

    def __init__(
        self,
        parts: DecoderParts,
        layers: range,
        data: StepData,
        *,
        layers_again: int,
        whole: Mapping[int, int] | None = None,
        splits_backward: bool = False,
        saved: Saved = "layers",
        is_selective: bool = False,
        offload: Offload = "none",
        keeps_losses: bool = False,
        shared: Mapping[int, SharedDocument] | None = None,
        is_forward_only: bool = False,
        units: Units = AS_THEY_ARE,
    ) -> None:
        self._shared, self._is_forward_only = shared or {}, is_forward_only
        self._parts, self._data = parts, data
        self.units = units
        """What is done with the parameters of its units."""
        self.layers = layers
        """Of the chunk, in order."""
        self.has_embedding = layers.start == 0
        """Whether token ids come in, and not what other layers made of them."""
        self.has_head = layers.stop == len(parts.layers)
        """Whether losses come out."""
        again = layers.stop if is_forward_only else layers.start + layers_again
        self._runs = [range(layer, layer + 1) for layer in range(layers.start, again)]
        self._runs += [range(again, layers.stop)] if again < layers.stop else []
        self._again = again
        saved_to = again if saved == "layers" else min(layers.start + 1, again)
        self._saved_layers = range(layers.start, layers.start if is_forward_only else saved_to)
        self._made: list[torch.Tensor] = []
        """What goes into the layers that are computed again, where it is made again too, last to be used first."""
        self._is_selective = is_selective
        is_far = offload == "kv" and len(layers) > LAYERS_ON_DEVICE
        if is_far and any(
            chunk_width(module) for layer in layers for module in parts.layers[layer].modules()
        ):
            raise PlanError(
                'offload="kv" sends keys and values of whole documents, and this model has layers that attend within '
                'chunks (attention_chunk_size); choose offload="none"'
            )
        self._link = HostLink(data.input_ids.device) if is_far else None
        self._whole = whole or {}
        self._rows_are_far = is_far and saved == "stage"
        self._documents: dict[int, _Document] = {}
        self._caches: dict[int, TreeCache] = {}
        """Of trees that aren't whole in one MicroPack."""
        self._graphs: dict[SliceKey, Leaf] = {}
        self._later = DeferredWeightGrads() if splits_backward else None
        self._waiting: dict[SliceKey, list[tuple[int, list[DeferredGrad]]]] = {}
        """By MicroPack: layers, last to first, and what each has deferred."""
        self.losses: list[torch.Tensor] = []
        """Parts of the step's loss, of the chunk with the head."""
        self.token_losses = torch.zeros_like(data.weights) if keeps_losses and self.has_head else None
        """`[num_tokens]`: cross-entropy of each token's label, not weighted."""

    def forward(self, key: SliceKey, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run a MicroPack forward; return `[1, rows, hidden]`.

        Args:
            hidden: `[1, rows, hidden]` out of the chunk before; None for the first.
        """
        slices = self._slices(key, FORWARD)
        if hidden is None:
            self.units.gather(EMBEDDING)
            hidden = self._parts.embed(self._data.rows(own_tokens(key, self._shared), self._data.input_ids))
            self.units.release(EMBEDDING)
        positions = self._parts.positions(slices, hidden)
        with self._near(key, FORWARD):
            for layers in self._runs:
                if layers.start < self._again:
                    if layers.start in self._saved_layers:
                        self._keep(key, layers.start, hidden)
                    with ungraphed(hidden):
                        # The last layer's output may be made again; its keys and values are needed now.
                        hidden = self._gathered(layers.start, hidden, positions, slices)
                else:
                    first = hidden = hidden.detach().requires_grad_()
                    with selectively(self._parts.layers[layers.start : layers.stop], self._is_selective):
                        for layer in layers:
                            if layer > layers.start:
                                hidden.register_hook(partial(self._between, key, layer))  # type: ignore[no-untyped-call]
                            hidden = self._gathered(layer, hidden, positions, slices)
                    self._graphs[key] = (first, hidden)
        if self._is_forward_only:
            self._end_forward(key, hidden)
        return hidden.detach()

    def _end_forward(self, key: SliceKey, hidden: torch.Tensor) -> None:
        """Compute losses, and release the documents that have run; no backward pass comes."""
        if self.has_head:
            own = own_tokens(key, self._shared)
            targets, numbers = self._data.targets(own)
            self.units.gather(self._parts.head_unit)
            losses = self._parts.head_losses(hidden, targets)
            self.units.release(self._parts.head_unit)
            self.losses.append((losses * self._data.weights_of(own, numbers)).sum())
            self._keep_losses(own, losses, numbers)
        for document, _, stop in self._held(key):
            if document < 0 or stop == self._length(document):
                del self._documents[document]
                self._caches.pop(document, None)

    def backward(self, key: SliceKey, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run a MicroPack backward; return the gradient of what came in, None where ids did.

        Args:
            gradient: of what it gave out, `[1, rows, hidden]`; None for the chunk with the head.
        """
        slices = self._slices(key, BACKWARD)
        positions: Positions | None = None
        with self._near(key, BACKWARD):
            for layers in reversed(self._runs):
                if layers.start >= self._again:
                    first, out = self._graphs.pop(key)
                    gradient = self._head(key, out) if gradient is None else gradient
                    self.units.gather(layers.stop - 1)
                else:
                    first, positions = self._into(key, layers.start, positions, slices)
                    self.units.gather(layers.start)
                    out = self._run(layers.start, first.requires_grad_(), positions, slices)
                    gradient = self._head(key, out) if gradient is None else gradient
                with uncast(out):
                    torch.autograd.backward(out, gradient)
                self._end_backward(key, layers.start)
                assert first.grad is not None
                gradient = first.grad
        assert gradient is not None
        for document, start, _ in self._held(key):
            if start == 0:
                del self._documents[document]
                self._caches.pop(document, None)
        if not self.has_embedding:
            return gradient
        self._parts.embed_backward(
            self._data.rows(own_tokens(key, self._shared), self._data.input_ids), gradient
        )
        self.units.reduce(EMBEDDING)
        return None

    def weight(self, key: SliceKey) -> None:
        """Add up the weight gradients that the MicroPack's backward has left waiting."""
        for layer, waiting in self._waiting.pop(key):
            add_up(waiting)
            self.units.reduce(layer)

    def events(self, kind: int) -> list[Event]:
        """Return the calls of `Units` that a task of a kind makes, whatever its MicroPack; see `Units.task`."""
        head, again = self._parts.head_unit, range(self.layers.start, self._again)
        if kind == FORWARD:
            ends = [head] if self.has_head and self._is_forward_only else []
            return _reading([EMBEDDING] * self.has_embedding + [*self.layers, *ends])
        if kind == WEIGHT:
            return [("reduce", layer) for layer in reversed(self.layers)]
        of_head: list[Event] = [*_reading([head]), ("reduce", head)] if self.has_head else []
        has_graphs = self._again < self.layers.stop
        found = list(of_head) if has_graphs else []
        for layer in reversed(self.layers):
            if again and layer == again[-1] and len(self._saved_layers) < len(again):
                found += _reading(again[:-1])  # makes their outputs again, which weren't kept
            found.append(("gather", layer))
            found += of_head if layer == self.layers.stop - 1 and not has_graphs else []
            found.append(("release", layer))
            found += [("reduce", layer)] if self._later is None else []
        return found + [("reduce", EMBEDDING)] * self.has_embedding

    def _between(self, key: SliceKey, layer: int, _: torch.Tensor) -> None:
        """Go on, in the backward pass of a graph, from a layer to the one before."""
        self._end_backward(key, layer)
        self.units.gather(layer - 1)

    def _end_backward(self, key: SliceKey, layer: int) -> None:
        self.units.release(layer)
        if self._later is None:
            self.units.reduce(layer)
        else:
            self._waiting.setdefault(key, []).append((layer, self._later.take()))

    def _gathered(
        self, layer: int, hidden: torch.Tensor, positions: Positions, slices: Slices
    ) -> torch.Tensor:
        """Run a layer, whose weights aren't needed afterwards."""
        self.units.gather(layer)
        out = self._run(layer, hidden, positions, slices)
        self.units.release(layer)
        return out

    def _run(self, layer: int, hidden: torch.Tensor, positions: Positions, slices: Slices) -> torch.Tensor:
        rows = hidden.shape[1]
        hidden = hidden if rows else with_idle_row(hidden)
        with self._later or nullcontext():
            hidden = self._parts.run_layer(layer, hidden, positions, slices)
        return hidden if rows else hidden[:, :0]

    def _head(self, key: SliceKey, out: torch.Tensor) -> torch.Tensor:
        """Run norm, head and loss forward and backward; return the gradient of what came out of the last layer."""
        key, data = own_tokens(key, self._shared), self._data
        targets, numbers = data.targets(key)
        weights = data.weights_of(key, numbers) if data.objective is None else None

        def weigh(losses: torch.Tensor, some: slice) -> torch.Tensor:
            if weights is not None:
                return weights[some] * data.scale
            assert data.objective is not None
            return data.objective.weights(losses, numbers[some]) * data.scale

        self.units.gather(self._parts.head_unit)
        losses, gradient = self._parts.head_backward(out, targets, weigh)
        self.units.release(self._parts.head_unit)
        self.units.reduce(self._parts.head_unit)
        if weights is not None:
            self.losses.append((losses * weights).sum())
        elif data.objective is not None and data.objective.values:
            self.losses.append(torch.stack(data.objective.values).sum())
            data.objective.values.clear()
        self._keep_losses(key, losses, numbers)
        return gradient

    def _keep_losses(self, key: SliceKey, losses: torch.Tensor, numbers: IntArray) -> None:
        """Keep the losses of targets, where asked for."""
        if self.token_losses is None:
            return
        if self._data.forest is not None:
            at = on_device(torch.from_numpy(numbers), losses.device)
            self.token_losses[at] = losses.to(self.token_losses.dtype)
            return
        row = 0
        for document, start, stop in key:
            first = int(self._data.offsets[document])
            self.token_losses[first + start : first + stop] = losses[row : row + stop - start]
            row += stop - start

    def _length(self, document: int) -> int:
        return int(self._data.offsets[document + 1] - self._data.offsets[document])

    def _held(self, key: SliceKey) -> SliceKey:
        """Return a MicroPack's slices, whole documents of the same number as one document, `~number`, of all rows."""
        held: list[tuple[int, int, int]] = []
        for number, pieces in itertools.groupby(key, lambda piece: self._whole.get(piece[0])):
            if number is None:
                held += pieces
            else:
                held.append((~number, 0, sum(stop for _, _, stop in pieces)))
        return tuple(held)

    def _slices(self, key: SliceKey, kind: int) -> Slices:
        """Return a MicroPack's slices with the caches of their documents, which the first slice makes."""
        if self._data.forest is not None:
            return self._tree_slices(key, self._data.forest)
        held, slices = self._held(key), []
        for number, start, stop in held if kind == FORWARD else reversed(held):
            shared = self._shared.get(number)
            length = stop if number < 0 else self._length(number)
            if number not in self._documents:
                cache = None if number < 0 else self._cache(length if shared is None else shared.rows)
                self._documents[number] = _Document(cache)
            document = self._documents[number]
            if not document.takes_turn(start, stop, length, kind):
                raise self._out_of_turn((number, start, stop), kind)
            if document.cache is not None:
                own_rows = None if shared is None else shared.own_rows(start, stop)
                if shared is not None:
                    shared.begin(kind, start, self._attended(kind))
                piece = CachedSlice(cache=document.cache, start=start, stop=stop, own_rows=own_rows)
                slices.append(piece)
        slices = slices if kind == FORWARD else slices[::-1]
        if lengths := tuple(stop for document, _, stop in key if document in self._whole):
            return [WholeDocuments(lengths), *slices]
        if not any(piece.rows for piece in slices):
            slices.append(CachedSlice(cache=DocumentCache(1), start=0, stop=1))
        return slices

    def _tree_slices(self, key: SliceKey, forest: StepForest) -> Slices:
        """Return a MicroPack's slices of trees; those that are whole in it are one."""
        slices = []
        for number, start, _ in self._held(key):
            if number not in self._documents:
                self._documents[number] = _Document(None)
                if number >= 0:
                    self._caches[number] = TreeCache(forest.trees[number].longest)
            if number >= 0:
                slices.append(forest.slice_of(number, start, self._caches[number]))
            else:
                slices.append(forest.whole([tree for tree, *_ in key if self._whole.get(tree) == ~number]))
        return slices

    def _out_of_turn(self, piece: tuple[int, int, int], kind: int) -> PlanError:
        number, start, stop = piece
        if number < 0:
            number = next(document for document, same in self._whole.items() if same == ~number)
            stop = self._length(number)
        return PlanError(
            f"{'forward' if kind == FORWARD else 'backward'} slice {start:,}-{stop:,} of document {number}, of "
            f"{self._length(number):,} tokens, is out of turn; slices run forward first to last, then backward last "
            "to first"
        )

    def _cache(self, length: int) -> DocumentCache:
        return DocumentCache(length) if self._link is None else HostCache(length, link=self._link)

    def _keep(self, key: SliceKey, layer: int, hidden: torch.Tensor) -> None:
        """Keep a layer's input; that of a single slice isn't copied."""
        row, held = 0, rows_of(self._held(key), self._shared)
        for document, start, stop in held:
            rows = hidden[0, row : row + stop - start].detach()
            row += stop - start
            inputs = self._documents[document].inputs
            if layer not in inputs:
                assert self._link is not None or not self._rows_are_far
                inputs[layer] = HostRows(self._link) if self._rows_are_far and self._link else RowStack()
            is_shared = (
                len(held) > 1 and not self._rows_are_far
            )  # or one document's rows would keep all alive
            inputs[layer].add(rows.clone() if is_shared else rows)

    def _into(
        self, key: SliceKey, layer: int, positions: Positions | None, slices: Slices
    ) -> tuple[torch.Tensor, Positions]:
        """Return a layer's input, `[1, rows, hidden]`, which is removed, and the rows' positions."""
        if self._made:
            hidden = self._made.pop()
        elif layer in self._saved_layers:
            hidden = self._taken(key, layer)
        else:
            hidden = self._taken(key, self.layers.start)
            positions = positions or self._parts.positions(slices, hidden)
            for again in range(self.layers.start, layer):
                self._made.append(hidden)
                with ungraphed(hidden):
                    hidden = self._gathered(again, hidden, positions, slices)
        return hidden.detach(), positions or self._parts.positions(slices, hidden)

    def _taken(self, key: SliceKey, layer: int) -> torch.Tensor:
        """Return the stored input of a layer, `[1, rows, hidden]`; a single piece isn't copied."""
        pieces = [
            piece
            for document, start, stop in reversed(rows_of(self._held(key), self._shared))
            for piece in reversed(self._documents[document].inputs[layer].take(stop - start))
        ]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces[::-1]))[None]

    @contextlib.contextmanager
    def _near(self, key: SliceKey, kind: int) -> Iterator[None]:
        """Have keys and values from host memory on the device while a MicroPack runs."""
        key = rows_of(self._held(key), self._shared)
        caches: dict[int, HostCache] = {}
        for document, _, _ in key:
            cache = self._documents[document].cache
            if isinstance(cache, HostCache) and document not in caches:
                of_document = [piece for piece in key if piece[0] == document]
                first, last = min(piece[1] for piece in of_document), max(piece[2] for piece in of_document)
                cache.begin(first, last, self._visits(kind), is_new=kind == FORWARD)
                caches[document] = cache
        yield
        for cache in caches.values():
            cache.end()

    def _attended(self, kind: int) -> list[Attended]:
        """Return the calls of attention of a task, in order; none if keys and values are in host memory."""
        if self._link is not None:
            return []
        forward, backward = (partial(Attended, is_backward=passes) for passes in (False, True))
        if kind == FORWARD:
            return [forward(layer) for layer in self.layers]
        visits = [backward(layer) for layer in reversed(range(self._again, self.layers.stop))]
        again = range(self.layers.start, self._again)
        if len(self._saved_layers) < len(again):
            visits += [forward(layer) for layer in again[:-1]]
        return visits + [visit(layer) for layer in reversed(again) for visit in (forward, backward)]

    def _visits(self, kind: int) -> list[Visit]:
        """Return the layers whose attention a task runs, in order."""
        if kind == FORWARD:
            return [Visit(layer, has_own=False, is_backward=False) for layer in self.layers]
        graphs, again = range(self._again, self.layers.stop), range(self.layers.start, self._again)
        visits = [Visit(layer, has_own=True, is_backward=True) for layer in reversed(graphs)]
        if len(self._saved_layers) < len(again):
            visits += [Visit(layer, has_own=False, is_backward=False) for layer in again[:-1]]
        return visits + [Visit(layer, has_own=False, is_backward=True) for layer in reversed(again)]


# `DeferredWeightGrads`: weight gradients of linear layers that wait until a task of their own adds them up.
#
# Zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241) compute a MicroPack's input gradients as soon as possible,
# since the previous stage waits for them, and its weight gradients when the stage would idle. No module is changed:
# while a layer runs, calls of `torch.nn.functional.linear` with a parameter as weight go through a function whose
# backward keeps the operands of the weight gradient. All other parameters (norms, biases, stacked experts) get their
# gradients at once.


class DeferredGrad(NamedTuple):
    """A weight gradient that hasn't been computed: `gradient.T @ rows`."""

    weight: torch.nn.Parameter  # `[outputs, inputs]`
    rows: torch.Tensor  # `[..., inputs]`: the layer's input
    gradient: torch.Tensor  # `[..., outputs]`: of the layer's output


class DeferredWeightGrads(TorchFunctionMode):
    """While entered, linear layers are run so that their backward leaves weight gradients in `collected`."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[DeferredGrad] = []
        """In the order of the backward passes; running one removes it."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, `linear` in another way where its weight is a parameter that learns."""
        kwargs = kwargs or {}
        if function is not torch.nn.functional.linear or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return self._linear(*args, **kwargs)

    def take(self) -> list[DeferredGrad]:
        """Return what was collected since the last call."""
        taken, self.collected = self.collected, []
        return taken

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        is_own = isinstance(weight, torch.nn.Parameter) and weight.requires_grad and weight.is_leaf
        if not is_own or not input.requires_grad:
            return torch.nn.functional.linear(input, weight, bias)
        out: torch.Tensor = _Linear.apply(lowered(input), weight, self)  # type: ignore[no-untyped-call]
        return out if bias is None else out + lowered(bias)


class _Linear(torch.autograd.Function):
    """A linear layer without bias, whose weight gradient is left to `DeferredWeightGrads`."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.nn.Parameter, later: DeferredWeightGrads
    ) -> torch.Tensor:
        # The weight is kept as itself, and not as a saved tensor: it takes part in no graph here.
        ctx.save_for_backward(rows)
        ctx.weight, ctx.later = weight, later
        return torch.nn.functional.linear(rows, weight.detach().to(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        # Apart from the graph, which would otherwise live on with them.
        ctx.later.collected.append(DeferredGrad(ctx.weight, rows.detach(), gradient.detach()))
        return gradient @ ctx.weight.detach().to(gradient.dtype), None, None


def add_up(waiting: Sequence[DeferredGrad]) -> None:
    """Add weight gradients to those of their parameters; what they were made of is free then.

    Cost: a matrix product each, which adds where the gradient stands.
    """
    for weight, rows, gradient in waiting:
        add_product(weight, gradient.flatten(0, -2), rows.flatten(0, -2))


# `selectively`: graphs that don't keep products which one multiplication recomputes: norm outputs and gates.
#
# A norm ends in `weight * normed` and a gated layer in `act(gate) * up`. The multiplication keeps both factors for
# its own backward, and the next linear layers keep the product as well. Here they keep the factors and multiply
# again: the same operation on the same bits (selective recomputation; Korthikanti et al. 2022, arXiv 2205.05198, §5).
# The model isn't patched; its linear layers have hooks meanwhile.


class _Product(NamedTuple):
    """A view of a product, stored as its factors."""

    one: torch.Tensor
    other: torch.Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextlib.contextmanager
def selectively(layers: Iterable[nn.Module], is_on: bool = True) -> Iterator[None]:
    """Let graphs that are made meanwhile keep factors instead of products that go into these layers' linear layers.

    A product whose factors aren't both saved, as where one of them needs no gradient, is saved itself.
    """
    if not is_on:
        yield
        return
    # The products of the linear layer that runs, by its storage.
    products: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(_: nn.Module, given: tuple[Any, ...]) -> None:
        product = given[0] if given else None
        node: Any = product.grad_fn if isinstance(product, torch.Tensor) else None
        if product is None or node is None or node.name() != "MulBackward0":
            return
        one, other = node._saved_self, node._saved_other
        if one is not None and other is not None:
            products[product.untyped_storage()._cdata] = (one.detach(), other.detach())

    def forget(*_: Any) -> None:
        products.clear()  # the product may be freed now, and its address reused

    def pack(saved: torch.Tensor) -> torch.Tensor | _Product:
        factors = products.get(saved.untyped_storage()._cdata)
        if factors is None:
            return saved
        return _Product(*factors, saved.size(), saved.stride(), int(saved.storage_offset()))

    def unpack(saved: torch.Tensor | _Product) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        product = saved.one * saved.other
        return product.as_strided(saved.size, saved.stride, saved.offset)

    linear = [module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(note) for module in linear]
    hooks += [module.register_forward_hook(forget) for module in linear]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for hook in hooks:
            hook.remove()
