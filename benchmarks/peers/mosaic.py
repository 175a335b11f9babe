"""MosaicML Streaming: documents in its own MDS shards, read by the workers of its loader, packed by a collator.

It reads samples and packs nothing. Two collators pack for it: llm-foundry's, and one of our own that is as plain
and as fast as a few lines of NumPy can be. `streaming.base` is imported without the package around it, which would
need torchvision for data sets of pictures.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal

import numpy as np

from benchmarks.peers import llm_foundry

NAME = "MosaicML Streaming"
Collator = Literal["llm-foundry", "own"]


def write(folder: str, tokens: np.ndarray, offsets: np.ndarray) -> None:
    """Write documents as MDS shards, without compression."""
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

    Args:
        folder: of MDS shards.
        capacity: tokens a row can hold.
        rows: of a batch.
        epochs: over the documents; None for no end.
        workers: processes of the loader; 0 for none.
        collator: which one packs.
        documents: handed to the collator at a time; it keeps those that don't fit into its rows.
    """
    base = _base()
    base.util.clean_stale_shared_memory()
    data = base.StreamingDataset(local=folder, batch_size=documents, shuffle=False)
    if collator == "own":
        collate: Any = RowsCollator(capacity, rows)
    else:
        collate = llm_foundry.collator(capacity, rows)
    options = {"prefetch_factor": 4, "persistent_workers": True} if workers else {}
    loader = base.StreamingDataLoader(
        data, batch_size=documents, num_workers=workers, collate_fn=collate, **options
    )
    done = 0
    while epochs is None or done < epochs:
        yield from loader
        done += 1


class RowsCollator:
    """Packs documents into rows, longest first, each into the first row that has room; the rest waits."""

    def __init__(self, capacity: int, rows: int) -> None:
        """Take the shape of a batch."""
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
    """Import `streaming.base` alone."""
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
