"""Open data of any supported kind that consists of tokens with random access."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from varlen.documents.memory import spooled
from varlen.errors import SourceError
from varlen.files.paths import Data, File, Format, LeftOut, entries_of, is_url, unread
from varlen.files.splits import choose
from varlen.files.written import read_manifest
from varlen.regular import open_regular
from varlen.store.arrow import ArrowFile, map_arrow
from varlen.store.bin_idx import MAGIC, MegatronFile
from varlen.store.growing import PATIENCE_S, PartialStore, is_begun
from varlen.store.store import open_store
from varlen.store.token_files import FileTokens
from varlen.store.tokens import TokenDocuments
from varlen.text.loss_masks import Mask, as_wide
from varlen.types import Int32Array, IntArray

_SUFFIXES = (".bin", ".idx")


def open_tokens(
    data: Data,
    *,
    patience_s: float = PATIENCE_S,
    check_tokens: bool = True,
    cache: Path | None = None,
    split: str | None = None,
    format: Format | None = None,
) -> TokenDocuments | None:
    """Open documents that can be read at random without tokenizing or copying; None for other data.

    These are a token store, even while it is written; Megatron's pairs of `.bin` and `.idx`, named by either file, by
    the common prefix, by a glob or by a folder; and uncompressed Arrow files of token ids, one document per row, as
    Hugging Face's `save_to_disk` writes them.
    """
    data = spooled(data, cache=cache)
    entries = entries_of(data)
    if len(entries) == 1 and not isinstance(entries[0], File) and not is_url(entries[0]):
        folder = Path(entries[0]).expanduser()
        manifest = read_manifest(folder)
        if manifest is not None and manifest.get("kind") == "tokens":
            return open_store(folder, check_tokens=check_tokens, manifest=manifest)
        if manifest is None and is_begun(folder):
            return PartialStore(folder, patience_s=patience_s, check_tokens=check_tokens)
    pairs = [_pairs(entry) for entry in entries]
    if all(pairs):
        choices = [_of_split(entry, prefixes, split) for entry, prefixes in zip(entries, pairs)]
        named = {
            str(prefix.absolute()): (prefix, name) for prefixes, _ in choices for prefix, name in prefixes
        }
        return FileTokens(
            [MegatronFile(prefix, name, check_tokens=check_tokens) for prefix, name in named.values()],
            unread="; ".join(sentence for _, sentence in choices if sentence) or None,
        )
    if any(pairs):
        with_, without = (
            next(e for e, prefixes in zip(entries, pairs) if bool(prefixes) == is_) for is_ in (True, False)
        )
        raise SourceError(f"{with_} holds Megatron's .bin and .idx, and {without} doesn't; read them apart")
    return _mapped(data, check_tokens, split, format)


def is_token_store(entry: str | Path | File) -> bool:
    """Whether an entry of data is a token store, even one that is being written."""
    if isinstance(entry, File) or is_url(entry):
        return False
    folder = Path(entry).expanduser()
    if folder.is_file():
        return False
    manifest = read_manifest(folder)
    return is_begun(folder) if manifest is None else manifest.get("kind") == "tokens"


def is_megatron(entry: str | Path | File) -> bool:
    """Whether an entry of data names complete Megatron pairs of `.bin` and `.idx`."""
    try:
        return bool(_pairs(entry))
    except SourceError:
        return False


def _mapped(data: Data, check_tokens: bool, split: str | None, format: Format | None) -> FileTokens | None:
    """Open Arrow files, if all of them support random access."""
    from varlen.files.finding import Naming, find  # workers don't need it

    resolved = find(data, Naming(split=split, format=format))
    files: list[ArrowFile] = []
    for file in resolved.files:
        mapped = map_arrow(file)
        if mapped is None:
            return None
        files.append(mapped)
    return FileTokens(files, check_tokens=check_tokens, unread=unread(resolved.left_out, resolved.taken))


def _of_split(
    entry: str | Path, pairs: list[tuple[Path, str]], split: str | None
) -> tuple[list[tuple[Path, str]], str | None]:
    """Choose the pairs of a split in a folder; also return a sentence on the others."""
    if not Path(entry).expanduser().is_dir():
        return pairs, None
    names = {f"{pair[1]}.arrow": pair for pair in pairs}  # `choose` reads splits off names of row files only
    choice = choose(list(names), names, split, str(entry))
    reasons: dict[str, list[tuple[Path, str]]] = {}
    for name, why in choice.left_out.items():
        reasons.setdefault(why, []).append(names[name])
    left_out = [
        LeftOut(
            why=why,
            num_files=len(some),
            num_bytes=sum(Path(f"{prefix}.bin").stat().st_size for prefix, _ in some),
            names=tuple(name for _, name in some),
        )
        for why, some in reasons.items()
    ]
    sentence = unread(left_out, [] if choice.split is None else [choice.split])
    return [names[name] for name in names if name in choice.taken], sentence


def _pairs(entry: str | Path | File) -> list[tuple[Path, str]]:
    """List the Megatron pairs of an entry, by common prefix and name; [] where it is something else."""
    if isinstance(entry, File) or is_url(entry):
        return []
    path = Path(entry).expanduser()
    if path.is_dir():
        paths = sorted(p for p in path.rglob("*.idx") if _is_index(p))
        return [(p.with_suffix(""), p.relative_to(path).with_suffix("").as_posix()) for p in paths]
    if path.suffix in _SUFFIXES and path.is_file():
        return [_pair(path)]
    if Path(f"{path}.idx").is_file():
        return [(path, path.name)]
    if glob.has_magic(str(path)):
        root = Path(path.anchor)
        paths = sorted(root.glob(str(path.relative_to(path.anchor))))
        if paths and all(p.suffix in _SUFFIXES and p.is_file() for p in paths):
            return list(dict.fromkeys(_pair(p) for p in paths))
    return []


def _pair(path: Path) -> tuple[Path, str]:
    prefix = path.with_suffix("")
    missing = [suffix for suffix in _SUFFIXES if not Path(f"{prefix}{suffix}").is_file()]
    if missing:
        raise SourceError(f"{path} is half of a pair: {prefix}{missing[0]} isn't there; copy it too")
    return prefix, prefix.name


def _is_index(path: Path) -> bool:
    """Whether a file begins like Megatron's indexes."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


