"""Conversations, and what TRL's chat templates make of them: an oracle for what of a chat is supervised.

TRL ships the templates of many models, and of most a training twin: the same template with `{% generation %}`
around what the assistant generates. `transformers` turns these marks into a mask of tokens.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

Messages = list[dict[str, Any]]
Marked = tuple[str, list[tuple[int, int]]]
"""A text, and which characters [start, stop) of it are supervised."""

_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|?>|<[a-z_]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<(?:start|end)_of_[a-z]+>|\[gMASK\]|<sop>|</s>|<image>"
)
_KNOWN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that the vocabularies have, but not as special ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A template of TRL's, its special tokens, and the form in which it takes messages."""

    name: str
    eos: str
    bos: str = "<s>"
    takes_parts: bool = False
    """Contents must be lists of parts."""
    trims_parts: bool = False
    """It trims each part of a content, so that parts are not what they are joined."""
    thoughts: str = "reasoning_content"
    """The key under which it reads thoughts."""
    text_arguments: tuple[bool, bool] = (False, False)
    """Whether the original, and the twin, take a call's arguments as JSON text, not as an object."""
    null_content: bool = False
    """A call without a content must have it as null, not as an empty text."""
    before: tuple[str, ...] = ()
    """What the twin labels at the start of a turn though the prompt has written it: the longest that fits."""
    after: tuple[tuple[str, str], ...] = (("<|im_end|>\n", "<|im_end|>"),)
    """What the twin labels at the end of a turn, and what of it the model must write to stop."""
    stop: tuple[str, ...] = ()
    """A stop token that the twin's text ends with and the original's doesn't: varlen appends EOS there."""


_EOT, _IM_END = "<|END_OF_TURN_TOKEN|>", "<|im_end|>"
_THINKING: dict[str, Any] = {"eos": _IM_END, "before": ("<think>\n", "<think>")}
_DEEPSEEK: dict[str, Any] = {
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "before": ("<｜Assistant｜><think>\n", "<｜Assistant｜>", "<｜tool▁outputs▁end｜>"),
    "null_content": True,
    "after": (),
}
_GEMMA_END = (("<end_of_turn>\n", "<end_of_turn>"),)
_GEMMA4: dict[str, Any] = {
    "bos": "<bos>",
    "eos": "<eos>",
    "after": (("<turn|>\n", "<turn|>"),),
    "trims_parts": True,
}
_PHI: dict[str, Any] = {"eos": "<|endoftext|>", "after": (("<|end|>\n", "<|end|>"),)}
_UTTERANCE = (("<end_of_utterance>\n", "<end_of_utterance>"),)
_LLAMA: dict[str, Any] = {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "after": ()}
_LFM: dict[str, Any] = {"bos": "<|startoftext|>", "eos": _IM_END}
_TABLE: dict[str, dict[str, Any]] = {
    "cohere": {"bos": "<BOS_TOKEN>", "eos": _EOT, "after": ()},
    "cohere2": {"bos": "<BOS_TOKEN>", "eos": _EOT, "after": ()},
    "deepseek_r1_distill": _DEEPSEEK | {"text_arguments": (True, True)},
    "deepseekv3": _DEEPSEEK | {"text_arguments": (True, False)},
    "diffusion_gemma": _GEMMA4,
    "gemma": {"bos": "<bos>", "eos": "<eos>", "after": _GEMMA_END},
    "gemma3": {"bos": "<bos>", "eos": "<eos>", "after": _GEMMA_END, "trims_parts": True},
    "gemma4": _GEMMA4,
    "gemma4_v2": _GEMMA4,
    "gemma4_v3": _GEMMA4,
    "gemma4_v4": _GEMMA4,
    "gemma4_v5": _GEMMA4,
    "glm4moe": {"eos": "<|endoftext|>", "after": (), "stop": ("<|user|>", "<|observation|>")},
    "gptoss": {"eos": "<|return|>", "thoughts": "thinking", "before": ("<|start|>assistant",), "after": ()},
    "idefics3": {"eos": "<|end_of_text|>", "takes_parts": True, "after": _UTTERANCE},
    "lfm2": _LFM,
    "lfm2_2_5": _LFM | {"thoughts": "thinking"},
    "lfm2_2_5_v2": _LFM | {"thoughts": "thinking"},
    "lfm2_2_5_vl": _LFM | {"thoughts": "thinking"},
    "lfm2_v2": _LFM,
    "llama3": _LLAMA,
    "llama3_1": _LLAMA,
    "llama3_2": _LLAMA,
    "llava_next": {"eos": "</s>", "takes_parts": True, "after": ()},
    "muse_glimmer": {
        "bos": "<|begin_of_text|>",
        "eos": "<|end_of_text|>",
        "before": ("<|start|>assistant",),
        "after": (),
    },
    "nemotron_3_5_lightning": _THINKING,
    "nemotron_3_nano": _THINKING,
    "nemotron_3_super": _THINKING,
    "nemotron_3_ultra": _THINKING,
    "phi3": _PHI,
    "phi3_5": _PHI,
    "qwen2_5": {"eos": _IM_END, "before": ("\n",)},
    "qwen2_5_vl": {"eos": _IM_END},
    "qwen3": {"eos": _IM_END},
    "qwen3_5_nothink": {"eos": _IM_END, "before": ("<think>\n\n</think>\n\n", "<think>\n")},
    "qwen3_5_think": _THINKING,
    "qwen3_6": _THINKING,
    "qwen3_8": _THINKING,
    "qwen3_instruct_2507": {"eos": _IM_END},
    "qwen3_vl": {"eos": _IM_END},
    "smolvlm": {"eos": "<end_of_utterance>", "takes_parts": True, "after": _UTTERANCE},
}

