"""Rows to documents: texts and chats are encoded, ready tokens are checked, and all become flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from varlen.documents.chat_rows import steps_of
from varlen.documents.pretokenized import ready_documents
from varlen.errors import SettingError, SourceError
from varlen.files.columns import Columns
from varlen.files.losses import NO_LOSSES, Losses
from varlen.files.rows import READ_AS_TEXT, Fault, NotJson, Rows, as_list, json_kind, losses_of, refuse
from varlen.text.chat_template import ChatTemplate
from varlen.text.loss_masks import Mask, all_weigh_one, as_marks
from varlen.text.messages import without_nulls
from varlen.text.rendering import Choice, Rendered, between
from varlen.text.tokenizer import FastTokenizer, Tokenizer, backend_faults
from varlen.types import Int32Array, IntArray

Supervise = Literal["assistant", "last", "all"]
_PRUNE = {
    role: partial(without_nulls, is_chat=role not in ("tools", "chat_template_kwargs"))
    for role in ("messages", "tools", "prompt", "completion", "chat_template_kwargs")
}
"""Of roles whose values may hold objects, what takes away the keys that a table gives to all of them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Documents:
    """Documents end to end: document d is `tokens[offsets[d]:offsets[d + 1]]`."""

    tokens: Int32Array
    """int32 `[num_tokens]`."""
    offsets: IntArray
    """int64 `[num_documents + 1]`."""
    loss_mask: Mask | None = None
    """uint8 `[num_tokens]`: 1 where a token is trained on; None where all are. Where rows have weights float32: what
    a token's label weighs, 0 for none."""
    faults: tuple[Fault, ...] = ()
    """Records that were skipped."""
    losses: Losses = NO_LOSSES
    """What chat templates left out of these documents, and all that `faults` stand for."""
    rows: IntArray | None = None
    """int64 `[num_documents]`: index of each document's row among the rows that texts or chats were encoded from;
    None where document d is of row d, and for ready tokens."""

    def __len__(self) -> int:
        """Count the documents, empty ones too."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """int64 `[num_documents]`: tokens of each document."""
        return np.diff(self.offsets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How rows become tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate
    """Of chats."""
    append_eos: bool = True
    """End every text, and every completion given as text, with the tokenizer's EOS."""
    supervise: Supervise = "assistant"
    """Which tokens of chats and completions are trained on."""
    allow_unwritten: bool = False
    """Count what a chat template leaves out of an assistant's own turn, where it would be an error."""
    row_weights: bool = False
    """Take other weights of messages and tokens than 0 and 1 as those of their losses."""
    vocab_size: int | None = None
    """Ready tokens at or above are refused; None to take any."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Names of columns by role, where they aren't the usual ones."""


def targets_of(documents: Documents) -> IntArray:
    """Count the labels that each document gives: of all supervised tokens but its first, which nothing predicts."""
    if documents.loss_mask is None:
        return np.maximum(documents.lengths - 1, 0)
    before = np.concatenate([[0], np.cumsum(as_marks(documents.loss_mask), dtype=np.int64)])
    starts, stops = documents.offsets[:-1], documents.offsets[1:]
    targets: IntArray = before[stops] - before[np.minimum(starts + 1, stops)]
    return targets


def encode_rows(rows: Rows, columns: Columns, encoding: Encoding) -> Documents:
    """Turn rows into documents.

    An empty text is a document of no tokens, without EOS: there is nothing to train on, and it is counted.
    """
    documents = _encoded(rows, columns, encoding)
    if not documents.faults:
        return documents
    return replace(documents, losses=documents.losses + losses_of(documents.faults))


def none_of(faults: tuple[Fault, ...]) -> Documents:
    """Return no documents, and why."""
    return Documents(
        tokens=np.zeros(0, dtype=np.int32),
        offsets=np.zeros(1, dtype=np.int64),
        faults=faults,
        losses=losses_of(faults),
    )


