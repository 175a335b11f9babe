"""The split of a file in a folder, by the naming rules of Hugging Face's `datasets`.

File names are relative to the folder that the user named. `datasets` applies the first rule that matches any file to
the whole folder. Here a rule applies to the folder in which it finds both `train` and another split (its root), so
that several data sets may lie side by side. All rules are case-sensitive.

============  ====================================================  =============================================
rule          a file belongs to a split                             root
============  ====================================================  =============================================
shards        `data/NAME-00000-of-00002*.*`, any NAME               the folder of `data`
folder        a parent folder's name has a word of the split        the folder of that folder
file          its own name has a word of the split, and more        the folder of the file
both          by folder, or else by file                            as above
============  ====================================================  =============================================

=============  =====================================
split          words
=============  =====================================
train          train, training
validation     validation, valid, dev, val
test           test, testing, eval, evaluation
=============  =====================================

A word is delimited by one of `- . _ space 0-9`, by the beginning of a name, or by the end of a folder's name. Within
a root, the first rule that finds `train` and another split applies; if several roots contain a file, the outermost
one. Files without a split below such a root are left out, as `datasets` does; all other files are read.

Only files of rows and `.txt` indicate splits. Source code has similar names (`test_x.py`, `test/`), so a folder that
holds code is no split, and beside code a `.txt` counts only if its name consists of a split's word and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from varlen.counts import many
from varlen.errors import SourceError
from varlen.files.paths import is_code, kind_of, suffix_of

WORDS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF_WORD = {word: split for split, words in WORDS.items() for word in words}
_PARTS = re.compile(r"[-._ 0-9]")
_SHARD = re.compile(r"(?:(?P<root>.*)/)?data/(?P<split>[^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_NOTHING_ELSE = re.compile(rf"(?:{'|'.join(_SPLIT_OF_WORD)})(?:[-._ 0-9]|of|part|shard)*\.txt(?:\.\w+)?")
_SHOWN = 6

ALL = "all"  # instead of a split's name: everything in a folder
Rule = Literal["shards", "folder", "file", "both"]
_RULES: tuple[Rule, ...] = ("shards", "folder", "file", "both")
Groups = dict[str, list[str]]  # file names by split, in listing order


@dataclass(kw_only=True, slots=True)
class Root:
    """A folder below which files are named by splits."""

    by_rule: dict[Rule, Groups] = field(default_factory=dict)

    def add(self, rule: Rule, split: str, name: str) -> None:
        """Assign a file to a split."""
        names = self.by_rule.setdefault(rule, {}).setdefault(split, [])
        if not names or names[-1] != name:
            names.append(name)

    def groups(self, wanted: str | None) -> Groups | None:
        """Return the files of each split by the first rule that gives the wanted one; None where none does."""
        for rule in _RULES:
            by_split = self.by_rule.get(rule, {})
            if wanted in by_split if wanted is not None else ("train" in by_split and len(by_split) > 1):
                return dict(by_split)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The files of a folder that are read, and why others aren't."""

    taken: frozenset[str]
    left_out: Mapping[str, str]  # reason by name: "split test", "no split"
    split: str | None = None  # the one chosen, where there were others


def canonical(split: str) -> str:
    """Return the split that a word stands for: "validation" for "dev"; other names stand for themselves."""
    return _SPLIT_OF_WORD.get(split, split)


def of_word(name: str, *, is_folder: bool) -> list[str]:
    """Return the splits whose words occur in the name of a file or folder, delimited."""
    parts = _PARTS.split(name)
    if not is_folder:
        parts = parts[:-1]  # the part after the last delimiter has none after it
    return [split for split, words in WORDS.items() if any(word in parts for word in words)]


def choose(names: Sequence[str], every: Iterable[str], wanted: str | None, folder: str) -> Choice:
    """Choose the files of a split among those of a folder."""
    if wanted == ALL or not names:
        return Choice(taken=frozenset(names), left_out={})
    split = None if wanted is None else canonical(wanted)
    roots = _roots(names, every)
    governed: list[tuple[str, Groups]] = []
    for root in sorted(roots, key=lambda root: (root.count("/") + bool(root), root)):
        groups = roots[root].groups(split)
        if groups is None and split != wanted:
            groups = roots[root].groups(wanted)
        if groups is not None:
            governed.append((root, groups))
        elif split is None and not any(_is_below(root, outer) for outer, _ in governed):
            _refuse_without_train(roots[root].by_rule.get("shards", {}), folder)
    if not governed and split is not None:
        rules = [groups for root in roots.values() for groups in root.by_rule.values()]
        known = {split_name: files for groups in rules for split_name, files in groups.items()}
        raise SourceError(no_such_split(wanted or "", known, folder))
    return _chosen(names, governed, wanted)


