"""The pages of reference that are made from declarations: settings of `varlen train`, and options of every verb.

`python docs/reference.py` writes them; with `--check` it says which of them are out of date, and changes nothing.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from varlen.arguments import TOKENS, options_of
from varlen.cli.app import app
from varlen.feed.settings import LoaderSettings
from varlen.train.settings import TrainSettings

FOLDER = Path(__file__).resolve().parent / "reference"
_NAMES = {
    **{bool: "`true` or `false`", int: "whole number", float: "number", str: "text", Mapping: "table"},
    **{Path: "path", list: "texts"},
}
_DIRTY = re.compile(r"\[/?(?:[a-z ]*)\]")
"""Marks of rich, which the help on a terminal is styled with."""


def main() -> None:
    """Write the pages, or check them."""
    wanted = {FOLDER / "settings.md": settings_page(), FOLDER / "cli.md": cli_page()}
    if "--check" not in sys.argv[1:]:
        for path, text in wanted.items():
            path.write_text(text, encoding="utf-8")
        return
    old = [path.name for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
    if old:
        sys.exit(f"docs/reference: {', '.join(old)} is out of date; run: python docs/reference.py")


def settings_page() -> str:
    """Return the page of the configuration of `varlen train`, a section a table."""
    hints = get_type_hints(TrainSettings)
    parts = [_SETTINGS]
    for name in (one.name for one in fields(TrainSettings)):
        kind = next(one for one in (hints[name], *get_args(hints[name])) if is_dataclass(one))
        parts.append(f"## `[{name}]`\n\n{_about(kind)}\n\n{_table(_settings_of(kind))}")
    return "\n\n".join(parts) + "\n"


def _about(kind: Any) -> str:
    """Return what a table's docstring says, after its name."""
    text = inspect.cleandoc(kind.__doc__).split(": ", 1)[1]
    return text[:1].upper() + text[1:]


def _settings_of(kind: Any) -> Iterable[tuple[str, str, str, str]]:
    """Yield name, type, default and text of each setting of a table."""
    texts = {name: one.text for name, one in options_of(LoaderSettings).items()} | _documented(kind)
    hints = get_type_hints(kind, include_extras=True)
    of_loader = options_of(LoaderSettings)
    for one in sorted(fields(kind), key=lambda each: each.name not in _documented(kind)):
        is_own = one.name in _documented(kind) or one.name not in of_loader
        default = one.default if is_own else of_loader[one.name].default
        if default is MISSING:
            default = one.default_factory() if one.default_factory is not MISSING else MISSING
        yield one.name, _type(hints[one.name]), _shown(default), _sentence(texts.get(one.name, ""))


def _documented(kind: Any) -> dict[str, str]:
    """Return the text below each field of a class, where it has one."""
    found = {}
    for base in kind.__mro__[:-1]:
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError):
            continue
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, [*body.body[1:], None]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                found[field.target.id] = inspect.cleandoc(after.value.value) if is_text else ""
    return found


def _type(hint: Any) -> str:
    """Return the values that a setting takes, in words."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = []
    for one in options:
        if get_origin(one) is Literal:
            words += [f'`"{choice}"`' for choice in get_args(one)]
        elif get_origin(one) is Annotated:
            words.append("tokens")
        elif get_origin(one) is tuple:
            words.append("list of texts")
        elif one is not NoneType:
            words.append(_NAMES.get(get_origin(one) or one, "table"))
    return ", ".join(dict.fromkeys(words))


def _shown(default: Any) -> str:
    if default is MISSING:
        return "required"
    if default is None or default == {}:
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def _table(rows: Iterable[tuple[str, ...]], first: str = "setting") -> str:
    lines = [f"| {first} | takes | default | |", "|---|---|---|---|"]
    for name, *others in rows:
        lines.append("| " + " | ".join([f"`{name}`", *(one.replace("|", "\\|") for one in others)]) + " |")
    return "\n".join(lines)


def cli_page() -> str:
    """Return the page of the command line, a section a verb."""
    parts = [_CLI]
    for command in app.registered_commands:
        verb, function = command.name, command.callback
        assert function is not None
        verb = verb or function.__name__
        options = list(_options(function))
        given = "".join(f" {name}" for name, *_ in options if not name.startswith("-"))
        about = _DIRTY.sub("", inspect.cleandoc(function.__doc__ or ""))
        table = _table(options, "option")
        parts.append(
            f"## `varlen {verb}`\n\n```text\nvarlen {verb} [OPTIONS]{given}\n```\n\n{about}\n\n{table}"
        )
    return "\n\n".join(parts) + "\n"


def _options(function: Callable[..., Any]) -> Iterable[tuple[str, str, str, str]]:
    """Yield name, what it takes, default and text of each argument and option of a verb."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint, declared = get_args(hints.get(name, parameter.annotation))[:2]
        is_option = isinstance(declared, typer.models.OptionInfo)
        long = f"--{name.replace('_', '-')}"
        # In `Annotated`, the first name stands where typer's own signature has a default.
        names = [one for one in (declared.default, *(declared.param_decls or ())) if isinstance(one, str)]
        shown = ", ".join(names or [long]) if is_option else declared.metavar or name.upper()
        is_flag = hint is bool and is_option
        takes = (
            "" if is_flag or not is_option else f"`{declared.metavar}`" if declared.metavar else _type(hint)
        )
        default = (
            "" if parameter.default in (False, None, inspect.Parameter.empty) else f"`{parameter.default}`"
        )
        text, _, said = _DIRTY.sub("", declared.help or "").partition("\\[default: ")
        yield shown, takes, default or said.rstrip().removesuffix("]"), _sentence(text)


_SETTINGS = f"""\
# Settings of `varlen train`

Every table and key of the configuration, for people who write one. `varlen train --init config.toml` writes a short
example; `--set TABLE.KEY=VALUE` overrides a key on the command line.

Settings that count tokens also take texts: {TOKENS}. An empty default means that the setting is left out."""

_CLI = """\
# Command line

For users of the command line: every verb and option of `varlen`, as `varlen VERB --help` prints them.

Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted, 143 ended by SIGTERM, 138 by SIGUSR1."""


if __name__ == "__main__":
    main()
