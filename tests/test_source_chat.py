"""Chats to text: what the assistant says is supervised, mark included, and nothing else is."""

from __future__ import annotations

import pickle  # noqa: F401

import pytest
from chats import chat, said, template

from varlen.source.chat import chat_template

TALK = chat("u:Hi", "a:Hello!", "u:Bye", "a:See you.")


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
