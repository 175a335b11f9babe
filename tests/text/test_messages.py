"""Messages in whatever spelling a row has: one list with role and content, or a sentence that names the message."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.chats import chat

from varlen.errors import SourceError, VarlenError
from varlen.text.messages import as_messages

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}


def test_plain_messages_are_handed_on_as_they_are():
    messages = chat("s:a", "d:b", "u:c", "a:d", "t:e")

    assert as_messages(messages) is messages


def test_sharegpt_is_renamed():
    spoken = ["system", "human", "gpt", "function_call", "observation", "tool", "user", "assistant"]
    spoken += ["chatgpt", "function"]

    messages = as_messages([{"from": role, "value": role[0]} for role in spoken])

    assert [message["role"] for message in messages] == [
        *("system", "user", "assistant", "assistant", "tool", "tool", "user", "assistant"),
        *("assistant", "tool"),
    ]
    assert [message["content"] for message in messages] == [role[0] for role in spoken]
    assert all(set(message) == {"role", "content"} for message in messages)


def test_other_words_for_roles_are_taken_beside_content():
    messages = as_messages([{"role": "human", "content": "a"}, {"role": "model", "content": "b"}])

    assert messages == chat("u:a", "a:b")


def test_the_text_of_a_list_is_read_as_json():
    messages = chat("u:é", "a:界")

    assert as_messages(json.dumps(messages)) == messages


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "\nb"}, {"text": "c"}]

    assert as_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nbc"}]


def test_null_is_left_out_but_for_content_and_within_arguments():
    row = {
        "role": "assistant",
        "content": None,
        "name": None,
        "tool_calls": [CALL | {"id": None}],
        "weight": 0,
    }

    assert as_messages([row]) == [{"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 0}]


def test_a_call_of_a_tool_may_come_without_content():
    row = {"role": "assistant", "tool_calls": [CALL]}

    assert as_messages([row]) == [row]


def test_the_messages_given_are_not_changed():
    row = {"from": "gpt", "value": "a", "weight": None}

    as_messages([row])

    assert row == {"from": "gpt", "value": "a", "weight": None}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "must be a list of messages, found a number"),
        (None, "found null"),
        ({}, "found an object"),
        ((), "found tuple"),
        ([], "empty list"),
        ("Hello", "neither .*'Hello'"),
        ("x" * 50, "xxx…"),
        ('{"role": "user"}', "found an object"),
        ("[" * 100_000, "can't be read"),
        ("1" * 5000, "can't be read"),
        (
            [{"role": "user", "content": "a"}, "b"],
            "message 2 must be an object with role and content, found text",
        ),
        ([{"content": "a"}], "message 1 has no role.*`content`"),
        ([{}], "message 1 has no role.*none"),
        (
            [{"role": "bot", "content": ""}],
            "unknown role 'bot'; known: system, developer, user, assistant, tool",
        ),
        ([{"from": "bot", "value": ""}], "unknown role 'bot'"),
        ([{"role": {}, "content": ""}], "unknown role {}"),
        ([{"role": "user"}], r"message 1 \(user\) has no content"),
        ([{"role": "user", "content": None, "tool_calls": [CALL]}], "has no content; only an assistant's"),
        ([{"role": "assistant", "content": None}], r"message 1 \(assistant\) has no content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "has no content"),
        ([{"role": "user", "content": 3}], "must be text or a list of parts of text, found a number"),
        ([{"role": "user", "content": {"text": "a"}}], "found an object"),
        ([{"role": "user", "content": [{"type": "image", "url": "a"}]}], "a part of type 'image'"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "a text that is a number"),
        ([{"role": "user", "content": ["a"]}], "only parts of text.*found text"),
        ([{"role": "assistant", "content": "", "tool_calls": "f"}], "tool_calls of message 1 must be a list"),
        (
            [{"role": "assistant", "content": "", "tool_calls": ["f"]}],
            "tool_calls of message 1 must be a list",
        ),
        ([{"role": "user", "content": "", 3: ""}], "the key 3; keys must be text"),
    ],
)
def test_what_is_no_chat_is_an_error(value, words):
    with pytest.raises(SourceError, match=words):
        as_messages(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from(["user", "gpt"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "from", "content", "value", "text", "type", "tool_calls"]), inner
        )
    ),
)


@given(value=JSON)
def test_whatever_json_holds_becomes_messages_or_an_error_of_ours(value):
    for spelled in (value, json.dumps(value), [value]):
        try:
            messages = as_messages(spelled)
        except VarlenError:
            continue
        assert messages == as_messages(messages)
        assert all(message["role"] in ("user", "assistant") for message in messages)
