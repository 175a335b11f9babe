"""Rows to documents: texts and chats are encoded, token ids are validated, and all become flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from varlen.documents.chat_rows import renderers_of
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
# By role, functions that drop the null keys that a table gives to all objects.
_PRUNE = {
    role: partial(without_nulls, is_chat=role not in ("tools", "chat_template_kwargs"))
    for role in ("messages", "tools", "prompt", "completion", "chat_template_kwargs")
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Documents:
    """Concatenated documents: document d is `tokens[offsets[d]:offsets[d + 1]]`."""

    tokens: Int32Array  # int32 `[num_tokens]`
    offsets: IntArray  # int64 `[num_documents + 1]`
    # uint8 `[num_tokens]`: 1 where a token is trained on; None where all are. With row weights float32: the weight of
    # a token's label, 0 for none.
    loss_mask: Mask | None = None
    faults: tuple[Fault, ...] = ()  # skipped records
    losses: Losses = NO_LOSSES  # what chat templates left out of these documents, and everything in `faults`
    # int64 `[num_documents]`: index of each document's row; None where document d is of row d, and for token ids.
    rows: IntArray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """int64 `[num_documents]`: tokens of each document."""
        return np.diff(self.offsets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How rows become tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate  # for chats
    append_eos: bool = True  # end every text, and every completion given as text, with the tokenizer's EOS
    supervise: Supervise = "assistant"  # which tokens of chats and completions are trained on
    allow_unwritten: bool = False  # count what a template drops of an assistant's turn, instead of raising
    row_weights: bool = False  # take weights of messages and tokens other than 0 and 1 as loss weights
    vocab_size: int | None = None  # token ids at or above are rejected; None: any are accepted
    columns: Mapping[str, str] = field(default_factory=dict)  # column names by role, if unusual


def targets_of(documents: Documents) -> IntArray:
    """Count the labels of each document: all supervised tokens except its first, which nothing predicts."""
    if documents.loss_mask is None:
        return np.maximum(documents.lengths - 1, 0)
    before = np.concatenate([[0], np.cumsum(as_marks(documents.loss_mask), dtype=np.int64)])
    starts, stops = documents.offsets[:-1], documents.offsets[1:]
    targets: IntArray = before[stops] - before[np.minimum(starts + 1, stops)]
    return targets


def encode_rows(rows: Rows, columns: Columns, encoding: Encoding) -> Documents:
    """Encode rows as documents.

    An empty text becomes a document of no tokens, without EOS: there is nothing to train on, and it is counted.
    """
    documents = _encoded(rows, columns, encoding)
    if not documents.faults:
        return documents
    return replace(documents, losses=documents.losses + losses_of(documents.faults))


def none_of(faults: tuple[Fault, ...]) -> Documents:
    """Return no documents, with faults."""
    return Documents(
        tokens=np.zeros(0, dtype=np.int32),
        offsets=np.zeros(1, dtype=np.int64),
        faults=faults,
        losses=losses_of(faults),
    )


def _encoded(rows: Rows, columns: Columns, encoding: Encoding) -> Documents:
    """Encode rows as documents, without the losses of faults."""
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
    renderers = renderers_of(columns, values, len(rows), encoding.template, choice)
    for role, column in values.items():
        for index in (index for index, cell in enumerate(column) if type(cell) is NotJson):
            renderers[index] = partial(refuse, f"`{columns.names[role]}` holds {column[index].why}")
    # A template's rendering has its own beginning; a plain-text prompt has none.
    is_plain = [
        columns.kind == "prompt" and isinstance(prompt, str) for prompt in values.get("prompt", renderers)
    ]
    return _chats(rows, renderers, encoding, is_plain)


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
    rows: Rows, renderers: Sequence[Callable[[], Rendered]], encoding: Encoding, is_plain: Sequence[bool]
) -> Documents:
    """Render rows, encode them, and mark what is supervised."""
    wrong: dict[int, str] = {}
    rendered: list[Rendered] = []
    begins: list[bool] = []
    for index, render in enumerate(renderers):
        try:
            rendering = _ending(render())
            if not rendering.text.isascii() and _half_character(rendering.text):
                wrong[index] = "holds half a character (a lone surrogate)"
            else:
                rendered.append(rendering)
                begins.append(is_plain[index])
        except SourceError as error:
            wrong[index] = f"can't be used: {error}"
    losses = sum((rendering.losses for rendering in rendered if rendering.losses), NO_LOSSES)
    # The weights of last turns, before more of the text is trained.
    of_ends = [rendering.weights[-1] if rendering.weights else 1 for rendering in rendered]
    is_all = encoding.supervise == "all"
    if is_all and any(rendering.off or rendering.weights for rendering in rendered):
        rendered, is_all = [_all_of(rendering) for rendering in rendered], False
    mask: Mask | None
    tokens, offsets, mask = _encode_spans(rendered, encoding.tokenizer)
    needs_eos = np.array([rendering.needs_eos for rendering in rendered], dtype=bool)
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
        rows=_rows_but(wrong, len(renderers)),
    )


def _all_of(rendering: Rendered) -> Rendered:
    """Supervise all of a conversation except what its author switches off."""
    weighed = [(span, weight) for span, weight in zip(rendering.spans, rendering.weights) if weight != 1]
    apart = sorted([*rendering.off, *(span for span, _ in weighed)])
    every = sorted([*((span, 1.0) for span in between(apart, len(rendering.text))), *weighed])
    weights = tuple(weight for _, weight in every) if weighed else ()
    return replace(rendering, spans=tuple(span for span, _ in every), weights=weights)


def _rows_but(wrong: Mapping[int, str], num_rows: int) -> IntArray | None:
    """Return the indexes of usable rows, or None where all are."""
    return np.delete(np.arange(num_rows), list(wrong)) if wrong else None


def _ending(rendered: Rendered) -> Rendered:
    """Strip blanks after the last turn if the EOS must follow it immediately."""
    if not (rendered.needs_eos and rendered.spans):
        return rendered
    stop = rendered.spans[-1][1]
    return replace(rendered, text=rendered.text[:stop]) if rendered.text[stop:].isspace() else rendered


def _encode_spans(rendered: Sequence[Rendered], tokenizer: Tokenizer) -> tuple[Int32Array, IntArray, Mask]:
    """Encode texts with their supervised spans.

    A text is cut at span boundaries, so that no token straddles one: at inference the model also continues from the
    tokens of the prompt. Where cutting would change all tokens, whole texts are encoded, and a token is supervised if
    any of its characters is.
    """
    each: list[float] = []  # weight of each span, where any isn't 1
    if any(rendering.weights for rendering in rendered):
        each = [
            weight for rendering in rendered for weight in rendering.weights or (1.0,) * len(rendering.spans)
        ]
    if isinstance(tokenizer, FastTokenizer) and not tokenizer.is_cuttable:
        spans = np.array(
            [span for rendering in rendered for span in rendering.spans], dtype=np.int64
        ).reshape(-1, 2)
        counts_ = np.cumsum([0, *(len(rendering.spans) for rendering in rendered)]).astype(np.int64)
        tokens, offsets, marked = tokenizer.encode_spans(
            [rendering.text for rendering in rendered], spans, counts_
        )
        if not each:
            return tokens, offsets, (marked > 0).astype(np.uint8)
        return tokens, offsets, np.array([0, *each], dtype=np.float32)[marked]
    parts: list[list[str]] = []  # of each text: before, in and between its spans, and after the last
    values: list[float] = []  # of each part
    firsts = [0]
    of_spans = iter(each)
    for rendering in rendered:
        at = 0
        own: list[str] = []
        for start, stop in rendering.spans:
            own += (rendering.text[at:start], rendering.text[start:stop])
            values += (0, next(of_spans, 1))
            at = stop
        own.append(rendering.text[at:])
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
    """Prepend ids to some documents, and append the EOS to some that don't end in it.

    In chats prepended ids are never supervised; the EOS always is, with the weight of the last turn (`of_ends`).
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
    for index, id_ in enumerate(prefix):
        at = longer[:-1][starts] + index
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
    """Return the id that ends a document, if any."""
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
    """Return why a value isn't valid text: a lone surrogate, bytes, or another kind of value."""
    if isinstance(value, str):
        return f"holds half a character in `{name}` (a lone surrogate)"
    if isinstance(value, bytes):
        return f"holds bytes in `{name}`, which must be a string of valid UTF-8; {READ_AS_TEXT}"
    return f"holds {json_kind(value)} in `{name}`, which must be a string"


