"""What `inspect` and `pack` share: turning arguments into a source of documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from varlen.errors import SettingError
from varlen.source.source import Source


def as_source(
    data: Sequence[str], *, tokenizer: str, column: Sequence[str], eos: str | None, **more: Any
) -> Source | Path:
    """Return the source that arguments name, or the folder of a token store.

    Args:
        data: as given.
        tokenizer: as given.
        column: ROLE=NAME each.
        eos: a token, or its id.
        more: handed on to `open_source`.

    Raises:
        SourceError: no such files.
        SettingError: an argument out of its range.
    """
    from varlen.source.source import open_source
    from varlen.source.store import read_manifest

    if len(data) == 1 and Path(data[0]).is_dir():
        manifest = read_manifest(Path(data[0]))
        if manifest is not None and manifest.get("kind") == "tokens":
            return Path(data[0])
    columns: dict[str, str] = {}
    for entry in column:
        role, equals, name = entry.partition("=")
        if not equals or not name:
            raise SettingError(f"--column takes ROLE=NAME, such as text=body; got {entry!r}")
        columns[role] = name
    end: int | str | None = int(eos) if eos is not None and eos.isdigit() else eos
    return open_source(data, tokenizer, columns=columns, eos=end, **more)