def _encoded(rows: Rows, columns: Columns, encoding: Encoding) -> Documents:
    """Turn rows into documents, of whose losses those of faults are still to be counted."""
    if columns.kind == "tokens":
        taken = {role: rows.columns[name] for role, name in columns.names.items()}
        tokens, offsets, mask, wrong = ready_documents(
            taken, len(rows), encoding.vocab_size, weighs=encoding.row_weights
        )
        return Documents(tokens=tokens, offsets=offsets, loss_mask=mask, faults=rows.blame(wrong))
    values = {role: as_list(rows.columns[name], _PRUNE.get(role)) for role, name in columns.names.items()}
    if columns.kind == "text":
        return _texts(rows, values["text"], encoding)
    choice = Choice(
        last=encoding.supervise == "last",
        everything=encoding.supervise == "all",
        allow_unwritten=encoding.allow_unwritten,
        row_weights=encoding.row_weights,
    )
    steps = steps_of(columns, values, len(rows), encoding.template, choice)
    for role, column in values.items():
        for index in (index for index, cell in enumerate(column) if type(cell) is NotJson):
            steps[index] = partial(refuse, f"`{columns.names[role]}` holds {column[index].said}")
    # What a template renders has a beginning of its own; a prompt that is plain text has none.
    is_plain = [
        columns.kind == "prompt" and isinstance(prompt, str) for prompt in values.get("prompt", steps)
    ]
    return _chats(rows, steps, encoding, is_plain)


def _texts(rows: Rows, values: Sequence[Any], encoding: Encoding) -> Documents:
    """Encode a column of texts."""
    wrong: dict[int, str] = {}
    texts: list[str] = []
    for index, value in enumerate(values):
        if type(value) is str and (value.isascii() or not _half_character(value)):
            texts.append(value)
        else:
            wrong[index] = _not_text("text", value)
    tokens, offsets = encoding.tokenizer.encode(texts)
    specials = encoding.tokenizer.specials
    is_full = np.diff(offsets) > 0
    tokens, offsets, _ = _enclose(
        tokens, offsets, None, is_full, specials.prefix_ids, is_full, eos_of(encoding)
    )
    return Documents(
        tokens=tokens, offsets=offsets, faults=rows.blame(wrong), rows=_rows_but(wrong, len(values))
    )


def _chats(
    rows: Rows, steps: Sequence[Callable[[], Rendered]], encoding: Encoding, is_plain: Sequence[bool]
) -> Documents:
    """Render rows, encode them, and mark what is supervised."""
    wrong: dict[int, str] = {}
    rendered: list[Rendered] = []
    begins: list[bool] = []
    for index, step in enumerate(steps):
        try:
            one = _ending(step())
            if not one.text.isascii() and _half_character(one.text):
                wrong[index] = "holds half a character (a lone surrogate)"
            else:
                rendered.append(one)
                begins.append(is_plain[index])
        except SourceError as error:
            wrong[index] = f"can't be used: {error}"
    losses = sum((one.losses for one in rendered if one.losses), NO_LOSSES)
    of_ends = [one.weights[-1] if one.weights else 1 for one in rendered]  # before others are trained too
    is_all = encoding.supervise == "all"
    if is_all and any(one.off or one.weights for one in rendered):
        rendered, is_all = [_all_of(one) for one in rendered], False
    mask: Mask | None
    tokens, offsets, mask = _encode_spans(rendered, encoding.tokenizer)
    needs_eos = np.array([one.needs_eos for one in rendered], dtype=bool)
    if needs_eos.any():
        starts, prefix = np.array(begins, dtype=bool), encoding.tokenizer.specials.prefix_ids
        eos = eos_of(encoding)
        tokens, offsets, mask = _enclose(tokens, offsets, mask, starts, prefix, needs_eos, eos, of_ends)
    whole = is_all or mask is None or all_weigh_one(mask)
    return Documents(
        tokens=tokens,
        offsets=offsets,
        loss_mask=None if whole else mask,
        faults=rows.blame(wrong),
        losses=losses,
        rows=_rows_but(wrong, len(steps)),
    )


