"""Whatever messages contain, exactly the assistant's turns are supervised, and skeletons tell the same."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.chats import LOSSES_ALLOWED, SPECIAL, TEMPLATES, chat, said, template
from tests.support.rarely import examples, mostly
from tests.text.trl_chats import FAMILIES, source_of, template_names, tokenizer_of
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from varlen.documents.documents import _encode_spans, dividing_id
from varlen.errors import SourceError
from varlen.text import rendering
from varlen.text.chat_template import CHATML, ChatTemplate, chat_template, prompt_and_completion
from varlen.text.load_tokenizer import load_tokenizer
from varlen.text.rendering import Rendered
from varlen.text.skeleton import Skeleton
from varlen.text.tokenizer import FastTokenizer

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


def is_thought_alone(message: dict[str, str]) -> bool:
    thoughts, end, response = message["content"].rpartition("</think>")
    return bool(end and thoughts.strip() and not response.strip())


def test_a_turn_whose_text_is_thoughts_that_the_template_drops_is_not_trained():
    rendered = template("thinking").render(chat("u:", "a:why</think>", "u:", "a:b"), choice=LOSSES_ALLOWED)

    assert [rendered.text[slice(*span)] for span in rendered.spans] == ["<think>\n\n</think>\n\nb<|im_end|>"]


@pytest.mark.parametrize("name", list(IN_PYTHON))
@given(turns=TALKS, knows_marks=st.booleans())
@hypothesis.example(turns=["u:<|im_start|>assistant\nHi<|im_end|>\n", "a:", "u: ", "a: "], knows_marks=True)
@hypothesis.example(turns=["u:\U000f00001\U000f0000", "a:\U000f00000\U000f0000"], knows_marks=True)
@hypothesis.example(turns=["u:a", "a:<think>\nb</think>\n\nc", "u:</think>", "a:d</think>"], knows_marks=True)
def test_every_template_supervises_what_the_same_template_in_python_says(name, turns, knows_marks):
    messages = chat(*turns)
    text, spans = expect(name, messages)
    hypothesis.assume(spans and not (name == "thinking" and any(map(is_thought_alone, messages))))

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
def test_what_is_filled_in_is_what_a_second_rendering_finds(name, chat):
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
def test_json_arguments_and_tools_need_no_second_rendering(monkeypatch):
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


def test_variables_in_another_order_are_other_variables():
    template = chat_template("{% for n in order %}{{ n }}{% endfor %}" + CHATML.replace("\n", ""))
    chat, orders = [{"role": "assistant", "content": "."}], ({"a": 1, "b": 1}, {"b": 1, "a": 1})
    texts = [template.render(chat, variables={"order": order}).text[:2] for order in orders]
    assert (texts, len(template.skeletons)) == (["ab", "ba"], 2)


END, HEAD = "<|im_end|>", "<|im_start|>"
WORDS = ("Hello", " there", "\n", "  ", "é", "user", "assistant\n")
MARKS = ("<|im", "_end|>", "|>", "<", END, HEAD, "x<|im_end|>")
PIECE = st.lists(st.sampled_from(WORDS + MARKS), max_size=6).map("".join)
CORPUS = ["Hello there user assistant é is what we say and hear", "<|im_end|> x <|im_start|>"] * 40


ODD = {
    "takes blanks": "rstrip",
    "takes blanks before": "lstrip",
    "whole words": "single_word",
    "normalized": "normalized",
}
KINDS = ("plain", "lower", "prefix space", *ODD, "overlap", "longer", "around", "split")


@cache
def small_tokenizer(kind: str) -> FastTokenizer:
    """A small tokenizer with special tokens, and with what is odd about them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix space")
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    if kind == "lower":
        made.normalizer = normalizers.Lowercase()
    flags: dict[str, Any] = {"normalized": False} | ({ODD[kind]: True} if kind in ODD else {})
    made.add_special_tokens([AddedToken(text, special=True, **flags) for text in (END, HEAD)])
    more = {"overlap": "x<|im", "longer": f"{END}\n", "around": f"<{END}>"}.get(kind)
    if more:
        made.add_tokens([AddedToken(more, normalized=False)])
    if kind == "split":
        made.encode_special_tokens = True
    found = load_tokenizer(made)
    assert isinstance(found, FastTokenizer)
    return found


def cut(rendered: list[Rendered], tokenizer: FastTokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """Ids and mask of each text, piece by piece."""
    tokens, masks = [], []
    for one in rendered:
        bounds = [0, *(place for span in one.spans for place in span), len(one.text)]
        pieces = [one.text[a:b] for a, b in zip(bounds, bounds[1:])]
        ids = [tokenizer.encode([piece])[0].tolist() if piece else [] for piece in pieces]
        tokens.append([id_ for part in ids for id_ in part])
        masks.append([number % 2 for number, part in enumerate(ids) for _ in part])
    return tokens, masks


@pytest.mark.parametrize("kind", KINDS)
@given(
    st.lists(st.lists(st.tuples(PIECE, PIECE, st.booleans()), min_size=1, max_size=4), min_size=1, max_size=3)
)
@examples(30, 80)
def test_texts_whose_parts_are_encoded_at_once_are_those_that_are_cut(kind, rows):
    tokenizer, rendered = small_tokenizer(kind), []
    for turns in rows:
        text, spans = "", []
        for asked, answered, is_ended in turns:
            text += f"{HEAD}user\n{asked}{END}\n{HEAD}assistant\n"
            start = len(text)
            text += answered + END * is_ended
            if len(text) > start:
                spans.append((start, len(text)))
        if spans:
            rendered.append(Rendered(text=text + "\n" * len(turns), spans=tuple(spans), needs_eos=False))
    if not rendered or not tokenizer.is_cuttable:
        return

    tokens, offsets, mask = _encode_spans(rendered, tokenizer)

    wanted, masks = cut(rendered, tokenizer)
    assert [part.tolist() for part in np.split(tokens, offsets[1:-1])] == wanted
    assert [part.tolist() for part in np.split(mask, offsets[1:-1])] == masks


def test_only_what_is_surely_split_at_divides():
    found = {kind: dividing_id(small_tokenizer(kind), END) is not None for kind in KINDS}

    assert found == {kind: kind in ("plain", "lower", "prefix space") for kind in KINDS}
    assert dividing_id(small_tokenizer("plain"), "Hello") is None
    assert dividing_id(small_tokenizer("plain"), "nowhere") is None
