"""What fast-axolotl offers, with its names, arguments and outputs."""

from varlen.adapters.fast_axolotl.packing import (
    LeakWarning,
    PackedColumns,
    concatenate_and_pack,
    pack_sequences,
)
from varlen.adapters.fast_axolotl.reading import streaming_dataset_reader

__all__ = [
    "LeakWarning",
    "PackedColumns",
    "concatenate_and_pack",
    "pack_sequences",
    "streaming_dataset_reader",
]
