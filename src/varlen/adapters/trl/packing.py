"""TRL's `pack_dataset`, with its arguments and outputs, planned over the whole set by varlen's packer."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from varlen.adapters.peers import raises_too
from varlen.adapters.trl.columns import (
    METHODS,
    SEQ_LENGTHS,
    Rows,
    Strategy,
    in_trl_order,
    lengths_of,
    packed,
    schema_with_lengths,
    warn_of_truncation,
)
from varlen.arguments import as_choice, as_count
from varlen.errors import DocumentsError, MissingExtraError, SettingError
from varlen.pack.api import pack
from varlen.types import IntArray

_MAP_SETTINGS = (
    "num_proc",
    "batch_size",
    "writer_batch_size",
    "keep_in_memory",
    "load_from_cache_file",
    "cache_file_name",
    "cache_file_names",
    "new_fingerprint",
    "suffix_template",
    "disable_nullable",
    "desc",
)
_TOKENS_AT_A_TIME = 2**22  # tokens written at a time: 32 MB of int64, whatever the set's size


@raises_too(AssertionError, TypeError)
def pack_dataset(
    dataset: Any, seq_length: int, strategy: Strategy = "bfd", map_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Pack the rows of a data set into rows of up to `seq_length` tokens.

    A Dataset is packed as a whole, by its lengths, so the rows don't depend on `num_proc` or `batch_size`; each set
    of a DatasetDict is packed separately. Rows and their order are the same as TRL's if TRL gets the whole set as
    one batch. An IterableDataset is packed in windows of `batch_size` documents, and documents that don't fill a row
    are carried over to the next window.

    Args:
        dataset: a Dataset, an IterableDataset, or a dictionary of either; every column has one list per row.
        seq_length: maximum tokens of a row.
        strategy: "bfd" truncates longer documents and logs the number of lost tokens; "bfd_split" (formerly
            "bfd-requeue") splits them; "wrapped" concatenates documents and cuts anywhere.
        map_kwargs: how rows are written, as for `Dataset.map`: num_proc, keep_in_memory, load_from_cache_file,
            cache_file_name(s), writer_batch_size, new_fingerprint, desc and the like; `batch_size` for streams.

    Returns:
        The packed data set, of the same type: its columns in their types and format and, except for "wrapped",
        `seq_lengths`, the lengths of each row's documents.

    Raises:
        DocumentsError: not a data set, or columns without lists or with lists of different lengths.
        SettingError: a setting is out of range, or is one of `map` that packing doesn't support.
        MissingExtraError: the library `datasets` isn't installed.

    >>> from datasets import Dataset
    >>> rows = Dataset.from_dict({"input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]})
    >>> pack_dataset(rows, seq_length=4, strategy="bfd_split")[:]
    {'input_ids': [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]], 'seq_lengths': [[4], [3, 1], [2, 1]]}
    """
    as_choice(strategy, "strategy", get_args(Strategy))
    capacity = as_count(seq_length, "seq_length")
    settings = dict(map_kwargs or {})
    try:
        from datasets import Dataset, IterableDataset
    except ImportError:
        raise MissingExtraError("pack_dataset packs data sets of datasets: `pip install datasets`") from None
    if strategy == "bfd-requeue":
        warnings.warn('"bfd-requeue" is now called "bfd_split"', FutureWarning, stacklevel=2)
    if isinstance(dataset, dict):
        files = settings.pop("cache_file_names", None) or {}
        return type(dataset)(
            {
                name: _packed_set(part, capacity, strategy, _named(settings, files.get(name)))
                for name, part in dataset.items()
            }
        )
    if not isinstance(dataset, Dataset | IterableDataset):
        raise DocumentsError(
            f"a Dataset, an IterableDataset or a dictionary of either can be packed, got {type(dataset).__name__}; "
            "make one with datasets.Dataset.from_dict, or pack lists with vl.pack"
        )
    return _packed_set(dataset, capacity, strategy, settings)


def _named(settings: dict[str, Any], file: str | None) -> dict[str, Any]:
    """Return the settings of one of several sets, with its own cache file."""
    return settings if file is None else {**settings, "cache_file_name": file}


