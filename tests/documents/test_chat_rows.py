"""Rows in the forms that people have, as chats and instructions, train what their author says, or are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.chats import HEAD, TAGGED, TAIL

from varlen.documents.source import open_source
from varlen.documents.texts import read_texts
from varlen.errors import SettingError, SourceError
from varlen.files.columns import find_columns
from varlen.text.chat_template import chat_template, prompt_and_completion
from varlen.text.rendering import Choice

CONTENT = "{{ m.content if m.content is defined and m.content else '' }}"
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
    # Their own texts.
    if source is WITH_OBJECTS or form not in (
        "openai",
        "mistral",
        "escaped",
        "old openai",
    ):
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
    for source in (None, HEAD + CONTENT + TAIL, TAGGED):
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
    for source in (None, HEAD + CONTENT + TAIL, TAGGED):
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
    with pytest.raises(SettingError, match="the variable 'messages' can't be passed to a chat template"):
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


WITH_CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER, GOOD = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
SYSTEM = {"role": "system", "content": "S"}
ENDS = ["<|im_start|>", "<|im_end|>"]


def texts(data: Any, **options: Any) -> list[tuple[str, str]]:
    """Return the text of each document, and what is trained of it."""
    source = open_source(data, **options)
    found = []
    for part in source.parts():
        for documents in source.read(part):
            bounds = documents.offsets.tolist()
            mask = documents.loss_mask
            for a, b in zip(bounds, bounds[1:]):
                ids = documents.tokens[a:b].tolist()
                on = [1] * len(ids) if mask is None else mask[a:b].tolist()
                decode = source.encoding.tokenizer.decode
                found.append((decode(ids), decode([i for i, is_on in zip(ids, on) if is_on])))
    return found


@pytest.mark.parametrize("form", ["messages", "columns", "wrapped"])
@pytest.mark.parametrize("stored", ["parquet", "json lines"])
def test_keys_that_a_table_gives_to_all_arguments_are_no_arguments(form, stored, tmp_path):
    calls = [
        {"type": "function", "function": {"name": "w", "arguments": arguments}}
        for arguments in ({"city": "Oslo"}, {"days": 2})
    ]
    chats: list[Any] = [[USER, {"role": "assistant", "content": "", "tool_calls": [call]}] for call in calls]
    if form == "columns":
        chats = [
            {"role": ["user", "assistant"], "content": ["Q", ""], "tool_calls": [None, [call]]}
            for call in calls
        ]
    if form == "wrapped":
        chats = [{"messages": chat} for chat in chats]
    path = tmp_path / ("a.parquet" if stored == "parquet" else "a.jsonl")
    if stored == "parquet":
        pq.write_table(pa.table({"messages": chats}), path)
    else:
        path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))

    found = texts(path, chat_template=WITH_CALLS)

    spelled = [text.partition("<call>")[2].partition("</call>")[0] for text, _ in found]
    assert [json.loads(call)["arguments"] for call in spelled] == [{"city": "Oslo"}, {"days": 2}]


@pytest.mark.parametrize("empty", [[], {}, None])
def test_an_empty_list_of_calls_is_none_whoever_speaks(empty):
    source = (
        "{% for m in messages %}{% if m.tool_calls is defined and m.role != 'assistant' %}"
        "{{ raise_exception('calls of ' + m.role) }}{% endif %}{{ m.role + ':' + m.content }}{% endfor %}"
    )
    messages = [{**one, "tool_calls": empty, "name": None} for one in (SYSTEM, USER, GOOD)]

    assert (
        chat_template(source).render(messages).text == chat_template(source).render([SYSTEM, USER, GOOD]).text
    )


@pytest.mark.parametrize(
    ("flag", "is_on"),
    [
        ({"weight": "0"}, False),
        ({"weight": "0.0"}, False),
        ({"weight": "1"}, True),
        ({"train": " False "}, False),
        ({"training": "true"}, True),
        ({"loss_mask": 0}, False),
        ({"loss_weight": 0.0}, False),
        ({"loss_scale": 0}, False),
        ({"masked": True}, False),
        ({"masked": False}, True),
        ({"weight": 1, "train": False}, False),
    ],
)
def test_flags_in_every_spelling(flag, is_on):
    rendered = chat_template(end_marks=ENDS).render([USER, {**GOOD, **flag}, USER, {**GOOD, "content": "B"}])

    said = [rendered.text[a:b].removesuffix("<|im_end|>") for a, b in rendered.spans]
    assert said == (["A", "B"] if is_on else ["B"])


def test_an_undesired_completion_is_not_trained_as_if_it_were_desired():
    rows = [
        {"prompt": "Q", "completion": "good", "label": True},
        {"prompt": "Q", "completion": "bad", "label": False},
        {"prompt": [USER], "completion": [GOOD], "label": False},
        {"prompt": "Q", "completion": "unlabelled"},
    ]

    with pytest.raises(SourceError, match=r"row 2 .*`label` is False: a negative example.*--on-error skip"):
        texts(rows)
    assert [trained for _, trained in texts(rows, on_error="skip")] == ["good", "unlabelled"]


TABLE_FORMS: dict[str, tuple[Any, Any]] = {
    "lists": ([USER], [GOOD]),
    "columns": ({"role": ["user"], "content": ["Q"]}, {"role": ["assistant"], "content": ["A"]}),
    "text": (json.dumps([USER]), json.dumps([GOOD])),
    "sharegpt": ([{"from": "human", "value": "Q"}], [{"from": "gpt", "value": "A"}]),
}


@pytest.mark.parametrize("form", TABLE_FORMS)
def test_prompts_and_completions_of_messages_in_every_form_with_a_system(form):
    prompt, completion = TABLE_FORMS[form]
    rows = [
        {"prompt": prompt, "completion": completion},
        {"prompt": prompt, "completion": completion, "system": "S"},
    ]

    assert texts(rows) == texts([{"messages": [USER, GOOD]}, {"messages": [SYSTEM, USER, GOOD]}])


def test_text_that_is_json_but_no_chat_stays_text():
    rows = [{"prompt": '[{"a": 1}]', "completion": '[{"b": 2}]'}, {"prompt": "[{", "completion": "[{"}]

    assert texts(rows) == [('[{"a": 1}][{"b": 2}]', '[{"b": 2}]'), ("[{[{", "[{")]


def test_a_system_beside_a_prompt_of_text_names_the_way_out_which_works():
    rows = [{"system": "S", "prompt": "Q", "completion": "A"}]

    with pytest.raises(SourceError, match="--column instruction=prompt --column output=completion"):
        texts(rows)
    named = texts(rows, columns={"instruction": "prompt", "output": "completion"})
    assert named == texts([{"messages": [SYSTEM, USER, GOOD]}])


@pytest.mark.parametrize("system", ["system", "system_prompt"])
@pytest.mark.parametrize("in_rows", [0, 1])
def test_a_system_prompt_of_its_own_column_goes_first(system, in_rows):
    rows: list[dict[str, Any]] = [{"question": "Q", "response": "A", system: ""} for _ in range(2)]
    rows[in_rows][system] = "S"

    assert texts(rows)[in_rows] == texts([{"messages": [SYSTEM, USER, GOOD]}])[0]


@pytest.mark.parametrize(
    "history", [[["Q1", "A1"]], '[["Q1", "A1"]]', [{**USER, "content": "Q1"}, {**GOOD, "content": "A1"}]]
)
def test_earlier_turns_of_an_instruction_are_turns(history):
    rows = [
        {"instruction": "Q", "input": " ", "output": "A", "history": []},
        {"instruction": "Q", "input": "", "output": "A", "history": history},
    ]
    earlier = [{**USER, "content": "Q1"}, {**GOOD, "content": "A1"}]

    assert texts(rows) == texts([{"messages": [USER, GOOD]}, {"messages": [*earlier, USER, GOOD]}])
    with pytest.raises(SourceError, match="`history` must be a list of pairs"):
        texts([{"instruction": "Q", "output": "A", "history": [["Q1"]]}])


def in_bytes(*names: str) -> pa.Array:
    """A chat some of whose strings, by name, are stored as bytes."""
    fields = [(name, pa.binary() if name in names else pa.string()) for name in ("role", "content")]
    return pa.array([[USER, GOOD]]).cast(pa.list_(pa.struct(fields)))


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"messages": in_bytes("role", "content")}, [[USER, GOOD]]),
        ({"messages": in_bytes("content")}, [[USER, GOOD]]),
        ({"messages": pa.array([json.dumps([USER, GOOD]).encode()])}, [[USER, GOOD]]),
        ({"instruction": pa.array([b"Q"]), "output": pa.array([b"A"])}, [[USER, GOOD]]),
        (
            {"messages": pa.array([json.dumps([USER, GOOD])]), "system": pa.array([b"S"])},
            [[SYSTEM, USER, GOOD]],
        ),
    ],
    ids=["roles", "contents", "JSON", "instructions", "system"],
)
def test_bytes_within_chats_name_the_way_out_which_works(columns, expected, tmp_path):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")

    with pytest.raises(SourceError, match="--binary-as-text"):
        texts(tmp_path)
    assert texts(tmp_path, binary_as_text=True) == texts([{"messages": chat} for chat in expected])


def test_a_variable_that_no_row_may_give_costs_its_row_alone():
    rows = [
        {"messages": [USER, GOOD], "chat_template_kwargs": {"messages": []}},
        {"messages": [USER, GOOD], "chat_template_kwargs": None},
    ]

    assert len(texts(rows, on_error="skip")) == 1


PARTIAL = {
    "strings alone": ("for k, v in c.function.arguments.items() if v is string", {"q": "s", "n": 123456}),
    "nothing deep": (
        "for k, v in c.function.arguments.items() if v is not mapping",
        {"q": "s", "n": {"deep": "thing"}},
    ),
    "two of them": (
        "for k, v in (c.function.arguments.items() | list)[:2]",
        {"q": "s", "r": "t", "u": "other"},
    ),
}


@pytest.mark.parametrize("kind", PARTIAL)
def test_arguments_that_a_template_writes_in_part_are_refused_where_a_row_has_more(kind):
    loop, arguments = PARTIAL[kind]
    source = WITH_CALLS.replace("c.function | tojson", "c.function.name").replace(
        "</call>", "' }}{% " + loop + " %}{{ k }}={{ v }}{% endfor %}{{ '</call>"
    )
    template = chat_template(source, end_marks=ENDS)

    def render(given: dict[str, Any]) -> Any:
        call = {"type": "function", "function": {"name": "w", "arguments": given}}
        return template.render([USER, {"role": "assistant", "content": "", "tool_calls": [call]}])

    assert "<call>wq=s</call>" in render({"q": "s"}).text
    with pytest.raises(SourceError, match="doesn't write `tool_calls` of message 2"):
        render(arguments)


def test_tools_that_a_template_writes_in_part_are_refused():
    tools = [
        {"type": "function", "function": {"name": name, "description": "d", "parameters": {}}}
        for name in ("first_tool", "second_tool")
    ]
    template = chat_template("{{ tools[0].function.name if tools else '' }}" + WITH_CALLS, end_marks=ENDS)

    assert "first_tool" in template.render([USER, GOOD], tools[:1]).text
    with pytest.raises(SourceError, match=r"doesn't write tools, and the row has 2 \(second_tool\)"):
        template.render([USER, GOOD], tools)


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def documents(path: Path, **settings: Any) -> list[tuple[str, str]]:
    """Each document's text, and what of it is trained."""
    source = open_source(path, tokenizer="bytes", **settings)
    found = []
    for part in source.parts():
        for block in source.read(part):
            mask = np.ones(len(block.tokens)) if block.loss_mask is None else block.loss_mask
            for start, stop in zip(block.offsets, block.offsets[1:]):
                tokens, taken = block.tokens[start:stop], mask[start:stop] == 1
                found.append((trained_text(tokens), trained_text(tokens[taken])))
    return found


