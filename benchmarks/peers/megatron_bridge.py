"""Megatron-Bridge 0.3.1: its own files for packing, preparing and collating, read from the installed package.

Importing the package needs megatron-core, and through it a GPU's libraries. The four files that matter here need
little of all that: a flag that says whether files lie in an object store (they don't), a class that only names a
type, and this process's rank. Stand-ins for those, about ten lines, are lighter than megatron-core's wheel, which
would be installed for the same three names. Nothing of what is measured or compared is a stand-in: the files are
run unchanged.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

NAME = "Megatron-Bridge first_fit_shuffle"
ALGORITHM = "first_fit_shuffle"
"""The algorithm that the package itself uses, and the faster of its two."""
_PLACE = "megatron.bridge.data.datasets"
_PACKAGES = (
    "megatron",
    "megatron.core",
    "megatron.bridge",
    "megatron.bridge.data",
    "megatron.bridge.data.datasets",
    "megatron.bridge.training",
    "megatron.bridge.training.tokenizers",
    "megatron.bridge.utils",
)


def packer(lengths: np.ndarray, capacity: int) -> Callable[[], list[list[int]]]:
    """Return a call that packs a histogram of lengths; the packs that come out hold lengths, not numbers."""
    module = _execute("megatron_bridge_packing", "packing_utils")
    histogram = np.bincount(lengths, minlength=capacity + 1).tolist()

    def pack() -> list[list[int]]:
        packs, _ = module.create_packing_strategy(histogram, capacity, ALGORITHM)
        return packs

    return pack


class Numbers:
    """The tokenizer of the fixtures: a text is token ids in decimal, divided by spaces."""

    legacy = False

    def __init__(self, eos_id: int) -> None:
        self.eos_id = self.eod = self.pad_id = eos_id

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


@cache
def package() -> SimpleNamespace:
    """Return the modules `packing_utils`, `packed_sequence` and `sft` of the installed release.

    They keep each other; nothing stays behind in `sys.modules`, where transformers and accelerate look whether
    Megatron is installed.
    """
    with _stand_ins():
        loaded = {
            name: _execute(f"{_PLACE}.{name}", name)
            for name in ("packing_utils", "utils", "sft", "packed_sequence")
        }
    return SimpleNamespace(**loaded)


def with_first_fit(first_fit: Callable[[list[int], int], list[list[int]]]) -> ModuleType:
    """Return `packing_utils` anew, whose `first_fit` is replaced by one that gives the same packs sooner.

    0.3.1 looks through all packs for each document; later releases, which PyPI doesn't have, search a tree.
    """
    module = _execute("megatron_bridge_packing_sooner", "packing_utils")
    module.first_fit = first_fit
    return module


def dataset(
    path: str | Path,
    *,
    seq_length: int,
    eos_id: int,
    metadata_path: str | Path | None = None,
    **settings: Any,
) -> Any:
    """Return its `GPTSFTPackedDataset` of a `.npy` file."""
    return package().sft.GPTSFTPackedDataset(
        file_path=str(path),
        tokenizer=Numbers(eos_id),
        max_seq_length=seq_length,
        pack_metadata_file_path=None if metadata_path is None else str(metadata_path),
        prompt_template="{input} {output}",
        label_key="output",
        truncation_field="input",
        **settings,
    )


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Give the package's files what they import and don't use here, and take it away again."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
    flag = SimpleNamespace(is_enabled=lambda: False)
    made = {name: ModuleType(name) for name in _PACKAGES}
    for module in made.values():
        module.__path__ = []
    leaves = {
        "megatron.core.msc_utils": {"MultiStorageClientFeature": flag},
        "megatron.core.tokenizers": {"MegatronTokenizer": Numbers},
        "megatron.bridge.training.tokenizers.tokenizer": {"MegatronTokenizer": Numbers},
        "megatron.bridge.utils.common_utils": {"get_rank_safe": lambda: 0},
    }
    for name, attributes in leaves.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(attributes)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
            del sys.modules[name]
        sys.modules.update(before)


def _execute(name: str, file: str) -> ModuleType:
    """Run one file of the installed package, unchanged, as a module of this name."""
    path = f"{_PLACE.replace('.', '/')}/{file}.py"
    (entry,) = [entry for entry in metadata.files("megatron-bridge") or [] if str(entry) == path]
    spec = importlib.util.spec_from_file_location(name, entry.locate())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if name.startswith(_PLACE):  # what follows imports it by this name
        sys.modules[name] = module
    spec.loader.exec_module(module)
    logging.getLogger(module.__name__).setLevel(logging.WARNING)
    return module
