"""llm-foundry's packing collator, read from its own file inside the installed package.

Importing the package itself needs composer and streaming, of which the packer uses a module of helpers for several
machines. So that one file is loaded from the installed package, unchanged, with a stand-in for what it doesn't call.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

import numpy as np

NAME = "llm-foundry BinPackCollator"
_FILE = "llmfoundry/data/packing.py"
_IGNORED = -100


def packer(arrays: list[np.ndarray], capacity: int, rows: int) -> Callable[[], dict[str, Any]]:
    """Return a call that packs one padded batch of documents into rows; what is left over waits for the next batch.

    Args:
        arrays: token ids of each document.
        capacity: tokens a row can hold.
        rows: that come out.
    """
    import torch

    module = _module()
    width = max(map(len, arrays))
    ids = torch.zeros((len(arrays), width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, array in enumerate(arrays):
        ids[row, : len(array)] = torch.from_numpy(array.astype(np.int64))
        mask[row, : len(array)] = 1
    labels = ids.masked_fill(mask == 0, _IGNORED)

    def pack() -> dict[str, Any]:
        collator = module.BinPackCollator(None, rows, capacity, 0, "right")
        batch = {"input_ids": ids.clone(), "labels": labels.clone(), "attention_mask": mask}
        return {**collator.pack(batch), "efficiency": collator.efficiency, "waste": collator.waste}

    return pack


def collator(capacity: int, rows: int) -> Callable[[list[dict[str, np.ndarray]]], dict[str, Any]]:
    """Return the packing collator for lists of documents, padded for it; what is left over waits for the next batch.

    `sequence_id` tells it, and whoever takes its batches, which document a token belongs to.

    Args:
        capacity: tokens a row can hold.
        rows: that come out.
    """
    packing = _module().BinPackCollator(_padded, rows, capacity, 0, "right")
    return packing  # type: ignore[no-any-return]


def _padded(samples: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Pad documents to the longest, as the collator wants them."""
    import torch

    arrays = [sample["input_ids"] for sample in samples]
    ids = torch.zeros((len(arrays), max(map(len, arrays))), dtype=torch.int32)
    mask = torch.zeros_like(ids)
    for row, array in enumerate(arrays):
        ids[row, : len(array)] = torch.from_numpy(array)
        mask[row, : len(array)] = 1
    labels = ids.masked_fill(mask == 0, _IGNORED)
    labels[:, 0] = _IGNORED
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _module() -> ModuleType:
    """Load the file that packs from the installed package."""
    (entry,) = [file for file in metadata.files("llm-foundry") or [] if str(file) == _FILE]
    for name in ("composer", "composer.utils", "llmfoundry", "llmfoundry.utils", "llmfoundry.utils.consts"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["composer.utils"].dist = None  # type: ignore[attr-defined]
    sys.modules["llmfoundry.utils.consts"].CROSS_ENTROPY_IGNORE_INDEX = _IGNORED  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("llm_foundry_packing", entry.locate())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
