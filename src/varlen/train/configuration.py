"""The configuration file of `varlen train`: read table by table, written with every setting, and an example of it."""

from __future__ import annotations

import difflib
import json
import os
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from varlen.arguments import as_tokens, in_words
from varlen.errors import SettingError, SourceError
from varlen.parsed import UnreadableError, parse_toml
from varlen.regular import read_regular_text
from varlen.train.settings import TrainSettings, shown
from varlen.types import Overlong

_Settings = TypeVar("_Settings")
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    Mapping: "a table",
}


def read_config(path: str | Path, changes: Sequence[str] = ()) -> TrainSettings:
    """Read a configuration file."""
    try:
        table = parse_toml(read_regular_text(path))
    except OSError as error:
        raise SourceError(
            f"{path} can't be read: {error.strerror or error}; varlen train --init {path} writes an example"
        ) from None
    except ValueError as error:
        raise SourceError(f"{path} is no TOML: {error}") from None
    for change in changes:
        _put(table, change)
    return as_settings(TrainSettings, table, "")


def as_config(given: TrainSettings | Mapping[str, Any] | str | Path) -> TrainSettings:
    """Return a configuration that is given as settings, as tables by name, or as a file."""
    if isinstance(given, TrainSettings):
        return given
    return as_settings(TrainSettings, given, "") if isinstance(given, Mapping) else read_config(given)


def as_settings(kind: type[_Settings], table: Mapping[str, Any], name: str) -> _Settings:
    """Return the settings that a table holds."""
    hints = get_type_hints(kind, include_extras=True)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise SettingError(
                f"{_dotted(name, key)} is no setting; the nearest is {_nearest(key, name, known)}"
            )
    given = {key: _as_value(hints[key], value, _dotted(name, key)) for key, value in table.items()}
    for key, option in known.items():
        if key not in given and option.default is MISSING and option.default_factory is MISSING:
            what = f"the table [{key}]" if is_dataclass(hints[key]) else _dotted(name, key)
            raise SettingError(f"the configuration lacks {what}, which has no default")
    return kind(**given)


def _dotted(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def flat(table: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by their dotted names; what users name themselves stays one value."""
    for key, value in table.items():
        dotted = _dotted(name, key)
        if isinstance(value, Mapping) and dotted not in ("data.columns", "data.chat_template_kwargs"):
            yield from flat(value, dotted)
        else:
            yield dotted, value


def _nearest(key: str, name: str, known: Iterable[str]) -> str:
    """Return the setting that was meant: one of another table that has this very name, or one that is alike."""
    hints = get_type_hints(TrainSettings)
    for table in (option.name for option in fields(TrainSettings)):
        kind = next(option for option in (hints[table], *get_args(hints[table])) if is_dataclass(option))
        if key in {option.name for option in fields(kind)}:
            return f"{table}.{key}"
    return _dotted(name, difflib.get_close_matches(key, list(known), n=1, cutoff=0.0)[0])


def _as_value(hint: Any, value: Any, key: str) -> Any:
    """Return a value as a field wants it."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    options = tuple(option for option in options if option is not NoneType)
    value = os.fspath(value) if isinstance(value, os.PathLike) else value  # of Python, not of TOML
    for option in options:
        if get_origin(option) is Annotated:
            return as_tokens(value, key)
        if is_dataclass(option):
            if isinstance(value, Mapping):
                return as_settings(option, value, key)  # type: ignore[arg-type]
        elif _fits(option, value):
            if get_origin(option) is tuple:
                return tuple(value)
            return float(value) if option is float else value
    raise SettingError(f"{key} must be {_in_words(options)}, got {shown(value)}{_meant(options, value)}")


def _fits(option: Any, value: Any) -> bool:
    """Return whether a value of TOML is of this type: a truth value is no number, and a whole number is one."""
    origin = get_origin(option)
    if origin is Literal:
        return value in get_args(option) and isinstance(value, str)
    if origin is tuple:
        item = get_args(option)[0]
        return isinstance(value, list | tuple) and all(_fits(item, each) for each in value)
    if origin is not None:
        return isinstance(value, Mapping)
    if option is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, option) and (option is bool or not isinstance(value, bool))


def _in_words(options: Sequence[Any]) -> str:
    words = []
    for option in options:
        if get_origin(option) is Literal:
            words.append(" or ".join(f'"{choice}"' for choice in get_args(option)))
        elif get_origin(option) is tuple:
            words.append(f"a list of {_items_of(get_args(option)[0])}")
        else:
            words.append(
                "a table" if is_dataclass(option) else _WORDS.get(get_origin(option) or option, "a table")
            )
    return " or ".join(words)


def _items_of(item: Any) -> str:
    if get_origin(item) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(item))
    return "texts" if item is str else "whole numbers"


def _meant(options: Sequence[Any], value: Any) -> str:
    """Return a hint at the choice nearest to a text that is none of them; "" if none is near."""
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f'; the nearest is "{near[0]}"' if near else ""


def _put(table: dict[str, Any], change: str) -> None:
    """Put one "table.key=value" over a table."""
    key, equals, text = change.partition("=")
    *path, last = key.strip().split(".")
    if not (equals and path and last):
        raise SettingError(f"--set takes TABLE.KEY=VALUE, such as run.steps=100; got {change!r}")
    for part in path:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise SettingError(f"--set {change}: {part} is no table")
        table = inner
    try:
        table[last] = parse_toml(f"value = {text.strip()}")["value"]
    except UnreadableError:
        table[last] = text.strip()


