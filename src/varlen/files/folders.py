"""Which files of a folder are data: Hugging Face's saved data sets, caches and hub layouts, or any other folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from varlen.counts import many
from varlen.errors import SourceError
from varlen.files.paths import FORMATS, TEXT_SUFFIXES, Format, LeftOut, is_text_name, kind_of, suffix_of
from varlen.files.remote import Listed, is_hidden
from varlen.files.splits import ALL, Choice, Groups, among, canonical, choose, no_such_split
from varlen.files.written import MANIFEST
from varlen.parsed import UnreadableError, parse_yaml

# Prefixes of the names of text files that describe the data beside them.
_ABOUT_DATA = ("readme", "license", "licence", "changelog", "notice", "contributing")
# Written beside packed rows by Megatron-Bridge, and by `varlen pack` for it: counts and lengths.
_ABOUT_PACKS = re.compile(r"\d+_metadata\.jsonl")
_INFO, _INFOS, _STATE, _DICT = "dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"
_OF_DATA_SETS = {_INFO, _INFOS, _DICT, _STATE, MANIFEST, "_manifest.json"}
_OFTEN_ABOUT = {"config.json"}  # `datasets` never reads these; here they are data only where nothing else is
# Suffixes of parts of a file, as `split` and Spark name them.
_PIECE = re.compile(r"(\.\d+|\.part[\w-]*|\.chunk[\w-]*)?")
_CACHED = re.compile(r"(?:cache|indices)-[^/]*\.arrow")
_CACHE = "cached result of `datasets`"
_GONE = "link that leads nowhere"
_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """A local or remote folder: its files, and how to read and inspect them."""

    path: str  # as the user named it
    listing: Sequence[Listed]  # all files below, sorted by name
    read: Callable[[Listed], bytes]
    # Returns the row format of each file by its first bytes; None for other files.
    look: Callable[[Sequence[Listed]], list[Format | None]]
    gone: frozenset[str] = frozenset()  # paths of broken links

    def find(self, name: str) -> Listed | None:
        """Return the file of this name, or None."""
        return next((entry for entry in self.listing if entry.name == name), None)

    def where(self, name: str = "") -> str:
        """Return the path or URL of an entry, for messages."""
        return f"{self.path.rstrip('/')}/{name}" if name else self.path

    def below(self, name: str) -> Folder:
        """Return a subfolder."""
        listing = [
            replace(e, name=e.name[len(name) + 1 :]) for e in self.listing if e.name.startswith(f"{name}/")
        ]
        return Folder(path=self.where(name), listing=listing, read=self.read, look=self.look, gone=self.gone)


@dataclass(kw_only=True, slots=True)
class Chosen:
    """The files that are read, and data files that aren't."""

    entries: list[Listed]
    formats: Mapping[str, Format] = field(default_factory=dict)  # by path, for files whose names don't say it
    left_out: dict[str, list[Listed]] = field(default_factory=dict)  # by reason
    taken: tuple[str, ...] = ()  # the split chosen among several

    def leave_out(self, why: str, entries: Sequence[Listed]) -> None:
        """Record files that aren't read."""
        if entries:
            self.left_out.setdefault(why, []).extend(entries)

    def summary(self) -> tuple[LeftOut, ...]:
        """Return the files left out, counted by reason."""
        return tuple(
            LeftOut(
                why=why,
                num_files=len(entries),
                num_bytes=sum(max(entry.size, 0) for entry in entries),
                names=tuple(entry.name for entry in entries[:_SHOWN]),
            )
            for why, entries in self.left_out.items()
        )


