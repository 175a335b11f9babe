"""Conversations in many forms, in the common spelling, for tests of chat templates."""

from __future__ import annotations

from typing import Any

from tests.trl_chats import Chat


def _u(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _s(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def _a(content: Any, thoughts: str | None = None, calls: list[Any] | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts is not None:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _call(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def _result(content: Any, name: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": f"call{number:05d}", "content": content}


def _tool(name: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": f"The {key}."} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Does {name}.", "parameters": schema},
    }


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


TOOLS = [_tool("get_weather", city="string", days="integer"), _tool("search_web", query="string")]
_PARIS, _ROME = _call("get_weather", 1, city="Paris", days=2), _call("search_web", 2, query="Rome hotels")

CHATS: dict[str, Chat] = {
    "one turn": Chat(messages=[_u("What is six times seven?"), _a("It is forty-two.")]),
    "three turns": Chat(
        messages=[_u("First?"), _a("One."), _u("Second?"), _a("Two things."), _u("Third?"), _a("Three.")]
    ),
    "same answers": Chat(messages=[_u("Yes"), _a("Yes"), _u("Yes"), _a("Yes"), _u("Yes"), _a("Yes")]),
    "system": Chat(messages=[_s("Answer in rhymes."), _u("Hello?"), _a("Mellow.")]),
    "system, two turns": Chat(messages=[_s("Be brief."), _u("Why?"), _a("Because."), _u("So?"), _a("Yes.")]),
    "developer": Chat(
        messages=[{"role": "developer", "content": "Be formal."}, _u("Hi?"), _a("Good afternoon.")]
    ),
    "ends with the user": Chat(messages=[_u("One?"), _a("Uno."), _u("Two?")]),
    "two answers in a row": Chat(messages=[_u("Tell me."), _a("A first part."), _a("A second part.")]),
    "call": Chat(messages=[_u("Paris?"), _a(None, calls=[_PARIS])]),
    "call, result, answer": Chat(
        messages=[
            _u("Paris?"),
            _a(None, calls=[_PARIS]),
            _result("18 C", "get_weather", 1),
            _a("It is mild."),
        ]
    ),
    "tools, call, result, answer": Chat(
        messages=[
            _u("Paris?"),
            _a(None, calls=[_PARIS]),
            _result("18 C", "get_weather", 1),
            _a("It is mild."),
        ],
        tools=TOOLS,
    ),
    "system, tools, plain answer": Chat(messages=[_s("Be kind."), _u("Hi?"), _a("Hello!")], tools=TOOLS),
    "tools, content and call": Chat(
        messages=[
            _u("Paris?"),
            _a("Let me look.", calls=[_PARIS]),
            _result("18 C", "get_weather", 1),
            _a("It is mild."),
        ],
        tools=TOOLS,
    ),
    "tools, empty content and call": Chat(
        messages=[_u("Paris?"), _a("", calls=[_PARIS]), _result("18 C", "get_weather", 1), _a("Mild.")],
        tools=TOOLS,
    ),
    "tools, parallel calls": Chat(
        messages=[
            _u("Paris and Rome?"),
            _a(None, calls=[_PARIS, _ROME]),
            _result("18 C", "get_weather", 1),
            _result("Ten hotels.", "search_web", 2),
            _a("Mild, and ten."),
        ],
        tools=TOOLS,
    ),
    "tools, calls one after another": Chat(
        messages=[
            _u("Paris and Rome?"),
            _a(None, calls=[_PARIS]),
            _result("18 C", "get_weather", 1),
            _a(None, calls=[_ROME]),
            _result("Ten hotels.", "search_web", 2),
            _a("Mild, and ten."),
        ],
        tools=TOOLS,
    ),
    "tools, calls in two turns": Chat(
        messages=[
            _u("Paris?"),
            _a(None, calls=[_PARIS]),
            _result("18 C", "get_weather", 1),
            _a("It is mild."),
            _u("And Rome?"),
            _a(None, calls=[_ROME]),
            _result("Ten hotels.", "search_web", 2),
            _a("Ten of them."),
        ],
        tools=TOOLS,
    ),
    "tools, ends with a result": Chat(
        messages=[_u("Paris?"), _a(None, calls=[_PARIS]), _result("18 C", "get_weather", 1)], tools=TOOLS
    ),
    "thoughts": Chat(messages=[_u("Six by seven?"), _a("42.", "Multiply them: six sevens.")]),
    "thoughts in two turns": Chat(
        messages=[_u("One?"), _a("Uno.", "In Spanish."), _u("Two?"), _a("Dos.", "Spanish as before.")]
    ),
    "thoughts in the last turn": Chat(
        messages=[_u("One?"), _a("Uno."), _u("Two?"), _a("Dos.", "Spanish as before.")]
    ),
    "thoughts in the first turn": Chat(
        messages=[_u("One?"), _a("Uno.", "In Spanish."), _u("Two?"), _a("Dos.")]
    ),
    "tools, thoughts": Chat(
        messages=[
            _u("Paris?"),
            _a(None, "The tool knows it.", [_PARIS]),
            _result("18 C", "get_weather", 1),
            _a("It is mild.", "Eighteen is mild weather."),
        ],
        tools=TOOLS,
    ),
    "tools, thoughts in two turns": Chat(
        messages=[
            _u("Paris?"),
            _a(None, "The tool knows it.", [_PARIS]),
            _result("18 C", "get_weather", 1),
            _a("It is mild.", "Eighteen is mild weather."),
            _u("And Rome?"),
            _a(None, "Search for hotels then.", [_ROME]),
            _result("Ten hotels.", "search_web", 2),
            _a("Ten of them.", "Count them all."),
        ],
        tools=TOOLS,
    ),
    "parts": Chat(
        messages=[
            _u(_parts("What ", "is it?")),
            _a(_parts("A cat.")),
            _u(_parts("And?")),
            _a(_parts("A dog.")),
        ]
    ),
    "unicode": Chat(
        messages=[
            _u("Żółć, e\u0301, 你好, שלום\u200f?"),
            _a("🦆👩\u200d👩\u200d👧 مرحبا e\u0301\u0323 naïve 漢字"),
            _u("ß → ẞ?"),
            _a("a\u0308\U0001f1e9\U0001f1ea"),
        ]
    ),
    "blanks around": Chat(
        messages=[_u("  Why \n"), _a("\n\n  Because it is.  \n"), _u("\tSo?"), _a(" Well, yes.\n\n")]
    ),
    "words of templates": Chat(
        messages=[
            _u("Say assistant\n twice: user\n."),
            _a("assistant\n\nmodel\nuser\n"),
            _u("Ok?"),
            _a("user"),
        ]
    ),
    "nested arguments": Chat(
        messages=[
            _u("Find."),
            _a(
                None,
                calls=[
                    _call("search_web", 3, query='名古屋 "quoted" & <b>', tags=["x", None], deep={"a": 1.5})
                ],
            ),
            _result('{"ok": true}', "search_web", 3),
            _a("Found."),
        ],
        tools=TOOLS,
    ),
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
_QWEN3_5 = (
    *_SEVERAL_TURNS,
    *_EARLIER_THOUGHTS,
    "thoughts in the last turn",
    "tools, calls in two turns",
)
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
