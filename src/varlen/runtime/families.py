"""The families of transformers models that run in slices: what each does around its layers, and who is refused, why.

Inside its layers a family does what it likes, its own modules run; what a step needs to know is how ids become what
goes into the first layer, which rotary positions a layer is told, and what is done to what the head gives.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from varlen.errors import ModelError
from varlen.model_families import FAMILIES, Sliced, family_named

SLICED = {name: row.sliced for name, row in FAMILIES.items() if row.sliced is not None}
"""Families that run in slices; each is tested against its uncut model."""


def family_of(model: Any) -> tuple[str, Sliced]:
    """Return what a model's family does around its layers, and its name."""
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if name in SLICED:
        return name, SLICED[name]
    family = family_named(name)
    if family.is_recurrent:
        raise ModelError(
            f"slices don't run {name} models: some of their layers hand a state on from token to token, and a slice "
            'keeps keys and values alone; train them unsliced, or cut their documents with overlong="split"'
        )
    if family.has_own_attention:
        raise ModelError(
            f"slices don't run {name} models: their attention computes its own scores, or their layers don't hand it "
            "what they are told, so no function of transformers' registry can take its place; train them unsliced"
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
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    if "dynamic" in kinds:
        raise ModelError(
            f'this {name} model\'s rotary positions depend on the longest text it has seen (rope_type="dynamic"); '
            'train with "yarn", "linear" or "longrope", which don\'t'
        )
    if model.training:
        _check_noise(name, model)
        _check_balance(name, config)


def rope_by_length(config: Any) -> bool:
    """Return whether rotary positions depend on how long a document is in all (`rope_type="longrope"`)."""
    rope = getattr(config, "rope_parameters", None) or {}
    return any(
        each.get("rope_type") == "longrope" for each in (rope, *rope.values()) if isinstance(each, dict)
    )


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
    """Refuse a loss that balances experts: it is of all tokens of a batch together, and no sum over slices."""
    weight = getattr(config, "router_aux_loss_coef", 0.0) or 0.0
    if getattr(config, "output_router_logits", False) and weight:
        raise ModelError(
            f"this {name} model adds a loss that balances its experts (output_router_logits=True, "
            f"router_aux_loss_coef={weight:g}), which is of all tokens of a batch together and isn't computed in "
            "slices; set output_router_logits=False in the config"
        )
