"""`ChunkStep`: one chunk of layers during a step, and what documents leave there until they come back.

A layer either keeps its graph from forward to backward, so that both passes are cut alike, or is computed again from
what went into it, which is kept a document at a time, so that backward slices may be cut elsewhere. Neighbouring
layers that keep their graphs are one graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from varlen.errors import PlanError
from varlen.runtime.attention import CachedSlice
from varlen.runtime.cache import DocumentCache
from varlen.runtime.later import Later, Waiting, add_up
from varlen.runtime.parts import Parts, Positions
from varlen.runtime.shared import Key as Key
from varlen.runtime.shared import SharedDocument, rows_of, tokens_of, with_idle_row
from varlen.step_plan import BACKWARD, FORWARD

Leaf = tuple[torch.Tensor, torch.Tensor]
"""What went into a graph and what came out."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepData:
    """The tokens of a step, and what is learned from them."""

    input_ids: torch.Tensor
    """int64 `[num_tokens]`: documents one behind the other."""
    labels: torch.Tensor
    """int64 `[num_tokens]`: the token after each; -100 where there is none to learn."""
    weights: torch.Tensor
    """float32 or wider `[num_tokens]`: of each token's loss in the step's; 0 where nothing is learned."""
    offsets: npt.NDArray[np.int64]
    """int64 `[num_documents + 1]`: where documents begin."""

    def rows(self, key: Key, of: torch.Tensor) -> torch.Tensor:
        """Return the entries of a flat `[num_tokens]` that belong to a MicroPack's rows.

        Args:
            key: the MicroPack.
            of: one of the tensors above.
        """
        parts = [of[int(self.offsets[d]) + start : int(self.offsets[d]) + stop] for d, start, stop in key]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(slots=True)
class _Document:
    """What a document leaves between its tasks."""

    cache: DocumentCache
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """By layer that is computed again: `[tokens, hidden]` into it."""
    forward_to: int = 0
    """Tokens that have run forward."""
    backward_from: int = -1
    """Tokens that haven't run backward; -1 before the first backward slice."""


