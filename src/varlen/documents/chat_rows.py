"""Rows of chats, of prompts and completions, and of instructions, rendered by the chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from varlen.errors import SettingError, SourceError
from varlen.files.columns import Columns
from varlen.files.rows import found_kind
from varlen.text.chat_template import ChatTemplate, check_variables, prompt_and_completion
from varlen.text.messages import Chat, as_chat, as_messages, from_json
from varlen.text.rendering import Choice, Rendered


def renderers_of(
    columns: Columns,
    values: Mapping[str, Sequence[Any]],
    num_rows: int,
    template: ChatTemplate,
    choice: Choice,
) -> list[Callable[[], Rendered]]:
    """Return a function for each row, which renders the row or raises."""
    nothing = [None] * num_rows
    tools, systems = values.get("tools", nothing), values.get("system", nothing)
    variables = values.get("chat_template_kwargs", nothing)

    def chat(messages: Any, system: Any, row_tools: Any, row_variables: Any) -> Rendered:
        asked = _with_system(as_chat(messages, keeps_weights=choice.row_weights), system)
        return template.render(asked, row_tools, variables=_variables(row_variables), choice=choice)

    if columns.kind == "messages":
        return [partial(chat, *row) for row in zip(values["messages"], systems, tools, variables)]
    if columns.kind == "instruction":

        def instruct(
            instruction: Any, context: Any, output: Any, history: Any, system: Any, row_variables: Any
        ) -> Rendered:
            messages = instruction_messages(instruction, context, output, history)
            return chat(messages, system, None, row_variables)

        contexts, histories = (values.get(role, nothing) for role in ("context", "history"))
        asked = zip(values["instruction"], contexts, values["output"], histories, systems, variables)
        return [partial(instruct, *row) for row in asked]

    def complete(
        prompt: Any, completion: Any, label: Any, system: Any, row_tools: Any, row_variables: Any
    ) -> Rendered:
        _check_label(label)
        prompt, completion = _as_chats(prompt, completion, weighs=choice.row_weights)
        row_tools = None if isinstance(prompt, str) else row_tools
        prompt = _with_system(prompt, system) if system else prompt
        given = _variables(row_variables)
        return prompt_and_completion(prompt, completion, template, row_tools, variables=given, choice=choice)

    labels = values.get("label", nothing)
    asked = zip(values["prompt"], values["completion"], labels, systems, tools, variables)
    return [partial(complete, *row) for row in asked]


def _check_label(label: Any) -> None:
    """Raise for a completion that is a negative example."""
    if label is None or label is True:
        return
    if label is False or label == 0 or (isinstance(label, str) and label.strip().lower() in ("false", "0")):
        raise SourceError(
            f"its `label` is {label!r}: a negative example, as in KTO data, which would be trained as a positive "
            'one; leave such rows out (--on-error skip, on_error="skip"), or drop the column if it means something '
            "else"
        )


def _as_chats(prompt: Any, completion: Any, *, weighs: bool) -> tuple[Any, Any]:
    """Normalize a prompt and a completion of messages; return texts as they are."""
    if isinstance(prompt, str) and isinstance(completion, str):
        if not (prompt.startswith("[{") and completion.startswith("[{")):
            return prompt, completion
        try:
            read = [from_json(text, "a chat") for text in (prompt, completion)]
        except SourceError:
            return prompt, completion
        if not all(
            isinstance(message, dict) and ("role" in message or "from" in message)
            for some in read
            for message in some
        ):
            return prompt, completion
        prompt, completion = read
    kinds = (list, dict)
    if isinstance(prompt, kinds) and isinstance(completion, kinds) and completion:
        earlier = as_chat(prompt, keeps_weights=weighs) if prompt else Chat(messages=[])
        return earlier, as_chat(completion, keeps_weights=weighs)
    return prompt, completion


def _with_system(chat: Any, system: Any) -> Any:
    """Prepend the text of the `system` column as a message."""
    if system is None or system == "":
        return chat
    if not isinstance(system, str):
        raise SourceError(f"`system` must be a string, found {found_kind(system)}")
    if not isinstance(chat, Chat):
        raise SourceError(
            "the prompt is text, in which `system` has no place; to write such rows as chats, name their columns as "
            "those of an instruction: --column instruction=prompt --column output=completion"
        )
    messages = chat.messages
    if messages and messages[0]["role"] in ("system", "developer"):
        if messages[0].get("content") == system:
            return chat
        raise SourceError("`system` and the chat's own system message differ; keep one")
    off, weights = chat.shifted(1)
    return Chat(messages=[{"role": "system", "content": system}, *messages], off=off, weights=weights)


def _variables(value: Any) -> dict[str, Any]:
    """Return a row's template variables, from an object or its JSON text."""
    if isinstance(value, str):
        value = from_json(value, "`chat_template_kwargs`") if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SourceError(f"`chat_template_kwargs` must be an object, found {found_kind(value)}")
    try:
        check_variables(value)
    except SettingError as error:
        raise SourceError(str(error)) from None
    return value


# Instructions, as in Alpaca, Dolly and Megatron-LM's question-answer files, as chats.


def instruction_messages(
    instruction: Any, context: Any, output: Any, history: Any = None
) -> list[dict[str, Any]]:
    r"""Return an instruction and its output as a chat.

    >>> instruction_messages("Sum up.", "A long text.", "Short.")[0]["content"]
    'Sum up.\n\nA long text.'
    """
    for role, value in (("instruction", instruction), ("context", context or ""), ("output", output)):
        if not isinstance(value, str):
            raise SourceError(f"`{role}` must be a string, found {found_kind(value)}")
    if not output:
        raise SourceError("the output is empty, so there is nothing to train on; leave out the row")
    asked = "\n\n".join(part for part in (instruction, context) if part and part.strip())
    turn = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    return [*_earlier(history), *turn] if history else turn


def _earlier(history: Any) -> list[dict[str, Any]]:
    """Return earlier turns as messages."""
    if isinstance(history, str):
        history = from_json(history, "`history`") if history.strip() else []
    if isinstance(history, list) and all(isinstance(turn, dict) for turn in history):
        return as_messages(history) if history else []
    messages: list[dict[str, Any]] = []
    for turn in history if isinstance(history, list) else [history]:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise SourceError(
                f"`history` must be a list of pairs of question and answer, or of messages, found {found_kind(turn)}"
            )
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn)]
    return messages