def _all_of(one: Rendered) -> Rendered:
    """Return a conversation all of which is supervised but what its author switches off."""
    weighed = [(span, weight) for span, weight in zip(one.spans, one.weights) if weight != 1]
    apart = sorted([*one.off, *(span for span, _ in weighed)])
    every = sorted([*((span, 1.0) for span in between(apart, len(one.text))), *weighed])
    weights = tuple(weight for _, weight in every) if weighed else ()
    return replace(one, spans=tuple(span for span, _ in every), weights=weights)


def _rows_but(wrong: Mapping[int, str], num_rows: int) -> IntArray | None:
    """Return the rows that can be used, by index, or None where all can."""
    return np.delete(np.arange(num_rows), list(wrong)) if wrong else None


def _ending(rendered: Rendered) -> Rendered:
    """Cut blanks off that follow the last turn where the EOS is to follow it at once."""
    if not (rendered.needs_eos and rendered.spans):
        return rendered
    stop = rendered.spans[-1][1]
    return replace(rendered, text=rendered.text[:stop]) if rendered.text[stop:].isspace() else rendered


def _encode_spans(rendered: Sequence[Rendered], tokenizer: Tokenizer) -> tuple[Int32Array, IntArray, Mask]:
    """Encode texts with the spans of their characters that are supervised.

    A text is cut at the ends of spans, so that no token straddles one: at inference the model continues from
    the tokens of the prompt as well. Where cutting would change all tokens, whole texts are encoded, and a token is
    supervised if any of its characters is.
    """
    each: list[float] = []  # what each span weighs, where one of them weighs other than 1
    if any(one.weights for one in rendered):
        each = [weight for one in rendered for weight in one.weights or (1.0,) * len(one.spans)]
    if isinstance(tokenizer, FastTokenizer) and not tokenizer.is_cuttable:
        spans = np.array([span for one in rendered for span in one.spans], dtype=np.int64).reshape(-1, 2)
        counts_ = np.cumsum([0, *(len(one.spans) for one in rendered)]).astype(np.int64)
        tokens, offsets, marked = tokenizer.encode_spans([one.text for one in rendered], spans, counts_)
        if not each:
            return tokens, offsets, (marked > 0).astype(np.uint8)
        return tokens, offsets, np.array([0, *each], dtype=np.float32)[marked]
    parts: list[list[str]] = []  # of each text those before, in and between its spans, and behind the last
    values: list[float] = []  # of each part
    firsts = [0]
    of_spans = iter(each)
    for one in rendered:
        at = 0
        own: list[str] = []
        for start, stop in one.spans:
            own += (one.text[at:start], one.text[start:stop])
            values += (0, next(of_spans, 1))
            at = stop
        own.append(one.text[at:])
        values.append(0)
        parts.append(own)
        firsts.append(len(values))
    tokens, bounds = encode_parts(tokenizer, parts)
    marks: npt.NDArray[Any] = np.array(values, dtype=np.float32 if each else np.uint8)
    return tokens, bounds[firsts], np.repeat(marks, np.diff(bounds))


