"""Skeletons that are filled in, tools and JSON arguments among their texts, tell what a second rendering tells."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rarely import examples, mostly
from tests.text.trl_chats import FAMILIES, source_of, template_names, tokenizer_of

from varlen.errors import SourceError
from varlen.text import rendering
from varlen.text.chat_template import ChatTemplate, chat_template
from varlen.text.load_tokenizer import load_tokenizer
from varlen.text.skeleton import Skeleton

SHIPPED = [name for name in sorted(FAMILIES) if name in template_names()]
OFTEN = ["deepseekv3", "gemma4", "gptoss", "lfm2_v2", "llama3_1", "muse_glimmer", "qwen2_5", "qwen3"]
WORDS = (
    "x", "two words", " ", "\n", "  lead", "trail \n", "", '{"', '"}', '": "', "é", "\U000f0000", "</tool_call>",
    "<|im_start|>user\n", "<|im_end|>\n", "# Tools", '{"name": "f", "arguments": {}}', "None", "[]",
)  # fmt: skip
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map("".join)
LEAF = st.one_of(
    TEXT, st.integers(-9, 9), st.booleans(), st.none(), st.floats(-2, 2).map(lambda x: round(x, 3))
)
ARGUMENTS = st.dictionaries(TEXT.filter(bool), st.one_of(LEAF, st.lists(LEAF, max_size=2)), max_size=3)


@st.composite
def chats(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages with calls and answers, and tools, whose texts look like the template's own."""
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 2))):
        messages.append({"role": "user", "content": draw(TEXT)})
        if draw(st.booleans()):
            given_ = draw(ARGUMENTS)
            spelled = draw(st.sampled_from([given_, json.dumps(given_), json.dumps(given_, indent=1)]))
            call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": spelled}}
            messages.append(
                {"role": "assistant", "content": draw(st.sampled_from(["", "said"])), "tool_calls": [call]}
            )
            messages.append({"role": "tool", "name": "f", "tool_call_id": "call00001", "content": draw(TEXT)})
        messages.append({"role": "assistant", "content": draw(TEXT)})
    described = {"name": draw(st.sampled_from(["f", "g h"])), "description": draw(TEXT)}
    schema = {"type": "object", "properties": {"p": {"type": "string", "description": draw(TEXT)}}}
    tools = [{"type": "function", "function": {**described, "parameters": schema}}]
    return messages, tools * draw(st.integers(0, 2))


def template_of(name: str) -> ChatTemplate:
    specials = load_tokenizer(tokenizer_of(name)).specials
    return chat_template(source_of(name), special_tokens=specials.texts, end_marks=specials.end_marks)


def outcome(template: ChatTemplate, messages: Any, tools: Any) -> Any:
    try:
        found = template.render(messages, tools or None)
    except SourceError as error:
        return str(error)
    return found.text, found.spans, found.needs_eos, found.losses


@pytest.mark.parametrize("name", mostly([name for name in OFTEN if name in SHIPPED], SHIPPED))
@given(chats())
@examples(8, 20)
def test_what_is_filled_in_is_what_a_second_rendering_finds(name: str, chat: Any) -> None:
    messages, tools = chat
    filled, twice = template_of(name), template_of(name)

    found = outcome(filled, messages, tools)

    def left_open(*given_: Any, **settings_: Any) -> Skeleton | None:
        made = skeleton_of(*given_, **{**settings_, "kind": "apart"})
        has_calls = any("tool_calls" in message for message in given_[1])
        return made and replace(made, is_open=made.is_open or has_calls or settings_["tool"] is not None)

    skeleton_of = rendering.skeleton_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "skeleton_of", lambda *g, **s: left_open(*g, **{"tool": None, **s}))
        assert found == outcome(twice, messages, tools)


@pytest.mark.skipif(not SHIPPED, reason="trl, which brings the templates, is not installed")
def test_json_arguments_and_tools_need_no_second_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    template, renders = template_of("qwen3"), []
    call = {
        "function": {"name": "f", "arguments": {"city": "Köln", "days": [1, 2.5, None], "at": {"k": " v "}}}
    }
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "7 °C"},
        {"role": "assistant", "content": "Cold."},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    template.render(messages, tools)
    run = type(template.program).run
    monkeypatch.setattr(
        type(template.program), "run", lambda *given_, **more: renders.append(1) or run(*given_, **more)
    )

    template.render(messages, [*tools, {"type": "function", "function": {"name": "g", "parameters": {}}}])

    assert len(renders) == 1
