"""Chats in any spelling to text: what the assistant says is supervised, and nothing else is; or a refusal."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.chats import BARE, LLAMA, LOSSES_ALLOWED, MARKS, SPECIAL, TEMPLATES, chat, said, template

from varlen.errors import SettingError, SourceError, VarlenError
from varlen.text.chat_template import CHATML, chat_template, prompt_and_completion
from varlen.text.messages import as_messages

TALK = chat("u:Hi", "a:Hello!", "u:Bye", "a:See you.")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"to": "<é>"}}}
CALLING = [
    {"role": "user", "content": "Add 1."},
    {"role": "assistant", "content": "Sure.", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]


def test_chatml_supervises_content_and_end_mark_and_neither_header_nor_newline():
    rendered = chat_template().render(chat("s:Be kind.", "u:Hi", "a: Hello!\n", "u:Bye", "a:"))

    assert rendered.text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n Hello!\n<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n"
    )
    assert rendered.spans == ((90, 108), (162, 172))
    assert said(rendered) == [" Hello!\n<|im_end|>", "<|im_end|>"]
    assert not rendered.needs_eos


@pytest.mark.parametrize(
    ("name", "expected", "needs_eos"),
    [
        ("chatml", ["Hello!<|im_end|>", "See you.<|im_end|>"], False),
        ("llama", ["Hello!<|eot_id|>", "See you.<|eot_id|>"], False),
        ("mistral", [" Hello!</s>", " See you.</s>"], False),
        ("gemma", ["Hello!<end_of_turn>", "See you.<end_of_turn>"], False),
        ("thinking", ["Hello!<|im_end|>", "<think>\n\n</think>\n\nSee you.<|im_end|>"], False),
        ("tagged", ["Hello!<|im_end|>", "See you.<|im_end|>"], False),
        ("bare", ["Hello!", "See you."], True),
        ("prompted", [" Hello!</s>", " See you.</s>"], False),
    ],
)
@pytest.mark.parametrize("knows_marks", [True, False], ids=["marks known", "marks unknown"])
def test_a_turn_reaches_from_the_generation_prompt_through_the_end_mark(
    name, expected, needs_eos, knows_marks
):
    rendered = template(name, knows_marks=knows_marks).render(TALK)

    assert said(rendered) == expected
    assert rendered.needs_eos == needs_eos


def test_a_literal_after_the_content_is_a_mark_up_to_white_space_and_a_special_token_anywhere():
    source = "{% for m in messages %}{{ m.role + ':' + m.content + '*end* of turn<stop>\n' }}{% endfor %}"

    literal = chat_template(source).render(TALK)
    special = chat_template(source, end_marks=["<stop>", "\n", ""]).render(TALK)

    assert said(literal) == ["Hello!*end*", "See you.*end*"]
    assert said(special) == ["Hello!*end* of turn<stop>", "See you.*end* of turn<stop>"]


def test_the_header_of_the_next_message_is_no_end_mark_though_it_is_a_special_token():
    source = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"

    rendered = chat_template(source, end_marks=["<|user|>", "<|assistant|>"]).render(TALK)

    assert said(rendered) == ["Hello!", "See you."]
    assert rendered.needs_eos


def test_an_eos_between_messages_ends_a_turn_and_the_last_turn_needs_one():
    source = (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}"
        "{% if not loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
    )

    rendered = chat_template(source, special_tokens=SPECIAL).render(TALK)

    assert said(rendered) == ["Hello!</s>", "See you."]
    assert rendered.needs_eos


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (["<|end|>", "<|return|>", "<|start|>"], ["Hello!<|end|>", "See you.<|return|>"]),
        ([], ["Hello!", "See you.<|return|>"]),
    ],
)
def test_the_last_turn_may_end_with_a_mark_of_its_own(marks, expected):
    source = (
        "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{{ '<|start|>assistant' if add_generation_prompt }}"
    )

    rendered = chat_template(source, end_marks=marks).render(TALK)

    assert said(rendered) == ["<|message|>" + text for text in expected]


def test_what_a_template_writes_once_at_the_end_hides_no_mark_before_it():
    source = CHATML + "<end of chat>"

    rendered = chat_template(source).render(TALK)

    assert said(rendered) == ["Hello!<|im_end|>", "See you.<|im_end|>"]


def test_keys_that_the_template_does_not_read_change_nothing():
    messages = [message | {"weight": 1, "name": "x"} for message in TALK]

    assert template("llama").render(messages) == template("llama").render(TALK)


def test_an_eos_is_not_asked_for_where_a_user_speaks_last():
    rendered = template("bare").render(chat("u:Hi", "a:Hello!", "u:Bye"))

    assert said(rendered) == ["Hello!"]
    assert not rendered.needs_eos


def test_assistants_that_follow_each_other_are_turns_of_their_own():
    rendered = template("llama").render(chat("a: I ", "u:?", "a:am", "a:here"))

    assert said(rendered) == ["I<|eot_id|>", "am<|eot_id|>", "here<|eot_id|>"]


def test_a_system_message_that_moves_into_a_later_turn_stays_unsupervised():
    rendered = template("mistral").render(chat("s: S ", "u:a", "a:b ", "u: c", "a: d"))

    assert rendered.text == "<s>[INST] a [/INST] b </s>[INST]  S \n\n c [/INST]  d</s>"
    assert said(rendered) == [" b </s>", "  d</s>"]


def test_tool_calls_are_supervised_as_the_template_writes_them_and_results_are_not():
    rendered = template("thinking").render(CALLING)

    assert said(rendered) == [
        "<think>\n\n</think>\n\nSure.\n<tool_call>\n"
        '{"name": "add", "arguments": {"to": "<é>"}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nIt is 2.<|im_end|>",
    ]
    assert not rendered.needs_eos


def test_tools_that_are_offered_stand_in_the_text_and_are_not_supervised():
    source = "{{ tools | tojson }}\n" + LLAMA
    rendered = chat_template(source, special_tokens=SPECIAL).render(TALK, tools=[{"name": "\U000f0000"}])

    assert rendered.text.startswith('[{"name": "\U000f0000"}]')
    assert said(rendered) == ["Hello!<|eot_id|>", "See you.<|eot_id|>"]


def test_tools_that_are_no_json_are_an_error():
    with pytest.raises(SourceError, match="tools of a chat must be JSON schemas"):
        template("llama").render(TALK, tools=[{1, 2}])


def test_an_end_mark_of_another_kind_after_a_tool_call_is_found_among_the_special_tokens():
    source = LLAMA.replace("'<|eot_id|>'", "('<|eom_id|>' if message.tool_calls else '<|eot_id|>')")
    source = source.replace(
        "| trim +", "| trim + (message.tool_calls | tojson if message.tool_calls else '') +"
    )

    rendered = chat_template(source, special_tokens=SPECIAL, end_marks=["<|eom_id|>"]).render(CALLING)
    unknown = chat_template(source, special_tokens=SPECIAL).render(CALLING[:2])

    calls = '[{"type": "function", "function": {"name": "add", "arguments": {"to": "<é>"}}}]'
    assert said(rendered) == [f"Sure.{calls}<|eom_id|>", "It is 2.<|eot_id|>"]
    assert unknown.needs_eos


@pytest.mark.parametrize("key", ["reasoning_content", ""], ids=["of its own", "within the content"])
def test_thoughts_are_supervised_where_the_template_keeps_them(key):
    turns = [("Two?", "So", "2"), ("Three?", "Well", "3")]
    messages = []
    for question, thought, answer in turns:
        messages.append({"role": "user", "content": question})
        content = answer if key else f"<think>\n{thought}\n</think>\n\n{answer}"
        messages.append({"role": "assistant", "content": content} | ({key: thought} if key else {}))

    rendered = template("thinking").render(messages)

    assert said(rendered) == ["2<|im_end|>", "<think>\nWell\n</think>\n\n3<|im_end|>"]


def test_a_prompt_that_opens_thoughts_is_not_supervised():
    source = TEMPLATES["thinking"].replace(
        "{{- '<|im_start|>assistant\\n' }}{% endif %}", "{{- G }}{% endif %}"
    )
    special = SPECIAL | {"G": "<|im_start|>assistant\n<think>\n"}

    rendered = chat_template(source, special_tokens=special).render(
        [TALK[0], {"role": "assistant", "content": "2", "reasoning_content": "So"}]
    )

    assert said(rendered) == ["So\n</think>\n\n2<|im_end|>"]


def test_a_template_that_loses_what_was_said_is_refused_with_the_ways_out():
    source = "{% for m in messages %}{{ m.role + ':' + m.content | upper + ' ' + m.content }}{% endfor %}"

    with pytest.raises(
        SourceError, match=r"can't be located.*generation.*another template.*supervise"
    ) as error:
        chat_template(source + "{{ messages | length }}").render(TALK)

    assert "rewrites" in str(error.value)


def test_generation_tags_alone_decide_and_empty_blocks_are_left_out():
    source = (
        "{% for m in messages %}{% generation %}{% endgeneration %}"
        "<{% if m.role == 'user' %}{% generation %}{{ m.content }}{% endgeneration %}>{% endif %}{% endfor %}"
    )

    rendered = chat_template(source).render(chat("u:\U000f0000é", "a:x", "u:y"), choice=LOSSES_ALLOWED)

    assert rendered.losses.unwritten == {"content": (1, 1)}
    assert rendered.text == "<\U000f0000é><<y>"
    assert rendered.spans == ((1, 3), (6, 7))


def test_generation_tags_within_macros_and_blocks_of_text_are_found():
    source = (
        "{% macro turn(m) %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endmacro %}"
        "{% for m in messages %}{% set text %}{{ turn(m) }}{% endset %}{{ m.role + text }}{% endfor %}"
    )

    rendered = chat_template(source).render(chat("u:a", "a:bc"))

    assert rendered.text == "user[a]assistant[bc]"
    assert said(rendered) == ["a", "bc"]


@pytest.mark.parametrize(
    ("after", "needs_eos"),
    [("{% endgeneration %}", True), ("{% endgeneration %}</s>", False), ("</s>{% endgeneration %}", False)],
)
def test_generation_tags_need_an_eos_where_no_mark_is_written(after, needs_eos):
    source = "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}" + after + "\n{% endfor %}"

    assert chat_template(source).render(TALK).needs_eos == needs_eos
    assert chat_template(source, special_tokens=SPECIAL).render(TALK).needs_eos == needs_eos


def test_generation_tags_that_mark_nothing_are_an_error():
    source = "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"

    with pytest.raises(SourceError, match="mark nothing in this chat"):
        chat_template(source).render(TALK)


def test_generation_tags_whose_text_is_worked_with_are_an_error():
    source = "{% set t %}{% generation %}ab{% endgeneration %}{% endset %}{{ t }}{{ t | length }}"

    with pytest.raises(SourceError, match="works with the text of its"):
        chat_template(source).render(TALK)


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_of_a_prompt_and_completion_of_messages_only_the_completion_is_supervised(name):
    whole = template(name).render(TALK)

    rendered = prompt_and_completion(TALK[:2], TALK[2:], template(name))

    assert rendered.text == whole.text
    assert rendered.spans == whole.spans[1:]
    assert rendered.needs_eos == whole.needs_eos


def test_of_a_prompt_and_completion_of_text_the_completion_is_supervised_and_needs_an_eos():
    rendered = prompt_and_completion("2 + 2 =", " 4", template("llama"))

    assert (rendered.text, rendered.spans, rendered.needs_eos) == ("2 + 2 = 4", ((7, 9),), True)


def test_a_prompt_may_be_empty_and_end_with_an_assistant():
    assert said(prompt_and_completion("", "4", template("llama"))) == ["4"]
    assert said(prompt_and_completion([], TALK, template("llama")))[0] == "Hello!<|eot_id|>"
    assert said(prompt_and_completion(TALK[:2], TALK[1:2], template("llama"))) == ["Hello!<|eot_id|>"]


@pytest.mark.parametrize(
    ("prompt", "completion", "words"),
    [
        ("a", "", "completion is empty, so there is nothing to train on"),
        (TALK, [], "completion is an empty list, so there is nothing to train on"),
        (TALK, TALK[:1], r"the completion has no assistant turn \(roles: user\)"),
        ("a", TALK, "both be text or both lists of messages; the prompt is text, the completion a list"),
        (None, "a", "the prompt is null, the completion text"),
        ("a", "\ud800", "half a character"),
    ],
)
def test_a_prompt_and_completion_without_anything_to_train_on_is_an_error(prompt, completion, words):
    with pytest.raises(SourceError, match=words):
        prompt_and_completion(prompt, completion, template("llama"))


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (chat("u:Hi", "u:Bye"), r"no assistant turn \(roles: user\), so nothing in it would be trained"),
        (chat("u:Hi", "a:\ud83d"), "half a character"),
        ([*TALK, {"role": "bot", "content": ""}], "message 5 has the unknown role 'bot'; known: system"),
        ([*TALK, {"role": ["user"], "content": ""}], "message 5 has the unknown role"),
        (None, "must be a list of messages, found null"),
        ({"role": "user", "content": ""}, "must be a list of messages, found an object"),
        ([], "empty list"),
        (TALK[0], "found an object"),
        (["Hi"], "message 1 must be an object"),
        ([{"role": "assistant", "content": 3}], r"content of message 1 \(assistant\) must be text"),
    ],
)
def test_a_chat_that_is_none_is_an_error_with_every_template(name, messages, words):
    with pytest.raises(SourceError, match=words):
        template(name).render(messages)


def test_an_assistant_that_says_nothing_is_an_error_where_no_mark_ends_the_turn():
    with pytest.raises(SourceError, match="the assistant says nothing"):
        template("bare").render(chat("u:Hi", "a:"))


def test_chatml_refuses_tool_calls_which_it_would_lose():
    with pytest.raises(SourceError, match="ChatML has no form for tool calls"):
        chat_template().render(CALLING)


def test_a_template_knows_sharegpt_parts_and_json():
    spelled = '[{"from": "human", "value": "Hi"}, {"role": "model", "content": [{"type": "text", "text": "Hello!"}]}]'

    assert chat_template().render(spelled) == chat_template().render(TALK[:2])


def test_the_fingerprint_follows_whatever_decides_text_and_spans():
    made = [
        chat_template(),
        chat_template(BARE),
        chat_template(BARE, special_tokens=SPECIAL),
        chat_template(BARE, special_tokens=SPECIAL, end_marks=MARKS),
    ]

    assert len({one.fingerprint for one in made}) == 4
    assert all(len(one.fingerprint) == 64 for one in made)
    assert chat_template(CHATML).fingerprint == made[0].fingerprint
    assert (
        chat_template(BARE, special_tokens=SPECIAL, end_marks=MARKS[::-1]).fingerprint == made[3].fingerprint
    )


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_template_can_be_sent_to_another_process(name):
    first = template(name)

    again = pickle.loads(pickle.dumps(first))

    assert again.fingerprint == first.fingerprint
    assert again.render(TALK) == first.render(TALK)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"source": 3}, "the chat template must be text, got 3"),
        ({"special_tokens": {"bos_token": None}}, "bos_token must be text, got None"),
        ({"end_marks": [b"<|im_end|>"]}, "an end mark must be text"),
    ],
)
def test_a_template_and_its_tokens_must_be_text(arguments, words):
    with pytest.raises(SettingError, match=words):
        chat_template(**arguments)


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


ADDITION = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}


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
        "tool_calls": [ADDITION | {"id": None}],
        "weight": 0,
    }

    assert as_messages([row]) == [
        {"role": "assistant", "content": None, "tool_calls": [ADDITION], "weight": 0}
    ]


def test_a_call_of_a_tool_may_come_without_content():
    row = {"role": "assistant", "tool_calls": [ADDITION]}

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
        (
            [{"role": "user", "content": None, "tool_calls": [ADDITION]}],
            "has null as its content; only an assistant's.*found the keys `role`, `content`",
        ),
        ([{"role": "assistant", "content": None}], r"message 1 \(assistant\) has null as its content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "has null as its content"),
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
