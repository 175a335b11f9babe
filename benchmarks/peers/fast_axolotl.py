"""fast-axolotl's packing functions and its reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PACK = "fast-axolotl pack_sequences"
CONCATENATE = "fast-axolotl concatenate_and_pack"
READ = "fast-axolotl streaming_dataset_reader"


def packer(sequences: list, capacity: int, pad: int, eos: int) -> Callable[[], Any]:
    """Return a call that packs sequences, each followed by EOS and padding, as its release 0.2.0 does."""
    from fast_axolotl import pack_sequences

    return lambda: pack_sequences(sequences, capacity, pad, eos)


def concatenator(ids: list, labels: list, masks: list, capacity: int) -> Callable[[], Any]:
    """Return a call that packs sequences with their labels and masks."""
    from fast_axolotl import concatenate_and_pack

    return lambda: concatenate_and_pack(ids, labels, masks, capacity, 0)


def reader(path: str, kind: str, batch_size: int) -> Callable[[], int]:
    """Return a call that reads a file to its end and counts the rows."""
    from fast_axolotl import streaming_dataset_reader

    def read() -> int:
        return sum(len(batch["input_ids"]) for batch in streaming_dataset_reader(path, kind, batch_size, 1))

    return read
