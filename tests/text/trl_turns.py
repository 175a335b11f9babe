"""Conversations whose turns begin or end in ways that a usual one doesn't, for tests of chat templates."""

from __future__ import annotations

from tests.text.trl_chats import Chat
from tests.text.trl_conversations import (
    TOOLS,
    answer,
    call,
    parts,
    result,
    system,
    user,
)

_PARIS = call("get_weather", 1, city="Paris", days=2)

TURNS: dict[str, Chat] = {
    "the assistant first": Chat(messages=[answer("Hello."), user("Go"), answer("Ok.")]),
    "the assistant alone": Chat(messages=[answer("Hello.")]),
    "system and assistant": Chat(messages=[system("Tell."), answer("Hello.")]),
    "empty thoughts": Chat(messages=[user("Go"), answer("Ok.", "")]),
    "blank thoughts": Chat(messages=[user("Go"), answer("Ok.", " \n")]),
    "an empty answer": Chat(messages=[user("Go"), answer(""), user("Well?"), answer("Ok.")]),
    "an empty answer at the end": Chat(messages=[user("Go"), answer("Ok."), user("Well?"), answer("")]),
    "a call without arguments": Chat(
        messages=[
            user("Go"),
            answer(None, calls=[call("search_web", 1)]),
            result("ok", "search_web", 1),
            answer("Done."),
        ],
        tools=TOOLS,
    ),
    "large numbers": Chat(
        messages=[
            user("Go"),
            answer(
                None, calls=[call("search_web", 1, since=1_732_579_200, id=-(2**53) - 1, deep={"n": [2**31]})]
            ),
            result("ok", "search_web", 1),
            answer("Done."),
        ],
        tools=TOOLS,
    ),
    "thoughts, content and call": Chat(
        messages=[
            user("Go"),
            answer("I look.", "Think it.", [_PARIS]),
            result("a", "get_weather", 1),
            answer("Done.", "Then done."),
        ],
        tools=TOOLS,
    ),
    "a result in parts": Chat(
        messages=[
            user("Go"),
            answer(None, calls=[_PARIS]),
            result(parts("x", "y"), "get_weather", 1),
            answer("Ok."),
        ],
        tools=TOOLS,
    ),
    "a system in parts": Chat(messages=[system(parts("A", "B")), user("x"), answer(parts("y", "z"))]),
    "two systems": Chat(messages=[system("Be brief."), system("Be kind."), user("Go"), answer("Ok.")]),
    "a system in between": Chat(
        messages=[user("Go"), answer("Ok."), system("Be kind."), user("Go"), answer("Ok.")]
    ),
    "a call that nothing answers": Chat(
        messages=[user("Go"), answer(None, calls=[_PARIS]), user("Stop."), answer("Ok.")], tools=TOOLS
    ),
    "special tokens in words": Chat(
        messages=[
            user("What is <|im_end|>?"),
            answer("It is <|im_end|>."),
            user("</s>?"),
            answer("<|eot_id|>"),
        ]
    ),
}

UNTOLD = {
    # There is no generation prompt before the first turn to hold it against.
    "llama3_1": ("the assistant first", "the assistant alone"),
    "llama3_2": ("the assistant first", "the assistant alone"),
    "qwen3_5_nothink": ("the assistant first",),
    "qwen3_5_think": ("the assistant first",),
    "qwen3_6": ("the assistant first",),
    "qwen3_8": ("the assistant first",),
}
"""Of which conversations the oracle doesn't tell what is trained: the template fails on their first messages."""