def trained_text(tokens: Any) -> str:
    return bytes(token for token in tokens.tolist() if token < 256).decode()


def test_an_instruction_is_what_a_user_asks_and_its_output_alone_is_trained(tmp_path):
    chat = [
        {"role": "user", "content": "Sum up.\n\nA long text."},
        {"role": "assistant", "content": "Short."},
    ]
    asked = {"instruction": "Sum up.", "input": "A long text.", "output": "Short."}
    (of_chat,) = documents(written(tmp_path, {"messages": chat}))

    assert documents(written(tmp_path, asked)) == [of_chat]
    assert "Sum up.\n\nA long text." in of_chat[0]
    assert "Short." in of_chat[1]
    assert "long" not in of_chat[1]


@pytest.mark.parametrize("nothing", [{}, {"input": ""}, {"input": None}])
def test_an_instruction_about_nothing_is_asked_alone(tmp_path, nothing):
    ((text, _),) = documents(written(tmp_path, {"instruction": "Hi.", "output": "Hello.", **nothing}))

    assert "Hi." in text
    assert "Hi.\n\n" not in text


@pytest.mark.parametrize(
    ("asks", "answers"),
    [
        ("prompt", "response"),
        ("query", "answer"),
        ("question", "completion"),
        ("instruction", "answer"),
        ("input", "output"),
    ],
)
def test_instructions_and_outputs_have_other_usual_names(tmp_path, asks, answers):
    same = documents(written(tmp_path, {"instruction": "Q?", "output": "A."}))

    assert documents(written(tmp_path, {asks: "Q?", answers: "A.", "category": "else"})) == same


