"""Megatron-Bridge and Megatron-LM: their packed files, batches, settings and schedules, in each release's dialect.

Names are loaded when first used: files and settings need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varlen.adapters.megatron.dialects import Dialect
    from varlen.adapters.megatron.files.indexed import PackedIndexed, PackedIndexedWriter
    from varlen.adapters.megatron.files.metadata import (
        PackCounts,
        combined_metadata,
        metadata_entry,
        metadata_path,
        read_metadata,
        write_metadata,
    )
    from varlen.adapters.megatron.files.npy import PackedNpy, read_packed_npy
    from varlen.adapters.megatron.files.opening import PackedWriter, convert, create_packed, open_packed
    from varlen.adapters.megatron.files.pairs import write_megatron
    from varlen.adapters.megatron.files.parquet import PackedParquet
    from varlen.adapters.megatron.files.parquet_writer import PackedParquetWriter, write_packed_parquet
    from varlen.adapters.megatron.files.paths import (
        is_packed_parquet_file,
        is_packed_parquet_spec,
        resolve_packed_parquet_paths,
    )
    from varlen.adapters.megatron.files.reader import PackedReader
    from varlen.adapters.megatron.loader import MegatronLoader, saved_state
    from varlen.adapters.megatron.providers import external_loaders, loader_batch_size
    from varlen.adapters.megatron.rows import PackedRows

_HOMES = {
    "Dialect": "varlen.adapters.megatron.dialects",
    "MegatronLoader": "varlen.adapters.megatron.loader",
    "PackCounts": "varlen.adapters.megatron.files.metadata",
    "PackedIndexed": "varlen.adapters.megatron.files.indexed",
    "PackedIndexedWriter": "varlen.adapters.megatron.files.indexed",
    "PackedNpy": "varlen.adapters.megatron.files.npy",
    "PackedParquet": "varlen.adapters.megatron.files.parquet",
    "PackedParquetWriter": "varlen.adapters.megatron.files.parquet_writer",
    "PackedReader": "varlen.adapters.megatron.files.reader",
    "PackedRows": "varlen.adapters.megatron.rows",
    "PackedWriter": "varlen.adapters.megatron.files.opening",
    "combined_metadata": "varlen.adapters.megatron.files.metadata",
    "convert": "varlen.adapters.megatron.files.opening",
    "create_packed": "varlen.adapters.megatron.files.opening",
    "external_loaders": "varlen.adapters.megatron.providers",
    "is_packed_parquet_file": "varlen.adapters.megatron.files.paths",
    "is_packed_parquet_spec": "varlen.adapters.megatron.files.paths",
    "loader_batch_size": "varlen.adapters.megatron.providers",
    "metadata_entry": "varlen.adapters.megatron.files.metadata",
    "metadata_path": "varlen.adapters.megatron.files.metadata",
    "open_packed": "varlen.adapters.megatron.files.opening",
    "read_metadata": "varlen.adapters.megatron.files.metadata",
    "read_packed_npy": "varlen.adapters.megatron.files.npy",
    "resolve_packed_parquet_paths": "varlen.adapters.megatron.files.paths",
    "saved_state": "varlen.adapters.megatron.loader",
    "write_megatron": "varlen.adapters.megatron.files.pairs",
    "write_metadata": "varlen.adapters.megatron.files.metadata",
    "write_packed_parquet": "varlen.adapters.megatron.files.parquet_writer",
}

__all__ = [
    "Dialect",
    "MegatronLoader",
    "PackCounts",
    "PackedIndexed",
    "PackedIndexedWriter",
    "PackedNpy",
    "PackedParquet",
    "PackedParquetWriter",
    "PackedReader",
    "PackedRows",
    "PackedWriter",
    "combined_metadata",
    "convert",
    "create_packed",
    "external_loaders",
    "is_packed_parquet_file",
    "is_packed_parquet_spec",
    "loader_batch_size",
    "metadata_entry",
    "metadata_path",
    "open_packed",
    "read_metadata",
    "read_packed_npy",
    "resolve_packed_parquet_paths",
    "saved_state",
    "write_megatron",
    "write_metadata",
    "write_packed_parquet",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use and keep it."""
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    import importlib

    from varlen.errors import MissingExtraError

    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch is not installed; `pip install 'varlen[train]'` installs it") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, whether loaded or not."""
    return sorted(__all__)