FAMILIES = {name: Family(name=name, **options) for name, options in _TABLE.items()}


@functools.cache
def template_names() -> set[str]:
    folder = _folder()
    return {path.stem for path in folder.glob("*.jinja")} if folder else set()


@functools.cache
def _folder() -> Path | None:
    found = importlib.util.find_spec("trl")
    return Path((found.submodule_search_locations or [""])[0], "chat_templates") if found else None


@functools.cache
def source_of(name: str) -> str:
    """Return the text of a template.

    Raises:
        FileNotFoundError: TRL is absent.
    """
    folder = _folder()
    if folder is None:
        raise FileNotFoundError("trl is not installed, which brings the templates")
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


def twin_name(name: str) -> str | None:
    """Return the template with generation marks that writes what this one writes, if there is one."""
    twin = f"{name}_training"
    if twin in template_names():
        return twin
    return name if name in template_names() and _GENERATION.search(source_of(name)) else None


def without_marks(source: str) -> str:
    """Return a template with its generation marks hidden: blocks of the same blanks that mark nothing."""
    return _GENERATION.sub(
        lambda found: "{%" + found[1] + (" endif " if found[2] else " if true ") + found[3] + "%}", source
    )


@functools.cache
def tokenizer_of(name: str) -> Any:
    """Return a tokenizer of characters and the family's special tokens, by which masks are exact."""
    from tests.text.trl_conversations import CHATS
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    family, twin, source = FAMILIES[name], twin_name(name), source_of(name)
    texts = source + (source_of(twin) if twin else "")
    letters = sorted({*map(chr, range(127)), *texts, *str([chat.messages for chat in CHATS.values()])})
    letters += [c for c in "".join(_strings(list(CHATS.values()))) if c not in letters]
    vocabulary = {letter: number for number, letter in enumerate(dict.fromkeys(letters))}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    specials = sorted({*_SPECIAL.findall(texts), family.bos, family.eos})
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in _KNOWN])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=family.bos, eos_token=family.eos)
    made.chat_template = source
    return made