def test_what_dolly_calls_the_context_follows_the_instruction(tmp_path):
    row = {"instruction": "Who?", "context": "It was written in 1948.", "response": "Orwell."}

    assert list(read_texts(written(tmp_path, row))) == [
        "user: Who?\n\nIt was written in 1948.\nassistant: Orwell.\n"
    ]


def test_what_the_system_says_goes_before_an_instruction(tmp_path):
    row = {"system": "Be terse.", "question": "Q?", "response": "A."}
    ((text, trained),) = documents(written(tmp_path, row))

    assert text.index("Be terse.") < text.index("Q?")
    assert "terse" not in trained


def test_rows_may_have_an_input_where_the_first_has_none(tmp_path):
    rows = [{"instruction": "a", "output": "x"}, {"instruction": "b", "input": "about", "output": "y"}]

    assert list(read_texts(written(tmp_path, *rows))) == [
        "user: a\nassistant: x\n",
        "user: b\n\nabout\nassistant: y\n",
    ]


def test_a_table_of_instructions_is_read_as_its_rows_are(tmp_path):
    rows = [
        {"instruction": "a", "input": None, "output": "x"},
        {"instruction": "b", "input": "c", "output": "y"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")

    assert documents(tmp_path / "rows.parquet") == documents(written(tmp_path, *rows))


@pytest.mark.parametrize(
    ("present", "kind"),
    [
        (["instruction", "output", "file"], "instruction"),
        (["instruction", "context", "response", "category"], "instruction"),
        (["text", "instruction", "output"], "instruction"),
        (["messages", "instruction", "output"], "messages"),
        (["conversations", "id"], "messages"),
        (["text", "messages"], "messages"),
        (["prompt", "completion"], "prompt"),
        (["text", "url", "metadata", "id"], "text"),
        (["input_ids", "instruction", "output"], "tokens"),
    ],
)
def test_the_columns_that_say_most_are_taken(present, kind):
    assert find_columns(present, {}, "a.jsonl").kind == kind


@pytest.mark.parametrize("present", [["foo", "bar"], ["instruction", "category"], ["output"]])
def test_an_instruction_without_an_output_is_nothing_to_train_on(present):
    with pytest.raises(SourceError, match="`instruction` and `output`, or `input_ids`, found"):
        find_columns(present, {}, "a.jsonl")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"instruction": ["a", "b"], "output": "x"}, "`instruction` must be a string, found array"),
        ({"instruction": "a", "input": {"b": 1}, "output": "x"}, "`context` must be a string, found object"),
        ({"instruction": "a", "output": 7}, "`output` must be a string, found number"),
        ({"instruction": "a", "output": ""}, "the output is empty, so there is nothing to train on"),
    ],
)
def test_a_row_that_is_no_text_is_named(tmp_path, row, words):
    path = written(tmp_path, {"instruction": "a", "output": "x"}, row)

    with pytest.raises(SourceError, match=f"rows.jsonl.*2.*{words}"):
        documents(path)
    with pytest.raises(SourceError, match=f"rows.jsonl.*2.*{words}"):
        list(read_texts(path))


