"""What a loader is given: rows in memory become files, and paths lead there from any folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from varlen.counts import many
from varlen.documents.memory import placed
from varlen.documents.mixture import Mixture
from varlen.documents.source import Source
from varlen.errors import SettingError
from varlen.feed.settings import LoaderSettings
from varlen.files.paths import Data, File, entries_of, is_url

_log = logging.getLogger(__name__)


def placed_for(data: Data, settings: LoaderSettings) -> Data:
    """Return data as paths and files that workers open; iterables as files of their rows where they are streamed."""
    is_streamed = settings.mode != "indexed" and settings.scope != "all"
    columns = settings.reading.get("columns")
    return absolute(placed(data, columns, settings.cache, is_streamed=is_streamed))


def placed_in(mixture: Mixture, settings: LoaderSettings) -> dict[str, Data]:
    """Return the sources of a mixture as paths and files that workers open; arguments and errors as above."""
    columns = settings.reading.get("columns")
    return {name: absolute(placed(one, columns, settings.cache)) for name, one in mixture.sources.items()}


def absolute(data: Data) -> Data:
    """Return data by paths that lead there from any folder: a worker may be started after the trainer has moved."""
    if isinstance(data, File):
        return data
    if isinstance(data, str | os.PathLike):
        data = data if isinstance(data, str) else Path(data)
        # A home is the same from anywhere.
        if is_url(data) or not str(data) or str(data).startswith("~"):
            return data
        return str(Path(data).absolute())
    return [absolute(one) for one in entries_of(data)]


def check_passes(source: Source, settings: LoaderSettings) -> None:
    """Refuse several epochs of what can be iterated over once."""
    once = [file for file in source.files if file.live is not None and file.live.is_once]
    if once and settings.epochs != 1:
        raise SettingError(
            f"{once[0]} can be iterated over once, and epochs is {settings.epochs}; pass a function that makes it: "
            "PackedLoader(lambda: rows(), ...), or epochs=1"
        )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {many(len(names) - 1, 'more file')}"


def tell_read_by_all(names: list[str], source: Source, world: int) -> None:
    """Warn of what each of several ranks reads whole."""
    if not names:
        return
    is_live = any(file.live is not None for file in source.files)
    _log.warning(
        "%s can't be cut, so each of %s ranks reads all of it%s",
        _listed(names),
        f"{world:,}",
        " and takes the packs of its lanes" if is_live else "; `varlen index` reads it once",
    )
