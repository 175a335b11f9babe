"""Parts of texts encoded at once, with a special token between them that the tokenizer surely splits at."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from varlen.source.tokenizer import FastTokenizer, backend_faults
from varlen.types import Int32Array, IntArray

_DIVIDERS: dict[str, tuple[str, int]] = {}
"""By the tokenizer's fingerprint."""
_MOST_TRIED = 16
_BESIDE = ("Hi there", "user\n", " and", "  ", "\n\n", "1", ".", "<|", "é")
"""Texts that are tried on either side of a special token."""


def encode_parts(
    tokenizer: FastTokenizer, parts: Sequence[str], counts: Sequence[int]
) -> tuple[Int32Array, IntArray]:
    """Return the ids of parts of texts, each part's own, as the tokenizer's `encode` does, sooner.

    Args:
        tokenizer: what encodes.
        parts: of all texts.
        counts: of each text, how many of the parts are its own; at least 1.

    Raises:
        SettingError: the library failed.
    """
    divider, id_ = _divider(tokenizer)
    if not divider:
        return tokenizer.encode(parts)
    texts: list[str] = []
    dividers: list[int] = []
    ends: list[int] = []
    first = seen = 0
    for count in counts:
        own = parts[first : first + count]
        texts.append(divider.join(own))
        for part in own:
            seen += part.count(divider)
            dividers.append(seen)
            seen += 1
        dividers.pop()
        seen -= 1
        ends.append(seen)
        first += count
    tokens, offsets = tokenizer.encode(texts)
    places = np.flatnonzero(tokens == id_)
    if not np.array_equal(np.searchsorted(places, offsets[1:]), ends):
        return tokenizer.encode(parts)
    cuts = places[dividers]
    before = np.concatenate([[0], np.cumsum(np.array(counts, dtype=np.int64) - 1)])
    bounds = np.sort(np.concatenate([cuts - np.arange(len(cuts)), offsets - before]))
    return np.delete(tokens, cuts), bounds


def dividing_id(tokenizer: FastTokenizer, mark: str) -> int | None:
    """Return the id of a special token beside which a text has the same ids whether it is cut there or not.

    None for what is no such token, or where another one may take a part of it.
    """
    with backend_faults(tokenizer.name):
        known = tokenizer.backend.get_added_tokens_decoder().values()
        id_ = tokenizer.backend.token_to_id(mark)
    first = [token for token in known if not token.normalized]
    is_plain = any(
        token.content == mark and not (token.lstrip or token.rstrip or token.single_word) for token in first
    )
    begins = tuple(mark[:length] for length in range(1, len(mark)))
    overlaps = any(
        token.content.endswith(begins) or (mark in token.content and token.content != mark) for token in first
    )
    if id_ is None or not is_plain or overlaps:
        return None
    wholes = [f"{before}{mark}{after}" for before in _BESIDE for after in _BESIDE]
    tokens, offsets = tokenizer.encode([*wholes, *_BESIDE])
    ids = [tokens[a:b].tolist() for a, b in pairwise(offsets.tolist())]
    alone = ids[len(wholes) :]
    parted = [[*before, id_, *after] for before in alone for after in alone]
    return id_ if ids[: len(wholes)] == parted else None


def _divider(tokenizer: FastTokenizer) -> tuple[str, int]:
    """Return a special token that surely parts what stands on either side, and its id; "" where none is known."""
    key = tokenizer.fingerprint
    if key not in _DIVIDERS:
        marks = sorted(tokenizer.specials.end_marks)[:_MOST_TRIED]
        found = ((mark, dividing_id(tokenizer, mark)) for mark in marks)
        _DIVIDERS[key] = next(((mark, id_) for mark, id_ in found if id_ is not None), ("", -1))
    return _DIVIDERS[key]