def choose_files(folder: Folder, split: str | None, format_: Format | None) -> Chosen:
    """Choose the files of a folder that hold documents.

    Files about the data (README.md, LICENSE.txt, metadata of packed rows) aren't data where rows lie beside them;
    names that begin with a dot are left out.
    """
    chosen = _saved(folder, split)
    if chosen is None:
        chosen = _named(folder, split, format_)
    dangling = [entry for entry in chosen.entries if entry.path in folder.gone]
    if dangling:
        raise SourceError(dangling_links([entry.path for entry in dangling]))
    known = {entry.path for entries in chosen.left_out.values() for entry in entries}
    chosen.leave_out(
        _GONE,
        [
            e
            for e in folder.listing
            if e.path in folder.gone and e.path not in known and not is_hidden(e.name)
        ],
    )
    return chosen


def dangling_links(paths: Sequence[str]) -> str:
    """Return the message for broken links."""
    more = f" ({many(len(paths), 'such link')})" if len(paths) > 1 else ""
    return f"{paths[0]} is a link to something that isn't there{more}; put it back, or remove the link"


def _saved(folder: Folder, split: str | None) -> Chosen | None:
    """Choose the files of a data set saved by Hugging Face's `save_to_disk`; None for any other folder."""
    described_at = folder.find(_DICT)
    if described_at is not None:
        return _of_splits(folder, described(folder.read(described_at), described_at.path, "splits"), split)
    state = folder.find(_STATE)
    if state is None or folder.find(_INFO) is None:
        return None
    content = folder.read(state)
    refuse_indices(content, state.path)
    names = [entry.get("filename") for entry in described(content, state.path, "_data_files")]
    if not names:
        raise SourceError(f"{state.path} names no files, so the data set is empty")
    beside = {entry.name: entry for entry in folder.listing}
    files = [PurePosixPath(name).name if isinstance(name, str) else "" for name in names]
    missing = [name for name, file in zip(names, files) if file not in beside]
    if missing:
        raise SourceError(
            f"{state.path} names {missing[0]}, which isn't there ({len(missing):,} of {len(names):,} "
            "files are missing); copy the whole folder"
        )
    if split not in (None, ALL):
        raise SourceError(no_such_split(str(split), {}, folder.path))
    chosen = Chosen(entries=[beside[file] for file in files])
    rest = [entry for entry in folder.listing if entry.name not in files]
    chosen.leave_out(_CACHE, [entry for entry in rest if _CACHED.fullmatch(entry.name)])
    return chosen


def _of_splits(folder: Folder, splits: Sequence[object], split: str | None) -> Chosen:
    """Choose a split of a saved data set with several."""
    names = [str(name) for name in splits]
    if not names:
        raise SourceError(f"{folder.where(_DICT)} lists no splits, so the data set is empty; save it again")
    if split == ALL:
        wanted = names
    elif split is not None:
        wanted = [name for name in (split, canonical(split)) if name in names][:1]
        if not wanted:
            raise SourceError(
                no_such_split(
                    split, {n: [e.name for e in folder.below(n).listing] for n in names}, folder.path
                )
            )
    else:
        wanted = names[:1] if len(names) == 1 else ["train"]
        if wanted[0] not in names:
            raise SourceError(
                f"{folder.path} holds several splits ({', '.join(names)}); name one, such as --split {names[0]}"
            )
    chosen = Chosen(entries=[], taken=tuple(wanted) if len(wanted) < len(names) else ())
    for name in wanted:
        below = folder.below(name)
        if not below.listing:
            raise SourceError(f"{folder.where(_DICT)} names the split {name}, which isn't there; copy it too")
        part = choose_files(below, None, None)
        prefix = f"{name}/" if len(wanted) > 1 else ""
        chosen.entries += [replace(e, name=prefix + e.name) for e in part.entries]
        for why, entries in part.left_out.items():
            chosen.leave_out(why, entries)
    for name in names:
        if name not in wanted:
            chosen.leave_out(
                f"split {name}",
                [e for e in folder.listing if e.name.startswith(f"{name}/") and _is_rows(e.name)],
            )
    return chosen


