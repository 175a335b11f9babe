"""check_config: what would go wrong with a configuration of Megatron, before a job is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from varlen.adapters.megatron.config import rules_data, rules_model, rules_release
from varlen.adapters.megatron.config.reading import Reading, read
from varlen.adapters.megatron.config.report import ConfigFinding, ConfigReport, Rule

RULES: tuple[Rule, ...] = (
    *rules_release.SWITCH_RULES,
    *rules_data.BATCH_RULES,
    *rules_data.LENGTH_RULES,
    *rules_model.LOSS_RULES,
    *rules_model.GRAPH_RULES,
    *rules_release.ENERGON_RULES,
    *rules_model.FAMILY_RULES,
    *rules_release.RELEASE_RULES,
)
"""Every rule over settings alone, in the order in which findings are told and mended."""
MOST_CHANGES = 100
"""Errors that are mended one after the other; one change may bring another error to light."""


def check_config(
    cfg: Any, *, dialect: str | None = None, world_size: int | None = None, files: bool = True
) -> ConfigReport:
    """Find what would go wrong with packed training under a configuration, before a job is started.

    Holds the rules of Megatron-Bridge's own validation (releases 0.3 to 0.6 and main of August 2026), what its data
    sets and steps assert later, and where a release trains on and is wrong. Needs neither Megatron nor torch.

    Args:
        cfg: Megatron-Bridge's ConfigContainer or any object with such attributes, a nested mapping, OmegaConf, the
            path of a YAML file, YAML text (a string with a line break), or Megatron-LM's namespace of arguments.
            What isn't given has the release's default.
        dialect: `"0.4"`, `"0.5"`, `"0.6"` or a release such as `"0.5.0"`. None: told by the names that are there;
            0.4 and 0.5 have the same ones, and what only 0.4 does wrong is then a warning.
        world_size: processes of the job, from which the data-parallel size follows. None: not known.
        files: whether to look at the files that the configuration names.

    Returns:
        The findings, errors first; `report.ok` if none is an error; `report.changes`, the values that mend them
        together; `report.fixed(cfg)`, a copy with these values.

    Raises:
        SettingError: no settings of Megatron, values of a wrong kind (all are named), or an unknown dialect.
        SourceError: a file that is missing, empty, or no YAML mapping.
        MissingExtraError: YAML is given, and PyYAML isn't installed.

    Cost: some milliseconds; a few reads of small files.

    >>> report = check_config({"model": {"seq_length": 510, "context_parallel_size": 2}, "dataset": {}})
    >>> report.ok, report.kinds, report.changes
    (False, ('seq_length',), {'model.seq_length': 512})
    >>> print(report.errors[0].fix)
    508 or 512; model.seq_length = 512
    """
    reading = read(cfg, dialect=dialect, world_size=world_size)
    rules = (*RULES, *rules_data.FILE_RULES) if files else RULES
    findings = sorted(_findings(reading, rules), key=lambda finding: finding.level)
    return ConfigReport(
        findings=tuple(replace(finding, changes=_spelled(reading, finding.changes)) for finding in findings),
        dialect=reading.dialect,
        dialect_words=reading.dialect_words,
        packing=reading.packing,
        origin=reading.origin,
        changes=_spelled(reading, _mended(reading, rules)),
    )


def _findings(reading: Reading, rules: tuple[Rule, ...]) -> list[ConfigFinding]:
    return [finding for rule in rules for finding in rule(reading)]


def _mended(reading: Reading, rules: tuple[Rule, ...]) -> dict[str, Any]:
    """Return values that together mend every error that settings can mend, first errors first."""
    changes: dict[str, Any] = {}
    for _ in range(MOST_CHANGES):
        first = next(
            (found for found in _findings(reading, rules) if found.level == "error" and found.changes), None
        )
        if first is None:
            break
        for name, value in first.changes.items():
            changes.pop(name, None)  # later changes come last, as they may be of what an earlier one made
            changes[name] = value
        reading = reading.changed(first.changes)
    return changes


def _spelled(reading: Reading, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes by the names that the configuration itself has."""
    return {reading.spell(name): value for name, value in changes.items()}
