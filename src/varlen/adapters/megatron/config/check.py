"""check_config: what would go wrong with a configuration of Megatron, and the rules about the files that it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from varlen.adapters.megatron.config import rules_data, rules_model
from varlen.adapters.megatron.config.reading import Reading, as_written, read
from varlen.adapters.megatron.config.report import ConfigFinding, ConfigReport, Outcome, Rules, found
from varlen.errors import described
from varlen.parsed import parse_json
from varlen.regular import read_regular_text

RULES: Rules = (*rules_data.RULES, *rules_model.RULES)
"""Every rule over settings alone, in the order in which findings are reported."""
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
        dialect: `"0.4"`, `"0.5"`, `"0.6"` or a release such as `"0.5.0"`. None: inferred from the names in use;
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
    rules = (*RULES, *FILE_RULES) if files else RULES
    findings = sorted(_findings(reading, rules), key=lambda finding: finding.level)
    return ConfigReport(
        findings=tuple(replace(finding, changes=_spelled(reading, finding.changes)) for finding in findings),
        dialect=reading.dialect,
        dialect_words=reading.dialect_words,
        packing=reading.packing,
        origin=reading.origin,
        changes=_spelled(reading, _mended(reading, rules)),
    )


def _findings(reading: Reading, rules: Rules) -> list[ConfigFinding]:
    return [finding for rule in rules for finding in rule(reading)]


def _mended(reading: Reading, rules: Rules) -> dict[str, Any]:
    """Return values that together mend every error that settings can mend, first errors first."""
    changes: dict[str, Any] = {}
    for _ in range(MOST_CHANGES):
        first = next((f for f in _findings(reading, rules) if f.level == "error" and f.changes), None)
        if first is None:
            break
        for name, value in first.changes.items():
            changes.pop(name, None)  # reinsert at the end: an earlier change may have made the table it is in
            changes[name] = value
        reading = reading.changed(first.changes)
    return changes


def _spelled(reading: Reading, changes: Mapping[str, Any]) -> dict[str, Any]:
    return {reading.spell(name): value for name, value in changes.items()}


# Rules about files: packed rows that are there, in a form that the release reads, and metadata that is theirs.

PACKED = ("packed_train_data_path", "packed_val_data_path")
NEEDED = ("pack_size", "dataset_max_seqlen", "max_samples_per_bin", "min_packed_seqlen")
"""What the reader of fixed boundaries takes from each entry of a metadata file."""


def packed_rows_are_there(reading: Reading) -> Iterator[ConfigFinding]:
    """Packed files that are named exist, with a suffix that the release expects; URLs aren't checked."""
    is_first = reading.release is not None and reading.is_before(0, 4)
    for name in PACKED:
        setting = f"{reading.specs}.{name}"
        if not reading.is_offline or not reading.has(setting) or "://" in reading[setting]:
            continue
        path = str(reading[setting])
        if path.lower().endswith(".npy"):
            if not Path(path).is_file():
                yield _missing(reading, setting, "a file that is there")
            elif not is_first:
                limit = "Parquet from release 0.4 on"
                what = ".npy files are pickles, read whole into memory on every rank, and deprecated"
                fix = f"convert it: varlen.adapters.megatron.convert({path!r}, 'NAME.idx.parquet')"
                yield found(reading, "npy_file", setting, limit, what, "advice", fix=fix)
        elif is_first:
            yield _missing(reading, setting, "a .npy file before release 0.4", "an AssertionError")
        elif not _rows_at(path):
            pair = ", or a prefix of .bin and .idx" if reading.is_new else ""
            yield _missing(reading, setting, f"a Parquet file, folder or pattern{pair} that is there")


def metadata_belong_to_rows(reading: Reading) -> Iterator[ConfigFinding]:
    """A named metadata file is a JSON array of what was packed, to this size."""
    setting = f"{reading.specs}.packed_metadata_path"
    fix = f"name the file written with the packs of {as_written(reading.spec('packed_sequence_size'))}"
    for limit, what, is_error in _wrong_metadata(reading, setting) if reading.is_offline else ():
        outcome: Outcome = "stops" if is_error else "advice"
        yield found(reading, "metadata", setting, limit, what, outcome, fix=fix)


def _wrong_metadata(reading: Reading, setting: str) -> Iterator[tuple[str, str, bool]]:
    """Yield what must hold of the metadata, what happens otherwise, and whether the run stops."""
    is_static = bool(reading.spec("pad_cu_seqlens"))
    is_packed = reading.has(f"{reading.specs}.packed_train_data_path")
    path = reading[setting]
    if path is None:
        if is_static and is_packed:
            what = "its default is the folder of Megatron-Bridge's own packs; without it the data set doesn't open"
            yield "given with pad_cu_seqlens", what, False
        return
    if "://" in path:
        return
    if not Path(path).is_file():
        if is_packed:
            yield "a file that is there", "the data set doesn't open without it", True
        return
    try:
        entries: Any = parse_json(read_regular_text(path))
    except (ValueError, OSError) as error:
        yield "one JSON array", f"it isn't JSON: {described(error)}", True
        return
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        yield "one JSON array with an entry for each run", f"it holds {str(entries)[:60]}", True
        return
    missing = ", ".join(name for name in NEEDED if any(name not in entry for entry in entries))
    if missing:
        what = f"an entry lacks {missing}, from which a fixed number of boundaries is computed"
        yield f"entries with {', '.join(NEEDED)}", what, is_static
    size = reading.spec("packed_sequence_size")
    others = {entry["pack_size"] for entry in entries if isinstance(entry.get("pack_size"), int)} - {size}
    if others:
        what = f"it holds packs of {' and '.join(map(str, sorted(others)))}; readers take the largest of all entries"
        yield f"of packs of packed_sequence_size = {size}", what, is_static


def _missing(reading: Reading, setting: str, limit: str, how: str = "a FileNotFoundError") -> ConfigFinding:
    path = Path(reading[setting])
    where = "" if path.parent.is_dir() else f", and its folder {path.parent} doesn't exist either"
    seen = "this is something else" if path.exists() else f"there is nothing at this path{where}"
    fix = "pack the data with `varlen pack --format megatron`, or leave the path out to have it packed at the start"
    what = f"{seen}; Megatron-Bridge stops with {how}"
    return found(reading, "packed_file", setting, limit, what, fix=fix)


def _rows_at(path: str) -> bool:
    """Return whether a path leads to packed rows: a file, a folder with Parquet files, a pattern, a prefix."""
    location = Path(path)
    if location.is_dir():
        return any(inner.suffix.lower() in (".parquet", ".pq") for inner in location.iterdir())
    if location.is_file():
        return location.suffix.lower() in (".parquet", ".pq", ".bin", ".idx")
    if any(sign in path for sign in "*?["):
        return any(Path(location.anchor or ".").glob(str(location.relative_to(location.anchor))))
    return Path(f"{path}.bin").is_file() and Path(f"{path}.idx").is_file()


FILE_RULES = (packed_rows_are_there, metadata_belong_to_rows)
