"""What of a torchtitan configuration would train something else than the packs say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from varlen.adapters.torchtitan.loader import PackedDataLoader
from varlen.errors import SettingError

_MASKED = ("FlexAttention", "VarlenAttention")
"""Attention of torchtitan (0.3.0) that gets a mask made from positions; what it has beside them sees whole rows."""


def check_trainer(config: Any) -> None:
    """Refuse a `Trainer.Config` of torchtitan under which documents would leak, or steps be others than the loader's.

    Args:
        config: of torchtitan 0.3.0, or any object with `dataloader`, `training` and perhaps `model_spec`.

    Raises:
        SettingError: says which setting, and what it has to be.
    """
    loader, training = config.dataloader, config.training
    if not isinstance(loader, PackedDataLoader.Config):
        raise SettingError(
            f"dataloader is a {type(loader).__qualname__}; set it to PackedDataLoader.Config(source=...)"
        )
    if loader.global_batch_size != training.global_batch_size:
        ours, theirs = (
            "one batch of each rank (-1)" if size < 0 else f"{size:,} packs"
            for size in (loader.global_batch_size, training.global_batch_size)
        )
        raise SettingError(
            f"a step of the loader is {ours}, and one of the trainer {theirs}; set dataloader.global_batch_size to "
            f"{training.global_batch_size}, which is training.global_batch_size"
        )
    model = getattr(getattr(config, "model_spec", None), "model", None)
    for number, layer in _layers(model):
        inner = getattr(getattr(layer, "attention", None), "inner_attention", None)
        kind = type(inner).__qualname__.partition(".")[0]
        if inner is not None and kind not in _MASKED:
            raise SettingError(
                f"layer {number} of the model attends by {kind}, which gets no mask: its documents would see each "
                'other; make the model with attn_backend="flex" or "varlen"'
            )


def _layers(model: Any) -> list[tuple[Any, Any]]:
    """Return the layers of a model's configuration with their numbers or names."""
    layers = getattr(model, "layers", None) or ()
    return list(layers.items()) if isinstance(layers, Mapping) else list(enumerate(layers))
