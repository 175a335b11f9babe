"""Low-rank adapters by peft: added to a model, trained alone, and saved by themselves or merged into its weights."""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from varlen.errors import SettingError
from varlen.missing import installation
from varlen.train.settings import AdapterSettings, TrainSettings

_NAME = "default"
"""Of the adapter, within peft's layers."""
_ENDS = {"lm_head", "embed_tokens", "embed_out", "wte", "embed_in"}
"""What families call their embedding and their output head."""
_ADDED = "base_model.model."
"""What peft puts before names in its files."""


def check_adapter(settings: TrainSettings, config: Any) -> None:
    """Refuse an adapter that couldn't be exported."""
    adapter = settings.adapter
    if adapter is None:
        return
    if settings.model.type is not None and adapter.export == "adapter":
        raise SettingError(
            "[adapter] of random weights (model.type) would be exported without the weights that it belongs to; set "
            'adapter.export = "merged", or name a model as model.path'
        )
    ends = [name for name in adapter.targets if name.rpartition(".")[2] in _ENDS]
    if ends and getattr(config, "tie_word_embeddings", False):
        raise SettingError(
            f"adapter.targets names {ends[0]!r}, whose weight is that of the model's other end too "
            "(tie_word_embeddings), so an adapter of one end would change both when it is merged; leave it out"
        )


def add_adapter(model: Any, settings: AdapterSettings) -> None:
    """Add an adapter to a model, in place; all other parameters are frozen."""
    if importlib.util.find_spec("peft") is None:
        raise SettingError(
            f"[adapter] needs peft, which isn't installed; install it ({installation('peft')}), or leave the table "
            "out"
        )
    from peft import inject_adapter_in_model

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    targets = targets_of(model, settings)
    try:
        inject_adapter_in_model(_config(settings, targets), model, adapter_name=_NAME)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise SettingError(f"peft refuses the adapter: {reason}; change adapter.targets") from None


def targets_of(model: Any, settings: AdapterSettings) -> list[str]:
    """Return the names of the layers that get an adapter; by default all linear ones but the output head.

    Args:
        model: without an adapter; may be on "meta".
        settings: of the adapter.
    """
    head = model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    if not settings.targets:
        return sorted({name.rpartition(".")[2] for name in linear})
    ends = {name.rpartition(".")[2] for name, _ in model.named_modules() if name}
    for target in settings.targets:
        if not any(name == target or name.endswith(f".{target}") for name, _ in model.named_modules()):
            near = difflib.get_close_matches(target, sorted(ends), n=1, cutoff=0.0)
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise SettingError(
                f"adapter.targets names {target!r}, which no layer of this model is called; the nearest is "
                f"{near[0]!r} (its linear layers: {known})"
            )
    return list(settings.targets)


def _config(settings: AdapterSettings, targets: list[str]) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type] # any number
        lora_dropout=settings.dropout,
        target_modules=targets,
        use_dora=settings.method == "dora",
        bias="none",
        task_type="CAUSAL_LM",
    )


def backward_share(model: Any) -> float:
    """Return the share of a model's layers that are passed backward: those from the lowest adapted one on."""
    found = [re.search(r"\.(\d+)\.", name) for name, p in model.named_parameters() if p.requires_grad]
    lowest = min((int(match[1]) if match else 0 for match in found), default=0)
    return 1.0 - lowest / int(model.config.get_text_config().num_hidden_layers)


def stored_width(model: Any) -> int:
    """Return the numbers that an adapter stores of each row for its own gradients, in all layers together.

    LoRA stores what its first matrix gives; DoRA also what the layer and the second matrix give.
    """
    width = 0
    for module in model.modules():
        if first := getattr(module, "lora_A", None):
            is_scaled = bool(getattr(module, "lora_magnitude_vector", None))
            rank, outputs = first[_NAME].weight.shape[0], module.lora_B[_NAME].weight.shape[0]
            width += rank + 2 * outputs * is_scaled
    return width


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter is one of an adapter's."""
    return f".{_NAME}." in f"{name}." and ".lora_" in name


def merged_weights(
    model: Any, adapter: Mapping[str, torch.Tensor], tied: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Return the weights of a model with an adapter in them, by the names that they have without one.

    Args:
        model: with its own weights and an adapter's layers, on the CPU; it is changed.
        adapter: the adapter's weights.
        tied: other names of tied weights, which are left out.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    model.load_state_dict(dict(adapter), strict=False)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
    plain = {
        name.replace(".base_layer.", "."): weight
        for name, weight in model.state_dict().items()
        if not is_of_adapter(name)
    }
    return {name: weight for name, weight in plain.items() if name not in tied}


def write_adapter(
    folder: Path,
    settings: AdapterSettings,
    targets: list[str],
    adapter: Mapping[str, torch.Tensor],
    base: str | None,
) -> None:
    """Write an adapter as peft does, so that peft and transformers load it onto the model that it was made for.

    Args:
        folder: that is there.
        settings: of the adapter.
        targets: as `targets_of` returns them.
        adapter: the adapter's weights, by the model's names.
        base: folder or name of the model.
    """
    config = _config(settings, targets)
    config.base_model_name_or_path, config.inference_mode = base, True
    found = {key: sorted(each) if isinstance(each, set) else each for key, each in config.to_dict().items()}
    (folder / "adapter_config.json").write_text(json.dumps(found, indent=1, sort_keys=True), encoding="utf-8")
    weights = {
        f"{_ADDED}{name.replace(f'.{_NAME}', '')}": each.contiguous() for name, each in adapter.items()
    }
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
