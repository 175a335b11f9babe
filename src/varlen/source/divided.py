"""Parts of texts encoded at once, with a special token between them that the tokenizer surely splits at."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

from varlen.source.tokenizer import FastTokenizer, Tokenizer, backend_faults
from varlen.types import Int32Array, IntArray

_DIVIDERS: dict[tuple[str, frozenset[str]], tuple[str, int]] = {}
"""By the tokenizer's fingerprint and its special tokens."""
_MOST_TRIED = 16
_BESIDE = ("Hi there", "user\n", " and", "  ", "\n\n", "1", ".", "<|", "é")
"""Texts that are tried on either side of a special token."""


def encode_cut(
    tokenizer: Tokenizer, texts: Sequence[str], cuts: Sequence[int], counts: Sequence[int]
) -> tuple[Int32Array, IntArray]:
    """Return the ids of texts that are cut, each part's own.

    Where the tokenizer surely splits at a special token, the parts of a text are encoded at once with that between
    them, whose ids are taken out again: as if each part were encoded, sooner.

    Args:
        tokenizer: what encodes.
        texts: well-formed.
        cuts: of all texts, places in each, ascending; what stands between two of the same is an empty part.
        counts: of each text, how many of the cuts are its own.

    Returns:
        Tokens, and the bounds of all parts: of each text one more than its cuts.

    Raises:
        SettingError: the tokenizer failed.
    """
    parts, first = [], 0
    for text, count in zip(texts, counts):
        places = cuts[first : first + count]
        parts.append([text[a:b] for a, b in zip((0, *places), (*places, len(text)))])
        first += count
    divider, id_ = _divider(tokenizer) if isinstance(tokenizer, FastTokenizer) else ("", -1)
    if divider:
        found = _at_once(tokenizer, texts, parts, divider, id_)
        if found is not None:
            return found
    whole = list(chain.from_iterable(parts))
    tokens, bounds = tokenizer.encode([part for part in whole if part], is_chat=True)
    lengths = np.zeros(len(whole), dtype=np.int64)
    lengths[[bool(part) for part in whole]] = np.diff(bounds)
    return tokens, np.concatenate([[0], np.cumsum(lengths)])


def _at_once(
    tokenizer: Tokenizer, texts: Sequence[str], parts: Sequence[Sequence[str]], divider: str, id_: int
) -> tuple[Int32Array, IntArray] | None:
    """Encode the parts of each text at once; None where the special token doesn't come as often as it must."""
    tokens, offsets = tokenizer.encode([divider.join(own) for own in parts], is_chat=True)
    counts = np.array([len(own) for own in parts], dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(counts - 1)])
    places = np.flatnonzero(tokens == id_)
    ends, dividers = before, None
    if any(divider in text for text in texts):
        held = np.array([part.count(divider) for own in parts for part in own], dtype=np.int64)
        seen = np.concatenate([[0], np.cumsum(held)])
        last = np.cumsum(counts)
        ends = before + seen[np.concatenate([[0], last])]
        dividers = np.arange(before[-1]) + np.delete(seen[1:], last - 1)
    if not np.array_equal(np.searchsorted(places, offsets), ends):
        return None
    cuts = places if dividers is None else places[dividers]
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
    key = tokenizer.fingerprint, tokenizer.specials.end_marks
    if key not in _DIVIDERS:
        marks = sorted(tokenizer.specials.end_marks)[:_MOST_TRIED]
        found = ((mark, dividing_id(tokenizer, mark)) for mark in marks)
        _DIVIDERS[key] = next(((mark, id_) for mark, id_ in found if id_ is not None), ("", -1))
    return _DIVIDERS[key]
