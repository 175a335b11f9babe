"""Tokenize a source into a token store: in parts, concurrently, resumable and atomic; and add files to a store."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from varlen import __version__
from varlen.counts import many
from varlen.documents.block_reader import ReadProgress
from varlen.documents.source import Part, Source
from varlen.errors import SettingError, SourceError, StalledError
from varlen.files.fingerprints import fingerprint
from varlen.files.losses import nothing_read, stored, total
from varlen.files.ours import entries_below, sync, write_json
from varlen.files.written import LOCK, MANIFEST, PARTIAL, PLAN, SKIPPED, WORK, read_manifest, with_checksum
from varlen.offline.crew import Crew, Team
from varlen.offline.outputs import (
    check_output,
    check_overlap,
    finish,
    output_faults,
    part_of,
    remove_unfinished,
    remove_work,
    working_folder,
)
from varlen.regular import read_regular
from varlen.store.shard import Shard, ShardWriter
from varlen.store.store import (
    ROW_WEIGHTS,
    STORE_FORMAT,
    STORE_FORMATS,
    TEMPLATES,
    TokenStore,
    format_of,
    open_store,
)
from varlen.text.identity import made_by, mark_in
from varlen.text.tokenizer import ByteTokenizer, digest
from varlen.workers.processors import processors

_log = logging.getLogger(__name__)
OnProgress = Callable[[int, int, str], None]
SHARD_TOKENS = 1 << 24
PART_BYTES = 64 << 20


def quiet(done: int, total: int, text: str) -> None:
    """Ignore progress."""


def source_marks(source: Source) -> dict[str, Any]:
    """Return what identifies a source: its files by name, size and content, and how they become tokens.

    Also includes what is left out of its folders, which isn't part of the identity.
    """
    with ThreadPoolExecutor(max_workers=4) as pool:
        fingerprints = list(pool.map(fingerprint, source.files))
    files = [
        {"name": file.name, "size": file.size, "fingerprint": of_file}
        for file, of_file in zip(source.files, fingerprints)
    ]
    encoding, tokenizer_mark = source.encoding, source.made_by()
    left_out = {"left_out": [asdict(group) for group in source.left_out], "taken": list(source.taken)}
    return {
        **({name: json.loads(json.dumps(value)) for name, value in left_out.items() if value}),
        "files": files,
        "reading": source.fingerprint,
        "on_error": source.on_error,
        "tokenizer": {} if tokenizer_mark is None else tokenizer_mark.to_json(),
        "chat_template": encoding.template.fingerprint,
        "append_eos": encoding.append_eos,
        "supervise": encoding.supervise,
        **({ROW_WEIGHTS: True} if encoding.row_weights else {}),
    }


def index_source(
    source: Source,
    folder: Path,
    *,
    crew: Crew | None = None,
    overwrite: bool = False,
    marks: dict[str, Any] | None = None,
    on_progress: OnProgress = quiet,
) -> tuple[TokenStore, bool]:
    """Tokenize a source into a token store; return the store, and whether an earlier run had finished it.

    The bytes depend on the data, the tokenization and varlen's version, but not on the number of processes or
    interruptions.
    """
    folder = folder.resolve() if folder.is_symlink() else folder
    check_overlap(source.files, folder)
    with (crew or Crew()).started() as team:
        if marks is None:
            marks = marks_at_start(source, folder, team, on_progress)
        before = (read_manifest(folder) or {}).get("fingerprint")
        store = build_store(source, folder, marks, team=team, on_progress=on_progress, overwrite=overwrite)
    return store, store.fingerprint == before


def marks_at_start(source: Source, output: Path, team: Team, on_progress: OnProgress) -> dict[str, Any]:
    """Return what identifies a source, starting processes meanwhile if there will be work for them."""
    on_progress(0, 1, "looking at the files")
    if not output.exists() and sum(file.size for file in source.files) > PART_BYTES:
        team.start()
    return source_marks(source)


def build_store(
    source: Source,
    folder: Path,
    marks: dict[str, Any],
    *,
    team: Team,
    on_progress: OnProgress,
    overwrite: bool = False,
) -> TokenStore:
    """Tokenize a source into a store, or return the existing finished store.

    A store made from some of these files in the same way is kept, and the other files are added to it.
    """
    store = None
    while store is None:
        store = _built(source, folder, marks, team, on_progress, overwrite)
    return store


def _built(
    source: Source, folder: Path, marks: dict[str, Any], team: Team, on_progress: OnProgress, overwrite: bool
) -> TokenStore | None:
    """Return the store; None if another run changed it before this one had its lock."""
    existing = seen = read_manifest(folder)
    source, marks = in_stored_order(source, marks, existing)
    templates = source.templates if source.holds_chats() else {}
    grown = stages_before(existing, marks)
    store_fingerprint = fingerprint_of_marks(marks, grown)
    if existing is not None and existing.get("fingerprint") == store_fingerprint:
        remove_work(folder)
        return open_store(folder)
    if overwrite or existing is None or not grown or len(marks["files"]) == len(existing["source"]["files"]):
        if not overwrite:
            check_tokenizer(folder, existing, marks)
        existing, grown, store_fingerprint = None, [], fingerprint_of_marks(marks)
        check_output(folder, seen, overwrite=overwrite)
    with working_folder(folder, store_fingerprint, seen) as partial:
        if partial is None:
            return None
        if existing is not None:
            take_back(partial, folder, existing)
        first = grown[-1]["parts"] if grown else 0
        source = replace(source, files=source.files[grown[-1]["files"] :]) if grown else source
        note = _PartsNote(
            partial, store_fingerprint, first, {name: marks[name] for name in PLAN_MARKS if name in marks}
        )
        listed, num_parts = _index_parts(source, note, team, on_progress)
        if sum(shard["num_tokens"] for shard in listed) == 0:
            message = _nothing(source, listed, partial)
            remove_unfinished(partial)  # nothing to resume
            raise SourceError(message)
        all_shards = [*(existing["shards"] if existing is not None else []), *listed]
        manifest = {
            "varlen": __version__,
            "kind": "tokens",
            "format": format_of(all_shards),
            "fingerprint": store_fingerprint,
            "source": marks,
            **({TEMPLATES: dict(templates)} if templates else {}),
            "num_parts": num_parts,
            "num_documents": sum(shard["num_documents"] for shard in all_shards),
            "num_tokens": sum(shard["num_tokens"] for shard in all_shards),
            "num_targets": sum(shard["num_targets"] for shard in all_shards),
            "num_skipped": sum(shard["num_skipped"] for shard in all_shards),
            "losses": total(map(stored, all_shards)).to_json(),
            "shards": all_shards,
        }
        if existing is None:
            finish(partial, folder, manifest, MANIFEST)
        else:
            append(partial, folder, [shard["name"] for shard in listed], {**manifest, "grown": grown})
    return open_store(folder)


def check_tokenizer(folder: Path, existing: dict[str, Any] | None, marks: dict[str, Any]) -> None:
    """Raise if a store was made by another tokenizer, naming both."""
    was, now = made_by(existing), mark_in(marks.get("tokenizer"))
    if was is not None and now is not None and was.is_same(now) is False:
        raise SettingError(
            f"{folder} holds a set made from other data or settings: its tokenizer was {was.words}, and "
            f"{now.words} gives other ids; name another folder, or pass --overwrite (overwrite=True)"
        )


class _PartsNote(NamedTuple):
    """Metadata of a store, available before its parts are."""

    partial: Path  # the folder that shards are written to
    fingerprint: str  # of the store
    first: int  # number of the first new part
    source: dict[str, Any]  # marks of the source that readers of an unfinished store need


def _index_parts(
    source: Source, note: _PartsNote, team: Team, on_progress: OnProgress
) -> tuple[list[dict[str, Any]], int]:
    """Tokenize all parts of a source; return their shards, and the store's total number of parts."""
    parts = source.parts(PART_BYTES)
    partial, first = note.partial, note.first
    write_plan(partial, note.fingerprint, first + len(parts), note.source)
    read_progress = ReadProgress([source.part_bytes(part, PART_BYTES) for part in parts], on_progress)
    is_one = len(parts) == 1
    reading = source.watched(read_progress.read) if team.is_here(is_one=is_one) else source
    shards: dict[int, list[dict[str, Any]]] = {}
    for number, shards_of_part in team.run(
        index_part, (reading, partial), enumerate(parts, first), is_one=is_one
    ):
        shards[number] = shards_of_part
        read_progress.finish(number - first)
    return [shard for number in sorted(shards) for shard in shards[number]], first + len(parts)


