"""ConfigReport: what would go wrong with a configuration, one finding each, with the values that work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

from varlen.adapters.megatron.config.reading import Reading, as_written, entries
from varlen.adapters.megatron.config.settings import SETTINGS
from varlen.counts import many
from varlen.errors import SettingError

Kind: TypeAlias = (
    Literal["packing_switches", "packing_flag", "packing_specs", "packing_names", "packing_ignored"]
    | Literal["micro_batch_packed", "micro_batch_in_batch", "eval_micro_batch", "global_batch", "world_size"]
    | Literal["pack_size", "pack_below_seq_length", "seq_length", "seq_lengths_differ", "pad_seq_to_mult"]
    | Literal["max_single_sequence_length", "dataloader_type", "unknown_setting"]
    | Literal["per_token_loss", "average_in_collective", "loss_weighting"]
    | Literal[
        "cp_sizes", "hybrid_context_parallel", "energon", "mtp", "p_tuning", "model_family", "moe_padding"
    ]
    | Literal["cuda_graph_impl", "static_width", "static_boundaries", "graph_router", "graph_in_batch"]
    | Literal["middle_stages", "boundary_terminators", "parquet_padding", "packing_seed", "tokenizer_workers"]
    | Literal["overlong_samples", "eos_padding", "packed_file", "npy_file", "metadata"]
)
"""What a finding is about; stable, so that a program may tell them apart."""

Level = Literal["error", "warning"]
Outcome = Literal["stops", "silently wrong", "advice"]
"""stops: NVIDIA's own code ends with an error, at once or at the first step; silently wrong: it would train on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFinding:
    """One thing that would go wrong."""

    kind: Kind
    level: Level
    outcome: Outcome
    setting: str
    """Its name, as the configuration writes it."""
    seen: str
    """The setting and its value, and whether that is the release's default."""
    limit: str
    """What must hold."""
    what: str
    """What happens otherwise."""
    fix: str
    """The way out, with values."""
    changes: Mapping[str, Any]
    """Values that mend this one finding, by setting; empty where no setting alone does."""

    def __str__(self) -> str:
        """Return four lines: level, kind and effect; what was seen; what must hold; the fix."""
        how = "" if self.outcome == "advice" else f" ({self.outcome})"
        return (
            f"{self.level} {self.kind}{how}: {self.what}\n"
            f"  seen:  {self.seen}\n  must:  {self.limit}\n  fix:   {self.fix}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigReport:
    """All findings of one configuration, errors first; iterates over them."""

    findings: tuple[ConfigFinding, ...]
    dialect: str
    """`"0.4"`, `"0.5"` or `"0.6"`: the one that the rules were taken from."""
    dialect_words: str
    """The same in words, and whether another may be meant."""
    packing: str
    """How the run packs; empty if it doesn't."""
    origin: str
    """Which file it was."""
    changes: Mapping[str, Any]
    """Values that together mend every error that settings can mend; null takes a setting away."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; there may be warnings."""
        return not self.errors

    @property
    def errors(self) -> tuple[ConfigFinding, ...]:
        """The findings with which the run would stop or be wrong."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    @property
    def warnings(self) -> tuple[ConfigFinding, ...]:
        """The other findings: what may not be meant, or costs something."""
        return tuple(finding for finding in self.findings if finding.level == "warning")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of all findings, in their order."""
        return tuple(finding.kind for finding in self.findings)

    @property
    def overrides(self) -> tuple[str, ...]:
        """`changes` as arguments of a Megatron-Bridge recipe: `train.micro_batch_size=1`."""
        return tuple(f"{name}={as_written(value)}" for name, value in self.changes.items())

    @property
    def head(self) -> str:
        """How many findings there are, and of what."""
        errors, warnings = len(self.errors), len(self.warnings)
        counted = f"{many(errors, 'error')}, {many(warnings, 'warning')}" if self.findings else "nothing"
        return f"{counted} found in {self.origin}; {self.dialect_words}, {self.packing or 'no packing'}"

    def __iter__(self) -> Iterator[ConfigFinding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        """Return the headline, four lines for each finding, and the overrides that together fix the errors."""
        parts = [self.head, *map(str, self.findings)]
        if self.changes:
            parts += ["all errors that settings can mend are gone with:", *("  " + o for o in self.overrides)]
        return "\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return everything as what JSON can hold."""
        return {
            "ok": self.ok,
            "dialect": self.dialect,
            "packing": self.packing,
            "origin": self.origin,
            "findings": [
                {
                    **{name: getattr(finding, name) for name in finding.__dataclass_fields__},
                    "changes": _plain(finding.changes),
                }
                for finding in self.findings
            ],
            "changes": _plain(self.changes),
        }

    def raise_for_errors(self) -> None:
        """Do nothing where there is no error.

        Raises:
            SettingError: there is one; says the whole report.
        """
        if not self.ok:
            raise SettingError(str(self))

    def fixed(self, cfg: Any) -> Any:
        """Return a deep copy of a configuration with `changes` made in it.

        Args:
            cfg: a mapping or an object with attributes, the one that was checked; it must take new names.
        """
        copy = deepcopy(cfg)
        for name, value in self.changes.items():
            _put(copy, name, value)
        return copy


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _put(cfg: Any, name: str, value: Any) -> None:
    """Set a value deep in a configuration; parts of it that aren't there are made."""
    if isinstance(cfg, Mapping) and name in cfg:
        cfg[name] = value  # type: ignore[index]
        return
    *parts, last = name.split(".")
    for part in parts:
        held = entries(cfg, (part,)) or {}
        inner = held.get(part)
        if inner is None:
            inner = {} if isinstance(cfg, Mapping) or part == "dataset_kwargs" else SimpleNamespace()
            _set(cfg, part, inner)
            inner = (entries(cfg, (part,)) or {})[part]  # OmegaConf keeps a copy
        cfg = inner
    if isinstance(value, Mapping) and not isinstance(cfg, Mapping):
        # A new object has every setting, with the releases' defaults.
        inside = {
            full.rpartition(".")[2]: SETTINGS[full].default
            for full in SETTINGS
            if full.startswith(f"{name}.")
        }
        value = SimpleNamespace(**{**inside, **value})
    _set(cfg, last, _plain(value) if isinstance(value, Mapping) else value)


def _set(cfg: Any, name: str, value: Any) -> None:
    if isinstance(cfg, Mapping):
        cfg[name] = value  # type: ignore[index]
    else:
        setattr(cfg, name, value)


# How a rule words what it found, in the configuration's own spelling.

Text: TypeAlias = str | Callable[[Reading], str | None] | None
"""A sentence, in which `{r.…}` stands for what is read; or a function of the reading that returns one."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the tables: a setting, when it is wrong, what it must be, and what happens otherwise."""

    kind: Kind
    setting: Text
    is_broken: Callable[[Reading], object]
    limit: Text
    what: Text
    outcome: Outcome | Callable[[Reading], Outcome] = "stops"
    to: Any = ...
    """The value that works, or a function of the reading; `...` where it takes others (`changes`), or none works."""
    changes: Callable[[Reading], Mapping[str, Any]] | None = None
    fix: Text = None
    seen: Text = None

    def __call__(self, reading: Reading) -> Iterator[ConfigFinding]:
        """Yield the finding of a reading that breaks the rule."""
        if not self.is_broken(reading):
            return
        setting = _text(reading, self.setting) or ""
        changes: Mapping[str, Any] = {}
        if self.changes is not None:
            changes = self.changes(reading)
        elif self.to is not ...:
            changes = {setting: self.to(reading) if callable(self.to) else self.to}
        outcome = self.outcome(reading) if callable(self.outcome) else self.outcome
        limit, what = _text(reading, self.limit) or "", _text(reading, self.what) or ""
        fix, seen = _text(reading, self.fix), _text(reading, self.seen)
        yield found(reading, self.kind, setting, limit, what, outcome, changes, fix=fix, seen=seen)


Rules: TypeAlias = tuple[Callable[[Reading], Iterator[ConfigFinding]], ...]
"""Each goes over one reading, and yields what breaks it."""


def _text(reading: Reading, text: Text) -> str | None:
    if text is None or callable(text):
        return text and text(reading)
    return text.format(r=reading)


def found(
    reading: Reading,
    kind: Kind,
    setting: str,
    limit: str,
    what: str,
    outcome: Outcome = "stops",
    changes: Mapping[str, Any] | None = None,
    *,
    fix: str | None = None,
    seen: str | None = None,
) -> ConfigFinding:
    """Return a finding; an error unless it is advice."""
    mended = dict(changes or {})
    written = ", ".join(f"{reading.spell(name)} = {as_written(value)}" for name, value in mended.items())
    return ConfigFinding(
        kind=kind,
        level="warning" if outcome == "advice" else "error",
        outcome=outcome,
        setting=reading.spell(setting),
        seen=seen or reading.shown(setting),
        limit=limit,
        what=what,
        fix="; ".join(part for part in (fix, written) if part),
        changes=mended,
    )
