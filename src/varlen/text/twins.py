"""The training twins of chat templates that TRL ships: templates that keep earlier turns as they were written.

A template that rewrites earlier turns can't be trained on all turns of a row. For some families TRL has a twin of
the template that doesn't, with `{% generation %}` marks. Both are found in the installed package by their text.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from varlen.errors import MissingExtraError, SettingError

TWIN = "trl-training"
"""What the caller says to use it."""


def twin_of(source: str) -> str:
    """Say which twin a template has and how to use it; nothing where none is known."""
    name = _twins().get(source, ("", ""))[0]
    return (
        f"TRL's training twin of this template ({name}) keeps earlier turns: --chat-template {TWIN}"
        if name
        else ""
    )


def training_twin(source: str | None) -> str:
    """Return the text of a template's twin."""
    if _folder() is None:
        raise MissingExtraError(
            f"chat_template={TWIN!r} takes the training templates of TRL, which isn't installed; run: pip install trl"
        )
    if source is not None and source in _twins():
        return _twins()[source][1]
    known = ", ".join(sorted(name for name, _ in _twins().values()))
    raise SettingError(
        "TRL has no training twin of the tokenizer's chat template"
        + (", which has none" if source is None else "")
        + f"; it has: {known}"
    )


def _folder() -> Path | None:
    """Return where TRL keeps its templates, without importing it."""
    try:
        found = find_spec("trl")
    except (ImportError, ValueError):
        return None
    places = list(found.submodule_search_locations or ()) if found is not None else []
    folder = Path(places[0]) / "chat_templates" if places else None
    return folder if folder is not None and folder.is_dir() else None


@lru_cache(maxsize=1)
def _twins() -> dict[str, tuple[str, str]]:
    """Return by the text of each template the name and the text of its twin."""
    folder = _folder()
    if folder is None:
        return {}
    twins = {}
    for path in sorted(folder.glob("*_training.jinja")):
        original = folder / path.name.replace("_training", "")
        try:
            twins[original.read_text("utf-8")] = (path.stem, path.read_text("utf-8"))
        except OSError:
            continue
    return twins
