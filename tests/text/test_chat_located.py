"""Turns are located in what odd templates write, or the chat is refused; what isn't the assistant's never is."""

from __future__ import annotations

import pytest
from tests.support.chats import BARE, LLAMA, LOSSES_ALLOWED, SPECIAL, TEMPLATES, chat, said, template

from varlen.errors import SourceError
from varlen.text.chat_template import CHATML, chat_template

TALK = chat("u:Hi", "a:Hello!", "u:Bye", "a:See you.")


def each(turn: str, after: str = "") -> str:
    """A template that writes every message so."""
    return "{% for m in messages %}{{ " + turn + " }}{% endfor %}" + after


def test_the_longest_of_the_special_tokens_is_the_mark():
    source = each("m.role + ':' + m.content + '<|end|>'")

    assert said(chat_template(source, end_marks=["<|", "<|end|>"]).render(TALK))[0] == "Hello!<|end|>"


def test_white_space_is_no_end_mark_though_a_tokenizer_may_have_it_as_a_token():
    rendered = chat_template(BARE, end_marks=["\n", " ", ""]).render(TALK)

    assert said(rendered) == ["Hello!", "See you."]
    assert rendered.needs_eos


def test_what_stands_behind_a_mark_may_differ_at_the_end_of_a_chat():
    source = each("m.role + ':' + m.content + '*end*' + ('\\n' if loop.last else ' ')")

    assert said(chat_template(source).render(TALK)) == ["Hello!*end*", "See you.*end*"]


def test_a_mark_that_only_the_last_turn_has_makes_no_mark_of_the_next_header():
    source = each("'<|' + m.role + '|>' + m.content + ('\\n<|end|>' if loop.last else '')")

    rendered = chat_template(source, end_marks=["<|user|>", "<|assistant|>", "<|end|>"]).render(TALK)

    assert said(rendered) == ["Hello!", "See you.\n<|end|>"]
    assert not rendered.needs_eos


def test_thoughts_that_are_dropped_leave_turns_that_follow_each_other_in_their_place():
    thoughtful = [turn | {"reasoning_content": "So"} for turn in chat("a:1", "a:2", "a:3")]

    rendered = template("thinking").render([*chat("u:a"), *thoughtful[:2], *chat("u:b"), thoughtful[2]])

    assert said(rendered) == ["1<|im_end|>", "2<|im_end|>", "<think>\nSo\n</think>\n\n3<|im_end|>"]


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("m.role + ': ' + m.content | upper + '\\n'", ["HELLO! ", "SEE YOU."]),
        ("m.role + ': ' + m.content | upper + ('\\n' if loop.last else ' ')", ["HELLO!", "SEE YOU."]),
        ("m.role + ': ' + m.content | upper + '*end* of turn\\n'", ["HELLO! *end*", "SEE YOU.*end*"]),
        ("'[' + m.role + ']\\n' + m.content | upper + '</s>\\n'", ["HELLO! </s>", "SEE YOU.</s>"]),
        ("m.content | upper + ('\\n' if loop.last else ' ')", [" HELLO!", " SEE YOU."]),
    ],
    ids=["bare", "another end", "a literal mark", "an eos", "no header"],
)
def test_a_template_that_changes_contents_is_measured_by_prefixes(turn, expected):
    rendered = chat_template(each(turn), special_tokens=SPECIAL).render(
        chat("u:Hi", "a:Hello! ", "u:Bye", "a:See you.")
    )

    assert said(rendered) == expected
    assert rendered.needs_eos == expected[1].endswith("YOU.")


@pytest.mark.parametrize("spelled", ["text", "parts"])
def test_a_template_that_writes_parts_alone_is_given_parts(spelled):
    source = (
        "{% for m in messages %}{{ m.role + ':' }}{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{{ '<end>' }}{% endfor %}"
    )
    messages = TALK
    if spelled == "parts":
        messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in TALK]

    rendered = chat_template(source).render(messages)

    assert rendered.text == "user:Hi<end>assistant:Hello!<end>user:Bye<end>assistant:See you.<end>"
    assert said(rendered) == ["Hello!<end>", "See you.<end>"]


def test_a_generation_prompt_bounds_a_turn_whose_content_is_changed():
    source = LLAMA.replace("message['content'] | trim", "message['content'] | upper")

    rendered = chat_template(source, special_tokens=SPECIAL).render(TALK)

    assert said(rendered) == ["HELLO!<|eot_id|>", "SEE YOU.<|eot_id|>"]


def test_thoughts_within_contents_that_a_template_drops_from_every_turn_leave_the_answers():
    source = LLAMA.replace("message['content'] | trim", "message['content'].split('</think>')[-1] | trim")
    source = source.replace("{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}", "{{- PROMPT }}")
    special = SPECIAL | {"PROMPT": "<|start_header_id|>assistant<|end_header_id|>\n\n<think>\n"}

    rendered = chat_template(source, special_tokens=special).render(
        chat("u:1", "a:<think>\nSo</think> 2", "u:<think>", "a:<think>\nWell</think> 3"),
        choice=LOSSES_ALLOWED,
    )

    assert said(rendered) == ["2<|eot_id|>", "3<|eot_id|>"]
    assert rendered.losses.unwritten == {"reasoning_content": (2, 6)}


@pytest.mark.parametrize(
    "source",
    [
        LLAMA + "{{ 'tail' if messages[0].content == 'Hi' }}",
        each("m.content + m.content"),
        each("m.content", "{{ messages[1].content }}"),
        "{% for m in messages | reverse %}{{ m.role + m.content }}{% endfor %}",
        each("m.role + ':' + m.content | length | string"),
        each("m.content if m.role == 'user' else ''", "{{ messages | length }}"),
    ],
    ids=["a tail of its own", "twice", "again at the end", "backwards", "lengths alone", "never"],
)
def test_a_turn_that_cannot_be_located_is_refused(source):
    with pytest.raises(SourceError, match=r"can't be located in the text; put \{% generation %\}"):
        chat_template(source, special_tokens=SPECIAL).render(TALK)


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_user_who_writes_the_whole_chat_beforehand_is_not_supervised(name):
    said_before = template(name).render(TALK).text

    rendered = template(name).render([{"role": "user", "content": said_before}, *chat("a:No.")])

    assert len(rendered.spans) == 1
    assert said(rendered)[0].startswith(("No.", " No.", "<think>\n\n</think>\n\nNo."))
    assert rendered.spans[0][0] > len(said_before)


def test_a_chat_of_many_turns_is_located():
    rendered = chat_template(CHATML + "{# slow #}").render(chat(*("u:a", "a:b") * 30))

    assert said(rendered) == ["b<|im_end|>"] * 30