# Encode the parts of texts in one call, joined by a special token at which the tokenizer reliably splits.

_DIVIDERS: dict[tuple[str, frozenset[str]], tuple[str, int]] = {}  # by fingerprint and special tokens
_MOST_TRIED = 16
# Texts for probing both sides of a special token.
_BESIDE = ("Hi there", "user\n", " and", "  ", "\n\n", "1", ".", "<|", "é")


def encode_parts(tokenizer: Tokenizer, parts: Sequence[Sequence[str]]) -> tuple[Int32Array, IntArray]:
    """Return the ids of texts in parts, each part encoded by itself, and the bounds of the parts.

    Where the tokenizer reliably splits at a special token, the parts of a text are joined by it, encoded at once, and
    its ids removed: the same result, faster.
    """
    divider, id_ = _divider(tokenizer) if isinstance(tokenizer, FastTokenizer) else ("", -1)
    if divider:
        encoded = _at_once(tokenizer, parts, divider, id_)
        if encoded is not None:
            return encoded
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
    """Encode the joined parts of each text; None where the special token doesn't occur as often as expected."""
    tokens, offsets = tokenizer.encode([divider.join(own) for own in parts], is_chat=True)
    counts = np.array([len(own) for own in parts], dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(counts - 1)])
    found = np.flatnonzero(tokens == id_)
    ends, dividers = before, None
    if any(divider in part for own in parts for part in own):
        held = np.array([part.count(divider) for own in parts for part in own], dtype=np.int64)
        seen = np.concatenate([[0], np.cumsum(held)])
        last = np.cumsum(counts)
        ends = before + seen[np.concatenate([[0], last])]
        dividers = np.arange(before[-1]) + np.delete(seen[1:], last - 1)
    if not np.array_equal(np.searchsorted(found, offsets), ends):
        return None
    cuts = found if dividers is None else found[dividers]
    bounds = np.sort(np.concatenate([cuts - np.arange(len(cuts)), offsets - before]))
    return np.delete(tokens, cuts), bounds


def dividing_id(tokenizer: FastTokenizer, mark: str) -> int | None:
    """Return the id of a special token at which cutting a text doesn't change its ids.

    None if it is no special token, or overlaps another one.
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
    pieces = ids[len(wholes) :]
    joined = [[*before, id_, *after] for before in pieces for after in pieces]
    return id_ if ids[: len(wholes)] == joined else None


def _divider(tokenizer: FastTokenizer) -> tuple[str, int]:
    """Return a special token that reliably separates the texts beside it, and its id; "" where none is known."""
    key = tokenizer.fingerprint, tokenizer.specials.end_marks
    if key not in _DIVIDERS:
        marks = sorted(tokenizer.specials.end_marks)[:_MOST_TRIED]
        candidates = ((mark, dividing_id(tokenizer, mark)) for mark in marks)
        _DIVIDERS[key] = next(((mark, id_) for mark, id_ in candidates if id_ is not None), ("", -1))
    return _DIVIDERS[key]