def _nothing(source: Source, shards: list[dict[str, Any]], folder: Path) -> str:
    """Return the error message for data without a token: its files, and what was lost."""
    documents = sum(shard["num_documents"] for shard in shards)
    paths = [file.path for file in source.files]
    return nothing_read(paths, documents, total(map(stored, shards)), _first_skipped(folder, shards))


def _first_skipped(folder: Path, shards: list[dict[str, Any]]) -> str | None:
    """Return the first message about an unreadable record in some shards."""
    for shard in shards:
        with suppress(OSError), (folder / shard["name"] / SKIPPED).open(encoding="utf-8") as listed:
            return next(listed, "").rstrip("\n") or None
    return None


def index_part(shared: tuple[Source, Path], task: tuple[int, Part]) -> tuple[int, list[dict[str, Any]]]:
    """Tokenize one part into its own shards; return its number, and the content of the shards."""
    (source, folder), (number, part) = shared, task
    note = folder / WORK / f"{number:05d}.json"
    finished = _finished(folder, note)
    if finished is not None:
        return number, finished
    shards: list[dict[str, Any]] = []
    writer: ShardWriter | None = None
    try:
        with output_faults(folder):
            for documents in source.read(part):
                if writer is not None and writer.num_tokens + len(documents.tokens) > SHARD_TOKENS:
                    shards.append(_closed(writer, number, len(shards)))
                    writer = None
                if writer is None:
                    writer = ShardWriter(folder / _name(number, len(shards)), folder / WORK)
                writer.append(documents)
            if writer is not None:
                shards.append(_closed(writer, number, len(shards)))
                writer = None
            write_json(note, shards)
    finally:
        if writer is not None:
            writer.abandon()
    return number, shards


