"""Data sets that Hugging Face's `datasets` wrote to disk: what their descriptions say."""

from __future__ import annotations

import json
from typing import Any

from varlen.errors import SourceError

_INDICES = ("_indices_data_files", "_indices_files")
"""Where a data set names the rest that was selected from or shuffled and saved by an older version of `datasets`."""


def refuse_indices(content: bytes, path: str) -> None:
    """Refuse a data set of which only some rows are meant, or in another order.

    Args:
        content: of its state.json.
        path: of that, for messages.

    Raises:
        SourceError: it is one, or this isn't a description.
    """
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} doesn't describe a saved data set: it is not valid JSON") from error
    if isinstance(state, dict) and any(state.get(key) for key in _INDICES):
        raise SourceError(
            f"{path} names files of indices, which say which rows are meant and in which order, and "
            "aren't read here; load it with datasets, call flatten_indices() and save it again"
        )


def described(content: bytes, path: str, key: str) -> list[Any]:
    """Return a list that a data set's description holds.

    Args:
        content: of the description.
        path: of that, for messages.
        key: of the list.

    Raises:
        SourceError: it doesn't.
    """
    try:
        value = json.loads(content)[key]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(f"{path} doesn't describe a saved data set: no list `{key}`") from error
    if not isinstance(value, list) or (key == "_data_files" and not all(isinstance(v, dict) for v in value)):
        raise SourceError(f"{path} doesn't describe a saved data set: `{key}` is not a list of files")
    return value


def splits_described(content: bytes) -> list[str]:
    """Return the names of the splits that a dataset_info.json lists; none where it lists none."""
    try:
        splits = json.loads(content)["splits"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return [str(name) for name in splits] if isinstance(splits, dict) else []
