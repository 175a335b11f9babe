"""`check_ends`: whether a model's embedding and head are what their weights say, since steps compute both themselves.

A step multiplies by the head's weight and adds to the gradients of both ends where they stand, so that neither all
logits nor a gradient of the whole vocabulary is there at once. An adapter around them, or a hook on them, would be
passed by and never learn.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from varlen.counts import many
from varlen.errors import ModelError

_COPIES = "ModulesToSaveWrapper"
"""Of peft: trains a copy of a module, and has the copy's weight as its own."""


def check_ends(name: str, model: Any, embedding: Any, head: Any) -> None:
    """Refuse what a step would pass by: adapters and hooks at both ends, and what learns outside of the decoder.

    Args:
        name: of the family.
        model: a transformers model.
        embedding: of ids; without parameters where another stage holds it.
        head: that gives logits; likewise.

    Raises:
        ModelError: says what, and the way out.
    """
    for what, end, kind in (("embedding", embedding, nn.Embedding), ("head", head, nn.Linear)):
        if next(end.parameters(), None) is not None:
            _check_end(name, what, end, kind)
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


def _check_end(name: str, what: str, end: Any, kind: type[nn.Module]) -> None:
    """Refuse an end that computes something else than its weight says, or that has hooks.

    Raises:
        ModelError: says what, and the way out.
    """
    owner = end
    if type(end).__name__ == _COPIES:
        owner = next((m for m in end.modules() if m._parameters.get("weight") is end.weight), end)
    is_plain = isinstance(owner, kind) and owner._parameters.get("weight") is not None
    is_plain = is_plain and "forward" not in vars(owner)
    if what == "head" and is_plain:
        is_plain = type(owner).forward is kind.forward
    if not is_plain:
        raise ModelError(
            f"the {what} of this {name} model is a {type(owner).__module__}.{type(owner).__qualname__} that computes "
            f"more than its weight says, and slices compute the {what} by its weight; leave it out of an adapter's "
            'target_modules, and name it in "modules_to_save" if it is to learn'
        )
    hooks = len(getattr(owner.weight, "_backward_hooks", None) or ())
    if what == "head" and not isinstance(owner, FSDPModule):
        hooks += len(owner._forward_hooks) + len(owner._forward_pre_hooks)
    if hooks:
        raise ModelError(
            f"the {what} of this {name} model has {many(hooks, 'hook', 'hooks')} on what it gives or on its "
            "gradient, which slices, computing both by its weight, would pass by; remove what registered them"
        )