# Several sets of token documents as one: shards of the first, then those of the second, and so on.


class JoinedTokens:
    """Several sets of documents as one, with the parts that they had when they were joined."""

    def __init__(self, sets: Sequence[TokenDocuments], num_parts: Sequence[int] | None = None) -> None:
        """Join sets by their first `num_parts` parts, which must be there; None: by those there now."""
        self._sets = tuple(sets)
        parts_of = [source.num_parts for source in sets] if num_parts is None else num_parts
        held = [
            source.documents[: np.searchsorted(source.parts, parts)] for source, parts in zip(sets, parts_of)
        ]
        self._first = np.cumsum([0, *map(len, held)])
        self.documents: IntArray = np.concatenate(held)

    def with_parts(self, num_parts: Sequence[int]) -> JoinedTokens:
        """Return the same sets with these numbers of parts."""
        return JoinedTokens(self._sets, num_parts)

    def first_shard(self, number: int) -> int:
        """Return a set's first shard."""
        return int(self._first[number])

    def where(self, shard: int) -> str:
        """Describe a shard's location."""
        number = int(np.searchsorted(self._first, shard, side="right")) - 1
        return self._sets[number].where(shard - int(self._first[number]))

    def _each(self, shards: IntArray) -> Iterator[tuple[TokenDocuments, IntArray, IntArray]]:
        """Yield each set with the positions of its documents and their shards within the set."""
        owners = np.searchsorted(self._first, shards, side="right") - 1
        for number in np.unique(owners).tolist():
            at = np.flatnonzero(owners == number)
            yield self._sets[number], at, shards[at] - self._first[number]

    def lengths(self, shards: IntArray, documents: IntArray) -> IntArray:
        """Return the lengths of documents; arguments as in `TokenDocuments`."""
        lengths = np.empty(len(shards), dtype=np.int64)
        for source, at, within in self._each(shards):
            lengths[at] = source.lengths(within, documents[at])
        return lengths

    def will_need(self, shards: IntArray, documents: IntArray) -> None:
        """Prefetch documents; arguments as in `lengths`."""
        for source, at, within in self._each(shards):
            source.will_need(within, documents[at])

    def count_targets(
        self, shards: IntArray, documents: IntArray, starts: IntArray, stops: IntArray
    ) -> IntArray:
        """Count the labels of pieces; arguments as in `TokenDocuments`."""
        counts = np.empty(len(shards), dtype=np.int64)
        for source, at, within in self._each(shards):
            counts[at] = source.count_targets(within, documents[at], starts[at], stops[at])
        return counts

    def gather(
        self, shards: IntArray, documents: IntArray, starts: Sequence[int] | IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Read pieces of documents in the given order; arguments as in `TokenDocuments`."""
        begins = np.cumsum(lengths) - lengths
        tokens = np.empty(int(lengths.sum()), dtype=np.int32)
        mask: Mask = np.ones(len(tokens), dtype=np.uint8)
        is_masked = False
        for source, at, within in self._each(shards):
            sizes = lengths[at]
            ids, marks = source.gather(within, documents[at], np.asarray(starts)[at], sizes)
            where = np.repeat(begins[at] - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(ids))
            tokens[where] = ids
            if marks is not None:
                is_masked, mask = True, as_wide(mask, marks)
                mask[where] = marks
        return tokens, mask if is_masked else None
