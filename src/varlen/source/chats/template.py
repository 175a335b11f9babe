"""Chats to text, and exactly which characters of it the assistant said.

What is supervised is what an assistant generates when asked: from the end of the generation prompt through its
content and its tool calls to its end-of-turn mark. Where a template marks this itself by `{% generation %}`, its
marks alone decide; otherwise it is found by rendering, and a chat in which it can't be found is refused rather
than guessed at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from varlen.errors import SettingError, SourceError
from varlen.source.chats.messages import as_messages, well_formed
from varlen.source.chats.skeleton import EndMarks, Skeleton, free_character, shape_of, skeleton_of
from varlen.source.chats.spans import Said, by_frames, by_prefixes, fill

if TYPE_CHECKING:
    from varlen.source.chats.sandbox import Program

CHATML = """\
{% for message in messages %}
{% if message['tool_calls'] or message['function_call'] %}
{{ raise_exception("ChatML has no form for tool calls; use the template of the model's tokenizer") }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML, the template where a tokenizer has none of its own."""

_CHATML_HEADERS = {
    role: f"<|im_start|>{role}\n" for role in ("system", "developer", "user", "assistant", "tool")
}
_CHATML_CLOSING = "<|im_end|>\n"
_MOST_SKELETONS = 512
_WAYS_OUT = (
    "put {% generation %} ... {% endgeneration %} around what the assistant says in the template, "
    'choose another template, or supervise="all"'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as text, and what of it the assistant said."""

    text: str
    """The conversation as its template writes it."""
    spans: tuple[tuple[int, int], ...]
    """Supervised characters [start, stop), ascending, disjoint, none empty."""
    needs_eos: bool
    """The last message is the assistant's and no end-of-turn mark follows it: an EOS token must be appended, and
    supervised."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatTemplate:
    """A chat template that compiles. Make one by `chat_template`; it can be sent to other processes."""

    source: str
    """The template, in jinja's language."""
    fingerprint: str
    """SHA-256 of what decides text and spans: the source, the special tokens and the end marks."""
    special_tokens: Mapping[str, str]
    end_marks: tuple[str, ...]
    _marks: EndMarks = field(repr=False)
    _chatml_mark: int = field(repr=False)
    _skeletons: dict[Any, Skeleton | None] = field(repr=False, default_factory=dict)
    _compiled: list[Program] = field(repr=False, default_factory=list)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.source, dict(self.special_tokens), self.end_marks)

    @property
    def _program(self) -> Program:
        """Compiled when it is first asked for: most data is no chat, and the compiler takes long to import."""
        if not self._compiled:
            from varlen.source.chats.sandbox import compile_template

            self._compiled.append(compile_template(self.source, self.special_tokens))
        return self._compiled[0]

    def check(self) -> None:
        """Compile it now, so that it fails before data is read.

        Raises:
            SettingError: it does not compile.
        """
        _ = self._program

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> Rendered:
        """Render a conversation and find what the assistant says in it.

        Args:
            messages: as `as_messages` takes them.
            tools: JSON schemas of tools that the assistant may call.

        Returns:
            The text with its supervised spans: each assistant's message from the end of the generation prompt
            through the end-of-turn mark. The mark is the first special token in what the template writes after
            the content for this message, else the template's own characters right after the content up to
            white space.

        Raises:
            SourceError: these are no messages, none is the assistant's, the template fails on them, or it
                rewrites earlier turns so that what the assistant said can't be located.
        """
        return self._render(messages, tools, 0)

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None, first: int) -> Rendered:
        """Render all messages, the assistant's from number `first` on supervised."""
        if tools is None and self.source is CHATML:
            rendered = self._chatml(messages, first)
            if rendered is not None:
                return rendered
        messages = as_messages(messages)
        _check_roles(messages, first)
        text = well_formed(self._program.run(messages, tools))
        if self._program.has_generation:
            return self._generated(messages, tools, text, first)
        said = self._said(messages, tools, text)
        if said is None:
            raise SourceError(
                "the chat template rewrites earlier turns, or their contents, so that what the assistant said "
                f"can't be located in the text; {_WAYS_OUT}"
            )
        return _rendered(
            text, [s for s in said if s.message >= first], ends=messages[-1]["role"] == "assistant"
        )

    def _said(self, messages: list[dict[str, Any]], tools: list[Any] | None, text: str) -> list[Said] | None:
        """Locate the assistant's messages by the skeleton of their roles, else by prefixes."""

        def render(some: list[dict[str, Any]], prompts: bool) -> str:
            return self._program.run(some, tools, prompts=prompts)

        shape = shape_of(messages, self.source)
        if shape is not None:
            skeleton = self._skeleton(shape, tools)
            said = fill(skeleton, messages, text) if skeleton else None
            if said is not None:
                return said
        bare = self._skeleton(tuple((message["role"], "") for message in messages), tools)
        said = by_prefixes(render, messages, text, bare, self._marks)
        return said or by_frames(render, messages, text, bare, self._foreign(tools))

    def _foreign(self, tools: list[Any] | None) -> str:
        """Return all text that the template may write beside the messages."""
        try:
            tools_text = json.dumps(tools, ensure_ascii=False) if tools else ""
        except (TypeError, ValueError, RecursionError) as error:
            raise SourceError(f"the tools of a chat must be JSON schemas; these are not: {error}") from error
        return "".join((self.source, *self.special_tokens.values(), tools_text))

    def _skeleton(self, shape: tuple[tuple[str, str], ...], tools: list[Any] | None) -> Skeleton | None:
        """Return the skeleton of a shape, made when it is first seen."""
        foreign = self._foreign(tools)
        key = (shape, foreign if tools else "")
        if key not in self._skeletons:
            if len(self._skeletons) >= _MOST_SKELETONS:
                self._skeletons.clear()
            self._skeletons[key] = skeleton_of(
                lambda some, prompts: self._program.run(some, tools, prompts=prompts),
                shape,
                self._marks,
                foreign,
            )
        return self._skeletons[key]

    def _generated(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, text: str, first: int
    ) -> Rendered:
        """Read the spans off the template's own marks."""
        start = free_character(text)
        stop = free_character(text + start)
        marked = self._program.run(messages, tools, marks=start + stop)
        if marked.replace(start, "").replace(stop, "") != text:
            raise SourceError(
                "the chat template works with the text of its {% generation %} blocks, so that they can't be "
                "located; let it write them as they are"
            )
        spans = _between(marked, start, stop)
        if first:
            before = self._program.run(messages[:first], tools).rstrip()
            if not text.startswith(before):
                raise SourceError(
                    "the chat template rewrites the prompt when the completion follows, so that the completion "
                    "can't be located; give the whole chat as `messages`"
                )
            spans = [span for span in spans if span[0] >= len(before)]
        if not spans:
            raise SourceError("the {% generation %} blocks of the chat template mark nothing in this chat")
        ends = messages[-1]["role"] == "assistant" and not self._marks.end(text[slice(*spans[-1])].rstrip())
        if ends:
            bare = self._skeleton(tuple((message["role"], "") for message in messages), tools)
            ends = not (bare and bare.turns[-1].mark)
        return Rendered(text=text, spans=tuple(spans), needs_eos=ends)

    def _chatml(self, messages: list[dict[str, Any]], first: int) -> Rendered | None:
        """Write plain messages as ChatML without running the template; None for any other chat."""
        pieces: list[str] = []
        spans = []
        position = number = 0
        mark = self._chatml_mark
        try:
            for message in messages:
                content = message["content"]
                header = _CHATML_HEADERS[message["role"]]
                if len(message) != 2 or type(content) is not str:
                    return None
                pieces += (header, content, _CHATML_CLOSING)
                start = position + len(header)
                position = start + len(content) + len(_CHATML_CLOSING)
                if number >= first and header is _CHATML_HEADERS["assistant"]:
                    spans.append((start, start + len(content) + mark))
                number += 1
        except (TypeError, KeyError):
            return None
        if not spans or type(messages) is not list:
            return None
        return Rendered(text=well_formed("".join(pieces)), spans=tuple(spans), needs_eos=False)


