"""`DecoderParts`: a decoder of a known family taken apart at its layers, so that a stage runs some of them on rows.

The model stays as it is: its own modules are called with its own arguments, in the order of its own forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from varlen.attention.choice import KernelChoice, check_kernels
from varlen.attention.kernels import Kernels, on_device
from varlen.attention.rules import rotary_settings
from varlen.cost.memory import LOGIT_ROWS
from varlen.counts import many
from varlen.errors import ModelError
from varlen.model_families import FAMILIES, UNKNOWN, Sliced
from varlen.runtime.attention import register
from varlen.runtime.casting import uncast, ungraphed
from varlen.runtime.kv_cache import Slices
from varlen.runtime.main_grads import add_product, gradient

HEAD_ROWS = LOGIT_ROWS  # rows whose logits exist at once
EMBEDDING = -1  # number of the embedding among units
IGNORED = -100  # the label of a token with nothing to learn


class Positions(NamedTuple):
    """Where the rows of a MicroPack stand in their documents."""

    ids: torch.Tensor  # int64 `[1, rows]`
    embeddings: Any  # rotary cosines and sines, by kind if layers differ


class Logits(NamedTuple):
    """What becomes of what the head gives: `z` is `factor * z`, and then `cap * tanh(z / cap)`."""

    factor: float = 1.0
    cap: float | None = None


AS_GIVEN = Logits()


class _Softmax(NamedTuple):
    """The softmax of some rows over the vocabulary."""

    logits: torch.Tensor  # `[rows, vocabulary]`, as the head gave them, or `exps`
    exps: torch.Tensor  # `[rows, vocabulary]`: exp(z - max(z)), in float32 or wider
    totals: torch.Tensor  # `[rows]`: their sums
    slope: torch.Tensor | float  # of z by the logits
    losses: torch.Tensor  # `[rows]`: cross-entropy, 0 without a label


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderParts:
    """A causal decoder in the pieces that a step runs one by one."""

    embedding: nn.Embedding
    layers: Sequence[nn.Module]
    rotary: nn.Module
    norm: nn.Module
    head: nn.Linear
    head_is_plain: bool = True
    """Whether the head is its weight and bias alone; else it is run as a module, and autograd runs its backward."""
    kernels: KernelChoice = field(default_factory=KernelChoice)
    rotary_types: Sequence[str] = ()
    """`[layers]`: by which name each asks for its rotary positions; empty where all get the same."""
    by_length: bool = False  # whether rotary positions depend on a document's total length
    embedding_factor: float = 1.0  # multiplies embeddings outside of their module
    logits: Logits = AS_GIVEN

    @classmethod
    def of(cls, model: Any, kernels: Kernels = "auto") -> DecoderParts:
        """Take a model apart, and set its attention to that of slices."""
        check_kernels(kernels)
        check_wrappers(model)
        name, family = family_of(model)
        check_settings(name, model)
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError(
                f"{type(model).__name__} has no language-model head; give a model for causal language"
            )
        decoder, config = model.get_decoder(), model.config
        embedding = getattr(decoder, family.embedding)
        check_ends(name, model, embedding, head)
        model.set_attn_implementation(register())
        layers = tuple(decoder.layers)[: config.num_hidden_layers]
        factor = float(getattr(config, family.logit_factor)) if family.logit_factor else 1.0
        if family.logit_divisor:
            factor /= float(getattr(config, family.logit_divisor))
        parts = cls(
            embedding=embedding,
            layers=layers,
            rotary=decoder.rotary_emb,
            norm=getattr(decoder, family.norm),
            head=head,
            head_is_plain=is_plain(head),
            kernels=KernelChoice(kernels),
            rotary_types=tuple(config.layer_types[: len(layers)]) if family.rotary == "by_layer_type" else (),
            by_length=rope_by_length(config),
            embedding_factor=float(getattr(config, family.embedding_factor))
            if family.embedding_factor
            else 1.0,
            logits=Logits(factor, getattr(config, family.logit_cap) if family.logit_cap else None),
        )
        if parts.by_length:
            # The first call copies a table to the device, for which a step would wait.
            like = torch.empty(1, device=next(parts.rotary.buffers()).device)
            parts._rotations(like.new_zeros(1, 1, dtype=torch.int64), [], like)
        return parts

    @property
    def head_unit(self) -> int:
        """Number of norm and head among units."""
        return len(self.layers)

    def unit(self, number: int) -> list[nn.Module]:
        """Return a unit's modules: those of `EMBEDDING`, of a layer by its number, or of norm and head."""
        if number == EMBEDDING:
            return [self.embedding]
        return [self.norm, self.head] if number == self.head_unit else [self.layers[number]]

    def positions(self, slices: Slices, like: torch.Tensor) -> Positions:
        """Return the arguments of layers that give the positions of rows in their documents.

        Args:
            like: `[1, rows, hidden]`: a tensor of the layers' dtype and device.
        """
        ranges = [torch.arange(*own) for piece in slices for own in piece.ranges]
        ids = on_device(torch.cat(ranges)[None], like.device)
        ends = [end for piece in slices for end in piece.ends] if self.by_length else []
        return Positions(ids, self._rotations(ids, ends, like))

    def _rotations(self, ids: torch.Tensor, ends: Sequence[tuple[int, int]], like: torch.Tensor) -> Any:
        """Return cosines and sines of positions, by kind if layers differ."""
        if not self.rotary_types:
            return self._rotated(ids, ends, like)
        return {kind: self._rotated(ids, ends, like, kind) for kind in dict.fromkeys(self.rotary_types)}

    def _rotated(
        self, ids: torch.Tensor, ends: Sequence[tuple[int, int]], like: torch.Tensor, *kind: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of positions, `[1, rows, dim]`.

        Where they depend on how long a text is, each slice shows the last position of its document too.
        """
        if not ends:
            cosines, sines = self.rotary(like, ids, *kind)
            return cosines, sines
        made, row = [], 0
        for rows, length in ends:
            with_end = torch.cat([ids[:, row : row + rows], ids.new_full((1, 1), length - 1)], 1)
            made.append([x[:, :-1] for x in self.rotary(like, with_end, *kind)])
            row += rows
        cosines, sines = (torch.cat(each, 1) for each in zip(*made))
        return cosines, sines

    def run_layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        positions: Positions,
        slices: Slices,
    ) -> torch.Tensor:
        """Run one layer on the rows of a MicroPack.

        Args:
            hidden: `[1, rows, hidden]`.
        """
        rotated = positions.embeddings
        out = self.layers[layer](
            hidden,
            attention_mask=None,
            position_ids=positions.ids,
            position_embeddings=rotated[self.rotary_types[layer]] if self.rotary_types else rotated,
            use_cache=False,
            slices=slices,
            choice=self.kernels,
        )
        return out if isinstance(out, torch.Tensor) else out[0]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return `[1, rows, hidden]` of int64 `[rows]`, apart from the graph; `embed_backward` is its backward."""
        with torch.no_grad():
            hidden: torch.Tensor = self.embedding(input_ids[None])
        return hidden if self.embedding_factor == 1 else hidden * self.embedding_factor

    def embed_backward(self, input_ids: torch.Tensor, by_hidden: torch.Tensor) -> None:
        """Add to the embedding's gradient where its rows were used.

        Autograd would make, for every MicroPack, a gradient of the whole vocabulary.
        """
        weight, unused = self.embedding.weight, self.embedding.padding_idx
        if not weight.requires_grad:
            return
        total = gradient(weight)
        rows = by_hidden[0].to(total.dtype)
        rows = rows if self.embedding_factor == 1 else rows * self.embedding_factor
        if isinstance(scale := getattr(self.embedding, "embed_scale", None), torch.Tensor):
            rows = rows * scale.to(weight.dtype)  # Gemma's embedding multiplies what it looks up
        if unused is not None:
            rows = rows * (input_ids != unused)[:, None]
        total.index_add_(0, input_ids, rows)

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
        # The slope of a cap takes one buffer more.
        at_once = HEAD_ROWS if self.logits.cap is None else HEAD_ROWS // 2
        by_hidden = torch.empty_like(hidden)
        losses = weights.new_zeros(labels.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        for first in range(0, hidden.shape[1], at_once):
            rows = slice(first, first + at_once)
            part = hidden[0, rows].detach().requires_grad_()
            with torch.enable_grad():
                normed = self.norm(part)
            with ungraphed(part):
                losses[rows], by_normed = self._loss_backward(normed.detach(), labels[rows], weights[rows])
            with uncast(part):
                normed.backward(by_normed.to(normed.dtype))
            assert part.grad is not None
            by_hidden[0, rows] = part.grad
        return losses, by_hidden

    def head_losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of each row, `[rows]`, as `head_backward`; computes no gradient."""
        losses = hidden.new_zeros(labels.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        with ungraphed(hidden):
            for first in range(0, hidden.shape[1], HEAD_ROWS):
                rows = slice(first, first + HEAD_ROWS)
                losses[rows] = self._softmax(self._logits(self.norm(hidden[0, rows])), labels[rows]).losses
        return losses

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        if self.head_is_plain:
            return nn.functional.linear(normed, self.head.weight, self.head.bias)
        logits: torch.Tensor = self.head(normed)
        return logits

    def _softmax(self, logits: torch.Tensor, labels: torch.Tensor, *, has_slope: bool = False) -> _Softmax:
        """Run the softmax over the vocabulary, in one float32 buffer."""
        factor, cap = self.logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        slope: torch.Tensor | float = factor
        if factor != 1:
            wide *= factor
        if cap is not None:
            wide.div_(cap).tanh_()
            slope = wide.square().neg_().add_(1).mul_(factor) if has_slope else factor
            wide *= cap
        wide -= wide.amax(-1, keepdim=True)
        at_target = wide.gather(1, labels.clamp_min(0)[:, None])[:, 0]
        total = wide.exp_().sum(-1)
        losses = (total.log() - at_target) * (labels != IGNORED)
        return _Softmax(logits, wide, total, slope, losses)

    def _loss_backward(
        self, normed: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a chunk's losses and the gradient of the head's input, and add to the head's own; without a graph.

        Logits become their softmax, and that their gradient, in one float32 buffer; in the weights' dtype it then
        takes the place of the logits: 6 bytes a logit in bfloat16, 4 in float32.
        """
        normed = normed if self.head_is_plain else normed.requires_grad_()
        with nullcontext() if self.head_is_plain else torch.enable_grad():
            graph = self._logits(normed)
        given = graph.detach() if self.head_is_plain else graph.detach().clone()  # it is overwritten
        logits, wide, total, slope, losses = self._softmax(given, labels, has_slope=True)
        weights = weights.to(wide.dtype)
        wide *= (weights / total)[:, None]
        wide.scatter_add_(1, labels.clamp_min(0)[:, None], -weights[:, None])
        if self.logits != AS_GIVEN:
            wide *= slope
        if not self.head_is_plain:
            with uncast(graph):
                torch.autograd.backward(graph, wide.to(graph.dtype))
            assert normed.grad is not None
            return losses, normed.grad
        by_logits = logits.copy_(wide)
        weight, bias = self.head.weight, self.head.bias
        if weight.requires_grad:
            add_product(weight, by_logits, normed.to(by_logits.dtype))
        if bias is not None and bias.requires_grad:
            gradient(bias).add_(by_logits.sum(0))
        return losses, by_logits @ weight


_FSDP1, _CHECKPOINT = "FullyShardedDataParallel", "CheckpointWrapper"  # classes of torch.distributed


def check_wrappers(model: Any) -> None:
    """Refuse modules around those of a model that slices would pass by, or that would compute layers twice."""
    found = {type(module).__name__ for module in model.modules()} if isinstance(model, nn.Module) else ()
    if _FSDP1 in found:
        raise ModelError(
            f"{_FSDP1} (FSDP1) holds the model's parameters in flat ones, which slices don't gather; shard it by "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if _CHECKPOINT in found:
        raise ModelError(
            f"modules are wrapped by {_CHECKPOINT}, which computes them again in the backward pass, as slices do "
            'already; leave it out, and choose by recompute="none", "selective" or "full"'
        )


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Switch off gradient checkpointing of transformers: a step's plan says which layers are computed again."""
    found: list[Any] = [m for m in model.modules() if vars(m).get("gradient_checkpointing") is True]
    for module in found:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in found:
            module.gradient_checkpointing = True


def check_model(model: Any, kernels: Kernels) -> None:
    """Refuse a model that isn't run in slices, and leave it as it is."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    DecoderParts.of(model, kernels)
    model.set_attn_implementation(before)


# `check_ends`: whether a model's embedding and head are only their weights.
#
# A step multiplies by the head's weight and adds to both ends' gradients in place, so that neither all logits nor a
# gradient of the whole vocabulary exists at once. A head with an adapter or a hook is run as a module, block of rows
# by block of rows. An adapter around the embedding, or a hook on it, would be bypassed and never learn.

_COPIES = "ModulesToSaveWrapper"  # peft's class that trains a copy of a module and exposes the copy's weight


def check_ends(name: str, model: Any, embedding: Any, head: Any) -> None:
    """Refuse what a step would pass by: adapters and hooks at the embedding, and what learns outside the decoder."""
    if next(embedding.parameters(), None) is not None:
        _check_embedding(name, embedding)
    inside = {id(p) for part in (model.get_decoder(), head) for p in part.parameters()}
    outside = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside:
        raise ModelError(
            f"{outside[0]} stands outside of this {name} model's decoder and head "
            f"({many(len(outside), 'parameter that learns does', 'parameters that learn do')}), and slices run these "
            "alone, so it would have no gradient; freeze it by requires_grad_(False), or train the model unsliced"
        )
    stepped = [n for n, p in model.named_parameters() if getattr(p, "_post_accumulate_grad_hooks", None)]
    if stepped:
        raise ModelError(
            f"{stepped[0]} has a hook that runs once its gradient is there "
            f"({many(len(stepped), 'parameter has', 'parameters have')} one), and slices add to a gradient many "
            "times a step; remove it, and step the optimizer after engine.step"
        )


def is_plain(head: Any) -> bool:
    """Return whether a head gives the product with its weight alone, and nothing is hooked to it."""
    owner = _owner(head)
    if next(owner.parameters(), None) is None:
        return True  # another stage's
    if (
        not isinstance(owner, nn.Linear)
        or owner._parameters.get("weight") is None
        or "forward" in vars(owner)
    ):
        return False
    hooks = {} if isinstance(owner, FSDPModule) else owner._forward_hooks | owner._forward_pre_hooks
    hooks |= getattr(owner.weight, "_backward_hooks", None) or {}
    return type(owner).forward is nn.Linear.forward and not hooks


def _owner(end: Any) -> Any:
    """Return the module of which an end has the weight."""
    if type(end).__name__ != _COPIES:
        return end
    return next((m for m in end.modules() if m._parameters.get("weight") is end.weight), end)


def _check_embedding(name: str, embedding: Any) -> None:
    """Refuse an embedding that computes more than its weight defines, or that has hooks."""
    owner = _owner(embedding)
    is_own = isinstance(owner, nn.Embedding) and owner._parameters.get("weight") is not None
    if not is_own or "forward" in vars(owner):
        raise ModelError(
            f"the embedding of this {name} model is a {type(owner).__module__}.{type(owner).__qualname__} that "
            "computes more than its weight says, and slices compute its gradient by its weight; leave it out of an "
            'adapter\'s target_modules, and name it in "modules_to_save" if it is to learn'
        )
    hooks = len(getattr(owner.weight, "_backward_hooks", None) or ())
    if hooks:
        raise ModelError(
            f"the embedding of this {name} model has {many(hooks, 'hook', 'hooks')} on its gradient, which slices, "
            "computing it by its weight, would pass by; remove what registered them"
        )


# The families of transformers models that run in slices: what each does around its layers, and which are refused.
#
# Layers run as they are, whatever the family does inside them. A step needs to know how ids become the input of the
# first layer, which rotary positions each layer gets, and what happens to the head's output.

SLICED = {name: row.sliced for name, row in FAMILIES.items() if row.sliced is not None}
"""Families that run in slices; each is tested against its uncut model."""


def family_of(model: Any) -> tuple[str, Sliced]:
    """Return what a model's family does around its layers, and its name."""
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if name in SLICED:
        return name, SLICED[name]
    family = FAMILIES.get(name, UNKNOWN)
    if family.is_recurrent:
        raise ModelError(
            f"slices don't run {name} models: some of their layers carry a state from token to token, and a slice "
            'keeps keys and values alone; train them unsliced, or cut their documents with overlong="split"'
        )
    if family.has_own_attention:
        raise ModelError(
            f"slices don't run {name} models: their attention computes its own scores, or their layers don't pass "
            "their arguments to it, so no function of transformers' registry can take its place; train them unsliced"
        )
    raise ModelError(
        f"slices don't run {name} models, which aren't known to mix tokens in their attention alone; they run "
        f"{', '.join(SLICED)}"
    )


def check_settings(name: str, model: Any) -> None:
    """Refuse settings of a model under which slices would learn something else than the whole model does."""
    config = model.config
    if getattr(config, "use_bidirectional_attention", False):
        raise ModelError(
            f"this {name} model attends to later tokens (use_bidirectional_attention=True), which no slice has; "
            "set it to False in the config"
        )
    if any(each.get("rope_type") == "dynamic" for each in rotary_settings(config)):
        raise ModelError(
            f'this {name} model\'s rotary positions depend on the longest text it has seen (rope_type="dynamic"); '
            'train with "yarn", "linear" or "longrope", which don\'t'
        )
    if model.training:
        _check_noise(name, model)
        _check_balance(name, config)


def rope_by_length(config: Any) -> bool:
    """Return whether rotary positions depend on how long a document is in all (`rope_type="longrope"`)."""
    return any(each.get("rope_type") == "longrope" for each in rotary_settings(config))


def _check_noise(name: str, model: nn.Module) -> None:
    """Refuse dropout and jitter, which would differ between a slice's forward and its recomputation."""
    found = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            found.append(f"{path}.p={module.p:g}")
        for word, value in vars(module).items():
            noisy = "dropout" in word or "jitter" in word
            if noisy and isinstance(value, float) and value > 0:
                found.append(f"{path}.{word}={value:g}")
    if found:
        raise ModelError(
            f"this {name} model draws random numbers as it trains ({found[0]}; {len(found):,} such settings in all), "
            "and a slice computed again would draw others. Set its dropout and jitter to 0 in the config, or call "
            "model.eval(), in which it draws none"
        )


def _check_balance(name: str, config: Any) -> None:
    """Refuse a loss that balances experts over all tokens of a batch, which is no sum over slices."""
    weight = getattr(config, "router_aux_loss_coef", 0.0) or 0.0
    if getattr(config, "output_router_logits", False) and weight:
        raise ModelError(
            f"this {name} model adds a loss that balances its experts (output_router_logits=True, "
            f"router_aux_loss_coef={weight:g}), which is of all tokens of a batch together and isn't computed in "
            "slices; set output_router_logits=False in the config"
        )