def _named(folder: Folder, split: str | None, format_: Format | None) -> Chosen:
    """Choose files by their names, and by what a data set's card lists."""
    shown = [entry for entry in folder.listing if not is_hidden(entry.name)]
    beside, caches = _without_caches(folder, shown)
    card = folder.find(CARD)
    content = folder.read(card) if card is not None and 0 <= card.size <= MOST_BYTES else b""
    is_hub = is_card(content) or folder.find(_INFOS) is not None
    data, formats = _of_data(folder, beside, format_, is_hub=is_hub)
    if not data:
        raise SourceError(_no_data(folder, beside, caches))
    names = [entry.name for entry in data]
    every = [entry.name for entry in shown]
    choice = _by_card(folder, content, card, names, every, split)
    if choice is None:
        choice = _by_cache(folder, names, split) or choose(names, every, split, folder.path)
    chosen = Chosen(entries=[entry for entry in data if entry.name in choice.taken], formats=formats)
    for entry in data:
        if entry.name in choice.left_out:
            chosen.leave_out(choice.left_out[entry.name], [entry])
    chosen.leave_out(_CACHE, caches)
    chosen.taken = () if choice.split is None else (choice.split,)
    if not chosen.entries:
        raise SourceError(_no_data(folder, beside, caches))
    return chosen


def _by_card(
    folder: Folder,
    content: bytes,
    card: Listed | None,
    names: Sequence[str],
    every: Sequence[str],
    split: str | None,
) -> Choice | None:
    """Choose files as the data set's card lists them; None where it lists none."""
    if split == ALL:
        return None
    more = folder.find(CARD_YAML)
    configs = configs_of(folder.read(more), more.path, names, is_yaml=True) if more is not None else []
    if not configs and card is not None:
        configs = configs_of(content, card.path, names)
    config = chosen_config(configs, folder.path)
    if config is None:
        return None
    rest = f"not in configuration {config.name}"
    if list(config.groups) != [""]:
        return among(config.groups, names, split, folder.path, rest)
    inside = choose(config.groups[""], every, split, folder.path)
    others = {name: rest for name in names if name not in inside.taken and name not in inside.left_out}
    return Choice(taken=inside.taken, left_out={**inside.left_out, **others}, split=inside.split)


def _cache_folders(entries: Sequence[Listed]) -> list[str]:
    """Return the folders in which `datasets` caches a data set."""
    described_in = {_parent(entry.name) for entry in entries if _last(entry.name) == _INFO}
    saved = {_parent(entry.name) for entry in entries if _last(entry.name) == _STATE}
    with_rows = {_parent(entry.name) for entry in entries if entry.name.endswith(".arrow")}
    return sorted((described_in - saved) & with_rows)


def _without_caches(folder: Folder, entries: Sequence[Listed]) -> tuple[list[Listed], list[Listed]]:
    """Separate the cached results of `datasets` (of `.map` and the like) from the other files."""
    cached = _cache_folders(entries)
    if len(cached) > 1:
        raise SourceError(
            f"{folder.path} holds {len(cached):,} data sets, or versions of one, that `datasets` keeps, such as "
            f"{folder.where(cached[0])} and {folder.where(cached[1])}; name one of them"
        )
    by_name = {entry.name: entry for entry in entries}
    saved = [
        _parent(name)
        for name in by_name
        if _last(name) == _STATE and f"{name.removesuffix(_STATE)}{_INFO}" in by_name
    ]
    for name in saved:
        state = by_name[f"{name}/{_STATE}" if name else _STATE]
        refuse_indices(folder.read(state), state.path)
    within = {*cached, *saved}
    caches = [e for e in entries if _parent(e.name) in within and _CACHED.fullmatch(_last(e.name))]
    cache_paths = {entry.path for entry in caches}
    return [entry for entry in entries if entry.path not in cache_paths], caches


