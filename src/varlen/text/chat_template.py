"""Render chats to text, and locate exactly the characters that the assistant generates.

What is supervised is what an assistant generates when prompted: from the end of the generation prompt through its
content and its tool calls to its end-of-turn mark. Where a template marks this itself by `{% generation %}`, only its
marks count; otherwise it is located by rendering. A chat in which it can't be located is rejected rather than guessed
at, and so is a chat of which the template drops the assistant's text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varlen.errors import SettingError, SourceError, VarlenError
from varlen.files.losses import NO_LOSSES, Losses
from varlen.files.rows import READ_AS_TEXT
from varlen.regular import read_regular_text
from varlen.text.messages import Chat, as_chat, as_tools, well_formed
from varlen.text.rendering import ALL, VARIABLES, Choice, Rendered, between, spelled, training_twin, twin_of
from varlen.text.skeleton import EndMarks

if TYPE_CHECKING:
    from varlen.text.jinja_sandbox import Program
    from varlen.text.skeleton import Skeleton
    from varlen.text.tokenizer import Tokenizer
    from varlen.text.wants import Wants

_OWN = ("messages", "tools", "documents", "add_generation_prompt")  # variables of the chat itself


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatTemplate:
    """A chat template that compiles, made by `chat_template`; it can be sent to other processes."""

    source: str  # in Jinja's language
    fingerprint: str  # of what determines text and spans: sources, tokens, end marks, variables
    special_tokens: Mapping[str, str]
    end_marks: tuple[str, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)  # such as `enable_thinking`
    tool_use: ChatTemplate | None = None  # the template for conversations with tools
    skeletons: dict[Any, Skeleton | None] = field(repr=False, default_factory=dict)
    _wants: dict[str, Wants] = field(repr=False, default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        tool_use = {} if self.tool_use is None else {"tool_use": self.tool_use.source}
        named = {"default": self.source, **tool_use}
        return _again, (named, dict(self.special_tokens), self.end_marks, dict(self.variables))

    @cached_property
    def program(self) -> Program:
        """Compiled on first use: most data is no chat, and importing the compiler is slow."""
        from varlen.text.jinja_sandbox import compile_template

        return compile_template(self.source, self.special_tokens)

    @cached_property
    def marks(self) -> EndMarks:
        """What may end a turn: the end marks and the EOS token."""
        return EndMarks(self.end_marks, self.special_tokens.get("eos_token", ""))

    @cached_property
    def _chatml_mark(self) -> int:
        return self.marks.stop(CLOSING)

    def check(self) -> None:
        """Compile now, to fail before data is read."""
        _ = self.program

    def render(
        self,
        messages: Any,
        tools: Any = None,
        *,
        variables: Mapping[str, Any] | None = None,
        choice: Choice = ALL,
    ) -> Rendered:
        """Render a conversation and locate the assistant's text in it."""
        chat = as_chat(messages, keeps_weights=choice.row_weights)
        return self.render_from(chat, tools, 0, variables or {}, choice)

    def render_from(
        self, chat: Chat, tools: Any, first: int, variables: Mapping[str, Any], choice: Choice
    ) -> Rendered:
        """Render all messages, supervising the assistant's from index `first` on; as `render`."""
        tools = as_tools(tools) if tools else None
        if tools and self.tool_use is not None:
            return self.tool_use.render_from(chat, tools, first, variables, choice)
        if tools is None and self.source is CHATML:
            trained = None if not (chat.off or choice.last) else _trained(chat, first, choice)
            written = write_chatml(chat.messages, trained, first, self._chatml_mark)
            if written is not None and not (chat.off or chat.weights):
                text, spans, empty = written
                losses = Losses(empty_turns=empty) if empty else NO_LOSSES
                return Rendered(text=text, spans=tuple(spans), needs_eos=False, losses=losses)
        from varlen.text.rendering import Rendering

        trained = _trained(chat, first, choice)
        others_off = choice.everything and _are_others_off(chat)
        rendering = Rendering(self, chat, tools, {**self.variables, **variables})
        if not others_off:
            return rendering.rendered(first, trained, choice)
        made = rendering.rendered(first, trained, replace(choice, everything=False))
        return replace(made, off=between(made.spans, len(made.text)))

    def prompt(self, messages: Any) -> str:
        """Render a conversation up to where the assistant's answer begins."""
        from varlen.text.rendering import Rendering

        chat = as_chat(messages)
        return Rendering(self, chat, None, self.variables).render(chat.messages, True)

    def twin(self) -> ChatTemplate | None:
        """Return TRL's training twin of the template, or None."""
        if not twin_of(self.source):
            return None
        source = training_twin(self.source)
        return chat_template(source, special_tokens=self.special_tokens, end_marks=self.end_marks)

    def wants(self, variables: Mapping[str, Any]) -> Wants:
        """Return the form in which the template takes messages, probed on first use."""
        key = spelled(variables, VARIABLES, is_sorted=True)
        if key not in self._wants:
            from varlen.text.wants import wants_of

            self._wants[key] = wants_of(self.program, variables)
        return self._wants[key]