def _enclose(
    tokens: Int32Array,
    offsets: IntArray,
    mask: Mask | None,
    starts: npt.NDArray[np.bool_],
    prefix: Sequence[int],
    ends: npt.NDArray[np.bool_],
    eos: int | None,
    of_ends: Sequence[float] = (),
) -> tuple[Int32Array, IntArray, Mask | None]:
    """Put ids before some documents, and the EOS after some of those that don't end in it.

    What is put before is never supervised in chats, the EOS always is, and weighs as the last turn does (`of_ends`).
    """
    before = np.where(starts, len(prefix), 0)
    after = np.zeros(len(ends), dtype=np.int64)
    if eos is not None:
        is_ended = np.diff(offsets) > 0
        is_ended[is_ended] = tokens[offsets[1:][is_ended] - 1] == eos
        after[ends & ~is_ended] = 1
    added = before + after
    if not added.any():
        return tokens, offsets, mask
    longer = offsets.copy()
    longer[1:] += np.cumsum(added)
    result = np.empty(longer[-1], dtype=np.int32)
    is_old = np.ones(longer[-1], dtype=bool)
    for place, id_ in enumerate(prefix):
        at = longer[:-1][starts] + place
        result[at], is_old[at] = id_, False
    ended = longer[1:][after == 1] - 1
    result[ended], is_old[ended] = eos if eos is not None else 0, False
    result[is_old] = tokens
    if mask is not None:
        marked: Mask = np.zeros(longer[-1], dtype=mask.dtype)
        marked[is_old], marked[ended] = mask, np.asarray(of_ends)[after == 1]
        mask = marked
    return result, longer, mask


def eos_of(encoding: Encoding) -> int | None:
    """Return what ends a document, if anything is to."""
    if not encoding.append_eos:
        return None
    if encoding.tokenizer.specials.eos_id is None:
        raise SettingError(
            f"the tokenizer {encoding.tokenizer.name} names no token that ends a document, so a model would never "
            "learn to stop; name one (eos=, or --eos TEXT or ID), or leave documents without (append_eos=False, or "
            "--no-eos)"
        )
    return encoding.tokenizer.specials.eos_id


def _half_character(text: str) -> bool:
    """Whether a text can't be encoded: JSON can spell a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _not_text(name: str, value: Any) -> str:
    """Say why a value is no text."""
    if isinstance(value, str):
        return f"holds half a character in `{name}` (a lone surrogate)"
    if isinstance(value, bytes):
        return f"holds bytes in `{name}`, which must be a string of valid UTF-8; {READ_AS_TEXT}"
    return f"holds {json_kind(value)} in `{name}`, which must be a string"


# Parts of texts encoded at once, with a special token between them that the tokenizer surely splits at.

_DIVIDERS: dict[tuple[str, frozenset[str]], tuple[str, int]] = {}
"""By the tokenizer's fingerprint and its special tokens."""
_MOST_TRIED = 16
_BESIDE = ("Hi there", "user\n", " and", "  ", "\n\n", "1", ".", "<|", "é")
"""Texts that are tried on either side of a special token."""


def encode_parts(tokenizer: Tokenizer, parts: Sequence[Sequence[str]]) -> tuple[Int32Array, IntArray]:
    """Return the ids of texts in parts, each part's own, and where each begins and the last ends.

    Where the tokenizer surely splits at a special token, the parts of a text are encoded at once with that between
    them, whose ids are taken out again: as if each part were encoded, sooner.
    """
    divider, id_ = _divider(tokenizer) if isinstance(tokenizer, FastTokenizer) else ("", -1)
    if divider:
        found = _at_once(tokenizer, parts, divider, id_)
        if found is not None:
            return found
    whole = list(chain.from_iterable(parts))
    if all(whole):
        return tokenizer.encode(whole, is_chat=True)
    tokens, bounds = tokenizer.encode([part for part in whole if part], is_chat=True)
    lengths = np.zeros(len(whole), dtype=np.int64)
    lengths[[bool(part) for part in whole]] = np.diff(bounds)
    return tokens, np.concatenate([[0], np.cumsum(lengths)])


def _at_once(
    tokenizer: Tokenizer, parts: Sequence[Sequence[str]], divider: str, id_: int
) -> tuple[Int32Array, IntArray] | None:
    """Encode the parts of each text at once; None where the special token doesn't come as often as it must."""
    tokens, offsets = tokenizer.encode([divider.join(own) for own in parts], is_chat=True)
    counts = np.array([len(own) for own in parts], dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(counts - 1)])
    places = np.flatnonzero(tokens == id_)
    ends, dividers = before, None
    if any(divider in part for own in parts for part in own):
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
