"""`Parts`: a transformers decoder taken apart at its layers, so that a stage can run some of them on some rows.

The model stays as it is: its own modules are called with its own arguments, in the order of its own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from varlen.errors import ModelError
from varlen.runtime.attention import CachedSlice, register

FAMILIES = ("llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Families whose forward is embedding, rotary positions, layers, norm and head, with nothing in between."""
HEAD_ROWS = 1024
"""Rows whose logits are there at once."""
IGNORED = -100
"""The label of a token with nothing to learn."""


class Positions(NamedTuple):
    """Where the rows of a MicroPack stand in their documents."""

    ids: torch.Tensor
    """int64 `[1, rows]`."""
    embeddings: Any
    """What layers turn them into."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A causal decoder in the pieces that a step runs one by one."""

    embedding: nn.Embedding
    layers: Sequence[nn.Module]
    rotary: nn.Module
    norm: nn.Module
    head: nn.Linear

    @classmethod
    def of(cls, model: Any) -> Parts:
        """Take a model apart, and set its attention to that of slices.

        Args:
            model: a transformers model with a language-model head; its attention is changed in place, and
                `model.set_attn_implementation("sdpa")` undoes it.

        Raises:
            ModelError: a family that isn't known to run layer by layer, or a model without a head.
        """
        family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        if family not in FAMILIES:
            raise ModelError(
                f"slices don't run {family} models, whose layers may need more than rows and their positions; "
                f"they run {', '.join(FAMILIES)}"
            )
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError(
                f"{type(model).__name__} has no language-model head; give a model for causal language"
            )
        decoder = model.get_decoder()
        model.set_attn_implementation(register())
        return cls(
            embedding=decoder.embed_tokens,
            layers=tuple(decoder.layers),
            rotary=decoder.rotary_emb,
            norm=decoder.norm,
            head=head,
        )

    def positions(self, slices: Sequence[CachedSlice], like: torch.Tensor) -> Positions:
        """Return what layers are told of where rows stand in their documents.

        Args:
            slices: whose rows they are.
            like: `[1, rows, hidden]`: a tensor of the layers' dtype and device.
        """
        ids = torch.cat([torch.arange(*own) for piece in slices for own in piece.ranges])[None].to(
            like.device
        )
        return Positions(ids, self.rotary(like, position_ids=ids))

    def run_layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        positions: Positions,
        slices: Sequence[CachedSlice],
    ) -> torch.Tensor:
        """Run one layer on the rows of a MicroPack.

        Args:
            layer: its index.
            hidden: `[1, rows, hidden]`.
            positions: of the rows, by `positions`.
            slices: whose rows these are.
        """
        out = self.layers[layer](
            hidden,
            attention_mask=None,
            position_ids=positions.ids,
            position_embeddings=positions.embeddings,
            use_cache=False,
            slices=slices,
        )
        return out if isinstance(out, torch.Tensor) else out[0]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return `[1, rows, hidden]` of int64 `[rows]`, apart from the graph; `embed_backward` is its backward."""
        with torch.no_grad():
            hidden: torch.Tensor = self.embedding(input_ids[None])
        return hidden

    def embed_backward(self, input_ids: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add to the embedding's gradient where its rows were used.

        Autograd would make, for every MicroPack, a gradient of the whole vocabulary.
        """
        weight, unused = self.embedding.weight, self.embedding.padding_idx
        if not weight.requires_grad:
            return
        rows = gradient[0].to(weight.dtype)
        if unused is not None:
            rows = rows * (input_ids != unused)[:, None]
        _gradient(weight).index_add_(0, input_ids, rows)

    def head_backward(
        self, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run norm, head and loss forward and backward, some rows at a time, so that few logits are ever there.

        Args:
            hidden: `[1, rows, hidden]`, out of the last layer.
            labels: int64 `[rows]`: the token after each; -100 where there is none to learn.
            weights: `[rows]`: of each row's loss in that of the step; 0 where there is no label.

        Returns:
            The cross-entropy of each row, `[rows]`, 0 without a label, and the gradient of `hidden`.
        """
        gradient = torch.empty_like(hidden)
        losses = weights.new_zeros(labels.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        for first in range(0, hidden.shape[1], HEAD_ROWS):
            rows = slice(first, first + HEAD_ROWS)
            part = hidden[0, rows].detach().requires_grad_()
            with torch.enable_grad():
                normed = self.norm(part)
            losses[rows], by_normed = self._loss_backward(normed.detach(), labels[rows], weights[rows])
            normed.backward(by_normed)
            assert part.grad is not None
            gradient[0, rows] = part.grad
        return losses, gradient

    def _loss_backward(
        self, normed: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a chunk's losses and the gradient of the head's input, and add to the head's own gradient.

        Logits become their softmax, and that their gradient, in one float32 buffer; in the weights' dtype it then
        takes the place of the logits: 6 bytes a logit in bfloat16, 4 in float32.
        """
        logits = nn.functional.linear(normed, self.head.weight.detach(), _detached(self.head.bias))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = labels.clamp_min(0)[:, None]
        wide -= wide.amax(-1, keepdim=True)
        at_target = wide.gather(1, targets)[:, 0]
        total = wide.exp_().sum(-1)
        losses = (total.log() - at_target) * (labels != IGNORED)
        weights = weights.to(wide.dtype)
        wide *= (weights / total)[:, None]
        wide.scatter_add_(1, targets, -weights[:, None])
        by_logits = logits.copy_(wide)
        weight, bias = self.head.weight, self.head.bias
        if weight.requires_grad:
            _gradient(weight).addmm_(by_logits.T, normed)
        if bias is not None and bias.requires_grad:
            _gradient(bias).add_(by_logits.sum(0))
        return losses, by_logits @ weight.detach()


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient, zeros at first."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
