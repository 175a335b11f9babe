"""Reading: a configuration's settings of packing, one value each, whichever form and dialect it is written in."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from varlen.adapters.megatron.config.settings import (
    ARGUMENTS,
    CONTAINERS,
    IN_BATCH_NEW,
    IN_BATCH_OLD,
    KINDS,
    OFFLINE_FLAG,
    OFFLINE_NEW,
    OFFLINE_OLD,
    REAL_NEIGHBOURS,
    RENAMED,
    SECTIONS,
    SETTINGS,
)
from varlen.adapters.megatron.rows import NEWEST, Dialect, as_dialect
from varlen.arguments import as_count
from varlen.counts import many
from varlen.errors import MissingExtraError, SettingError, SourceError
from varlen.parsed import UnreadableError, parse_yaml
from varlen.regular import read_regular_text

PRETRAINING = (
    "GPTDatasetConfig",
    "MockGPTDatasetConfig",
    "GPTFIMDatasetConfig",
    "BlendedMegatronDatasetConfig",
)
COLLATED = ("DirectHFSFTDatasetConfig", "EnergonDatasetConfig", "MockVLMSFTDatasetConfig")
"""Data sets whose collator pads to the multiple that context parallelism needs."""
FINE_TUNING = ("FinetuningDatasetConfig", "HFDatasetConfig", "GPTSFTDatasetConfig", *COLLATED)
"""Data sets whose targets may all be masked on a rank; NVIDIA checks them so."""
CONVERSATIONS = (
    "HFDatasetConversationProvider",
    "PreloadedVLMConversationProvider",
    "MockVLMConversationProvider",
    "EnergonProvider",
)
"""The same before release 0.6, where NVIDIA doesn't check them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A configuration as the rules see it; `reading["model.seq_length"]` is a value, or the release's default."""

    values: Mapping[str, Any]
    """Settings that were given, by their names in `SETTINGS`; None where null was given."""
    spelled: Mapping[str, str]
    """How the configuration itself writes a name, where otherwise."""
    dialect: Dialect
    is_certain: bool
    """Whether the dialect was named, or inferred from names that only it has."""
    release: tuple[int, ...] | None = None
    """The release, where one was named to the patch: (0, 5, 1)."""
    is_arguments: bool = False
    """Whether these are Megatron-LM's own arguments."""
    classes: Mapping[str, tuple[str, ...]]
    """Names of the classes of `model`, `dataset` and `peft`."""
    held: frozenset[str] = frozenset()
    """Containers that are there, empty ones too."""
    mistyped: tuple[tuple[str, str], ...] = ()
    """Unknown names, each with the nearest known one."""
    world_size: int | None = None
    origin: str = "the configuration"

    def __getitem__(self, name: str) -> Any:
        """Return the value of a setting, the release's default where it isn't given."""
        value = self.values.get(name)
        return SETTINGS[name].default if value is None else value

    def has(self, name: str) -> bool:
        """Return whether a setting is given, and not null."""
        return self.values.get(name) is not None

    def given(self, value: Any, name: str, other: str) -> dict[str, Any]:
        """Return a value for a setting, and for another that must be the same where it is given."""
        return {name: value} | ({other: value} if self.has(other) else {})

    def spell(self, name: str) -> str:
        """Return a setting's name as the configuration writes it, or would."""
        if self.is_arguments and name not in self.spelled:
            return next((plain for plain, names in ARGUMENTS.items() if name in names), name)
        return self.spelled.get(name, name)

    def shown(self, name: str) -> str:
        """Return a setting and its value in words, and whether that is the release's default."""
        if name not in SETTINGS:
            return self.spell(name)
        if self.has(name):
            return f"{self.spell(name)} = {as_written(self[name])}"
        default = SETTINGS[name].default
        return f"{self.spell(name)} {'is not given' if default is None else f'= {as_written(default)}, the default'}"

    def changed(self, changes: Mapping[str, Any]) -> Reading:
        """Return what would be read with other values; None takes a setting, or all that it holds, away."""
        values, held = dict(self.values), set(self.held)
        for name, value in changes.items():
            if value is None:
                values = {other: v for other, v in values.items() if not f"{other}.".startswith(f"{name}.")}
                held.discard(name)
            elif isinstance(value, Mapping):
                values |= {f"{name}.{last}": inner for last, inner in value.items()}
                held.add(name)
            else:
                values[name] = value
                held |= {name.rpartition(".")[0]} - {""}
        return replace(self, values=values, held=frozenset(held))

    def is_before(self, *release: int) -> bool:
        """Return whether the release is, or may be, one before another."""
        if self.release is not None:
            return self.release < release
        return (0, int(self.dialect[2:]) - (not self.is_certain and self.dialect == "0.5")) < release

    @property
    def is_new(self) -> bool:
        """Whether the names and the checks are those of release 0.6 and later."""
        return self.dialect == "0.6"

    @property
    def dialect_words(self) -> str:
        """The dialect, and what is known of it."""
        if self.is_arguments:
            return "Megatron-LM's arguments"
        if self.release is not None:
            return f"Megatron-Bridge {'.'.join(map(str, self.release))}"
        if not self.is_certain and self.dialect == "0.5":
            return "Megatron-Bridge 0.4 or 0.5"
        return f"Megatron-Bridge {self.dialect}{'' if self.is_certain else ', as nothing says which'}"

    @property
    def cp(self) -> int:
        """Context-parallel ranks."""
        return int(self["model.context_parallel_size"])

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return int(self["model.tensor_model_parallel_size"])

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return int(self["model.pipeline_model_parallel_size"])

    @property
    def dp(self) -> int | None:
        """Data-parallel ranks; None where the number of processes isn't known, or doesn't divide."""
        group = self.tp * self.pp * self.cp
        return self.world_size // group if self.world_size and self.world_size % group == 0 else None

    @property
    def specs(self) -> str:
        """Where this dialect has the specs of offline packing."""
        return OFFLINE_NEW if self.is_new else OFFLINE_OLD

    def spec(self, name: str) -> Any:
        """Return one of the specs of offline packing."""
        return self[f"{self.specs}.{name}"]

    @property
    def in_batch_name(self) -> str:
        """What this dialect calls packing within a micro-batch."""
        return IN_BATCH_NEW if self.is_new else IN_BATCH_OLD

    @property
    def is_offline(self) -> bool:
        """Whether rows are packed before training, or are meant to be."""
        if self.is_new:
            return bool(self[OFFLINE_FLAG]) or OFFLINE_NEW in self.held
        return OFFLINE_OLD in self.held and self.spec("packed_sequence_size") > 0 and not self.is_pretraining

    @property
    def is_packed_here(self) -> bool:
        """Whether the run itself packs rows offline, as no file of packed rows is named."""
        return self.is_offline and not self.has(f"{self.specs}.packed_train_data_path")

    @property
    def is_in_batch(self) -> bool:
        """Whether the rows of a micro-batch are packed into one as it is made."""
        return bool(self[self.in_batch_name])

    @property
    def is_energon(self) -> bool:
        """Whether Energon packs as it reads."""
        return self.has("dataset.packing_buffer_size")

    @property
    def packing(self) -> str:
        """How this run packs, in words; empty if it doesn't."""
        ways = [
            (self.is_offline, f"offline packing to {self.spec('packed_sequence_size'):,}"),
            (self.is_in_batch, "in-batch packing"),
            (self.is_energon, "Energon's packing"),
            (bool(self["dataset.sft"]), "SFT packing"),
        ]
        return " and ".join(words for is_so, words in ways if is_so)

    @property
    def width(self) -> str:
        """Where this data set has the switch for rows of one width."""
        name = "dataset.pad_to_max_length"
        return name if self[name] else "dataset.dataset_kwargs.pad_to_max_length"

    def is_of(self, names: tuple[str, ...]) -> bool:
        """Return whether the data set is of one of these classes."""
        return bool(set(names) & set(self.classes.get("dataset", ())))

    @property
    def is_pretraining(self) -> bool:
        """Whether the data set is one of pre-training, where every token is a target."""
        return self.is_of(PRETRAINING)

    @property
    def is_fine_tuning(self) -> bool:
        """Whether a rank may meet a part of a row that has no target at all."""
        is_tuned = self.is_of((*FINE_TUNING, *CONVERSATIONS)) or bool(self.packing)
        return is_tuned and not self.is_pretraining

    @property
    def alignment(self) -> int:
        """The multiple that every document's slot, and a row, must have: `lcm(2·CP, CP·TP)`, for evaluation too."""
        sizes = {self.cp, self["dist.eval_context_parallel_size"] or self.cp}
        tp = self.tp if self["model.sequence_parallel"] and self.tp > 1 else 0
        return math.lcm(*(math.lcm(2 * size if size > 1 else 1, size * tp or 1) for size in sizes))

    @property
    def alignment_words(self) -> str:
        """How that multiple comes about."""
        parts = [f"context parallelism over {self.cp}"] if self.cp > 1 else []
        evaluation = self["dist.eval_context_parallel_size"]
        parts += [f"over {evaluation} in evaluation"] if evaluation not in (None, self.cp) else []
        is_scattered = self["model.sequence_parallel"] and self.tp > 1
        parts += [f"sequence parallelism over {self.tp}"] if is_scattered else []
        return " and ".join(parts) or "no parallelism along the sequence"


