"""MosaicML Streaming: documents in its own MDS shards, read by the workers of its loader, packed by a collator.

It reads samples and packs nothing. Two collators pack for it: llm-foundry's, and one of our own that is as plain
and as fast as a few lines of NumPy can be. `streaming.base` is imported without the package around it, which would
need torchvision for data sets of pictures. llm-foundry's package would need composer and streaming, of which its
packer uses a module of helpers for several machines: that one file is loaded from the installed package, unchanged,
with a stand-in for what it doesn't call.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from types import ModuleType
from typing import Any, Literal

import numpy as np

FOUNDRY = "llm-foundry BinPackCollator"
_FILE = "llmfoundry/data/packing.py"
_IGNORED = -100


def foundry_packer(arrays: list[np.ndarray], capacity: int, rows: int) -> Callable[[], dict[str, Any]]:
    """Return a call that packs a padded batch of documents into rows; what is left over waits for the next batch."""
    import torch

    module = _foundry()
    ids, mask, labels = _padded(arrays, torch.int64)

    def pack() -> dict[str, Any]:
        collator = module.BinPackCollator(None, rows, capacity, 0, "right")
        batch = {"input_ids": ids.clone(), "labels": labels.clone(), "attention_mask": mask}
        return {**collator.pack(batch), "efficiency": collator.efficiency, "waste": collator.waste}

    return pack


def foundry_collator(capacity: int, rows: int) -> Callable[[list[dict[str, np.ndarray]]], dict[str, Any]]:
    """Return the packing collator for lists of documents, padded for it; what is left over waits for the next batch.

    `sequence_id` tells it, and whoever takes its batches, which document a token belongs to.
    """

    def pad(samples: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        import torch

        ids, mask, labels = _padded([sample["input_ids"] for sample in samples], torch.int32)
        labels[:, 0] = _IGNORED
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}

    packing = _foundry().BinPackCollator(pad, rows, capacity, 0, "right")
    return packing  # type: ignore[no-any-return]


def _padded(arrays: list[np.ndarray], dtype: Any) -> tuple[Any, Any, Any]:
    """Pad documents to the longest, as the collator wants them: ids, mask and labels."""
    import torch

    ids = torch.zeros((len(arrays), max(map(len, arrays))), dtype=dtype)
    mask = torch.zeros_like(ids)
    for row, array in enumerate(arrays):
        ids[row, : len(array)] = torch.from_numpy(array)
        mask[row, : len(array)] = 1
    return ids, mask, ids.masked_fill(mask == 0, _IGNORED)


def _foundry() -> ModuleType:
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


NAME = "MosaicML Streaming"
Collator = Literal["llm-foundry", "own"]


def write(folder: str, tokens: np.ndarray, offsets: np.ndarray) -> None:
    base = _base()
    with base.MDSWriter(out=folder, columns={"input_ids": "ndarray:int32"}) as out:
        for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
            out.write({"input_ids": tokens[start:stop]})


def batches(
    folder: str,
    capacity: int,
    rows: int,
    epochs: int | None,
    *,
    workers: int,
    collator: Collator,
    documents: int,
) -> Iterator[dict[str, Any]]:
    """Yield batches of packed rows of tensors.

    So many `documents` are handed to the collator at a time; it keeps those that don't fit. `epochs=None` never
    ends.
    """
    base = _base()
    base.util.clean_stale_shared_memory()
    data = base.StreamingDataset(local=folder, batch_size=documents, shuffle=False)
    if collator == "own":
        collate: Any = RowsCollator(capacity, rows)
    else:
        collate = foundry_collator(capacity, rows)
    options = {"prefetch_factor": 4, "persistent_workers": True} if workers else {}
    loader = base.StreamingDataLoader(
        data, batch_size=documents, num_workers=workers, collate_fn=collate, **options
    )
    for _ in itertools.count() if epochs is None else range(epochs):
        yield from loader


class RowsCollator:
    """Packs documents into rows, longest first, each into the first row that has room; the rest waits."""

    def __init__(self, capacity: int, rows: int) -> None:
        self._capacity, self._rows = capacity, rows
        self._left: list[np.ndarray] = []

    def __call__(self, samples: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        """Return int32 tensors `[rows, capacity]`; segments and positions as grain has them."""
        import torch

        documents = sorted([*self._left, *(sample["input_ids"] for sample in samples)], key=len, reverse=True)
        ids = np.zeros((self._rows, self._capacity), np.int32)
        labels = np.full_like(ids, -100)
        segments, positions = np.zeros_like(ids), np.zeros_like(ids)
        filled, counts, self._left = [0] * self._rows, [0] * self._rows, []
        steps = np.arange(self._capacity, dtype=np.int32)
        for document in documents:
            size = len(document)
            row = next((row for row, at in enumerate(filled) if at + size <= self._capacity), -1)
            if row < 0:
                self._left.append(document)
                continue
            counts[row] += 1
            at = filled[row]
            filled[row] = stop = at + size
            ids[row, at:stop] = document
            labels[row, at + 1 : stop] = document[1:]
            segments[row, at:stop] = counts[row]
            positions[row, at:stop] = steps[:size]
        arrays = {"input_ids": ids, "labels": labels, "segment_ids": segments, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _base() -> Any:
    spec = importlib.util.find_spec("streaming")
    if spec is None:
        raise ImportError("mosaicml-streaming isn't installed")
    if "streaming" not in sys.modules:
        package = ModuleType("streaming")
        package.__path__ = list(spec.submodule_search_locations or [])
        package.__spec__ = spec
        sys.modules["streaming"] = package
    import streaming.base
    import streaming.base.util

    return streaming.base
