"""`DecoderParts`: a decoder taken apart at its layers, so that a stage runs some of them on rows.

The model stays as it is: its own modules are called with its own arguments, in the order of its own forward. Its
parts are found by looking at it, whatever its family; `probe` proves that they are all that it computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from varlen.attention.choice import KernelChoice, check_kernels
from varlen.attention.kernels import Kernels, on_device
from varlen.attention.rules import MASKLESS_KINDS, SINGLE_TOKENS, rotary_settings
from varlen.cost.memory import LOGIT_ROWS
from varlen.counts import many
from varlen.errors import ModelError
from varlen.model_families import FAMILIES, UNKNOWN, cache_name, names_in
from varlen.runtime.attention import register
from varlen.runtime.casting import uncast, ungraphed
from varlen.runtime.kv_cache import Slices
from varlen.runtime.main_grads import add_product, gradient, local

HEAD_ROWS = LOGIT_ROWS  # rows whose logits exist at once
EMBEDDING = -1  # number of the embedding among units
IGNORED = -100  # the label of a token with nothing to learn
_LEFT_KEYS = "shared_kv_states"  # argument of layers that leave keys and values for later ones, or read them


class Positions(NamedTuple):
    """Where the rows of a MicroPack stand in their documents."""

    ids: torch.Tensor  # int64 `[1, rows]`
    embeddings: Any  # rotary cosines and sines, by kind if layers differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """How tp ranks divide the rows of embedding and head: as `Shard(0)` does."""

    rank: int
    size: int  # ranks
    add: Callable[[torch.Tensor], None]  # replaces a tensor by its sum over the ranks
    most: Callable[[torch.Tensor], None]  # replaces a tensor by the elementwise maximum over the ranks

    def rows_of(self, ids: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of ids in this rank's part of a weight, and whether they are in it.

        Args:
            ids: int64 `[rows]`.
            weight: `[vocabulary, hidden]`: the whole one.
        """
        each = -(-len(weight) // self.size)
        first = min(self.rank * each, len(weight))
        stop = min(first + each, len(weight))
        return (ids - first).clamp(0, max(stop - first - 1, 0)), (ids >= first) & (ids < stop)


class Logits(NamedTuple):
    """What becomes of what the head gives, z: `factor * z`, then `cap * tanh(z / cap)`, then `z / temperature`."""

    factor: float = 1.0
    cap: float | None = None
    temperature: float = 1.0


AS_GIVEN = Logits()


class _Before:
    """Answers layers that ask a cache how many tokens came before their rows, and keeps nothing."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._before = ids[0] - torch.arange(ids.shape[1], device=ids.device)

    def get_seq_length(self, *_: Any) -> torch.Tensor:
        """Return what each row's number is short of its position, int64 `[rows]`."""
        return self._before

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as they are: the attention of slices keeps them."""
        return key, value


class Targets(NamedTuple):
    """What rows predict."""

    labels: torch.Tensor
    """int64 `[targets]`: token ids; -100 where there is nothing to learn."""
    rows: torch.Tensor | None = None
    """int64 `[targets]`, rising: the row of each; None where target t is that of row t."""
    offsets: npt.NDArray[np.int64] | None = None
    """int64 `[rows + 1]`, in host memory: the targets of each row; None as well."""

    def part(self, rows: slice) -> tuple[slice, Targets]:
        """Return which targets some rows have, and these."""
        if self.rows is None or self.offsets is None:
            return rows, Targets(self.labels[rows])
        last = min(rows.stop, len(self.offsets) - 1)
        mine = slice(int(self.offsets[rows.start]), int(self.offsets[last]))
        offsets = self.offsets[rows.start : last + 1] - mine.start
        return mine, Targets(self.labels[mine], self.rows[mine] - rows.start, offsets)


Weigh = Callable[[torch.Tensor, slice], torch.Tensor]
"""Returns the weights of targets' losses in the step's, given these losses, and which targets of the MicroPack."""


class _Softmax(NamedTuple):
    """The softmax of some rows over the vocabulary."""

    logits: torch.Tensor  # `[rows, vocabulary]`, as the head gave them, or `exps`
    exps: torch.Tensor  # `[rows, vocabulary]`: exp(z - max(z)), in float32 or wider
    totals: torch.Tensor  # `[rows]`: their sums
    slope: torch.Tensor | float  # of z by the logits
    losses: torch.Tensor  # `[targets]`: cross-entropy, 0 without a label


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
    vocabulary: Vocabulary | None = None
    """How tp ranks divide embedding and head; None where this process has them whole."""
    cache: str = ""
    """Argument of layers that ask a cache how many tokens came before, and take no positions for it (Llama 4)."""
    leaves_keys: bool = False
    """Whether layers want a dict in which some leave keys and values for later layers, of which slices run none."""

    @classmethod
    def of(cls, model: Any, kernels: Kernels = "auto") -> DecoderParts:
        """Take a model apart, and set its attention to that of slices."""
        check_kernels(kernels)
        check_wrappers(model)
        name = check_family(model)
        check_settings(name, model)
        parts = _parts_of(name, model, kernels)
        check_ends(name, model, parts.embedding, parts.head)
        set_attention(model, register())
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
    ) -> Any:
        """Return what the rotary module gives for positions: cosines and sines, each `[1, rows, dim]`, or one tensor.

        Where they depend on how long a text is, each slice shows the last position of its document too.
        """
        if not ends:
            return self.rotary(like, ids, *kind)
        made, row = [], 0
        for rows, length in ends:
            with_end = torch.cat([ids[:, row : row + rows], ids.new_full((1, 1), length - 1)], 1)
            made.append([x[:, :-1] for x in self.rotary(like, with_end, *kind)])
            row += rows
        return tuple(torch.cat(each, 1) for each in zip(*made))

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
        more: dict[str, Any] = {self.cache: _Before(positions.ids)} if self.cache else {}
        if self.leaves_keys:
            more[_LEFT_KEYS] = {}
        out = self.layers[layer](
            hidden,
            attention_mask=None,
            position_ids=positions.ids,
            position_embeddings=rotated[self.rotary_types[layer]] if self.rotary_types else rotated,
            use_cache=False,
            slices=slices,
            choice=self.kernels,
            **more,
        )
        return out if isinstance(out, torch.Tensor) else out[0]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return `[1, rows, hidden]` of int64 `[rows]`, apart from the graph; `embed_backward` is its backward."""
        with torch.no_grad():
            hidden = self._embedded(input_ids)[None] if self.vocabulary else self.embedding(input_ids[None])
        return hidden if self.embedding_factor == 1 else hidden * self.embedding_factor

    def _embedded(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return `[rows, hidden]` from an embedding that ranks divide."""
        assert self.vocabulary is not None
        weight = self.embedding.weight
        rows, is_here = self.vocabulary.rows_of(input_ids, weight)
        hidden = torch.where(is_here[:, None], local(weight)[rows], 0.0)
        self.vocabulary.add(hidden)
        scale = self._embed_scale(weight.dtype)
        return hidden if scale is None else hidden * scale

    def _embed_scale(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what Gemma's embedding multiplies what it looks up by."""
        scale = getattr(self.embedding, "embed_scale", None)
        return scale.to(dtype) if isinstance(scale, torch.Tensor) else None

    def embed_backward(self, input_ids: torch.Tensor, by_hidden: torch.Tensor) -> None:
        """Add to the embedding's gradient where its rows were used.

        Autograd would make, for every MicroPack, a gradient of the whole vocabulary.
        """
        weight, unused = self.embedding.weight, self.embedding.padding_idx
        if not weight.requires_grad:
            return
        total = local(gradient(weight))
        rows = by_hidden[0].to(total.dtype)
        rows = rows if self.embedding_factor == 1 else rows * self.embedding_factor
        if (scale := self._embed_scale(weight.dtype)) is not None:
            rows = rows * scale
        if unused is not None:
            rows = rows * (input_ids != unused)[:, None]
        if self.vocabulary is not None:
            input_ids, is_here = self.vocabulary.rows_of(input_ids, weight)
            rows = torch.where(is_here[:, None], rows, 0.0)
        total.index_add_(0, input_ids, rows)

    def head_backward(
        self, hidden: torch.Tensor, targets: Targets, weigh: Weigh
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run norm, head and loss forward and backward, some rows at a time, so that few logits are ever there.

        Args:
            hidden: `[1, rows, hidden]`, out of the last layer.
            targets: of these rows.
            weigh: gives the weight of each target's loss in that of the step; 0 where there is no label.

        Returns:
            The cross-entropy of each target, 0 without a label, and the gradient of `hidden`.
        """
        # The slope of a cap takes one buffer more.
        at_once = HEAD_ROWS if self.logits.cap is None else HEAD_ROWS // 2
        by_hidden = torch.empty_like(hidden)
        losses = hidden.new_zeros(
            targets.labels.shape, dtype=torch.promote_types(hidden.dtype, torch.float32)
        )
        for first in range(0, hidden.shape[1], at_once):
            rows = slice(first, first + at_once)
            mine, its = targets.part(rows)
            part = hidden[0, rows].detach().requires_grad_()
            with torch.enable_grad():
                normed = self.norm(part)
            with ungraphed(part):
                losses[mine], by_normed = self._loss_backward(normed.detach(), its, mine, weigh)
            with uncast(part):
                normed.backward(by_normed.to(normed.dtype))
            assert part.grad is not None
            by_hidden[0, rows] = part.grad
        return losses, by_hidden

    def head_losses(self, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Return the cross-entropy of each target, as `head_backward`; computes no gradient."""
        losses = hidden.new_zeros(
            targets.labels.shape, dtype=torch.promote_types(hidden.dtype, torch.float32)
        )
        with ungraphed(hidden):
            for first in range(0, hidden.shape[1], HEAD_ROWS):
                rows = slice(first, first + HEAD_ROWS)
                mine, its = targets.part(rows)
                losses[mine] = self._softmax(self._logits(self.norm(hidden[0, rows])), its).losses
        return losses

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        if self.head_is_plain:
            bias = self.head.bias
            return nn.functional.linear(
                normed, local(self.head.weight), None if bias is None else local(bias)
            )
        logits: torch.Tensor = self.head(normed)
        return logits

    def _softmax(self, logits: torch.Tensor, targets: Targets, *, has_slope: bool = False) -> _Softmax:
        """Run the softmax over the vocabulary, in one float32 buffer."""
        factor, cap, temperature = self.logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        slope: torch.Tensor | float = factor
        if factor != 1:
            wide *= factor
        if cap is not None:
            wide.div_(cap).tanh_()
            slope = wide.square().neg_().add_(1).mul_(factor) if has_slope else factor
            wide *= cap
        if temperature != 1:
            wide /= temperature
            slope = slope / temperature
        most = wide.amax(-1, keepdim=True)
        if self.vocabulary is not None:
            self.vocabulary.most(most)
        wide -= most
        at, is_here = self._at(targets.labels)
        at_target = wide.gather(1, at[:, None])[:, 0] if targets.rows is None else wide[targets.rows, at]
        total = wide.exp_().sum(-1)
        if self.vocabulary is not None and is_here is not None:
            sums = torch.cat([torch.where(is_here, at_target, 0.0), total])
            self.vocabulary.add(sums)
            at_target, total = sums[: len(at_target)], sums[len(at_target) :]
        of_rows = total.log() if targets.rows is None else total.log()[targets.rows]
        losses = (of_rows - at_target) * (targets.labels != IGNORED)
        return _Softmax(logits, wide, total, slope, losses)

    def _at(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return where labels are among the logits of this rank, int64 `[targets]`, and whether; None if all are."""
        known = labels.clamp_min(0)
        if self.vocabulary is None:
            return known, None
        return self.vocabulary.rows_of(known, self.head.weight)

    def _loss_backward(
        self, normed: torch.Tensor, targets: Targets, which: slice, weigh: Weigh
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a chunk's losses and the gradient of the head's input, and add to the head's own; without a graph.

        Logits become their softmax, and that their gradient, in one float32 buffer; in the weights' dtype it then
        takes the place of the logits: 6 bytes a logit in bfloat16, 4 in float32.
        """
        normed = normed if self.head_is_plain else normed.requires_grad_()
        with nullcontext() if self.head_is_plain else torch.enable_grad():
            graph = self._logits(normed)
        given = graph.detach() if self.head_is_plain else graph.detach().clone()  # it is overwritten
        logits, wide, total, slope, losses = self._softmax(given, targets, has_slope=True)
        weights = weigh(losses, which).to(wide.dtype)
        at, is_here = self._at(targets.labels)
        own = weights if is_here is None else weights * is_here
        if targets.rows is None:
            wide *= (weights / total)[:, None]
            wide.scatter_add_(1, at[:, None], -own[:, None])
        else:
            wide *= (torch.zeros_like(total).index_add_(0, targets.rows, weights) / total)[:, None]
            wide.index_put_((targets.rows, at), -own, accumulate=True)
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
            local(gradient(bias)).add_(by_logits.sum(0))
        by_normed = by_logits @ local(weight)
        if self.vocabulary is not None:
            self.vocabulary.add(by_normed)
        return losses, by_normed


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


def decoder_of(model: Any) -> Any:
    """Return the module with the layers that text runs through: of a vision model, its language model's."""
    decoder = model.get_decoder()
    while (inner := decoder.get_decoder() if hasattr(decoder, "get_decoder") else decoder) is not decoder:
        decoder = inner
    if isinstance(model, nn.Module) and not _has_layers(decoder):  # Llama 4's own answer is itself
        whole: Any = model
        config = whole.config.get_text_config()
        decoder = next(
            (m for m in model.modules() if _has_layers(m) and getattr(m, "config", None) is config), decoder
        )
    return decoder


def _has_layers(module: Any) -> bool:
    return any(isinstance(child, nn.ModuleList) for child in module.children())


def attention_of(model: Any) -> str:
    """Return the name of the attention that a model's text is run with."""
    return str(decoder_of(model).config._attn_implementation)


def set_attention(model: Any, name: str) -> None:
    """Run a model's text with another attention; vision towers keep theirs."""
    decoder_of(model).set_attn_implementation(name)


def check_model(model: Any, kernels: Kernels) -> None:
    """Refuse a model that isn't run in slices, by looking at it, and leave it as it is."""
    check_wrappers(model)
    check_family(model)
    before = attention_of(model)
    DecoderParts.of(model, kernels)
    set_attention(model, before)


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
    inside = {id(p) for part in (decoder_of(model), head) for p in part.parameters()}
    outside = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside:
        raise ModelError(
            f"{outside[0]} stands outside of this {name} model's decoder and head "
            f"({many(len(outside), 'parameter that learns does', 'parameters that learn do')}), and slices run these "
            "alone, so it would have no gradient; freeze it by requires_grad_(False) (a vision tower has nothing to "
            "learn from text), or train the model unsliced"
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


# What a model computes around its layers, found by looking at its modules, its config and the names in its code.
#
# Layers run as they are, whatever they do inside. A step needs to know how ids become the input of the first layer,
# which rotary positions each layer gets, and what happens to the head's output.


def check_family(model: Any) -> str:
    """Refuse a model whose layers are known to do what slices can't; return the name of its family."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    name = getattr(text, "model_type", None) or type(model).__name__
    family = FAMILIES.get(name, UNKNOWN)
    kinds = getattr(text, "layer_types", None) or ()
    foreign = [kind for kind in dict.fromkeys(kinds) if kind not in _ATTENDING]
    named = f" ({sum(kind in foreign for kind in kinds)} of kind {', '.join(foreign)})" if foreign else ""
    if foreign and not any(kind in MASKLESS_KINDS or "hybrid" in kind for kind in foreign):
        raise ModelError(
            f"slices don't run {name} models: some of their layers select or compress the tokens that they attend "
            f"to{named}, which the attention of slices doesn't compute; train them unsliced"
        )
    if family.is_recurrent or foreign or getattr(model, "_is_stateful", False):
        raise ModelError(
            f"slices don't run {name} models: some of their layers carry a state from token to token{named}, and a "
            'slice keeps keys and values alone; train them unsliced, or cut their documents with overlong="split"'
        )
    if family.has_own_attention:
        raise ModelError(
            f"slices don't run {name} models: their attention computes its own scores, or their layers don't pass "
            "their arguments to it, so no function of transformers' registry can take its place; train them unsliced"
        )
    if not hasattr(model, "get_decoder"):
        raise ModelError(
            f"slices don't run {name} models: they have no get_decoder, which models of transformers for causal "
            "language have; give such a model"
        )
    return str(name)


_ATTENDING = ("full_attention", "sliding_attention", "chunked_attention", *SINGLE_TOKENS)
_NORMS = ("norm", "final_norm", "final_layer_norm", "final_layernorm", "ln_f")
"""What decoders call the norm after their last layer."""


def _parts_of(name: str, model: Any, kernels: Kernels) -> DecoderParts:
    """Find a model's parts, and refuse what it has besides them."""
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(
            f"{type(model).__name__} has no language-model head; give a model for causal language"
        )
    decoder = decoder_of(model)
    config, embedding, children = (
        decoder.config,
        decoder.get_input_embeddings(),
        dict(decoder.named_children()),
    )
    layers: Sequence[nn.Module] = next(
        (tuple(m) for m in children.values() if isinstance(m, nn.ModuleList)), ()
    )
    norm = next((children[each] for each in _NORMS if each in children), None)
    rotary = next((m for each, m in children.items() if "rotary" in each), None)
    missing = [
        what for what, m in (("norm after its layers", norm), ("rotary positions", rotary)) if m is None
    ]
    if not layers or norm is None or rotary is None:
        raise ModelError(
            f"slices don't run {name} models: their {type(decoder).__name__} has no "
            f"{missing[0] if layers else 'list of layers'}, and slices run a decoder of an embedding, a list of "
            f"layers with rotary positions, and a norm; it has {', '.join(children)}; train it unsliced"
        )
    _check_rest(name, decoder, (embedding, *layers, norm, rotary))
    layers = layers[: config.num_hidden_layers]
    around = names_in(decoder, "forward")
    after = around | names_in(model, "forward")
    told = {
        field: value
        for field in ("embedding_multiplier", "logit_scale", "logits_scaling", "final_logit_softcapping")
        if field in after and isinstance(value := getattr(config, field, None), int | float)
    }
    by_type = "layer_type" in inspect.signature(type(rotary).forward).parameters
    kinds = tuple(getattr(config, "layer_types", None) or ())[: len(layers)]
    inside: dict[Any, nn.Module] = {type(module): module for layer in layers for module in layer.modules()}
    counts = any("get_seq_length" in names_in(module, "forward") for module in inside.values())
    return DecoderParts(
        embedding=embedding,
        layers=layers,
        rotary=rotary,
        norm=norm,
        head=head,
        head_is_plain=is_plain(head),
        kernels=KernelChoice(kernels),
        rotary_types=kinds if by_type else (),
        by_length=rope_by_length(config),
        embedding_factor=float(told["embedding_multiplier"])
        if "embedding_multiplier" in around & told.keys()
        else 1.0,
        logits=Logits(
            float(told.get("logit_scale", 1.0)) / float(told.get("logits_scaling", 1.0)),
            told.get("final_logit_softcapping"),
        ),
        cache=cache_name(layers[0]) if counts else "",
        # transformers 5.24's layers of Gemma 4 leave keys and values there even if no later layer reads them.
        leaves_keys=any(_LEFT_KEYS in inspect.signature(kind.forward).parameters for kind in inside),
    )


def _check_rest(name: str, decoder: Any, parts: Sequence[Any]) -> None:
    """Refuse a decoder that computes with more than its parts."""
    if getattr(decoder.config, "num_kv_shared_layers", 0):
        raise ModelError(
            f"the last {decoder.config.num_kv_shared_layers} layers of this {name} model attend to the keys and "
            "values of earlier layers (num_kv_shared_layers), and slices run each layer by itself; train it unsliced"
        )
    known = {id(p) for part in parts for p in part.parameters()}
    rest = [n for n, p in decoder.named_parameters() if id(p) not in known]
    if rest:
        raise ModelError(
            f"{rest[0]} of this {name} model ({many(len(rest), 'such parameter', 'such parameters')}) belongs to "
            "neither its embedding nor a layer nor the norm after them, and slices run these alone; train it unsliced"
        )


def check_settings(name: str, model: Any) -> None:
    """Refuse settings of a model under which slices would learn something else than the whole model does."""
    config = decoder_of(model).config
    if getattr(config, "use_bidirectional_attention", False) in (True, "all"):
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