def _strings(value: Any) -> list[str]:
    if isinstance(value, Chat):
        return _strings(value.messages)
    if isinstance(value, dict):
        return [text for entry in value.items() for text in _strings(list(entry))]
    return [t for entry in value for t in _strings(entry)] if isinstance(value, list) else [str(value)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A conversation in the common form: contents as text, arguments as objects, thoughts as `reasoning_content`."""

    messages: Messages
    tools: list[Any] | None = None

    def up_to(self, number: int) -> Chat:
        """Return its first messages."""
        return Chat(messages=self.messages[:number], tools=self.tools)


def native(chat: Chat, family: Family, *, twin: bool) -> Chat:
    """Return a chat in the form that the family's template wants."""
    taken = []
    for message in chat.messages:
        own = dict(message)
        content = own.get("content")
        if isinstance(content, list) and not family.trims_parts:
            content = "".join(part["text"] for part in content)
        if own.get("tool_calls"):
            content = content or (None if family.null_content else "")
            if family.text_arguments[twin]:
                own["tool_calls"] = [_as_text(call) for call in own["tool_calls"]]
        own["content"] = (
            [{"type": "text", "text": content}] if family.takes_parts and content is not None else content
        )
        if "reasoning_content" in own:
            own[family.thoughts] = own.pop("reasoning_content")
        taken.append(own)
    return Chat(messages=taken, tools=chat.tools)


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def render(name: str, source: str, chat: Chat, *, prompts: bool = False) -> str | None:
    """Return a chat as transformers writes it, None where the template refuses it or fails."""
    got = _rendered(name, source, chat, add_generation_prompt=prompts)
    return got[0][0] if got else None


def marked(name: str, source: str, chat: Chat) -> Marked | None:
    """Return what transformers writes, and what the template's generation marks stand around."""
    got = _rendered(name, source, chat, return_assistant_tokens_mask=True)
    if not got:
        return None
    return got[0][0], [(start, stop) for start, stop in got[1][0] if start < stop]


def _rendered(name: str, source: str, chat: Chat, **options: Any) -> Any:
    """Call transformers' renderer, which takes null contents too; `apply_chat_template` leaves them out before."""
    from transformers.utils.chat_template_utils import render_jinja_template

    names = tokenizer_of(name).special_tokens_map
    try:
        return render_jinja_template([chat.messages], chat.tools, chat_template=source, **options, **names)
    except (TemplateError, TypeError, KeyError, AttributeError, ValueError, IndexError):
        return None


def contract(family: Family, found: Marked) -> Marked:
    """Return a twin's marks less what the table of families says they hold and a model needn't write."""
    text, spans = found
    kept = []
    for number, (start, stop) in enumerate(spans):
        begin = next((b for b in family.before if text.startswith(b, start) and start + len(b) < stop), "")
        end = next((len(a) - len(b) for a, b in family.after if text.endswith(a, start, stop)), 0)
        # An EOS that follows at once is the model's to write, and so is what stands before it.
        end = 0 if [text[a:b] for a, b in spans[number + 1 :] if a == stop] == [family.eos] else end
        kept.append((start + len(begin), stop - end))
    return text, joined(kept)


def joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    whole: list[tuple[int, int]] = []
    for start, stop in spans:
        whole.append((whole.pop()[0], stop) if whole and whole[-1][1] == start else (start, stop))
    return whole


def lost(name: str, source: str, chat: Chat, *, twin: bool, last_alone: bool = False) -> list[str]:
    """Return what a template doesn't write of the assistant's messages, or of its last one, and of the tools."""
    family, missing = FAMILIES[name], []
    text = render(name, source, native(chat, family, twin=twin)) or ""
    if chat.tools and any(tool["function"]["name"] not in text for tool in chat.tools):
        missing.append("tools")
    last_user = max((n for n, message in enumerate(chat.messages) if message["role"] == "user"), default=-1)
    for number, message in enumerate(chat.messages):
        if message["role"] != "assistant" or (last_alone and number < last_answer(chat)):
            continue
        until = render(name, source, native(chat.up_to(number + 1), family, twin=twin)) or ""
        before = render(name, source, native(chat.up_to(number), family, twin=twin)) or ""
        own = until[common(until, before) :]
        contents, thoughts = _pieces(message)
        missing += [f"{number}: {piece!r}" for piece in contents + thoughts if not _is_in(piece, own)]
        # Thoughts may go once the user speaks again, and nothing else may.
        kept = contents + (thoughts if number > last_user else [])
        missing += [f"{number}, later: {piece!r}" for piece in kept if not _is_in(piece, text)]
    return missing


def last_answer(chat: Chat) -> int:
    return max(n for n, message in enumerate(chat.messages) if message["role"] == "assistant")


def _is_in(piece: str, text: str) -> bool:
    """Return whether a text is written, as it is or within JSON."""
    return piece.strip() in text or json.dumps(piece, ensure_ascii=False)[1:-1] in text


def common(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    return next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _pieces(message: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the texts of a message: content and calls, and thoughts."""
    content = message.get("content") or ""
    pieces = [content] if isinstance(content, str) else [part["text"] for part in content]
    for call in message.get("tool_calls") or ():
        pieces.append(call["function"]["name"])
        pieces += [v for v in call["function"]["arguments"].values() if isinstance(v, str)]
    thoughts = message.get("reasoning_content") or ""
    return [piece for piece in pieces if piece.strip()], [thoughts] if thoughts.strip() else []


_THOUGHTS = re.compile(r"<think>\n.*?\n</think>\n\n", re.DOTALL)
"""What the twins of Qwen keep in earlier turns, and the originals leave out."""


_OTHER = "\U000f0000"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a chat must become with a template."""

    text: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    eos: bool = False
    """The template ends the last turn by nothing: an EOS follows, supervised."""
    refused: str = ""
    """Why there must be no text."""
    rewritten: bool = False
    """The original writes an earlier turn otherwise than when it was the last one."""

    @property
    def said(self) -> list[str]:
        return [self.text[start:stop] for start, stop in self.spans]


@functools.cache
def marked_source(name: str) -> str | None:
    """Return a template that writes what this one writes, with marks around what the assistant generates."""
    twin = twin_name(name)
    if twin is not None:
        return source_of(twin)
    return _marked_gemma(source_of(name)) if name.startswith("gemma4") else None


def _marked_gemma(source: str) -> str:
    """Mark a template of Gemma 4 as TRL marks DiffusionGemma's, which is nearly the same: TRL has no twins of it."""
    begin, end = "{%- generation -%}", "{%- endgeneration -%}"
    head, between, loop = source.partition("{%- for message in loop_messages -%}")
    captured = "{{- captured_content -}}"
    contents = ("{{- strip_thinking(message['content']) -}}", "{{- strip_thinking(item['text']) -}}")
    first, last = "{{- '<|tool_call>call:' + function['name'] + '{' -}}", "{{- '}<tool_call|>' -}}"
    assert loop.count(first) == loop.count(last) == 1
    loop = loop.replace(first, begin + first).replace(last, last + end)
    thoughts = "{{- '<|channel>thought\\n' + thinking_text + '\\n<channel|>' -}}"
    for place in (thoughts, "{{- '<turn|>\\n' -}}", *((captured,) if captured in loop else contents)):
        assert loop.count(place) == 1 or place is thoughts
        chosen = f"{{%- if role == 'model' -%}}{begin}{place}{end}{{%- else -%}}{place}{{%- endif -%}}"
        loop = loop.replace(place, chosen)
    return head + between + loop


@functools.cache
def hidden_twin(name: str) -> str:
    """Return the twin's source without its marks."""
    twin = twin_name(name)
    assert twin is not None
    return without_marks(source_of(twin))


def of_twin(name: str, chat: Chat) -> Expected:
    """Return what the twin, its marks hidden, must give: what its marks say."""
    family, source = FAMILIES[name], hidden_twin(name)
    text = render(name, source, native(chat, family, twin=True))
    if text is None:
        return Expected(refused="transformers refuses it")
    if missing := lost(name, source, chat, twin=True):
        return Expected(refused=f"not written: {missing}")
    found = _twins(name, chat)
    assert found is not None
    assert found[0] == text, "hiding the marks must not change the text"
    return Expected(text=text, spans=tuple(found[1]))


def of_original(name: str, chat: Chat, *, last_alone: bool = False) -> Expected:
    """Return what the original must give; it must write the last answer, or all."""
    family, source = FAMILIES[name], source_of(name)
    text = render(name, source, native(chat, family, twin=False))
    if text is None:
        return Expected(refused="transformers refuses it")
    if missing := lost(name, source, chat, twin=False, last_alone=last_alone):
        return Expected(refused=f"not written: {missing}")
    rewritten = not preserves(name, chat)
    found = _twins(name, chat)
    aligned = _aligned(family, text, found) if found else None
    if aligned is None:
        aligned = by_prompts(name, chat, text)
    spans, eos = aligned
    return Expected(text=text, spans=tuple(spans), eos=eos, rewritten=rewritten)


def of_last_turn(name: str, chat: Chat) -> Expected:
    """Return what the original must give where the last turn of the assistant alone is trained."""
    whole = of_original(name, chat, last_alone=True)
    number, family, source = last_answer(chat), FAMILIES[name], source_of(name)
    before = native(chat.up_to(number), family, twin=False)
    plain, prompt = (render(name, source, before, prompts=some) or "" for some in (False, True))
    first = len(prompt) if whole.text.startswith(prompt) else common(plain, whole.text)
    # Another answer in the place of the last one tells which spans are its own.
    last = chat.messages[number]
    other = last | {"reasoning_content" if "reasoning_content" in last else "content": _OTHER}
    another = Chat(messages=[*chat.messages[:number], other], tools=chat.tools)
    own = common(render(name, source, native(another, family, twin=False)) or "", whole.text)
    spans = tuple((max(start, min(first, own)), stop) for start, stop in whole.spans if stop >= own)
    return replace(whole, spans=spans)


def preserves(name: str, chat: Chat, *, twin: bool = False) -> bool:
    """Return whether a template writes every turn of the assistant as it wrote it when it was the last."""
    family, source = FAMILIES[name], hidden_twin(name) if twin else source_of(name)
    whole = render(name, source, native(chat, family, twin=twin)) or ""
    for number, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            until = render(name, source, native(chat.up_to(number + 1), family, twin=twin)) or ""
            if not whole.startswith(until.rstrip()):
                return False
    return True


def _twins(name: str, chat: Chat) -> Marked | None:
    """Return what the twin marks, by the contract."""
    source = marked_source(name)
    if source is None:
        return None
    found = marked(name, source, native(chat, FAMILIES[name], twin=True))
    return contract(FAMILIES[name], found) if found else None


def _aligned(family: Family, text: str, found: Marked) -> tuple[list[tuple[int, int]], bool] | None:
    """Move a twin's marks to the original's text, which is the twin's less some thoughts and a stop token at the end.

    Returns:
        Spans and whether an EOS must follow; None where the texts differ in another way.
    """
    other, spans = found
    eos = False
    for stop in family.stop:
        if other.endswith(stop) and not text.endswith(stop):
            other, eos = other[: -len(stop)], True
    places, at, here = [], 0, 0
    for block in _THOUGHTS.finditer(other):
        kept = other[at : block.start()]
        if not text.startswith(kept, here):
            break
        places += range(here, here + len(kept))
        here, at = here + len(kept), block.start()
        if not text.startswith(block[0], here):
            places += [here] * len(block[0])
            at = block.end()
            while text.startswith("\n", here) and not other.startswith("\n", at):
                here += 1  # with the thoughts the twin strips the lines before the content
    places += range(here, here + len(other) - at)
    if text[here:].rstrip("\n") != other[at:].rstrip("\n"):
        return None
    places += [len(text)] * (len(found[0]) + 1 - len(places))
    moved = [
        (places[start], min(places[stop], len(text.rstrip("\n")) if eos else len(text)))
        for start, stop in spans
    ]
    return [(start, stop) for start, stop in moved if start < stop], eos


def by_prompts(name: str, chat: Chat, text: str) -> tuple[list[tuple[int, int]], bool]:
    """Return what stands between each generation prompt and the end of the turn, for templates without a twin."""
    family, source, spans = FAMILIES[name], source_of(name), []
    for number, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        prompt = render(name, source, native(chat.up_to(number), family, twin=False), prompts=True) or ""
        until = render(name, source, native(chat.up_to(number + 1), family, twin=False)) or ""
        assert text.startswith(until), (name, number, until, text)
        assert until.startswith(prompt), (name, number, prompt, until)
        spans.append((len(prompt), len(until)))
    return contract(family, (text, spans))[1], bool(family.stop) and chat.messages[-1]["role"] == "assistant"