def _finished(folder: Path, note: Path) -> list[dict[str, Any]] | None:
    """Return the shards that an earlier run made of a part, if they are intact."""
    try:
        shards: list[dict[str, Any]] = json.loads(read_regular(note))
        for shard in shards:
            counts = Shard(folder / shard["name"]).counts
            if {"name": shard["name"], **counts.to_json()} != shard:
                return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return shards


def _name(part: int, shard: int) -> str:
    return f"{part:05d}-{shard:04d}"


def _closed(writer: ShardWriter, part: int, shard: int) -> dict[str, Any]:
    return {"name": _name(part, shard), **writer.close().to_json()}


# Growing stores: additional files become new parts after the existing ones.
#
# A manifest lists the earlier stages of a store, each with its fingerprint at the time. Existing shards keep their
# names, positions and bytes, so readers can continue, and see the rest when they reopen the store.


def fingerprint_of_marks(marks: dict[str, Any], grown: Sequence[dict[str, Any]] = ()) -> str:
    """Return what changes with the tokens of a store and their order."""
    stages = [list(grown)] if grown else []
    return digest(json.dumps([STORE_FORMAT, __version__, deciding(marks), *stages], sort_keys=True))


def deciding(marks: dict[str, Any]) -> dict[str, Any]:
    """Return the marks that a source's tokens depend on, excluding what is left out of its folders."""
    return {name: value for name, value in unnamed(marks).items() if name not in ("left_out", "taken")}


def unnamed(marks: dict[str, Any]) -> dict[str, Any]:
    """Return marks without the tokenizer's name: it may be a path, which doesn't affect ids."""
    tokenizer = marks.get("tokenizer") or {}
    if not tokenizer or tokenizer.get("name") == ByteTokenizer().name:
        return marks
    return {**marks, "tokenizer": {**tokenizer, "name": ""}}


PLAN_MARKS = ("tokenizer", ROW_WEIGHTS)  # marks of a source that are written to the plan of its store


def write_plan(partial: Path, fingerprint: str, num_parts: int, marks: Mapping[str, Any]) -> None:
    """Write the plan of a token store, for processes that read it while it is written."""
    with output_faults(partial):
        write_json(
            partial / WORK / PLAN,
            with_checksum({"fingerprint": fingerprint, "num_parts": num_parts, **marks}),
        )


def in_stored_order(
    source: Source, marks: dict[str, Any], manifest: dict[str, Any] | None
) -> tuple[Source, dict[str, Any]]:
    """Put the files that a store was made from before new ones; unchanged if some are missing."""
    known_files = _files(manifest)
    if not known_files:
        return source, marks
    numbers: dict[str, list[int]] = {}
    for number, file in enumerate(marks["files"]):
        numbers.setdefault(json.dumps(file, sort_keys=True), []).append(number)
    order: list[int] = []
    for known in known_files:
        same = numbers.get(json.dumps(known, sort_keys=True))
        if not same:
            return source, marks
        order.append(same.pop(0))
    order += sorted(number for left in numbers.values() for number in left)
    return (
        replace(source, files=tuple(source.files[number] for number in order)),
        {**marks, "files": [marks["files"][number] for number in order]},
    )


