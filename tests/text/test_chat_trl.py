"""What of a chat is supervised agrees with TRL's training twins, for all of its templates.

varlen gets the original template, or the twin with its marks hidden, and the chat in its common form; transformers
gets the twin and the chat in the form that the template wants.
"""

import functools
import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest
from tests.support.rarely import mostly
from tests.text.trl_chats import (
    FAMILIES,
    Chat,
    Expected,
    hidden_twin,
    joined,
    marked,
    native,
    of_last_turn,
    of_original,
    of_twin,
    preserves,
    source_of,
    template_names,
    tokenizer_of,
    twin_name,
)
from tests.text.trl_conversations import CHATS, KEPT_BY_THE_TWIN, REWRITES, TURNS, UNTOLD

from varlen.documents.documents import Encoding, encode_rows
from varlen.errors import SourceError
from varlen.files.columns import Columns
from varlen.files.rows import Rows
from varlen.text.chat_template import ChatTemplate, chat_template, prompt_and_completion
from varlen.text.load_tokenizer import load_tokenizer
from varlen.text.rendering import Choice

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl, whose templates are the oracle, is not installed"
)

_ORIGINALS = [name for name in FAMILIES if twin_name(name) != name]
_TWINS = [name for name in FAMILIES if twin_name(name)]
_MOST_SHOWN = 600


@functools.cache
def _encoding(name: str, source: str, supervise: Any = "assistant") -> Encoding:
    tokenizer = load_tokenizer(tokenizer_of(name))
    return Encoding(tokenizer=tokenizer, template=_template(name, source), supervise=supervise)


@functools.cache
def _template(name: str, source: str) -> ChatTemplate:
    specials = load_tokenizer(tokenizer_of(name)).specials
    return chat_template(source, special_tokens=specials.texts, end_marks=specials.end_marks)


def _compare(name: str, source: str, chat: Chat, expected: Expected, supervise: str = "assistant") -> None:
    """Require the tokens and the mask that are expected, or a refusal where nothing is."""
    rows = Rows(columns={"messages": [chat.messages], "tools": [chat.tools]}, numbers=[1], path="chats")
    columns = Columns(kind="messages", names={"messages": "messages", "tools": "tools"})
    documents = encode_rows(rows, columns, _encoding(name, source, supervise))
    faults = "; ".join(map(str, documents.faults))
    tokenizer = tokenizer_of(name)
    ids = documents.tokens.tolist()
    mask = [1] * len(ids) if documents.loss_mask is None else documents.loss_mask.tolist()
    said = _said(tokenizer, ids, mask)
    if expected.refused:
        assert faults, f"must be refused, since {expected.refused}; trained instead: {said}"
        return
    may_refuse = expected.rewritten and supervise != "last" and twin_name(name)
    if may_refuse and f"{twin_name(name)}.jinja" in faults:
        return
    assert not faults, f"refused: {faults[:_MOST_SHOWN]}; expected: {expected.said}"
    text = expected.text[: expected.spans[-1][1]] if expected.eos else expected.text
    wanted = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    wanted_ids, offsets = list(wanted["input_ids"]), wanted["offset_mapping"]
    wanted_mask = _marks(offsets, expected.spans)
    if expected.eos:
        wanted_ids, wanted_mask = [*wanted_ids, tokenizer.eos_token_id], [*wanted_mask, 1]
    got = tokenizer.decode(ids)
    assert ids == wanted_ids, f"another text: {got[-_MOST_SHOWN:]!r} for {text[-_MOST_SHOWN:]!r}"
    wanted_said = _said(tokenizer, wanted_ids, wanted_mask)
    assert mask == wanted_mask, f"trained {said}, not {wanted_said}"


def _marks(offsets: Iterable[tuple[int, int]], spans: Iterable[tuple[int, int]]) -> list[int]:
    """Return of each token whether it is within a span."""
    return [int(any(a <= start and stop <= b for a, b in spans)) for start, stop in offsets]


def _said(tokenizer: Any, ids: list[int], mask: list[int]) -> list[str]:
    runs: list[list[int]] = []
    for number, (id_, is_on) in enumerate(zip(ids, mask)):
        if is_on and (number == 0 or not mask[number - 1]):
            runs.append([])
        if is_on:
            runs[-1].append(id_)
    return [tokenizer.decode(run) for run in runs]


def test_every_template_of_trl_is_here():
    names = {name for name in template_names() if not name.endswith("_training")}
    assert names == set(FAMILIES)
    assert len([name for name in FAMILIES if twin_name(name) not in (None, name)]) >= 31
    assert len(CHATS) >= 13