def chat_template(
    source: str | Mapping[str, str] | None = None,
    *,
    special_tokens: Mapping[str, str] | None = None,
    end_marks: Collection[str] = (),
    variables: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """Compile a chat template."""
    named = {"default": CHATML} if not source else {"default": source} if isinstance(source, str) else source
    if not isinstance(named, Mapping):
        raise SettingError(f"the chat template must be text, got {source!r}")
    if "default" not in named:
        raise SettingError(
            f"the tokenizer has {len(named):,} chat templates ({', '.join(sorted(named))}) and none is called "
            "default; name one by --chat-template FILE (chat_template=)"
        )
    tokens, seen = dict(special_tokens or {}), dict(variables or {})
    check_variables(seen)
    text = CHATML if named["default"] == CHATML else named["default"]
    tool_use = None
    if "tool_use" in named:
        only = {"default": named["tool_use"]}
        tool_use = chat_template(only, special_tokens=tokens, end_marks=end_marks, variables=seen)
    for name, value in (
        ("the chat template", text),
        *tokens.items(),
        *(("an end mark", m) for m in end_marks),
    ):
        if not isinstance(value, str):
            raise SettingError(f"{name} must be text, got {value!r}")
    marks = tuple(sorted(set(end_marks)))
    decides: list[Any] = [text, sorted(tokens.items()), marks]
    if seen or tool_use is not None:
        decides += [spelled(seen, VARIABLES, is_sorted=True), tool_use and tool_use.source]
    made = ChatTemplate(
        source=text,
        fingerprint=hashlib.sha256(json.dumps(decides).encode("ascii")).hexdigest(),
        special_tokens=tokens,
        end_marks=marks,
        variables=seen,
        tool_use=tool_use,
    )
    if text is not CHATML:
        made.check()
    return made


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise if a variable would hide the chat itself."""
    for name in variables:
        if name in _OWN or not str(name).isidentifier():
            raise SettingError(
                f"the variable {name!r} can't be passed to a chat template: {', '.join(_OWN)} are reserved, and a "
                "name has only letters, digits and _"
            )


def prompt_and_completion(
    prompt: object,
    completion: object,
    template: ChatTemplate,
    tools: Any = None,
    *,
    variables: Mapping[str, Any] | None = None,
    choice: Choice = ALL,
) -> Rendered:
    """Join a prompt and its completion, of which only the completion is supervised."""
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise SourceError("the completion is empty, so there is nothing to train on; leave out the row")
        text = well_formed(prompt + completion)
        return Rendered(text=text, spans=((len(prompt), len(text)),), needs_eos=True)
    if isinstance(prompt, list | Chat) and isinstance(completion, list | Chat):
        if not completion:
            raise SourceError(
                "the completion is an empty list, so there is nothing to train on; leave out the row"
            )
        earlier = as_chat(prompt, keeps_weights=choice.row_weights) if prompt else Chat(messages=[])
        later, first = as_chat(completion, keeps_weights=choice.row_weights), len(earlier.messages)
        off, weights = later.shifted(first)
        chat = Chat(
            messages=earlier.messages + later.messages,
            off=earlier.off | off,
            weights={**earlier.weights, **weights},
        )
        return template.render_from(chat, tools, first, variables or {}, choice)
    kinds = {"str": "text", "list": "a list of messages", "NoneType": "null", "dict": "an object"}
    names = [type(value).__name__ for value in (prompt, completion)]
    seen, other = (kinds.get(name, name) for name in names)
    raise SourceError(
        f"prompt and completion must both be text or both lists of messages; the prompt is {seen}, "
        f"the completion {other}" + (f"; {READ_AS_TEXT}" if "bytes" in names else "")
    )


def _again(
    named: dict[str, str],
    special_tokens: dict[str, str],
    end_marks: tuple[str, ...],
    variables: dict[str, Any],
) -> ChatTemplate:
    """Rebuild a template in the process that it was sent to."""
    return chat_template(named, special_tokens=special_tokens, end_marks=end_marks, variables=variables)


def _trained(chat: Chat, first: int, choice: Choice) -> list[int]:
    """Return the indexes of the supervised messages."""
    speaking = [n for n, message in enumerate(chat.messages) if n >= first and message["role"] == "assistant"]
    what = "completion" if first else "chat"
    if not speaking:
        seen = ", ".join(dict.fromkeys(message["role"] for message in chat.messages[first:]))
        raise SourceError(
            f"the {what} has no assistant turn (roles: {seen}), so nothing in it would be trained; "
            "leave out the row"
        )
    trained = [n for n in (speaking[-1:] if choice.last else speaking) if n not in chat.off]
    if not trained:
        raise SourceError(
            f"every assistant turn of the {what} that could be trained is switched off (weight 0, train false), so "
            "nothing in it would be trained; leave out the row"
        )
    return trained


def _are_others_off(chat: Chat) -> bool:
    """Whether all messages but the assistant's are switched off, so that only these are trained."""
    others = {n: message["role"] for n, message in enumerate(chat.messages) if message["role"] != "assistant"}
    if others.keys() <= chat.off:
        return bool(others)
    for number in sorted(others.keys() & {*chat.off, *chat.weights}):
        raise SourceError(
            f"message {number + 1} ({others[number]}) has the weight {chat.weights.get(number, 0):g}, and with "
            "supervise=\"all\" what isn't the assistant's can't be told apart in the text: switch all of it off "
            '(supervise="assistant" does), or none'
        )
    return False


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Return what a template writes at the end of an assistant's turn, and its ids.

    Nothing where the template writes no mark, or one that doesn't depend on the turn alone: then the EOS ends it.
    """
    answer = "answer"
    try:
        made = template.render([{"role": "user", "content": "."}, {"role": "assistant", "content": answer}])
    except VarlenError:
        return "", []
    mark = "" if made.needs_eos else made.text[slice(*made.spans[-1])].rpartition(answer)[2].strip()
    return mark, tokenizer.encode([mark], is_chat=True)[0].tolist() if mark else []


def template_text(template: str | Path) -> str:
    """Return a chat template's text, given as text or as a file name."""
    if isinstance(template, str) and ("{" in template or "\n" in template):
        return template
    try:
        return read_regular_text(Path(template).expanduser())
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingError(f"the chat template {template} can't be read: {reason}") from error


# ChatML, the default for tokenizers without a template; plain chats are written without running it.

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

CLOSING = "<|im_end|>\n"
_HEADERS = {role: f"<|im_start|>{role}\n" for role in ("system", "developer", "user", "assistant", "tool")}


def write_chatml(
    messages: list[dict[str, Any]], trained: Collection[int] | None, first: int, mark: int
) -> tuple[str, list[tuple[int, int]], int] | None:
    """Write plain messages as ChatML; None for any other chat."""
    pieces: list[str] = []
    spans = []
    position = number = empty = 0
    assistant = _HEADERS["assistant"]
    try:
        for message in messages:
            content = message["content"]
            header = _HEADERS[message["role"]]
            if len(message) != 2 or type(content) is not str:
                return None
            pieces += (header, content, CLOSING)
            start = position + len(header)
            position = start + len(content) + len(CLOSING)
            if header is assistant and (number >= first if trained is None else number in trained):
                spans.append((start, start + len(content) + mark))
                empty += not content or content.isspace()
            number += 1
    except (TypeError, KeyError):
        return None
    if not spans or type(messages) is not list:
        return None
    return well_formed("".join(pieces)), spans, empty
