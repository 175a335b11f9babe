"""Megatron-Bridge's packing functions, read from their own file inside the installed package.

Importing the package itself needs megatron-core and through it CUDA; the module that packs needs NumPy and
tqdm alone. So that one file is loaded from the installed package, unchanged.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from importlib import metadata
from types import ModuleType

import numpy as np

NAME = "Megatron-Bridge first_fit_shuffle"
ALGORITHM = "first_fit_shuffle"
"""The algorithm that the package itself uses, and the faster of its two."""
_FILE = "megatron/bridge/data/datasets/packing_utils.py"


def packer(lengths: np.ndarray, capacity: int) -> Callable[[], list[list[int]]]:
    """Return a call that packs a histogram of lengths; the packs that come out hold lengths, not numbers."""
    module = _module()
    histogram = np.bincount(lengths, minlength=capacity + 1).tolist()

    def pack() -> list[list[int]]:
        packs, _ = module.create_packing_strategy(histogram, capacity, ALGORITHM)
        return packs

    return pack


def _module() -> ModuleType:
    """Load the file that packs from the installed package."""
    (entry,) = [file for file in metadata.files("megatron-bridge") or [] if str(file) == _FILE]
    spec = importlib.util.spec_from_file_location("megatron_bridge_packing", entry.locate())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    logging.getLogger(module.__name__).setLevel(logging.WARNING)
    return module