def _by_cache(folder: Folder, names: Sequence[str], split: str | None) -> Choice | None:
    """Choose the split of a data set cached by `datasets`, in files NAME-SPLIT.arrow; None for other folders."""
    cached = _cache_folders(folder.listing)
    if len(cached) != 1:
        return None
    described_at = folder.find(f"{cached[0]}/{_INFO}" if cached[0] else _INFO)
    splits = splits_described(folder.read(described_at)) if described_at is not None else []
    groups: dict[str, list[str]] = {}
    for name in names:
        stem = re.sub(r"(-\d{5}-of-\d{5})?\.arrow$", "", _last(name))
        of = [s for s in splits if stem == s or stem.endswith(f"-{s}")]
        if of and _parent(name) == cached[0]:
            groups.setdefault(max(of, key=len), []).append(name)
    return among(groups, names, split, folder.path, "no split") if groups else None


def _of_data(
    folder: Folder, entries: Sequence[Listed], format_: Format | None, *, is_hub: bool
) -> tuple[list[Listed], dict[str, Format]]:
    """Return the files that hold documents, in order, and the formats of those whose names don't say them."""
    entries = [entry for entry in entries if _last(entry.name) not in _OF_DATA_SETS]
    if format_ is not None:
        named = [entry for entry in entries if not _is_documentation(entry)]
        return [e for e in named if not _ABOUT_PACKS.fullmatch(_last(e.name))] or list(entries), {}
    rows = [entry for entry in entries if _is_rows(entry.name)]
    rows = [e for e in rows if not _ABOUT_PACKS.fullmatch(_last(e.name))] or rows
    rows = [e for e in rows if _last(e.name) not in _OFTEN_ABOUT] or rows
    formats = _looked_into(folder, [e for e in entries if _is_piece(e)])
    texts = [e for e in entries if kind_of(e.name)[0] == "text" and suffix_of(e.name) in TEXT_SUFFIXES]
    if rows or formats:
        texts = [
            e for e in texts if not _is_documentation(e) and not (is_hub and suffix_of(e.name) != ".txt")
        ]
    elif is_hub:
        texts = [e for e in texts if e.name != CARD]
    if not rows and not texts and not formats:
        formats = _looked_into(folder, [e for e in entries if not (_is_rows(e.name) or is_text_name(e.name))])
    taken = {entry.path for entry in (*rows, *texts)} | formats.keys()
    return [entry for entry in entries if entry.path in taken], formats


def _looked_into(folder: Folder, entries: Sequence[Listed]) -> dict[str, Format]:
    """Return the formats of those files that hold rows, by their content."""
    there = [entry for entry in entries if entry.path not in folder.gone and entry.size != 0]
    return {e.path: format_ for e, format_ in zip(there, folder.look(there)) if format_ is not None}


def _no_data(folder: Folder, entries: Sequence[Listed], caches: Sequence[Listed]) -> str:
    known = ", ".join(sorted(FORMATS.keys() | TEXT_SUFFIXES))
    others = [entry for entry in entries if _last(entry.name) not in _OF_DATA_SETS] or caches
    holds = f"; it holds {many(len(others), 'other file')}, such as {others[0].name}" if others else ""
    return (
        f"{folder.path} is a folder without any {known} file, plain or as .gz or .zst, and no other file in it has "
        f"rows{holds}; name other text files by a glob, such as '{folder.where('**/*.tex')}'"
    )


def _is_rows(name: str) -> bool:
    return kind_of(name)[0] != "text"


def _is_documentation(entry: Listed) -> bool:
    """Whether a file describes the data beside it, by its name."""
    return _last(entry.name).lower().startswith(_ABOUT_DATA)


def _is_piece(entry: Listed) -> bool:
    """Whether a name is that of a part of a file: without a suffix, or with a number for one."""
    is_named = not _is_documentation(entry) and not _last(entry.name).startswith("_")
    return is_named and not _is_rows(entry.name) and _PIECE.fullmatch(suffix_of(entry.name)) is not None


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


# The card of a data set on the Hugging Face hub (README.md, or .huggingface.yaml), as far as it lists files.