def _packed_set(dataset: Any, capacity: int, strategy: Strategy, settings: dict[str, Any]) -> Any:
    from datasets import Dataset

    known = _MAP_SETTINGS if isinstance(dataset, Dataset) else ("batch_size",)
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise SettingError(
            f"map_kwargs has {unknown[0]!r}, which packing a {type(dataset).__name__} doesn't use ({len(unknown):,} "
            f"of {len(settings):,} settings); pass only {', '.join(known)}"
        )
    if isinstance(dataset, Dataset):
        return _packed_dataset(dataset, capacity, strategy, settings)
    from varlen.adapters.trl.streaming import packed_stream

    return packed_stream(dataset, capacity, strategy, settings.get("batch_size", 1000))


def _packed_dataset(dataset: Any, capacity: int, strategy: Strategy, settings: dict[str, Any]) -> Any:
    """Pack a stored set, and keep its format."""
    from datasets import Dataset, DatasetInfo, Features

    method, overlong = METHODS[strategy]
    batches, schema, rows = _stored(dataset)
    plan = pack(lengths_of(batches, schema)[rows], capacity, method, overlong)
    warn_of_truncation(plan.ledger, capacity)
    with_lengths = strategy != "wrapped"
    features = dict(dataset.features)
    if with_lengths:
        features[SEQ_LENGTHS] = Features.from_arrow_schema(schema_with_lengths(schema))[SEQ_LENGTHS]
    info = DatasetInfo(description=dataset.info.description, features=None)
    numbers = Dataset.from_dict({"row": np.arange(plan.num_packs)}, info=info, split=dataset.split)
    if plan.num_packs:
        function = functools.partial(
            _written, dataset=dataset, rows=in_trl_order(plan), with_lengths=with_lengths
        )
        made = numbers.with_format("arrow").map(
            function,
            batched=True,
            features=Features(features),
            **{
                **_where(dataset, capacity, strategy, settings),
                "batch_size": max(_TOKENS_AT_A_TIME // capacity, 1),
            },
        )
    else:
        empty = Features(features).arrow_schema.empty_table()
        made = Dataset(empty, info=DatasetInfo(description=info.description), split=dataset.split)
    format = dict(dataset.format)
    format.update(format.pop("format_kwargs", {}))
    if with_lengths:
        format["columns"] = [*format["columns"], SEQ_LENGTHS]
    return made.with_format(**format)


def _stored(dataset: Any) -> tuple[list[pa.RecordBatch], pa.Schema, IntArray]:
    """Return the stored columns, their schema, and the stored row of each row of the set."""
    indices = getattr(dataset, "_indices", None)  # set by `shuffle`, `sort` and `select`
    rows = (
        np.arange(len(dataset))
        if indices is None
        else indices.column(0).to_numpy(zero_copy_only=False).astype(np.int64)
    )
    table = dataset.data
    return table.to_batches(), table.schema.remove_metadata(), rows


def _written(numbers: pa.Table, *, dataset: Any, rows: Rows, with_lengths: bool) -> pa.Table:
    """Return rows of the packed set by number."""
    wanted = numbers["row"].to_numpy()
    batches, schema, stored_rows = _stored(dataset)
    part = rows.part(wanted[0], wanted[-1] + 1)
    return packed(batches, stored_rows, part, schema, with_lengths=with_lengths)


def _where(dataset: Any, capacity: int, strategy: Strategy, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `map`: rows are written beside the set's files, under a fingerprint of all settings."""
    import datasets
    from datasets.fingerprint import Hasher

    from varlen import __version__

    mark = getattr(dataset, "_fingerprint", None)
    made_of = (mark, "pack_dataset", capacity, METHODS[strategy], __version__)
    chosen = {"desc": "Packing", "new_fingerprint": Hasher.hash(made_of), **settings}
    if dataset.cache_files and datasets.is_caching_enabled() and not chosen.get("keep_in_memory"):
        folder = os.path.dirname(dataset.cache_files[0]["filename"])  # noqa: PTH120
        chosen.setdefault("cache_file_name", f"{folder}/cache-{chosen['new_fingerprint']}.arrow")
    return chosen
