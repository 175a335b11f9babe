"""What of a chat must be supervised, by TRL's training twins and transformers, for each template and conversation."""

import functools
import re
from dataclasses import dataclass, replace

from tests.text.trl_chats import (
    FAMILIES,
    Chat,
    Family,
    Marked,
    common,
    contract,
    last_answer,
    lost,
    marked,
    native,
    render,
    source_of,
    twin_name,
    without_marks,
)

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
        """Return the supervised texts."""
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
