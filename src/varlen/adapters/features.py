"""Rows as a data loader hands them to a collator, a mapping each, read column by column."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.batch.flatten import FlatRow
from varlen.batch.torch import import_torch
from varlen.errors import DocumentsError, SettingError

Features = Sequence[Mapping[str, Any]]
"""A batch: for each document its values by name, as lists, numpy arrays or tensors."""


def column(features: Features, name: str) -> list[Any] | None:
    """Return a column of all features, or None where none has it.

    Raises:
        DocumentsError: some have it and some don't, so that nobody knows what is meant.
    """
    try:
        return [feature[name] for feature in features]
    except KeyError:
        without = [number for number, feature in enumerate(features) if name not in feature]
    except (TypeError, IndexError):
        odd = next(feature for feature in features if not hasattr(feature, "keys"))
        raise DocumentsError(
            f"a feature is a mapping from names to values, such as a row of a data set, and one here is a "
            f"{type(odd).__name__}"
        ) from None
    if len(without) == len(features):
        return None
    raise DocumentsError(
        f"{len(without):,} of {len(features):,} features have no {name!r}, feature {without[0]:,} first; "
        "give it to all of them, or to none"
    )


def required(features: Features, name: str) -> list[Any]:
    """Return a column that all features must have.

    Raises:
        DocumentsError: no features, or none of them has it.
    """
    if not len(features):
        raise DocumentsError(
            "a batch of no documents can't be collated; leave empty batches out of the sampler"
        )
    found = column(features, name)
    if found is None:
        names = ", ".join(map(repr, features[0])) or "no values"
        raise DocumentsError(f"features need {name!r}, the token ids of each document, and hold {names}")
    return found


def columns_to_carry(
    features: Features, wanted: Collection[str] | None, taken: Collection[str]
) -> dict[str, list[Any]]:
    """Return the other columns that travel along, in the order of the first feature.

    Args:
        features: at least one.
        wanted: names, each of which must be there; None for every column of numbers with one value a token.
        taken: names that aren't looked at.

    Raises:
        DocumentsError: a wanted column isn't in every feature.
        SettingError: a wanted column has the name of an array that a batch has anyway.
    """
    if wanted is None:
        others = [name for name in features[0] if name not in taken]
        found = {name: values for name in others if (values := _per_token(features, name)) is not None}
        return found
    clashing = [name for name in wanted if name in taken]
    if clashing:
        raise SettingError(
            f"{', '.join(map(repr, clashing))} can't be carried along: a batch has that anyway"
        )
    return {name: required(features, name) for name in wanted}


def _per_token(features: Features, name: str) -> list[Any] | None:
    """A column if it holds a number for each token, else None: text, numbers a document, lists of lists."""
    values: list[Any] = [feature.get(name) for feature in features]
    for feature, value in zip(features, values):
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__") or getattr(value, "ndim", 1) != 1:
            return None
        if len(value) != len(feature["input_ids"]):
            return None
        if len(value) and not hasattr(value, "dtype") and not isinstance(value[0], (int, float)):
            return None
    return values


def finish(arrays: Mapping[str, npt.NDArray[Any]], return_tensors: str) -> dict[str, Any]:
    """Return arrays as they are asked for.

    Args:
        arrays: by name.
        return_tensors: "pt" for torch tensors, which share their memory, "np" for numpy.
    """
    if return_tensors == "np":
        return dict(arrays)
    from_numpy = import_torch().from_numpy
    return {name: from_numpy(array) for name, array in arrays.items()}


def check_form(return_tensors: object) -> None:
    """Refuse forms of arrays that nobody makes here.

    Raises:
        SettingError: neither "pt" nor "np".
    """
    if return_tensors not in ("pt", "np"):
        raise SettingError(f'return_tensors must be "pt" (torch) or "np" (numpy); got {return_tensors!r}')


def flash_arguments(row: FlatRow, return_tensors: str) -> dict[str, Any]:
    """Return the boundaries of a row as FlashAttention's keyword arguments.

    Args:
        row: as `flatten` made it.
        return_tensors: "pt" or "np".
    """
    ends = finish({"cu_seq_lens_q": row.cu_seqlens, "cu_seq_lens_k": row.cu_seqlens}, return_tensors)
    return {**ends, "max_length_q": row.max_seqlen, "max_length_k": row.max_seqlen}


def carried_columns(row: FlatRow, given: Mapping[str, list[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of a row with the dtypes that torch gives them: lists of floats become float32.

    Args:
        row: as `flatten` made it.
        given: the columns as they came.
    """
    return {
        name: values.astype(np.float32)
        if values.dtype == np.float64 and all(type(value) is list for value in given[name])
        else values
        for name, values in row.columns.items()
    }