class ChunkStep:
    """One chunk of layers during one step; MicroPacks run forward in one order and backward in another."""

    def __init__(
        self,
        parts: Parts,
        layers: range,
        data: StepData,
        *,
        layers_again: int,
        splits_backward: bool = False,
        keeps_losses: bool = False,
        shared: Mapping[int, SharedDocument] | None = None,
    ) -> None:
        """Take the layers of a chunk.

        Args:
            parts: the model taken apart.
            layers: the chunk's, of all.
            data: of the step.
            layers_again: how many of them, the first ones, are computed again in the backward pass.
            splits_backward: whether weight gradients of linear layers wait for `weight`.
            keeps_losses: whether the loss of every token is kept in `token_losses`.
            shared: documents of whose rows this rank has some, by `shared_documents`; None for none.
        """
        self._shared = shared or {}
        self._parts, self._data = parts, data
        self.layers = layers
        """Of the chunk, in order."""
        self.has_embedding = layers.start == 0
        """Whether token ids come in, and not what other layers made of them."""
        self.has_head = layers.stop == len(parts.layers)
        """Whether losses come out."""
        again = layers.start + layers_again
        self._runs = [range(layer, layer + 1) for layer in range(layers.start, again)]
        self._runs += [range(again, layers.stop)] if again < layers.stop else []
        self._again = again
        self._documents: dict[int, _Document] = {}
        self._graphs: dict[Key, Leaf] = {}
        self._later = Later() if splits_backward else None
        self._waiting: dict[Key, list[Waiting]] = {}
        self.losses: list[torch.Tensor] = []
        """Parts of the step's loss, of the chunk with the head."""
        self.token_losses = torch.zeros_like(data.weights) if keeps_losses and self.has_head else None
        """`[num_tokens]`: cross-entropy of each token's label, not weighted."""

    def forward(self, key: Key, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run a MicroPack forward; return `[1, rows, hidden]`.

        Args:
            key: the MicroPack.
            hidden: `[1, rows, hidden]` out of the chunk before; None for the first.

        Raises:
            PlanError: a slice that isn't its document's next one.
        """
        slices = self._slices(key, FORWARD)
        if hidden is None:
            hidden = self._parts.embed(self._data.rows(tokens_of(key, self._shared), self._data.input_ids))
        positions = self._parts.positions(slices, hidden)
        for layers in self._runs:
            if layers.start < self._again:
                self._keep(key, layers.start, hidden)
                with torch.no_grad():
                    # The last layer's output may be made again with its graph; its keys and values are needed now.
                    hidden = self._run(layers, hidden, positions, slices)
            else:
                first = hidden.detach().requires_grad_()
                hidden = self._run(layers, first, positions, slices)
                self._graphs[key] = (first, hidden)
        return hidden.detach()

    def backward(self, key: Key, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run a MicroPack backward; return the gradient of what came in, None where ids did.

        Args:
            key: the MicroPack.
            gradient: of what it gave out, `[1, rows, hidden]`; None for the chunk with the head.

        Raises:
            PlanError: a slice that isn't its document's next one from the end.
        """
        slices = self._slices(key, BACKWARD)
        positions: Positions | None = None
        for layers in reversed(self._runs):
            if layers.start >= self._again:
                first, out = self._graphs.pop(key)
            else:
                first = self._kept(key, layers.start).requires_grad_()
                positions = positions or self._parts.positions(slices, first)
                out = self._run(layers, first, positions, slices)
            if gradient is None:
                gradient = self._head(key, out)
            torch.autograd.backward(out, gradient)
            assert first.grad is not None
            gradient = first.grad
            if layers.start < self._again:
                self._release(key, layers.start)
        assert gradient is not None
        if self._later is not None:
            self._waiting[key] = self._later.take()
        for document, start, _ in key:
            if start == 0:
                del self._documents[document]
        if not self.has_embedding:
            return gradient
        self._parts.embed_backward(
            self._data.rows(tokens_of(key, self._shared), self._data.input_ids), gradient
        )
        return None

    def weight(self, key: Key) -> None:
        """Add up the weight gradients that the MicroPack's backward has left waiting.

        Args:
            key: the MicroPack, as `backward` was given it.
        """
        add_up(self._waiting.pop(key))

    def _run(
        self, layers: range, hidden: torch.Tensor, positions: Positions, slices: Sequence[CachedSlice]
    ) -> torch.Tensor:
        rows = hidden.shape[1]
        hidden = hidden if rows else with_idle_row(hidden)
        with self._later or nullcontext():
            for layer in layers:
                hidden = self._parts.run_layer(layer, hidden, positions, slices)
        return hidden if rows else hidden[:, :0]

    def _head(self, key: Key, out: torch.Tensor) -> torch.Tensor:
        """Run norm, head and loss forward and backward; return the gradient of what came out of the last layer."""
        key = tokens_of(key, self._shared)
        labels, weights = (self._data.rows(key, of) for of in (self._data.labels, self._data.weights))
        losses, gradient = self._parts.head_backward(out, labels, weights)
        self.losses.append((losses * weights).sum())
        if self.token_losses is not None:
            row = 0
            for document, start, stop in key:
                first = int(self._data.offsets[document])
                self.token_losses[first + start : first + stop] = losses[row : row + stop - start]
                row += stop - start
        return gradient

    def _slices(self, key: Key, kind: int) -> list[CachedSlice]:
        """Return a MicroPack's slices with the caches of their documents, which the first slice makes.

        Raises:
            PlanError: a slice that isn't its document's next one in this pass.
        """
        slices = []
        for number, start, stop in key if kind == FORWARD else reversed(key):
            length = int(self._data.offsets[number + 1] - self._data.offsets[number])
            shared = self._shared.get(number)
            kept = length if shared is None else shared.rows
            document = self._documents.setdefault(number, _Document(DocumentCache(kept)))
            if kind == FORWARD:
                expected, document.forward_to = document.forward_to == start, stop
            else:
                left = length if document.backward_from < 0 else document.backward_from
                expected, document.backward_from = document.forward_to == length and left == stop, start
            if not expected:
                raise PlanError(
                    f"{'forward' if kind == FORWARD else 'backward'} slice {start:,}-{stop:,} of document {number}, "
                    f"of {length:,} tokens, is out of turn; slices run forward first to last, then backward last to "
                    "first"
                )
            share = None if shared is None else shared.share(start, stop)
            slices.append(CachedSlice(cache=document.cache, start=start, stop=stop, share=share))
        if not any(piece.rows for piece in slices):
            slices.append(CachedSlice(cache=DocumentCache(1), start=0, stop=1))
        return slices if kind == FORWARD else slices[::-1]

    def _keep(self, key: Key, layer: int, hidden: torch.Tensor) -> None:
        """Keep what goes into a layer, in one buffer a document."""
        row = 0
        for document, start, stop in rows_of(key, self._shared):
            kept = self._documents[document]
            if layer not in kept.inputs:
                kept.inputs[layer] = hidden.new_empty(kept.cache.length, hidden.shape[-1])
            kept.inputs[layer][start:stop] = hidden[0, row : row + stop - start]
            row += stop - start

    def _kept(self, key: Key, layer: int) -> torch.Tensor:
        """Return what went into a layer, `[1, rows, hidden]`; of one slice alone it is not copied."""
        pieces = [
            self._documents[document].inputs[layer][start:stop]
            for document, start, stop in rows_of(key, self._shared)
        ]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[None].detach()

    def _release(self, key: Key, layer: int) -> None:
        """Give back the memory of what went into a layer on rows whose backward is done."""
        for document, start, _ in rows_of(key, self._shared):
            kept = self._documents[document].inputs
            kept[layer] = kept[layer][:start].clone()
