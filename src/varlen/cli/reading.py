"""What `inspect` and `pack` share: turning arguments into a source of documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varlen.errors import SettingError

if TYPE_CHECKING:
    from varlen.source.lengths import Lengths
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
    end: int | str | None = int(eos) if eos is not None and eos.isdecimal() else eos
    return open_source(data, tokenizer, columns=_as_columns(column), eos=end, **more)


def lengths_of(
    data: Sequence[str], on_progress: Callable[[int, int, str], None], excerpts: int, **settings: Any
) -> Lengths:
    """Return the lengths of the documents that arguments name.

    Args:
        data: as given: documents, a token store, or one `.npz` file of lengths.
        on_progress: called with work done, all work, and words.
        excerpts: documents whose beginnings are wanted.
        settings: handed on to `as_source`.

    Raises:
        SourceError: a record can't be read, or there is no document.
    """
    from varlen.source.lengths import counted_lengths, read_lengths, stored_lengths
    from varlen.source.store import open_store

    source = as_source(data, **settings)
    if len(data) == 1 and data[0].endswith(".npz") and Path(data[0]).is_file():
        counted = counted_lengths(Path(data[0]))
        if counted is not None:
            return counted
    return (
        stored_lengths(open_store(source))
        if isinstance(source, Path)
        else read_lengths(source, on_progress, excerpts)
    )


def _as_columns(columns: Sequence[str]) -> dict[str, str]:
    """Return the column of each role.

    Raises:
        SettingError: one isn't of the form ROLE=NAME, or a role stands twice.
    """
    roles: dict[str, str] = {}
    for pair in columns:
        role, equals, name = pair.partition("=")
        if not (role and equals and name):
            raise SettingError(f"--column must be of the form ROLE=NAME, such as text=body; got {pair!r}")
        if role in roles:
            raise SettingError(f"--column names {role} twice, {roles[role]} and {name}; keep one of them")
        roles[role] = name
    return roles
