"""Rows of chats in the forms of tables, prompts, KTO and Alpaca: what is trained of them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from varlen.documents.source import open_source
from varlen.errors import SourceError
from varlen.text.chat_template import chat_template

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

    with pytest.raises(SourceError, match=r"row 2 .*`label` is False.* undesired .*--on-error skip"):
        texts(rows)
    assert [trained for _, trained in texts(rows, on_error="skip")] == ["good", "unlabelled"]


FORMS: dict[str, tuple[Any, Any]] = {
    "lists": ([USER], [GOOD]),
    "columns": ({"role": ["user"], "content": ["Q"]}, {"role": ["assistant"], "content": ["A"]}),
    "text": (json.dumps([USER]), json.dumps([GOOD])),
    "sharegpt": ([{"from": "human", "value": "Q"}], [{"from": "gpt", "value": "A"}]),
}


@pytest.mark.parametrize("form", FORMS)
def test_prompts_and_completions_of_messages_in_every_form_with_a_system(form):
    prompt, completion = FORMS[form]
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


_BYTES = pa.binary()


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {
                "messages": pa.array(
                    [[{"role": b"user", "content": b"Q"}, {"role": b"assistant", "content": b"A"}]],
                    pa.list_(pa.struct([("role", _BYTES), ("content", _BYTES)])),
                )
            },
            [[USER, GOOD]],
        ),
        (
            {
                "messages": pa.array(
                    [[{"role": "user", "content": b"Q"}, {"role": "assistant", "content": b"A"}]],
                    pa.list_(pa.struct([("role", pa.string()), ("content", _BYTES)])),
                )
            },
            [[USER, GOOD]],
        ),
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
