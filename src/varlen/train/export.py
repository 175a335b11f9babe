"""The trained model as transformers saves it: a folder that `from_pretrained` reads."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from varlen.errors import VarlenError
from varlen.source.writing import sync
from varlen.train.ranks import Ranks


def whole_weights(model: Any, tied: Mapping[str, str]) -> Mapping[str, torch.Tensor]:
    """Return a model's weights on the first rank, each once; all ranks call it together.

    Args:
        model: bare, sharded or not, and no stage.
        tied: other names of tied weights, which whole shards have too.
    """
    every: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return {name: weight for name, weight in every.items() if name not in tied}


def export_model(
    weights: Mapping[str, torch.Tensor],
    config: Any,
    folder: Path,
    ranks: Ranks,
    *,
    dtype: torch.dtype = torch.float32,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write a model to a folder, which appears whole; all ranks call it together.

    Args:
        weights: of the model by name; those of the first rank are written.
        config: of the model.
        folder: what is in it is replaced.
        ranks: of the run.
        dtype: that it is saved in; weights that the model keeps in float32 stay so.
        beside: writes what else belongs into the folder, such as the tokenizer.

    Raises:
        VarlenError: it can't be written, or another rank failed.
    """
    fault: VarlenError | None = None
    if ranks.is_first:
        partial = folder.with_name(f".{folder.name}.part")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            with torch.device("meta"):
                bare: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
            hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call] # in the midst of what a run shows
            bare.save_pretrained(partial, state_dict=_as_saved(weights, bare, dtype))
            if beside is not None:
                beside(partial)
            for path in sorted(partial.rglob("*")):
                sync(path)
            shutil.rmtree(folder, ignore_errors=True)
            partial.replace(folder)
            sync(folder.parent)
        except VarlenError as error:
            fault = error
        except OSError as error:
            fault = VarlenError(f"the trained model can't be written to {folder}: {error.strerror or error}")
    ranks.check_all(fault)


def _as_saved(weights: Mapping[str, torch.Tensor], model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return weights in a dtype, but for whole numbers and what the model keeps in float32."""
    kept = [
        part
        for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for part in getattr(model, name, None) or ()
    ]
    return {
        name: weight
        if not weight.is_floating_point() or any(f".{part}." in f".{name}." for part in kept)
        else weight.to(dtype)
        for name, weight in weights.items()
    }