def test_two_columns_that_may_be_the_context_are_to_be_named(tmp_path):
    row = {"instruction": "a", "context": "b", "input": "c", "output": "x"}
    path = written(tmp_path, row)

    with pytest.raises(
        SourceError, match="both may be what an instruction is about; name one: --column context="
    ):
        documents(path)
    assert "a\n\nc" in documents(path, columns={"context": "input"})[0][0]
    assert "a\n\nb" in documents(path, columns={"context": "context"})[0][0]


def test_a_context_under_another_name_than_the_first_row_s_is_not_passed_over(tmp_path):
    rows = [
        {"instruction": "a", "context": "b", "output": "x"},
        {"instruction": "a", "input": "c", "output": "x"},
    ]

    with pytest.raises(SourceError, match="`input`"):
        documents(written(tmp_path, *rows))
    with pytest.raises(SourceError, match="`context`"):
        documents(written(tmp_path, *reversed(rows)))


def test_an_instruction_under_a_name_that_goes_before_the_first_row_s_is_not_passed_over(tmp_path):
    rows = [{"input": "a", "output": "x"}, {"instruction": "Sum up.", "input": "a", "output": "x"}]
    path = written(tmp_path, *rows)

    with pytest.raises(
        SourceError, match=r"rows\.jsonl.*2.*has `instruction`, which the file's first row has not"
    ):
        documents(path)
    assert len(documents(path, columns={"instruction": "input"})) == 2
