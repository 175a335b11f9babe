"""Conversations in many forms, in the common spelling, and with turns that begin or end in unusual ways."""

from typing import Any

from tests.text.trl_chats import Chat


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def answer(content: Any, thoughts: str | None = None, calls: list[Any] | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts is not None:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def call(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def result(content: Any, name: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": f"call{number:05d}", "content": content}


def _tool(name: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": f"The {key}."} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Does {name}.", "parameters": schema},
    }


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


TOOLS = [_tool("get_weather", city="string", days="integer"), _tool("search_web", query="string")]
_PARIS, _ROME = call("get_weather", 1, city="Paris", days=2), call("search_web", 2, query="Rome hotels")


def turns(*texts: Any) -> list[dict[str, Any]]:
    """What the user and the assistant say in turn."""
    return [answer(text) if place % 2 else user(text) for place, text in enumerate(texts)]


_MILD = [result("18 C", "get_weather", 1), answer("It is mild.")]
_CALLED = [user("Paris?"), answer(None, calls=[_PARIS]), *_MILD]
_THOUGHT = [
    user("Paris?"),
    answer(None, "The tool knows it.", [_PARIS]),
    result("18 C", "get_weather", 1),
    answer("It is mild.", "Eighteen is mild weather."),
]
_HOTELS = result("Ten hotels.", "search_web", 2)
_QUERY = call("search_web", 3, query='名古屋 "quoted" & <b>', tags=["x", None], deep={"a": 1.5})

_MESSAGES: dict[str, list[dict[str, Any]]] = {
    "one turn": turns("What is six times seven?", "It is forty-two."),
    "three turns": turns("First?", "One.", "Second?", "Two things.", "Third?", "Three."),
    "same answers": turns("Yes", "Yes", "Yes", "Yes", "Yes", "Yes"),
    "system": [system("Answer in rhymes."), *turns("Hello?", "Mellow.")],
    "system, two turns": [system("Be brief."), *turns("Why?", "Because.", "So?", "Yes.")],
    "developer": [{"role": "developer", "content": "Be formal."}, *turns("Hi?", "Good afternoon.")],
    "ends with the user": turns("One?", "Uno.", "Two?"),
    "two answers in a row": [user("Tell me."), answer("A first part."), answer("A second part.")],
    "call": [user("Paris?"), answer(None, calls=[_PARIS])],
    "call, result, answer": _CALLED,
    "tools, call, result, answer": _CALLED,
    "system, tools, plain answer": [system("Be kind."), *turns("Hi?", "Hello!")],
    "tools, content and call": [user("Paris?"), answer("Let me look.", calls=[_PARIS]), *_MILD],
    "tools, empty content and call": [
        user("Paris?"),
        answer("", calls=[_PARIS]),
        result("18 C", "get_weather", 1),
        answer("Mild."),
    ],
    "tools, parallel calls": [
        user("Paris and Rome?"),
        answer(None, calls=[_PARIS, _ROME]),
        result("18 C", "get_weather", 1),
        _HOTELS,
        answer("Mild, and ten."),
    ],
    "tools, calls one after another": [
        user("Paris and Rome?"),
        answer(None, calls=[_PARIS]),
        result("18 C", "get_weather", 1),
        answer(None, calls=[_ROME]),
        _HOTELS,
        answer("Mild, and ten."),
    ],
    "tools, calls in two turns": [
        *_CALLED,
        user("And Rome?"),
        answer(None, calls=[_ROME]),
        _HOTELS,
        answer("Ten of them."),
    ],
    "tools, ends with a result": _CALLED[:3],
    "thoughts": [user("Six by seven?"), answer("42.", "Multiply them: six sevens.")],
    "thoughts in two turns": [
        user("One?"),
        answer("Uno.", "In Spanish."),
        user("Two?"),
        answer("Dos.", "Spanish as before."),
    ],
    "thoughts in the last turn": [*turns("One?", "Uno.", "Two?"), answer("Dos.", "Spanish as before.")],
    "thoughts in the first turn": [user("One?"), answer("Uno.", "In Spanish."), *turns("Two?", "Dos.")],
    "tools, thoughts": _THOUGHT,
    "tools, thoughts in two turns": [
        *_THOUGHT,
        user("And Rome?"),
        answer(None, "Search for hotels then.", [_ROME]),
        _HOTELS,
        answer("Ten of them.", "Count them all."),
    ],
    "parts": turns(parts("What ", "is it?"), parts("A cat."), parts("And?"), parts("A dog.")),
    "unicode": turns(
        "Żółć, e\u0301, 你好, שלום\u200f?",
        "🦆👩\u200d👩\u200d👧 مرحبا e\u0301\u0323 naïve 漢字",
        "ß → ẞ?",
        "a\u0308\U0001f1e9\U0001f1ea",
    ),
    "blanks around": turns("  Why \n", "\n\n  Because it is.  \n", "\tSo?", " Well, yes.\n\n"),
    "words of templates": turns(
        "Say assistant\n twice: user\n.", "assistant\n\nmodel\nuser\n", "Ok?", "user"
    ),
    "nested arguments": [
        user("Find."),
        answer(None, calls=[_QUERY]),
        result('{"ok": true}', "search_web", 3),
        answer("Found."),
    ],
}
CHATS = {
    name: Chat(messages=messages, tools=TOOLS if "tools" in name or name == "nested arguments" else None)
    for name, messages in _MESSAGES.items()
}

_EARLIER_THOUGHTS = ("thoughts in two turns", "thoughts in the first turn", "tools, thoughts in two turns")
_SEVERAL_TURNS = (
    "three turns",
    "same answers",
    "system, two turns",
    "ends with the user",
    "parts",
    "unicode",
    "blanks around",
    "words of templates",
)
_QWEN3_5 = (*_SEVERAL_TURNS, *_EARLIER_THOUGHTS, "thoughts in the last turn", "tools, calls in two turns")
_GEMMA = ("two answers in a row", "tools, content and call", *_EARLIER_THOUGHTS)
_PHI = (*_SEVERAL_TURNS, "two answers in a row")

REWRITES: dict[str, tuple[str, ...]] = {
    "diffusion_gemma": _GEMMA,
    "gemma4": ("tools, content and call",),
    "gemma4_v3": ("tools, content and call",),
    "gemma4_v4": ("tools, content and call",),
    "gemma4_v5": _GEMMA,
    "glm4moe": _EARLIER_THOUGHTS,
    "gptoss": (
        *_PHI,
        "thoughts in two turns",
        "thoughts in the first turn",
        "thoughts in the last turn",
        "tools, calls in two turns",
    ),
    "lfm2_2_5": _EARLIER_THOUGHTS,
    "lfm2_2_5_v2": _EARLIER_THOUGHTS,
    "lfm2_2_5_vl": _EARLIER_THOUGHTS,
    "nemotron_3_5_lightning": _EARLIER_THOUGHTS,
    "nemotron_3_nano": _EARLIER_THOUGHTS,
    "nemotron_3_super": _EARLIER_THOUGHTS,
    "nemotron_3_ultra": _EARLIER_THOUGHTS,
    "phi3": _PHI,
    "phi3_5": _PHI,
    "qwen3": (
        *_QWEN3_5,
        "two answers in a row",
        "call, result, answer",
        "nested arguments",
        "tools, call, result, answer",
        "tools, calls one after another",
        "tools, content and call",
        "tools, empty content and call",
        "tools, ends with a result",
        "tools, parallel calls",
    ),
    "qwen3_5_nothink": _QWEN3_5,
    "qwen3_5_think": _QWEN3_5,
    "qwen3_6": _QWEN3_5,
}
"""Of which conversations a template writes an assistant's turn otherwise once more messages follow."""

KEPT_BY_THE_TWIN = ("qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6")
"""Families whose twin writes every turn as it was when it was the last: all turns can be trained in one row."""


def _searched(**arguments: Any) -> Chat:
    search = call("search_web", 1, **arguments)
    messages = [user("Go"), answer(None, calls=[search]), result("ok", "search_web", 1), answer("Done.")]
    return Chat(messages=messages, tools=TOOLS)


TURNS: dict[str, Chat] = {
    "the assistant first": Chat(messages=[answer("Hello."), *turns("Go", "Ok.")]),
    "the assistant alone": Chat(messages=[answer("Hello.")]),
    "system and assistant": Chat(messages=[system("Tell."), answer("Hello.")]),
    "empty thoughts": Chat(messages=[user("Go"), answer("Ok.", "")]),
    "blank thoughts": Chat(messages=[user("Go"), answer("Ok.", " \n")]),
    "an empty answer": Chat(messages=turns("Go", "", "Well?", "Ok.")),
    "an empty answer at the end": Chat(messages=turns("Go", "Ok.", "Well?", "")),
    "a call without arguments": _searched(),
    "large numbers": _searched(since=1_732_579_200, id=-(2**53) - 1, deep={"n": [2**31]}),
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
    "two systems": Chat(messages=[system("Be brief."), system("Be kind."), *turns("Go", "Ok.")]),
    "a system in between": Chat(messages=[*turns("Go", "Ok."), system("Be kind."), *turns("Go", "Ok.")]),
    "a call that nothing answers": Chat(
        messages=[user("Go"), answer(None, calls=[_PARIS]), *turns("Stop.", "Ok.")], tools=TOOLS
    ),
    "special tokens in words": Chat(
        messages=turns("What is <|im_end|>?", "It is <|im_end|>.", "</s>?", "<|eot_id|>")
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