def chat_template(
    source: str | None = None,
    *,
    special_tokens: Mapping[str, str] | None = None,
    end_marks: Collection[str] = (),
) -> ChatTemplate:
    """Compile a chat template.

    Args:
        source: the template of a tokenizer, in jinja's language; None for ChatML.
        special_tokens: what the template sees by name, such as `bos_token` and `eos_token`.
        end_marks: texts of the tokenizer's special tokens, by which the end of a turn is known.

    Raises:
        SettingError: it does not compile, or is no text.
    """
    source = CHATML if source is None or source == CHATML else source
    tokens = dict(special_tokens or {})
    for name, value in (
        ("the chat template", source),
        *tokens.items(),
        *(("an end mark", m) for m in end_marks),
    ):
        if not isinstance(value, str):
            raise SettingError(f"{name} must be text, got {value!r}")
    marks = tuple(sorted(set(end_marks)))
    identity = json.dumps([source, sorted(tokens.items()), marks])
    ends = EndMarks(marks, tokens.get("eos_token", ""))
    made = ChatTemplate(
        source=source,
        fingerprint=hashlib.sha256(identity.encode("ascii")).hexdigest(),
        special_tokens=tokens,
        end_marks=marks,
        _marks=ends,
        _chatml_mark=ends.stop(_CHATML_CLOSING),
    )
    if source is not CHATML:
        made.check()
    return made


