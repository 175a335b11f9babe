"""Rows in the forms that people have give the text of the template's own form, and train what their author says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from varlen.documents.source import open_source
from varlen.errors import SettingError, SourceError
from varlen.text.chat_template import chat_template, prompt_and_completion
from varlen.text.rendering import Choice

HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
CONTENT = "{{ m.content if m.content is defined and m.content else '' }}"
TAIL = (
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{% for t in tools or [] %}{{ '[' + t.function.name + ' ' + t.function.parameters | tojson + ']' }}"
    "{% endfor %}"
)
OBJECTS = "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson + '</call>' }}{% endfor %}"
TEXTS = (
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' + c.function.arguments + '</call>' }}"
    "{% endfor %}"
)
WITH_OBJECTS, WITH_TEXTS = (TOOLS + HEAD + CONTENT + calls + TAIL for calls in (OBJECTS, TEXTS))
TAGGED = (
    HEAD
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    + "{% else %}{{ m.content }}{% endif %}"
    + TAIL
)
ARGUMENTS = {"city": "Köln", "days": [1, None], "deep": {"a": 1.5}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "w", "description": "Weather.", "parameters": SCHEMA}
WRAPPED = [{"type": "function", "function": FUNCTION}]


def asked(*more: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Weather?"}, *more]


def called(call: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return asked(
        {"role": "assistant", "tool_calls": [call], **more},
        {"role": "tool", "content": "7 C", "tool_call_id": "1"},
        {"role": "assistant", "content": "Seven."},
    )


OWN = called({"type": "function", "function": {"name": "w", "arguments": ARGUMENTS}}, content="")
FORMS: dict[str, Any] = {
    "openai": called(
        {"id": "1", "type": "function", "function": {"name": "w", "arguments": json.dumps(ARGUMENTS)}},
        content=None,
    ),
    "mistral": called({"id": "1", "function": {"name": "w", "arguments": json.dumps(ARGUMENTS)}}),
    "escaped": called(
        {"function": {"arguments": json.dumps(ARGUMENTS, ensure_ascii=True), "name": "w"}}, content=None
    ),
    "bare": called({"name": "w", "arguments": ARGUMENTS}, content=""),
    "old openai": [
        *asked(
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "w", "arguments": json.dumps(ARGUMENTS)},
            }
        ),
        {"role": "function", "name": "w", "content": "7 C"},
        {"role": "assistant", "content": "Seven."},
    ],
    "sharegpt": [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": json.dumps({"name": "w", "arguments": ARGUMENTS})},
        {"from": "observation", "value": "7 C"},
        {"from": "gpt", "value": "Seven."},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        *OWN[1:3],
        {"role": "assistant", "content": [{"type": "text", "text": "Sev"}, {"type": "text", "text": "en."}]},
    ],
    "datasets": {
        "role": ["user", "assistant", "tool", "assistant"],
        "content": ["Weather?", "", "7 C", "Seven."],
        "tool_calls": [None, OWN[1]["tool_calls"], None, None],
    },
    "text": json.dumps(OWN),
}


def said(rendered: Any) -> list[str]:
    return [rendered.text[a:b] for a, b in rendered.spans]


@pytest.mark.parametrize("source", [WITH_OBJECTS, WITH_TEXTS], ids=["objects", "texts"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_text_and_the_spans_of_the_templates_own(form, source):
    template = chat_template(source, end_marks=["<|im_start|>", "<|im_end|>"])
    expected = template.render(OWN, WRAPPED)

    rendered = template.render(FORMS[form], WRAPPED)

    spelled = json.loads(said(rendered)[0].partition("<call>")[2].partition("</call>")[0].removeprefix("w "))
    assert spelled.get("arguments", spelled) == ARGUMENTS
    if source is WITH_OBJECTS or form not in (
        "openai",
        "mistral",
        "escaped",
        "old openai",
    ):  # their own texts
        assert rendered.text == expected.text
        assert rendered.spans == expected.spans
    assert said(rendered)[1] == "Seven.<|im_end|>"


@pytest.mark.parametrize(
    "tools",
    [
        json.dumps(WRAPPED),
        [json.dumps(WRAPPED[0])],
        [FUNCTION],
        json.dumps([FUNCTION]),
        [{"type": "function", **FUNCTION}],
        [{"name": "w", "description": "Weather.", "input_schema": SCHEMA}],
        [{"type": "function", "function": {**FUNCTION, "parameters": json.dumps(SCHEMA)}}],
    ],
    ids=["text", "texts", "functions", "functions as text", "flat", "input schema", "parameters as text"],
)
def test_tools_in_any_form_are_written_as_objects(tools):
    template = chat_template(WITH_OBJECTS, end_marks=["<|im_end|>"])

    assert template.render(OWN, tools).text == template.render(OWN, WRAPPED).text


@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking", "parts"])
def test_thoughts_reach_the_template_under_the_key_that_it_reads(read, given):
    source = HEAD + f"{{{{ '<think>' + m.{read} + '</think>' if m.{read} else '' }}}}" + CONTENT + TAIL
    answer: dict[str, Any] = {"role": "assistant", "content": "4", given: "two and two"}
    if given == "parts":
        parts = [{"type": "thinking", "thinking": "two and two"}, {"type": "text", "text": "4"}]
        answer = {"role": "assistant", "content": parts}

    rendered = chat_template(source, end_marks=["<|im_end|>"]).render(asked(answer))

    assert said(rendered) == ["<think>two and two</think>4<|im_end|>"]


def test_what_a_template_never_writes_is_refused_and_counted_where_the_caller_allows_it():
    template = chat_template(HEAD + CONTENT + TAIL, end_marks=["<|im_end|>"])
    answer = {"role": "assistant", "content": "4", "reasoning": " two and two "}

    with pytest.raises(
        SourceError, match=r"`reasoning_content` of message 2 \(11 characters: 'two and two'\)"
    ):
        template.render(asked(answer))
    with pytest.raises(SourceError, match="`tool_calls` of message 2"):
        template.render(OWN)
    rendered = template.render(asked(answer), choice=Choice(allow_unwritten=True))

    assert said(rendered) == ["4<|im_end|>"]
    assert rendered.losses.unwritten == {"reasoning_content": (1, 11)}


def test_thoughts_of_earlier_turns_go_by_design_only_once_the_user_speaks_again():
    thoughts = (
        "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content and loop.last else '' }}"
    )
    template = chat_template(HEAD + thoughts + CONTENT + TAIL, end_marks=["<|im_end|>"])
    first, last = ({"role": "assistant", "content": c, "reasoning_content": f"so {c}"} for c in "ab")

    rendered = template.render([*asked(first), *asked(last)])

    assert said(rendered) == ["a<|im_end|>", "<think>so b</think>b<|im_end|>"]
    assert rendered.losses.dropped == {"reasoning_content": (1, 4)}
    assert not rendered.losses.unwritten
    with pytest.raises(SourceError, match="`reasoning_content` of message 2"):
        template.render([*asked(first), last])


@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}]
)
def test_a_message_that_its_author_switches_off_is_not_trained(flag):
    messages = [
        *asked({"role": "assistant", "content": "bad", **flag}),
        *asked({"role": "assistant", "content": "good"}),
    ]
    for source in (
        None,
        HEAD + CONTENT + TAIL,
        TAGGED,
    ):
        rendered = chat_template(source, end_marks=["<|im_end|>"]).render(messages)

        assert [text.removesuffix("<|im_end|>") for text in said(rendered)] == ["good"]


@pytest.mark.parametrize("value", [0.5, 2, "no", [1]])
def test_other_weights_are_refused(value):
    with pytest.raises(SourceError, match=r"message 2 has the weight .*only 0 and 1"):
        chat_template().render(asked({"role": "assistant", "content": "a", "weight": value}))


def test_a_row_of_which_all_turns_are_switched_off_is_refused():
    with pytest.raises(SourceError, match=r"every assistant turn of the chat .* is switched off"):
        chat_template().render(asked({"role": "assistant", "content": "a", "weight": 0}))


def test_the_last_turn_alone_is_trained_on_request():
    turns = [message for word in "abc" for message in asked({"role": "assistant", "content": word})]
    for source in (
        None,
        HEAD + CONTENT + TAIL,
        TAGGED,
    ):
        rendered = chat_template(source, end_marks=["<|im_end|>"]).render(turns, choice=Choice(last=True))
        completed = prompt_and_completion(
            turns[:1], turns[1:], chat_template(source, end_marks=["<|im_end|>"]), choice=Choice(last=True)
        )

        assert [text.removesuffix("<|im_end|>") for text in said(rendered)] == ["c"]
        assert completed.spans == rendered.spans


def test_special_tokens_that_follow_the_end_mark_at_once_are_trained_and_none_of_the_next_header():
    source = HEAD.replace("\\n", "|") + CONTENT + "{{ '<|im_end|></s>' }}{% endfor %}"

    rendered = chat_template(
        source, special_tokens={"eos_token": "</s>"}, end_marks=["<|im_end|>", "<|im_start|>"]
    ).render([*asked({"role": "assistant", "content": "a"}), *asked({"role": "assistant", "content": "b"})])

    assert said(rendered) == ["a<|im_end|></s>", "b<|im_end|></s>"]
    assert not rendered.needs_eos


def test_variables_of_the_caller_and_of_the_row_reach_the_template(tmp_path):
    source = "{{ '/think ' if thinking is defined and thinking else '' }}{{ tone }}:" + HEAD + CONTENT + TAIL
    answer = asked({"role": "assistant", "content": "a"})
    rows = [
        {"messages": answer},
        {"messages": answer, "chat_template_kwargs": {"thinking": True, "tone": "b"}},
    ]
    rows += [{"messages": answer, "chat_template_kwargs": '{"tone": "c"}'}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    found = open_source(tmp_path, chat_template=source, chat_template_kwargs={"tone": "a"})
    documents = next(iter(found.read(found.parts()[0])))

    bounds = documents.offsets.tolist()
    texts = [
        bytes(i for i in documents.tokens[a:b].tolist() if i < 256).decode()
        for a, b in zip(bounds, bounds[1:])
    ]
    assert [text.partition(":")[0] for text in texts] == ["a", "/think b", "c"]
    with pytest.raises(SettingError, match="can't be given the variable 'messages'"):
        open_source(tmp_path, chat_template=source, chat_template_kwargs={"messages": []})


def test_the_template_for_tools_is_taken_where_a_row_has_tools_and_a_list_needs_a_default():
    named = {"default": HEAD + CONTENT + TAIL, "tool_use": WITH_OBJECTS}
    template = chat_template(named, end_marks=["<|im_end|>"])
    plain = asked({"role": "assistant", "content": "a"})

    assert template.render(OWN, WRAPPED).text == chat_template(WITH_OBJECTS).render(OWN, WRAPPED).text
    assert template.render(plain).text == chat_template(named["default"]).render(plain).text
    assert template.fingerprint != chat_template(named["default"], end_marks=["<|im_end|>"]).fingerprint
    with pytest.raises(SettingError, match=r"2 chat templates .* and none is called default"):
        chat_template({"rag": "a", "tool_use": "b"})


def test_tools_that_no_template_writes_are_refused():
    for source in (None, HEAD + CONTENT + TAIL):
        with pytest.raises(SourceError, match=r"doesn't write tools, and the row has 1 \(w\)"):
            chat_template(source, end_marks=["<|im_end|>"]).render(
                asked({"role": "assistant", "content": "a"}), WRAPPED
            )


def test_an_answer_that_is_empty_is_counted():
    turns = [*asked({"role": "assistant", "content": " "}), *asked({"role": "assistant", "content": "b"})]
    for source in (None, HEAD + CONTENT + TAIL):
        assert chat_template(source, end_marks=["<|im_end|>"]).render(turns).losses.empty_turns == 1