def stages_before(manifest: dict[str, Any] | None, marks: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the earlier stages that a store will have; [] where it is to be made from scratch."""
    count = len(_files(manifest))
    if manifest is None or not 0 < count <= len(marks["files"]):
        return []
    grown = list(manifest.get("grown", ()))
    if count == len(marks["files"]):
        return grown
    was = fingerprint_of_marks({**marks, "files": marks["files"][:count]}, grown)
    if manifest.get("fingerprint") != was or "num_parts" not in manifest:
        return []
    stage = {
        "files": count,
        "parts": manifest["num_parts"],
        "shards": len(manifest["shards"]),
        "num_documents": manifest["num_documents"],
        "fingerprint": was,
    }
    return [*grown, stage]


def _files(manifest: dict[str, Any] | None) -> list[Any]:
    """Return the files that a store was made from; [] where there is no store."""
    if manifest is None or manifest.get("kind") != "tokens" or manifest.get("format") not in STORE_FORMATS:
        return []
    files = manifest.get("source", {}).get("files")
    return files if isinstance(files, list) else []


def take_back(partial: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Move shards back that an interrupted run moved into the store before listing them."""
    listed = {shard["name"] for shard in manifest["shards"]}
    with output_faults(folder):
        for shard in sorted(path.parent for path in folder.glob("*/shard.json")):
            part = part_of(shard.name)
            is_left = part is not None and part >= manifest["num_parts"] and not shard.is_symlink()
            if is_left and shard.name not in listed:
                shutil.rmtree(partial / shard.name, ignore_errors=True)
                shard.replace(partial / shard.name)


def append(partial: Path, folder: Path, names: Sequence[str], manifest: dict[str, Any]) -> None:
    """Move shards into a store, then list them atomically."""
    with output_faults(folder):
        for name in names:
            (partial / name).replace(folder / name)
        sync(folder)
        write_json(folder / MANIFEST, with_checksum(manifest))
        sync(folder)
        remove_unfinished(partial)


# The store that a loader makes of its documents in the user's cache, once for all processes.

_WAIT_S = 0.5


def indexed_in_cache(source: Source, cache: str | Path | None, patience_s: float) -> Path:
    """Tokenize documents into a store in the user's cache, or find them there; returns its folder.

    Of several processes that want the same store, one makes it and the others wait. If it dies, one of them resumes
    where it stopped.
    """
    base = (
        Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "varlen"
    )
    marks = source_marks(source)
    folder = base / "stores" / fingerprint_of_marks(marks)[:32]
    crew, is_logged = Crew(processes=_processes(source)), False
    since, seen = time.monotonic(), _written(folder)
    while True:
        try:
            store, was_there = index_source(source, folder, crew=crew, marks=marks)
        except SettingError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            if not is_logged:
                _log.info("another process indexes the data into %s; waiting for it", folder)
                is_logged = True
            written = _written(folder)
            if written != seen:
                since, seen = time.monotonic(), written
            elif time.monotonic() - since >= patience_s:
                raise StalledError(_stopped(folder, time.monotonic() - since)) from error
            time.sleep(_WAIT_S)
            continue
        if not was_there:
            _log.info("indexed %s into %s", many(int(store.documents.sum()), "document"), folder)
        return folder


def _processes(source: Source) -> int:
    """Return how many processes may tokenize: one if the tokenizer can't be pickled."""
    try:
        pickle.dumps(source)
    except (pickle.PicklingError, AttributeError, TypeError):
        return 1
    return processors()


def _written(folder: Path) -> list[tuple[str, int, int]]:
    """Return what has been written of a store so far, which changes while a process writes it."""
    return sorted(
        (str(path), status.st_size, status.st_mtime_ns)
        for path, status in entries_below(folder.with_name(folder.name + PARTIAL))
        # Trying the lock changes the time of its file.
        if path.name != LOCK and stat.S_ISREG(status.st_mode)
    )


def _stopped(folder: Path, seconds: float) -> str:
    partial = folder.with_name(folder.name + PARTIAL)
    lock = partial / WORK / LOCK
    return (
        f"{_holder(lock)} holds {lock}, and has written nothing into {partial} for {seconds:,.0f} s; end it and the "
        "next loader goes on where it stopped, or pass deadline_s to wait longer"
    )


def _holder(lock: Path) -> str:
    """Return the process that holds a lock, as far as /proc says."""
    try:
        inode = lock.stat().st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 2345 08:01:67890 0 EOF
            if "->" not in words and words[1] == "FLOCK" and int(words[5].rpartition(":")[2]) == inode:
                return f"process {words[4]}"
    except (OSError, ValueError, IndexError):  # other systems have no /proc/locks
        pass
    return "another process"