def prompt_and_completion(
    prompt: object, completion: object, template: ChatTemplate, tools: list[Any] | None = None
) -> Rendered:
    """Join a prompt and its completion, of which the completion alone is supervised.

    Args:
        prompt: text, or a list of messages.
        completion: of the same kind. As text it is supervised whole, with an EOS token to be appended; of
            messages only the assistant's are.
        template: what writes messages; text is left as it is.
        tools: JSON schemas of tools that the assistant may call.

    Raises:
        SourceError: one is text and the other messages, or the completion has nothing to train on.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise SourceError("the completion is empty, so there is nothing to train on; leave out the row")
        text = well_formed(prompt + completion)
        return Rendered(text=text, spans=((len(prompt), len(text)),), needs_eos=True)
    if isinstance(prompt, list) and isinstance(completion, list):
        if not completion:
            raise SourceError(
                "the completion is an empty list, so there is nothing to train on; leave out the row"
            )
        earlier = as_messages(prompt) if prompt else []
        return template._render(earlier + as_messages(completion), tools, len(earlier))
    kinds = {"str": "text", "list": "a list of messages", "NoneType": "null"}
    names = [type(value).__name__ for value in (prompt, completion)]
    seen, other = (kinds.get(name, name) for name in names)
    raise SourceError(
        f"prompt and completion must both be text or both lists of messages; the prompt is {seen}, "
        f"the completion {other}"
    )


def _again(source: str, special_tokens: dict[str, str], end_marks: tuple[str, ...]) -> ChatTemplate:
    """Make a template anew in the process that it was sent to."""
    return chat_template(source, special_tokens=special_tokens, end_marks=end_marks)


def _check_roles(messages: list[dict[str, Any]], first: int) -> None:
    """Require that the assistant speaks."""
    roles = [message["role"] for message in messages[first:]]
    if "assistant" not in roles:
        seen = ", ".join(dict.fromkeys(roles))
        what = "completion" if first else "chat"
        raise SourceError(
            f"the {what} has no assistant turn (roles: {seen}), so nothing in it would be trained"
        )


def _rendered(text: str, said: list[Said], *, ends: bool) -> Rendered:
    """Keep the turns in which something is said."""
    spans = tuple((turn.start, turn.stop) for turn in said if turn.start < turn.stop)
    if not spans:
        raise SourceError("the assistant says nothing in this chat, so nothing in it would be trained")
    return Rendered(text=text, spans=spans, needs_eos=ends and not said[-1].has_mark)


def _between(marked: str, start: str, stop: str) -> list[tuple[int, int]]:
    """Return where outermost blocks stand, in positions of the text without marks."""
    spans, position, depth, opened = [], 0, 0, 0
    for number, piece in enumerate(marked.replace(stop, start).split(start)):
        if number:
            is_start = marked[position + number - 1] == start
            if is_start and not depth:
                opened = position
            depth += 1 if is_start else -1
            if not depth and position > opened:
                spans.append((opened, position))
        position += len(piece)
    return spans