def as_written(value: Any) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(as_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {as_written(inner)}' for name, inner in value.items())}}}"
    return str(value)


def multiples(number: int, of: int) -> tuple[int, int]:
    """Return the nearest multiples of a number: the one below, at least once it, and the one above.

    >>> multiples(510, 4), multiples(3, 8), multiples(16, 8)
    ((508, 512), (8, 8), (16, 16))
    """
    below = max(number // of, 1) * of
    return below, -(-number // of) * of


def nearest(number: int, of: int) -> str | None:
    """Return both nearest multiples in words; None where there is one."""
    below, above = multiples(number, of)
    return f"{below} or {above}" if below != above else None


# From a configuration in any form to a Reading: names found, values of their kinds, the dialect.

NEAR = 0.88
"""How alike two names must be, as difflib counts it, for one to be taken for the other mistyped."""
_OLD_NAMES, _NEW_NAMES = {OFFLINE_OLD, IN_BATCH_OLD}, {OFFLINE_NEW, OFFLINE_FLAG, IN_BATCH_NEW}
_NEW_CLASSES = {"GPTSFTDatasetConfig", *COLLATED}
_OLD_CLASSES = {"HFDatasetConfig", *CONVERSATIONS}


@dataclass(slots=True)
class _Found:
    """What is gathered while a configuration is gone through."""

    tree: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    """Every name of `SETTINGS` and `CONTAINERS` that stands there, with a value or without."""
    mistyped: list[tuple[str, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def read(cfg: Any, *, dialect: str | None = None, world_size: int | None = None) -> Reading:
    """Read a configuration."""
    given = None if dialect is None else as_dialect(dialect)
    if world_size is not None:
        world_size = as_count(world_size, "world_size")
    tree, origin = open_tree(cfg)
    found = _Found(tree)
    is_arguments = not any(section in tree for section in SECTIONS)
    if is_arguments:
        _go_through_arguments(found)
    else:
        _go_through(found, "", tree)
    if not found.named:
        seen = ", ".join(list(tree)[:4]) or "nothing"
        raise SettingError(
            f"{origin} holds no settings of Megatron: it has {seen}; a configuration of Megatron-Bridge has `model`, "
            "`train` and `dataset`, Megatron-LM's arguments have `micro_batch_size` and others"
        )
    if found.wrong:
        more = f" ({len(found.wrong)} settings have values of a wrong kind)" if len(found.wrong) > 1 else ""
        raise SettingError(f"{origin}: {'; '.join(found.wrong)}{more}")
    # Names of 0.6 decide, even beside an older name: that one was set by hand, and a rule reports it as unused.
    known = given or ("0.6" if _has_any(found, _NEW_NAMES, _NEW_CLASSES) else None)
    return Reading(
        values=found.values,
        spelled=found.spelled,
        dialect=known or ("0.5" if _has_any(found, _OLD_NAMES, _OLD_CLASSES) else NEWEST),
        is_certain=known is not None,
        release=_release(dialect),
        is_arguments=is_arguments,
        classes=found.classes,
        held=frozenset(found.held),
        mistyped=tuple(found.mistyped),
        world_size=world_size or _counted(tree),
        origin=origin,
    )


def _go_through(found: _Found, path: str, level: Mapping[str, Any]) -> None:
    known = CONTAINERS.get(path, path)
    near = [name for name in (*SETTINGS, *CONTAINERS) if name.rpartition(".")[0] == known]
    for last, value in level.items():
        written = f"{path}.{last}" if path else last
        name = RENAMED.get(full := f"{known}.{last}" if known else last, full)
        value = resolved(value, found.tree)
        if written in CONTAINERS:
            _go_into(found, written, value)
        elif name in SETTINGS:
            _keep(found, name, written, value)
        elif path and last not in REAL_NEIGHBOURS and not last.startswith("_"):
            _suspect(found, written, last, [other.rpartition(".")[2] for other in near])


def _go_into(found: _Found, written: str, value: Any) -> None:
    name = CONTAINERS[written]
    found.named.add(written)
    wanted = [setting.rpartition(".")[2] for setting in SETTINGS if setting.rpartition(".")[0] == name]
    wanted += [inner.rpartition(".")[2] for inner in CONTAINERS if inner.rpartition(".")[0] == written]
    inside = entries(value, wanted)
    if inside is None:
        if value is not None and value != MISSING:
            found.wrong.append(f"{written} must be a mapping or an object of settings; got {value!r:.60}")
        return
    found.held.add(name)
    if written in ("model", "dataset", "peft", "dataset.preprocessing"):
        found.classes[written] = class_names(value)
    _go_through(found, written, inside)


def _go_through_arguments(found: _Found) -> None:
    for name, value in found.tree.items():
        plain = name.removeprefix("--").replace("-", "_")
        if plain in ARGUMENTS:
            for setting in ARGUMENTS[plain]:
                _keep(found, setting, name, resolved(value, found.tree))
        elif plain not in REAL_NEIGHBOURS:
            _suspect(found, name, plain, list(ARGUMENTS))
    if not found.named:
        found.mistyped.clear()


def _keep(found: _Found, name: str, written: str, value: Any) -> None:
    found.named.add(name)
    if name in found.values and written in RENAMED:
        return
    if written != name:
        found.spelled[name] = written
    if value is None or (isinstance(value, str) and value == MISSING):
        found.values.setdefault(name, None)
        return
    expected, as_value = KINDS[SETTINGS[name].kind]
    try:
        found.values[name] = as_value(value)
    except (TypeError, ValueError):
        message = f"{written} must be {expected}; got {value!r:.60}"
        if message not in found.wrong:
            found.wrong.append(message)


def _suspect(found: _Found, written: str, last: str, near: list[str]) -> None:
    alike = get_close_matches(last, near, n=1, cutoff=NEAR)
    if alike:
        found.mistyped.append((written, written[: len(written) - len(last)] + alike[0]))


def _has_any(found: _Found, names: set[str], classes: set[str]) -> bool:
    """Return whether the configuration has names or classes of some releases, a setting that is off among them."""
    return bool(found.named & names or classes & set(found.classes.get("dataset", ())))


def _release(dialect: str | None) -> tuple[int, ...] | None:
    """Return a release that was named to the patch, or that no dialect is named after."""
    parts = ("" if dialect is None else str(dialect)).removeprefix("v").split(".")
    numbers = tuple(int(part) for part in parts if part.isdecimal())
    return numbers if len(numbers) > 2 or numbers > (0, 6) or () < numbers < (0, 4) else None


def _counted(tree: Mapping[str, Any]) -> int | None:
    count = tree.get("world_size")
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


# A configuration in whichever form it comes: YAML, a mapping, objects with attributes, or argparse's namespace.

MISSING = "???"  # what OmegaConf and Hydra write where a value must still be given
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_LONGEST_CHAIN = 16
"""References that are followed one after the other; more are taken to go round."""
_VALUES = (str, bytes, int, float, complex, bool, list, tuple, set, frozenset, Path, type(None), type)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
_PLAIN = ("dict", "object", "Namespace", "SimpleNamespace", "DictConfig", "OrderedDict", "mappingproxy")
"""Classes whose names don't show what they hold."""


def open_tree(cfg: Any) -> tuple[dict[str, Any], str]:
    """Return a configuration's first level by name, and words for where it came from."""
    origin = "the configuration"
    if isinstance(cfg, Path) or (isinstance(cfg, str) and "\n" not in cfg):
        origin = str(cfg)
        cfg = _parsed(_text_of(Path(cfg)), origin)
    elif isinstance(cfg, str):
        origin = "the YAML text"
        cfg = _parsed(cfg, origin)
    found = entries(cfg, ())
    if found is None:
        raise SettingError(
            f"a configuration is a path, YAML, a mapping or an object with attributes; got {type(cfg).__name__}"
        )
    return _nested(found), origin


def entries(value: Any, wanted: Iterable[str]) -> dict[str, Any] | None:
    """Return what a mapping or an object holds, by name; None for plain values and functions."""
    if isinstance(value, Mapping):
        return {str(name): _item(value, name) for name in value}
    if isinstance(value, (*_VALUES, *_FUNCTIONS)) or hasattr(value, "__array__"):
        return None
    names = [field.name for field in fields(value)] if is_dataclass(value) else []
    names += [name for name in getattr(value, "__dict__", {}) if not name.startswith("_")]
    names += [name for name in wanted if hasattr(type(value), name)]
    return {name: getattr(value, name) for name in dict.fromkeys(names) if hasattr(value, name)}


def class_names(value: Any) -> tuple[str, ...]:
    """Return the names of the classes that a part of a configuration is of, its own first; `_target_` of YAML."""
    if isinstance(value, Mapping):
        target = value.get("_target_") if "_target_" in value else None
        return (target.rsplit(".", 1)[-1],) if isinstance(target, str) else ()
    return tuple(kind.__name__ for kind in type(value).__mro__ if kind.__name__ not in _PLAIN)


def resolved(value: Any, tree: Mapping[str, Any]) -> Any:
    """Return what a value stands for where it names another setting, as in `${model.seq_length}`."""
    here: Any = value
    for _ in range(_LONGEST_CHAIN):
        match = _REFERENCE.fullmatch(here) if isinstance(here, str) else None
        if match is None:
            return here
        here = tree
        for name in match[1].split("."):
            held = entries(here, (name,))
            if held is None or name not in held:
                return value
            here = held[name]
    return value


def _item(mapping: Mapping[Any, Any], name: Any) -> Any:
    """Return a mapping's value; OmegaConf raises where a value must still be given."""
    try:
        return mapping[name]
    except Exception as error:
        if type(error).__name__ == "MissingMandatoryValue":
            return MISSING
        raise


def _nested(found: dict[str, Any]) -> dict[str, Any]:
    """Return the same with names such as `model.seq_length` put where they belong."""
    tree = {name: value for name, value in found.items() if "." not in name}
    for name in found.keys() - tree.keys():
        *parts, last = name.split(".")
        here = tree
        for part in parts:
            held = entries(here.get(part), ()) or {}
            here[part] = dict(held)
            here = here[part]
        here[last] = found[name]
    return tree


def _text_of(path: Path) -> str:
    if path.expanduser().is_dir():
        raise SourceError(f"{path} is a folder; name the YAML file in it")
    try:
        return read_regular_text(path.expanduser())
    except FileNotFoundError:
        raise SourceError(f"{path}: there is no such file; name the YAML file of a configuration") from None
    except UnicodeDecodeError:
        raise SourceError(f"{path} is no text; name the YAML file of a training configuration") from None
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror or error}") from None


def _parsed(text: str, origin: str) -> dict[str, Any]:
    """Return the mapping that YAML holds; nothing that it names is imported or run."""
    try:
        found = parse_yaml(text)
    except ModuleNotFoundError:
        raise MissingExtraError("PyYAML is not installed; `pip install pyyaml` installs it") from None
    except UnreadableError as error:
        where = "" if error.line is None else f", line {error.line}"
        raise SourceError(f"{origin}{where}: not YAML that can be read safely: {error}") from None
    if found is None:
        raise SourceError(f"{origin} is empty; it must hold the settings of a training")
    if not isinstance(found, dict):
        held = many(len(found), "entry", "entries") if isinstance(found, list) else repr(found)[:60]
        raise SourceError(
            f"{origin} holds a {type(found).__name__} ({held}), not a mapping of settings such as `model:`"
        )
    return found
