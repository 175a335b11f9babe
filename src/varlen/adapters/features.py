"""Read the documents that a data loader passes to a collator, by rows or by columns, as columns."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.batch.flatten import FlatRow
from varlen.batch.packed import import_torch
from varlen.errors import DocumentsError, SettingError
from varlen.ragged import join

Features: TypeAlias = Any
"""A batch: for each document a mapping from names to values, which are lists, numpy arrays or tensors. Or the columns
themselves, as a data set gives them that is asked for several rows at once: an Arrow table, or a mapping."""
_EMPTY = "a batch of no documents can't be collated; leave empty batches out of the sampler"
_NUMBERS = ("int", "uint", "float", "double", "halffloat", "bool")  # prefixes of Arrow's types of numbers
WEIGHTS = "loss_weights"
# Names of columns that collators fill themselves.
TAKEN = (
    *("input_ids", "labels", "position_ids", "attention_mask", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)
_WARNED: list[str] = []
_log = logging.getLogger(__name__)
Columns: TypeAlias = Mapping[str, Any]  # a list with an entry per document, or an Arrow list array


def as_columns(features: Features, needed: Collection[str]) -> Columns:
    """Return the columns that all documents have."""
    if type(features) is not list:
        given = _as_table(features)
        if given is not None:
            return given
    if not len(features):
        raise DocumentsError(_EMPTY)
    try:
        columns = {name: [feature[name] for feature in features] for name in features[0]}
    except KeyError:
        columns = {}
    except (TypeError, IndexError):
        odd = next(feature for feature in features if not hasattr(feature, "keys"))
        raise DocumentsError(
            f"a feature is a mapping from names to values, such as a row of a data set, and one here is a "
            f"{type(odd).__name__}"
        ) from None
    # As many names in each, and all of the first's: so the others have no more.
    if columns and sum(map(len, features)) == len(features) * len(columns):
        return columns
    return _of_all(features, needed)


def warn_of_weights(columns: Columns, carried: Collection[str] = ()) -> None:
    """Warn once if rows have weights and the collator's batches have none."""
    if WEIGHTS not in columns or WEIGHTS in carried or _WARNED:
        return
    _WARNED.append(WEIGHTS)
    _log.warning(
        "rows have `%s`, which this collator's batches don't hold, as the losses of its trainers know no weights: "
        "all labels weigh alike. A PackedLoader under a trainer weighs them (row_weights=True)",
        WEIGHTS,
    )


def _as_table(features: Any) -> Columns | None:
    """Return the columns of an Arrow table or a mapping of columns; None for anything else."""
    if hasattr(features, "schema") and hasattr(features, "column"):
        columns = {name: _whole(features.column(name)) for name in features.schema.names}
    elif hasattr(features, "keys"):
        columns = {name: _whole(features[name]) for name in features.keys()}  # noqa: SIM118 - perhaps no iterator
    else:
        return None
    ids = columns.get("input_ids", ())
    if hasattr(ids, "__len__") and "input_ids" in columns and not len(ids):
        raise DocumentsError(_EMPTY)
    return columns


def _whole(column: Any) -> Any:
    """Return a column, chunks of lists combined."""
    is_chunked = hasattr(column, "num_chunks") and hasattr(column.type, "value_type")
    return column.combine_chunks() if is_chunked else column


def _of_all(features: Sequence[Mapping[str, Any]], needed: Collection[str]) -> Columns:
    """Return the columns that all features have, where some have more."""
    columns = {}
    for name in {name: None for feature in features for name in feature}:
        without = [number for number, feature in enumerate(features) if name not in feature]
        if not without:
            columns[name] = [feature[name] for feature in features]
        elif name in needed:
            raise DocumentsError(
                f"{len(without):,} of {len(features):,} features have no {name!r}, feature {without[0]:,} first; "
                "give it to all of them, or to none"
            )
    return columns


def required(columns: Columns, name: str) -> Any:
    """Return a column that must be there."""
    if name not in columns:
        names = ", ".join(map(repr, columns)) or "no values"
        what = ", the token ids of each document," if name == "input_ids" else ""
        raise DocumentsError(f"features need {name!r}{what} and hold {names}; give every document {name!r}")
    return columns[name]


def columns_to_carry(
    columns: Columns, wanted: Collection[str] | None, taken: Collection[str]
) -> dict[str, Any]:
    """Return the other columns that travel along, in their order."""
    if wanted is None:
        others = {name: values for name, values in columns.items() if name not in taken}
        return {
            name: values for name, values in others.items() if _is_per_token(values, columns["input_ids"])
        }
    clashing = [name for name in wanted if name in taken]
    if clashing:
        raise SettingError(
            f"{', '.join(map(repr, clashing))} can't be carried along, as a batch has that anyway; "
            "leave it out of columns"
        )
    return {name: required(columns, name) for name in wanted}


def _is_per_token(values: Any, documents: Any) -> bool:
    """Return whether a column has a number for each token, and not text, numbers per document or nested lists."""
    if any(isinstance(column, tuple) or hasattr(column, "null_count") for column in (values, documents)):
        held = getattr(getattr(values, "type", None), "value_type", None)
        if not isinstance(values, tuple) and (held is None or not str(held).startswith(_NUMBERS)):
            return False
        return np.array_equal(join(values, "a column").sizes, join(documents, "input_ids").sizes)
    for value, document in zip(values, documents):
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__") or getattr(value, "ndim", 1) != 1:
            return False
        if len(value) != len(document):
            return False
        if len(value) and not hasattr(value, "dtype") and not isinstance(value[0], (int, float)):
            return False
    return True


def finish(arrays: Mapping[str, npt.NDArray[Any]], return_tensors: str) -> dict[str, Any]:
    """Return arrays as they are asked for."""
    if return_tensors == "np":
        return dict(arrays)
    from_numpy = import_torch().from_numpy
    return {name: from_numpy(array) for name, array in arrays.items()}


def check_form(return_tensors: object) -> None:
    """Refuse array formats that this collator doesn't produce."""
    if return_tensors not in ("pt", "np"):
        raise SettingError(f'return_tensors must be "pt" (torch) or "np" (numpy); got {return_tensors!r}')


def flash_arguments(row: FlatRow, return_tensors: str) -> dict[str, Any]:
    """Return the boundaries of a row as FlashAttention's keyword arguments."""
    ends: Any = row.cu_seqlens if return_tensors == "np" else import_torch().from_numpy(row.cu_seqlens)
    longest = row.max_seqlen
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def as_torch_has_them(
    arrays: Mapping[str, npt.NDArray[Any]], given: Mapping[str, Any]
) -> dict[str, npt.NDArray[Any]]:
    """Return arrays with the dtypes that torch gives them: lists of floats become float32."""
    return {
        name: values.astype(np.float32)
        if values.dtype == np.float64
        and type(given.get(name)) is list
        and all(type(value) is list for value in given[name])
        else values
        for name, values in arrays.items()
    }