# Settings as a file: every setting of every table, those left out with their defaults.


def as_toml(settings: TrainSettings) -> str:
    """Return settings as a configuration file; a comment lists those whose default is empty or depends on others."""
    parts = []
    for table in fields(settings):
        held = getattr(settings, table.name)
        if held is not None:
            values = {one.name: getattr(held, one.name) for one in fields(held)}
            empty = [
                one.name
                for one in fields(held)
                if values[one.name] is None or values[one.name] == () == one.default
            ]
            parts += _table_text(table.name, values, empty)
    return "\n".join(parts)


def _table_text(name: str, values: Mapping[str, Any], empty: Collection[str] = ()) -> list[str]:
    """Return the lines of a table, those that are `empty` as a comment, then those of the tables within it."""
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    given = [f"{_key(key)} = {_toml_value(value)}" for key, value in plain.items() if key not in empty]
    words = textwrap.wrap(f"# at their defaults: {', '.join(empty)}", 118, subsequent_indent="#   ")
    lines = [f"[{name}]", *given, *(words if empty else ()), ""]
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            lines += _table_text(f"{name}.{_key(key)}", value)
    return lines


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_toml_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


# The configuration that `varlen train --init` writes: small, commented, and ready to run.

EXAMPLE = """\
# Trains a small Llama on packed documents:  varlen train CONFIG.toml
# On two processes:                          torchrun --standalone --nproc-per-node 2 -m varlen train CONFIG.toml
# Stopped, killed or finished: the same command goes on from the newest checkpoint, on as many processes as you like.
# Any setting can be put over:               varlen train CONFIG.toml --set run.steps=1000

[data]                       # the arguments of vl.PackedLoader
source = "store"             # of: varlen index 'data/*.jsonl' -o store
capacity = 1024              # tokens of a pack; documents are packed into it and kept apart
global_batch_size = 8        # packs of an optimizer step, over all processes
micro_batch_size = 2         # packs that a process computes at once; more are accumulated
overlong = "split"           # documents longer than a pack: OVERLONG

# [data.mixture.web]         # several sources by weight, in place of data.source; a table for each
# source = "web.jsonl"
# weight = 0.7

# [model]                    # of a saved model, in place of the two tables below
# path = "org/name"          # on the hub, or a folder

[model]                      # of random weights
type = "llama"               # transformers' name

[model.settings]             # transformers' settings of that type; vocab_size is the data's unless it stands here
hidden_size = 128
intermediate_size = 384
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 1024
tie_word_embeddings = true

[optimizer]                  # AdamW
learning_rate = 2e-3
weight_decay = 0.1           # of matrices; norms and biases don't decay
schedule = "cosine"          # or "linear", "constant", "wsd" (constant, and linear at the end)
warmup_steps = 10
min_learning_rate = 2e-4     # what the schedule falls to
max_grad_norm = 1.0          # 0 switches clipping off

[run]
output = "run"               # checkpoints, metrics.jsonl and the trained model
steps = 200                  # or: epochs = 1
checkpoint_every = 50        # steps; the last one and Ctrl-C save too
keep = 2                     # newest checkpoints that are kept
seed = 0
precision = "fp32"           # or "bf16"
parallel = "fsdp"            # how processes share the work: "ddp", "fsdp" or "none"

# [plan]                     # run steps in slices by plans made ahead; these are the defaults:
# slice_tokens = 8192        # of one process: rows that run at once; documents may be far longer
# pp = 1                     # of several: pipeline stages; the rest are data-parallel ranks
# method = "micropack"       # how steps are planned for them; see varlen plan
# recompute = "auto"         # "none", "selective" or "full"; "auto": as much as memory asks for
# hardware = "auto"          # "h100", ..., or a file of varlen plan --calibrate; "auto": what this machine measures

# [eval]                     # losses of documents that aren't trained
# every = 50                 # steps
# keep_best = true           # export the checkpoint of the lowest loss
# patience = 5               # early stopping: after so many evaluations without a lower loss
# [eval.sets]
# valid = "valid.jsonl"

# [adapter]                  # train a LoRA adapter of a saved model (needs peft)
# rank = 16
# export = "merged"          # or "adapter", as peft saves it

# [sample]                   # texts that the model writes in between
# chats = ["What is 2 + 2?"] # answered as a chat; prompts = [...]: continued as they stand

# [track]                    # beside metrics.jsonl
# to = ["tensorboard"]       # "wandb", "mlflow"

[log]
every = 10                   # steps between two lines where there is no terminal to draw on

[measure]
exposed_data = false         # after the last step, train the last 20 again from memory: what did data cost?
""".replace("OVERLONG", in_words(get_args(Overlong)))


def write_example(path: str | Path) -> None:
    """Write the example; it replaces nothing."""
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(EXAMPLE.replace("CONFIG.toml", os.fspath(path)))
    except FileExistsError:
        raise SettingError(f"{path} is there already; name another file") from None
    except OSError as error:
        raise SettingError(f"{path} can't be written: {error.strerror}") from None