def among(groups: Groups, names: Sequence[str], wanted: str | None, folder: str, rest: str) -> Choice:
    """Choose the files of a split where metadata lists each split's files."""
    if wanted == ALL:
        return Choice(taken=frozenset(names), left_out={})
    if wanted is not None:
        known = [name for name in (wanted, canonical(wanted)) if name in groups]
        if not known:
            raise SourceError(no_such_split(wanted, groups, folder))
        taken = {known[0]: groups[known[0]]}
    elif "train" in groups:
        taken = {"train": groups["train"]}
    else:
        _refuse_without_train(groups, folder)
        taken = groups
    own = frozenset(name for files in taken.values() for name in files)
    others = {name: f"split {split}" for split, files in groups.items() for name in files if name not in own}
    without = {name: rest for name in names if name not in own and name not in others}
    split = next(iter(taken)) if len(taken) == 1 and len(groups) > 1 else None
    return Choice(taken=own, left_out={**others, **without}, split=split)


def no_such_split(wanted: str, groups: Mapping[str, Sequence[str]], folder: str) -> str:
    """Return the error message for a split that doesn't exist, with the names of those that do."""
    if not groups:
        return (
            f"{folder} names no splits, so there is no split {wanted} to take; leave --split (split=) out, or name "
            "the files"
        )
    return f"{folder} has no split {wanted}; it has {_listed(groups)}"


def _refuse_without_train(groups: Mapping[str, Sequence[str]], folder: str) -> None:
    """Raise if no split is called `train`, though one is for training and another isn't."""
    families = {split for name in groups for split in of_word(name, is_folder=True)}
    if "train" in groups or not ("train" in families and len(families) > 1):
        return
    first = next(name for name in groups if "train" in of_word(name, is_folder=True))
    raise SourceError(
        f"{folder} holds {many(len(groups), 'split')}, and none is called train: {_listed(groups)}; name one: "
        f'--split {first} (split="{first}"), or --split all'
    )


def _listed(groups: Mapping[str, Sequence[str]]) -> str:
    shown = [f"{name} ({many(len(files), 'file')})" for name, files in groups.items()]
    more = f" and {len(shown) - _SHOWN:,} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _roots(names: Sequence[str], every: Iterable[str]) -> dict[str, Root]:
    """Return the folders below which files are named by splits."""
    code = [name for name in every if is_code(name)]
    with_code = {folder for name in code for folder in _folders(name)}
    roots: dict[str, Root] = {}
    for name in names:
        format_, _ = kind_of(name)
        if format_ == "text" and suffix_of(name) != ".txt":
            continue
        shard = _SHARD.fullmatch(name)
        if shard is not None:
            roots.setdefault(shard["root"] or "", Root()).add("shards", shard["split"], name)
        by_folder: set[str] = set()
        for folder in _folders(name):
            parent, _, last = folder.rpartition("/")
            for split in of_word(last, is_folder=True) if folder not in with_code else ():
                by_folder.add(parent)
                for rule in ("folder", "both"):
                    roots.setdefault(parent, Root()).add(rule, split, name)
        parent, _, last = name.rpartition("/")
        if format_ == "text" and code and not _NOTHING_ELSE.fullmatch(last):
            continue
        for split in of_word(last, is_folder=False):
            roots.setdefault(parent, Root()).add("file", split, name)
            if parent not in by_folder:
                roots[parent].add("both", split, name)
    return roots


def _folders(name: str) -> list[str]:
    """Return the folders that contain a file, outermost first, without the one that the user named."""
    parts = name.split("/")[:-1]
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]


def _is_below(folder: str, outer: str) -> bool:
    return not outer or folder == outer or folder.startswith(f"{outer}/")


def _chosen(names: Sequence[str], governed: Sequence[tuple[str, Groups]], wanted: str | None) -> Choice:
    """Choose among files below folders with several splits."""
    keys = {"train"} if wanted is None else {wanted, canonical(wanted)}
    splits_of: list[dict[str, list[str]]] = []
    for _, groups in governed:
        of: dict[str, list[str]] = {}
        for split, files in groups.items():
            for name in files:
                of.setdefault(name, []).append(split)
        splits_of.append(of)
    taken: set[str] = set()
    left_out: dict[str, str] = {}
    for name in names:
        # The outermost root with a rule for a file decides.
        splits = next((of[name] for of in splits_of if name in of), None)
        if splits is not None and not keys.isdisjoint(splits):
            taken.add(name)
        elif splits is not None:
            left_out[name] = f"split {splits[0]}"
        elif wanted is None and not any(_is_below(name, root) for root, _ in governed):
            taken.add(name)
        else:
            left_out[name] = "no split"
    spellings = (wanted, canonical(wanted or "train"))
    chosen = next((s for s in spellings if any(s in groups for _, groups in governed)), None)
    return Choice(taken=frozenset(taken), left_out=left_out, split=chosen if left_out else None)
