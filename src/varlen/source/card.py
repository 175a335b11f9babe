"""What the card of a data set on the Hugging Face hub says of its files: README.md, or .huggingface.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from varlen.errors import SourceError
from varlen.parsed import UnreadableError, parse_yaml
from varlen.source.splits import Groups

CARD, MORE = "README.md", ".huggingface.yaml"
MOST_BYTES = 16 << 20
_KEYS = (
    "configs",
    "dataset_info",
    "license",
    "language",
    "tags",
    "pretty_name",
    "task_categories",
    "size_categories",
)
"""Of which a card has some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One of the configurations ("subsets") of a data set."""

    name: str
    is_default: bool
    groups: Groups
    """Names of files by split."""


def is_card(content: bytes) -> bool:
    """Whether a README.md is the card of a data set: it begins with YAML that has a card's keys."""
    block = _yaml_of(content)
    return block is not None and any(re.search(rf"^{key}\s*:", block, re.MULTILINE) for key in _KEYS)


def configs_of(content: bytes, path: str, names: Sequence[str], *, is_yaml: bool = False) -> list[Config]:
    """Return the configurations that a card lists, of those whose files are there.

    Args:
        content: of the card.
        path: of the card, for messages.
        names: all files of data.
        is_yaml: it is YAML throughout.

    Raises:
        SourceError: the list can't be read.
    """
    block = content.decode(errors="replace") if is_yaml else _yaml_of(content)
    if block is None or not re.search(r"^configs\s*:", block, re.MULTILINE):
        return []
    configs = []
    for entry in _entries(block, path):
        name, files = entry.get("config_name"), entry.get("data_files")
        folder = entry.get("data_dir")
        prefix = f"{str(folder).strip('/')}/" if folder else ""
        if files is None:
            if not prefix:
                continue
            patterns = {"": [f"{prefix}**"]}
        else:
            patterns = {
                split: [prefix + one for one in some] for split, some in _patterns(files, path).items()
            }
        groups = {split: _matching(some, names) for split, some in patterns.items()}
        groups = {split: found for split, found in groups.items() if found}
        if groups:
            is_default = name == "default" or entry.get("default") is True
            configs.append(Config(name=str(name), is_default=is_default, groups=groups))
    return configs


def chosen_config(configs: Sequence[Config], folder: str) -> Config | None:
    """Return the configuration that is meant where none is named; None where the card lists none.

    Raises:
        SourceError: there are several, and none is the default.
    """
    if len(configs) < 2:
        return configs[0] if configs else None
    defaults = [config for config in configs if config.is_default]
    if len(defaults) == 1:
        return defaults[0]
    first = next(iter(next(iter(configs[0].groups.values()))))
    shown = ", ".join(config.name for config in configs[:8]) + (" and more" if len(configs) > 8 else "")
    raise SourceError(
        f"{folder} holds {len(configs):,} configurations of a data set ({shown}), by its {CARD}, and none is the "
        f"default; name the files of one by a glob or a folder, such as those beside {folder.rstrip('/')}/{first}, "
        "or read everything: --split all"
    )


def _yaml_of(content: bytes) -> str | None:
    """Return the YAML that a card begins with."""
    lines = content.removeprefix(b"\xef\xbb\xbf").decode(errors="replace").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return None
    stops = [number for number, line in enumerate(lines[1:], start=1) if line.rstrip() == "---"]
    return "\n".join(lines[1 : stops[0]]) if stops else None


def _entries(block: str, path: str) -> list[Mapping[str, Any]]:
    """Return the entries under `configs`; the rest of a card, which may be long, isn't parsed."""
    begun = re.search(r"^configs\s*:.*$", block, re.MULTILINE)
    if begun is None:
        return []
    after = block[begun.end() :]
    ended = re.search(r"^[^\s#-]", after, re.MULTILINE)
    text = block[begun.start() : begun.end()] + after[: ended.start() if ended else None]
    try:
        found = parse_yaml(text)
    except UnreadableError as error:
        raise SourceError(
            f"{path} lists configurations that can't be read ({error}); mend it, or name the files by a glob"
        ) from error
    entries = found.get("configs") if isinstance(found, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and "config_name" in entry for entry in entries
    ):
        raise SourceError(
            f"{path} lists configurations in a form that isn't `- config_name: ...`; mend it, or name the files by a "
            "glob"
        )
    return entries


def _patterns(files: Any, path: str) -> dict[str, list[str]]:
    """Return patterns of files by split: one or several, or such by split.

    Raises:
        SourceError: they have another form.
    """
    some = [files] if isinstance(files, str) else files
    if isinstance(some, list) and some and all(isinstance(one, str) for one in some):
        return {"train": some}
    found: dict[str, list[str]] = {}
    for one in some if isinstance(some, list) else [None]:
        split, paths = (one.get("split"), one.get("path")) if isinstance(one, dict) else (None, None)
        listed = [paths] if isinstance(paths, str) else paths
        if (
            not isinstance(split, str)
            or not isinstance(listed, list)
            or not all(isinstance(p, str) for p in listed)
        ):
            raise SourceError(
                f"{path} lists `data_files` that aren't paths, or splits with a path each; mend it, or name the "
                "files by a glob"
            )
        found.setdefault(split, []).extend(listed)
    return found


def _matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that some patterns match, as fsspec's globs do."""
    from fsspec.utils import glob_translate

    matched: dict[str, None] = {}
    for pattern in patterns:
        plain = pattern.removeprefix("./").strip("/")
        try:
            wanted = re.compile(glob_translate(plain))
        except (ValueError, re.error):
            continue
        matched |= dict.fromkeys(name for name in names if name == plain or wanted.match(name))
    return sorted(matched)
