"""One tokenizer for all that a loader feeds: refused by name where several meet, logged where tokens are bytes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varlen.errors import SettingError, VarlenError
from varlen.store.open import open_tokens
from varlen.text.identity import TokenizerMark, check_same, made_by, mark_in, mark_of
from varlen.text.load_tokenizer import load_tokenizer

_log = logging.getLogger(__name__)


def one_tokenizer(marks: Mapping[str, TokenizerMark | None], given: Any) -> dict[str, Any] | None:
    """Require that the sources of a mixture hold tokens of one tokenizer, and return its mark."""
    named = [(name, mark) for name, mark in marks.items() if mark is not None]
    if not named:
        return None
    first, meant = named[0]
    for name, mark in named[1:]:
        if mark.is_same(meant) is False:
            raise SettingError(
                f"the sources {first} and {name} of the mixture hold tokens of different tokenizers, {meant.words} "
                f"and {mark.words}, and a model knows the ids of one; make both with the same"
            )
    if given is not None:
        meant = mark_of(load_tokenizer(given))
        for name, mark in named:
            check_same(f"the source {name}", mark, meant, "make both with the same")
    return meant.to_json()


def differing(store: str | Path, given: Any) -> str:
    """Say by name that a store's tokenizer isn't the one that is given; "" where it is, or that can't be told."""
    if given is None:
        return ""
    try:
        mark, meant = made_by(open_tokens(store, check_tokens=False)), mark_of(load_tokenizer(given))
    except (VarlenError, OSError):
        return ""
    if mark is None or mark.is_same(meant) is not False:
        return ""
    return f". They were made by {mark.words}, and {meant.words} gives other ids: make them anew for that one"


def say_bytes(mark: Mapping[str, Any] | None, rank: int) -> None:
    """Say that tokens are bytes, on the first rank."""
    found = mark_in(mark)
    if rank == 0 and found is not None and found.are_bytes:
        _log.warning(
            "tokens are bytes, of the built-in tokenizer; for a model that has its own, pass that one"
        )