CARD, CARD_YAML = "README.md", ".huggingface.yaml"
MOST_BYTES = 16 << 20
# Keys of which every card has some.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One of the configurations ("subsets") of a data set."""

    name: str
    is_default: bool
    groups: Groups  # file names by split


def is_card(content: bytes) -> bool:
    """Whether a README.md is a data set's card: it begins with YAML that has a card's keys."""
    block = _yaml_of(content)
    return block is not None and any(re.search(rf"^{key}\s*:", block, re.MULTILINE) for key in _KEYS)


def configs_of(content: bytes, path: str, names: Sequence[str], *, is_yaml: bool = False) -> list[Config]:
    """Return the configurations that a card lists and whose files exist."""
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
                split: [prefix + pattern for pattern in listed]
                for split, listed in _patterns(files, path).items()
            }
        groups = {split: _matching(listed, names) for split, listed in patterns.items()}
        groups = {split: matched for split, matched in groups.items() if matched}
        if groups:
            is_default = name == "default" or entry.get("default") is True
            configs.append(Config(name=str(name), is_default=is_default, groups=groups))
    return configs


def chosen_config(configs: Sequence[Config], folder: str) -> Config | None:
    """Return the default configuration; None where the card lists none."""
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
    """Return the entries under `configs`, without parsing the rest of the card, which may be long."""
    begun = re.search(r"^configs\s*:.*$", block, re.MULTILINE)
    if begun is None:
        return []
    after = block[begun.end() :]
    ended = re.search(r"^[^\s#-]", after, re.MULTILINE)
    text = block[begun.start() : begun.end()] + after[: ended.start() if ended else None]
    try:
        document = parse_yaml(text)
    except UnreadableError as error:
        raise SourceError(
            f"{path} lists configurations that can't be read ({error}); mend it, or name the files by a glob"
        ) from error
    entries = document.get("configs") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and "config_name" in entry for entry in entries
    ):
        raise SourceError(
            f"{path} lists configurations in a form that isn't `- config_name: ...`; mend it, or name the files by a "
            "glob"
        )
    return entries


def _patterns(files: Any, path: str) -> dict[str, list[str]]:
    """Return patterns of files by split, from one pattern, a list, or a list by split."""
    entries = [files] if isinstance(files, str) else files
    if isinstance(entries, list) and entries and all(isinstance(entry, str) for entry in entries):
        return {"train": entries}
    patterns: dict[str, list[str]] = {}
    for entry in entries if isinstance(entries, list) else [None]:
        split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else (None, None)
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
        patterns.setdefault(split, []).extend(listed)
    return patterns


def _matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that match any of the patterns, by fsspec's glob rules."""
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


# Data sets that Hugging Face's `datasets` saved to disk: how their metadata describes them.

_INDICES = ("_indices_data_files", "_indices_files")  # used by old versions of `datasets` for selected rows


def refuse_indices(content: bytes, path: str) -> None:
    """Raise if only some rows of the data set are selected, or in another order."""
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} doesn't describe a saved data set: it is not valid JSON") from error
    if isinstance(state, dict) and any(state.get(key) for key in _INDICES):
        raise SourceError(
            f"{path} names files of indices, which say which rows are meant and in which order, and "
            "aren't read here; load it with datasets, call flatten_indices() and save it again"
        )


def described(content: bytes, path: str, key: str) -> list[Any]:
    """Return a list from a data set's metadata."""
    try:
        value = json.loads(content)[key]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(f"{path} doesn't describe a saved data set: no list `{key}`") from error
    if not isinstance(value, list) or (key == "_data_files" and not all(isinstance(v, dict) for v in value)):
        raise SourceError(f"{path} doesn't describe a saved data set: `{key}` is not a list of files")
    return value


def splits_described(content: bytes) -> list[str]:
    """Return the names of the splits that a dataset_info.json lists; [] where it lists none."""
    try:
        splits = json.loads(content)["splits"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return [str(name) for name in splits] if isinstance(splits, dict) else []
