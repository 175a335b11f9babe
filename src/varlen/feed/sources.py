"""A loader's data, opened as its settings say, and what is said of what isn't read of it."""

from __future__ import annotations

import logging
from typing import Any

from varlen.documents.source import Source, check_reading, open_source
from varlen.errors import SettingError
from varlen.feed.settings import LoaderSettings
from varlen.files.paths import Data
from varlen.store.open import open_tokens
from varlen.store.token_files import FileTokens
from varlen.store.tokens import TokenDocuments, weighs

_log = logging.getLogger(__name__)


def tokens_of(data: Data, settings: LoaderSettings) -> TokenDocuments | None:
    """Open documents that are tokens already; None where they aren't."""
    reading = settings.reading
    check_reading(reading.get("split"), reading.get("format"))
    tokens = open_tokens(
        data,
        patience_s=settings.patience_s,
        check_tokens=settings.on_error == "raise",
        split=reading.get("split"),
        format=reading.get("format"),
    )
    _say(getattr(tokens, "unread", None), settings)
    return tokens


def source_of(data: Data, tokenizer: Any, settings: LoaderSettings) -> Source:
    """Open documents that are to be tokenized, and say which of them are read."""
    source = open_source(data, tokenizer, **settings.reading)
    _say(source.unread(), settings)
    _say(source.said_of_template(), settings)
    return source


def _say(said: str | None, settings: LoaderSettings) -> None:
    """Log what is worth knowing of a source; of several ranks, one warns."""
    if said is not None:
        _log.log(logging.WARNING if settings.ranks[0] == 0 else logging.DEBUG, "%s", said)


def of_folders(settings: LoaderSettings) -> dict[str, Any]:
    """Return the settings that say which files of folders are tokens."""
    return {name: settings.reading.get(name) for name in ("split", "format")}


_USUAL = {
    "append_eos": True,
    "supervise": "assistant",
    "text_cut": "auto",
    "binary_as_text": False,
    "allow_unwritten": False,
}
"""Settings of reading that say how documents become tokens, where they aren't None."""


def refuse_reading(tokens: TokenDocuments, data: Data, settings: LoaderSettings) -> None:
    """Refuse settings that say how documents become tokens, where they are tokens already."""
    if settings.reading.get("row_weights") and not weighs(tokens):
        raise SettingError(
            f"{data} holds tokens already, without weights, which row_weights can't give them; leave it out, or "
            "index the rows again with it (varlen index --row-weights)"
        )
    of_files = () if isinstance(tokens, FileTokens) else ("split", "format")
    for name in ("columns", "chat_template", "chat_template_kwargs", "eos", *of_files, *_USUAL):
        if settings.reading.get(name, _USUAL.get(name)) != _USUAL.get(name):
            raise SettingError(f"{data} holds tokens already, which {name} can't change; leave it out")