@pytest.mark.parametrize("family", _TWINS)
def test_the_oracle_is_the_mask_that_transformers_gives(family):
    tokenizer, source = tokenizer_of(family), source_of(twin_name(family) or "")
    chat = native(CHATS["three turns"], FAMILIES[family], twin=True)
    got = tokenizer.apply_chat_template(
        chat.messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
    )
    found = marked(family, source, chat)
    assert found is not None
    text, spans = found
    wanted = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert got["input_ids"] == wanted["input_ids"]
    assert got["assistant_masks"] == _marks(wanted["offset_mapping"], spans)


_OFTEN = ("three turns", "tools, parallel calls", "system, two turns", "same answers")


@pytest.mark.parametrize("conversation", mostly(_OFTEN, CHATS))
@pytest.mark.parametrize("family", _ORIGINALS)
def test_the_original_trains_what_the_twin_marks(family, conversation):
    chat = CHATS[conversation]
    _compare(family, source_of(family), chat, of_original(family, chat))


@pytest.mark.parametrize("conversation", mostly(_OFTEN, CHATS))
@pytest.mark.parametrize("family", _TWINS)
def test_a_twin_without_its_marks_trains_what_they_mark(family, conversation):
    chat = CHATS[conversation]
    _compare(family, hidden_twin(family), chat, of_twin(family, chat))


@pytest.mark.parametrize("family", FAMILIES)
def test_which_chats_a_template_rewrites(family):
    usable = [c for c in CHATS if not of_original(family, CHATS[c]).refused]
    assert {c for c in usable if not preserves(family, CHATS[c])} == set(REWRITES.get(family, ()))
    if family in KEPT_BY_THE_TWIN:
        assert all(preserves(family, CHATS[c], twin=True) for c in usable)


_TURNS = [
    pytest.param(family, conversation, number, id=f"{family}-{conversation}-message {number}")
    for family, conversations in REWRITES.items()
    if family in _ORIGINALS
    for conversation in conversations
    for number, message in enumerate(CHATS[conversation].messages)
    if message["role"] == "assistant"
]


@pytest.mark.parametrize(("family", "conversation", "number"), _TURNS)
def test_each_turn_as_the_last_where_a_template_rewrites(family, conversation, number):
    chat = CHATS[conversation].up_to(number + 1)
    _compare(family, source_of(family), chat, of_last_turn(family, chat), "last")


_TOLD = [
    pytest.param(family, name, id=f"{family}-{name}")
    for family in FAMILIES
    for name in TURNS
    if name not in UNTOLD.get(family, ())
]


@pytest.mark.parametrize(("family", "name"), _TOLD)
def test_turns_that_begin_or_end_in_odd_ways(family, name):
    if family in _ORIGINALS:
        _compare(family, source_of(family), TURNS[name], of_original(family, TURNS[name]))
    if family in _TWINS:
        _compare(family, hidden_twin(family), TURNS[name], of_twin(family, TURNS[name]))


_SINGLE = (
    "three turns",
    "same answers",
    "tools, parallel calls",
    "tools, calls in two turns",
    "system, two turns",
)
_MARKED = [
    pytest.param(name, twin, id=f"{name}-{'twin' if twin else 'original'}")
    for name in FAMILIES
    for twin in (False, True)
    if not twin or name in _TWINS
]


@pytest.mark.parametrize(("family", "twin"), _MARKED)
def test_single_turns_are_parts_of_what_is_trained_of_all(family, twin):
    template = _template(family, source_of((twin_name(family) if twin else family) or ""))
    for conversation in _SINGLE:
        chat = CHATS[conversation]
        try:
            whole = template.render(chat.messages, chat.tools)
        except SourceError:
            continue
        speaking = [n for n, message in enumerate(chat.messages) if message["role"] == "assistant"]
        last = template.render(chat.messages, chat.tools, choice=Choice(last=True))
        number = speaking[-1]
        completed = prompt_and_completion(
            chat.messages[:number], chat.messages[number:], template, chat.tools
        )
        assert (completed.text, completed.spans) == (last.text, last.spans)
        assert whole.text == last.text
        assert whole.spans[-len(last.spans) :] == last.spans
        for off in speaking:
            flagged = [{**one, "train": False} if n == off else one for n, one in enumerate(chat.messages)]
            rendered = template.render(flagged, chat.tools)
            assert rendered.off
            assert rendered.spans
            assert joined(sorted((*rendered.spans, *rendered.off))) == joined(list(whole.spans))
