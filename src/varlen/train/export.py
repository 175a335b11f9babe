"""The trained model as transformers saves it: a folder that `from_pretrained` reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from varlen.errors import VarlenError
from varlen.source.writing import sync
from varlen.train.ranks import Ranks


def export_model(model: Any, config: Any, folder: Path, ranks: Ranks) -> None:
    """Write a model to a folder, which appears whole; all ranks call it together.

    Args:
        model: bare, sharded or not.
        config: of the model.
        folder: what is in it is replaced.
        ranks: of the run.

    Raises:
        VarlenError: it can't be written, or another rank failed.
    """
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)
    fault: VarlenError | None = None
    if ranks.is_first:
        partial = folder.with_name(f".{folder.name}.part")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            with torch.device("meta"):
                bare: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
            hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call] # in the midst of what a run shows
            bare.save_pretrained(partial, state_dict=weights)
            for path in partial.iterdir():
                sync(path)
            shutil.rmtree(folder, ignore_errors=True)
            partial.replace(folder)
            sync(folder.parent)
        except OSError as error:
            fault = VarlenError(f"the trained model can't be written to {folder}: {error.strerror or error}")
    ranks.check_all(fault)
