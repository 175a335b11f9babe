"""Whatever messages contain, exactly the assistant's turns are supervised: compared with templates in Python."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.chats import LOSSES_ALLOWED, SPECIAL, TEMPLATES, chat, said, template

from varlen.text.chat_template import CHATML, chat_template, prompt_and_completion

# What looks like a template's words, a slot of a skeleton, or a mark of a block; and white space of all kinds.
FRAGMENTS = [
    *("<|im_start|>assistant\n", "<|im_start|>user\n", "<|im_end|>\n", "<|im_end|>", "</s>", "<s>"),
    *("[INST] ", " [/INST]", " [/INST] ", "<end_of_turn>\n", "<start_of_turn>model\n", "<|eot_id|>"),
    *("<|start_header_id|>assistant<|end_header_id|>\n\n", "### Assistant: ", "### User: ", "ASSISTANT:"),
    *("<think>", "</think>", "<think>\n\n</think>\n\n", "{{ 7 * 7 }}", "{% generation %}", "{% endfor %}"),
    *("\U000f0000", "\U000f0001", "\U000f00000\U000f0000", "\U000f00001\U000f0000", "\ue000", "\U0010fffd"),
    *(" ", "\n", "\n\n", "\t", "\r\n", "\u2003", "a", "b", "é", "界", "0", "1"),
]
CONTENTS = (
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=6)
    .map("".join)
    .filter(lambda text: text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text))
)
TALKS = st.lists(CONTENTS, min_size=2, max_size=7).map(
    lambda contents: [("u" if n % 2 == 0 else "a") + ":" + content for n, content in enumerate(contents)]
)


def chatml(role: str, content: str, is_after: bool) -> tuple[str, str, str]:
    return f"<|im_start|>{role}\n", content + "<|im_end|>", "\n"


def llama(role: str, content: str, is_after: bool) -> tuple[str, str, str]:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n", content.strip() + "<|eot_id|>", ""


def mistral(role: str, content: str, is_after: bool) -> tuple[str, str, str]:
    return ("", f" {content}</s>", "") if role == "assistant" else (f"[INST] {content} [/INST]", "", "")


def gemma(role: str, content: str, is_after: bool) -> tuple[str, str, str]:
    name = "model" if role == "assistant" else role
    return f"<start_of_turn>{name}\n", content.strip() + "<end_of_turn>", "\n"


def thinking(role: str, content: str, is_after: bool) -> tuple[str, str, str]:
    if role == "assistant":
        thoughts = ""
        if "</think>" in content:
            thoughts = content.split("</think>")[0].split("<think>")[-1].strip("\n")
            content = content.split("</think>")[-1]
        content = content.lstrip("\n")
        if is_after:
            content = f"<think>\n{thoughts}\n</think>\n\n{content}"
    return chatml(role, content, is_after)


def bare(role: str, content: str, is_after: bool) -> tuple[str, str, str]:
    return f"### {role.title()}: ", content, "\n"


def prompted(role: str, content: str, is_after: bool) -> tuple[str, str, str]:
    return ("ASSISTANT:", f" {content}</s>", "") if role == "assistant" else (f"USER: {content} ", "", "")


IN_PYTHON = {
    "chatml": ("", chatml),
    "llama": ("<s>", llama),
    "mistral": ("<s>", mistral),
    "gemma": ("<s>", gemma),
    "thinking": ("", thinking),
    "tagged": ("", chatml),
    "bare": ("", bare),
    "prompted": ("", prompted),
}


def expect(name: str, messages: list[dict[str, str]]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Write a chat as its template in Python does: text and spans."""
    text, write = IN_PYTHON[name]
    spans = []
    last_user = max(n for n, message in enumerate(messages) if message["role"] == "user")
    for number, message in enumerate(messages):
        before, own, after = write(message["role"], message["content"], number > last_user)
        text += before
        if message["role"] == "assistant" and own:
            spans.append((len(text), len(text) + len(own)))
        text += own + after
    return text, tuple(spans)


@pytest.mark.parametrize("name", list(IN_PYTHON))
@given(turns=TALKS, knows_marks=st.booleans())
@hypothesis.example(turns=["u:<|im_start|>assistant\nHi<|im_end|>\n", "a:", "u: ", "a: "], knows_marks=True)
@hypothesis.example(turns=["u:\U000f00001\U000f0000", "a:\U000f00000\U000f0000"], knows_marks=True)
@hypothesis.example(turns=["u:a", "a:<think>\nb</think>\n\nc", "u:</think>", "a:d</think>"], knows_marks=True)
def test_every_template_supervises_what_the_same_template_in_python_says(name, turns, knows_marks):
    messages = chat(*turns)
    text, spans = expect(name, messages)
    hypothesis.assume(spans)

    rendered = template(name, knows_marks=knows_marks).render(messages, choice=LOSSES_ALLOWED)

    assert rendered.text == text
    assert rendered.spans == spans


@given(
    turns=st.lists(st.tuples(st.sampled_from("usatd"), CONTENTS).map(":".join), max_size=6),
    last=CONTENTS,
    marks=st.lists(
        st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im", "\n", "|>\n", "|", " "]), max_size=3
    ),
)
def test_the_quick_way_of_chatml_is_the_template_to_the_character(turns, last, marks):
    messages = chat(*turns, "a:" + last)
    quick = chat_template(end_marks=marks)
    slow = chat_template(CHATML + "{# the same #}", end_marks=marks)

    assert quick.source is CHATML
    assert quick.render(messages) == slow.render(messages)


@given(turns=TALKS, cut=st.integers(0, 2))
def test_the_quick_way_of_chatml_supervises_the_completion_as_the_template_does(turns, cut):
    messages = chat(*turns)
    slow = chat_template(CHATML + "{# the same #}")
    prompt, completion = messages[: 2 * cut], messages[2 * cut :]
    hypothesis.assume(len(completion) > 1)

    quick = prompt_and_completion(prompt, completion, chat_template())

    assert quick == prompt_and_completion(prompt, completion, slow)


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer of Hugging Face's that can spell any text."""
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        pytest.skip("transformers is not installed, so there is nothing to compare with")
    from varlen.text.load_tokenizer import train_bpe

    return PreTrainedTokenizerFast(tokenizer_object=train_bpe([], 256), **SPECIAL)


@pytest.mark.parametrize("name", list(IN_PYTHON))
@pytest.mark.parametrize(
    "turns",
    [
        ["u:Hi", "a:Hello!", "u:Bye", "a: See <you>. \n"],
        ["u: é \n", "a:", "u:<think>", "a:<think>\na\n</think>\n\nb"],
    ],
)
def test_transformers_renders_the_same_text(tokenizer, name, turns):
    messages = chat(*turns)
    source = TEMPLATES[name] or CHATML

    theirs = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False)

    assert template(name).render(messages).text == theirs


def test_transformers_masks_the_same_characters_by_generation_tags(tokenizer):
    messages = chat("u:Hi", "a:Hello!", "u:Bye", "a: See <you>. \n")
    rendered = template("tagged").render(messages)

    theirs = tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATES["tagged"], return_assistant_tokens_mask=True, return_dict=True
    )

    ours = [any(a <= n < b for a, b in rendered.spans) for n in range(len(rendered.text))]
    assert len(theirs["input_ids"]) == len(rendered.text), "one token a character, since all is ASCII"
    assert theirs["assistant_masks"] == [int(own) for own in ours]
    assert said(rendered) == ["Hello!<|im_end|>", " See <you>. \n<|im_end|>"]
