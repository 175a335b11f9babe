"""Tokenize a source into a token store: part by part, in parallel, resumable, atomic."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from varlen import __version__
from varlen.documents.block_reader import Watch
from varlen.documents.source import Part, Source
from varlen.errors import SettingError, SourceError
from varlen.files.fingerprints import fingerprint
from varlen.files.losses import nothing_read, stored, total
from varlen.files.written import MANIFEST, SKIPPED, WORK, read_manifest
from varlen.offline.crew import Crew, Team
from varlen.offline.grow import (
    TOLD,
    append,
    fingerprint_of_marks,
    in_stored_order,
    stages_before,
    take_back,
    write_plan,
)
from varlen.offline.outputs import (
    check_output,
    check_places,
    disk_faults,
    finish,
    remove_unfinished,
    tidy,
    working_folder,
    write_json,
)
from varlen.regular import read_regular
from varlen.store.shard import Shard, ShardWriter
from varlen.store.store import TokenStore, format_of, open_store
from varlen.store.tokens import ROW_WEIGHTS
from varlen.text.identity import made_by, mark_in

OnProgress = Callable[[int, int, str], None]
SHARD_TOKENS = 1 << 24
PART_BYTES = 64 << 20


def quiet(done: int, total: int, text: str) -> None:
    """Take note of no progress."""


def source_marks(source: Source) -> dict[str, Any]:
    """Return what identifies a source: its files by name, size and content, and how they become tokens.

    Beside that stands what of its folders isn't read, which decides nothing.
    """
    with ThreadPoolExecutor(max_workers=4) as pool:
        marks = list(pool.map(fingerprint, source.files))
    files = [
        {"name": file.name, "size": file.size, "fingerprint": mark} for file, mark in zip(source.files, marks)
    ]
    encoding, mark = source.encoding, source.made_by()
    unread = {"left_out": [asdict(one) for one in source.left_out], "taken": list(source.taken)}
    return {
        **({name: json.loads(json.dumps(value)) for name, value in unread.items() if value}),
        "files": files,
        "reading": source.fingerprint,
        "on_error": source.on_error,
        "tokenizer": {} if mark is None else mark.to_json(),
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
    """Tokenize a source into a token store; returns the store, and whether an earlier run had finished it.

    The bytes depend on the data, how it becomes tokens and varlen's version, not on who does the work or how often it
    was interrupted.
    """
    folder = folder.resolve() if folder.is_symlink() else folder
    check_places(source.files, folder)
    with (crew or Crew()).hired() as team:
        if marks is None:
            marks = look_at(source, folder, team, on_progress)
        before = (read_manifest(folder) or {}).get("fingerprint")
        store = build_store(source, folder, marks, team=team, on_progress=on_progress, overwrite=overwrite)
    return store, store.fingerprint == before


def look_at(source: Source, output: Path, team: Team, on_progress: OnProgress) -> dict[str, Any]:
    """Return what identifies a source, while processes start if there will be work for them."""
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
    """Tokenize a source into a store, or return the finished store that is there already.

    A store that was made of some of these files, in the same way, keeps what it holds and is given the others.
    """
    there = read_manifest(folder)
    source, marks = in_stored_order(source, marks, there)
    grown = stages_before(there, marks)
    print_ = fingerprint_of_marks(marks, grown)
    if there is not None and there.get("fingerprint") == print_:
        tidy(folder)
        return open_store(folder)
    if overwrite or there is None or not grown or len(marks["files"]) == len(there["source"]["files"]):
        if not overwrite:
            check_tokenizer(folder, there, marks)
        there, grown, print_ = None, [], fingerprint_of_marks(marks)
        check_output(folder, overwrite=overwrite)
    with working_folder(folder, print_) as partial:
        if there is not None:
            take_back(partial, folder, there)
        first = grown[-1]["parts"] if grown else 0
        source = replace(source, files=source.files[grown[-1]["files"] :]) if grown else source
        plan = _Plan(partial, print_, first, {name: marks[name] for name in TOLD if name in marks})
        listed, num_parts = _index_parts(source, plan, team, on_progress)
        if sum(shard["num_tokens"] for shard in listed) == 0:
            said = _nothing(source, listed, partial)
            remove_unfinished(partial)  # nobody resumes this
            raise SourceError(said)
        every = [*(there["shards"] if there is not None else []), *listed]
        manifest = {
            "varlen": __version__,
            "kind": "tokens",
            "format": format_of(every),
            "fingerprint": print_,
            "source": marks,
            "num_parts": num_parts,
            "num_documents": sum(shard["num_documents"] for shard in every),
            "num_tokens": sum(shard["num_tokens"] for shard in every),
            "num_targets": sum(shard["num_targets"] for shard in every),
            "num_skipped": sum(shard["num_skipped"] for shard in every),
            "losses": total(map(stored, every)).to_json(),
            "shards": every,
        }
        if there is None:
            finish(partial, folder, manifest, MANIFEST)
        else:
            append(partial, folder, [shard["name"] for shard in listed], {**manifest, "grown": grown})
    return open_store(folder)


def check_tokenizer(folder: Path, there: dict[str, Any] | None, marks: dict[str, Any]) -> None:
    """Refuse by name to replace what another tokenizer made."""
    was, now = made_by(there), mark_in(marks.get("tokenizer"))
    if was is not None and now is not None and was.is_same(now) is False:
        raise SettingError(
            f"{folder} holds a set made from other data or settings: of tokens of the tokenizer {was.words}, and "
            f"{now.words} gives other ids; name another folder, or pass --overwrite (overwrite=True)"
        )


class _Plan(NamedTuple):
    """What is told of a store before its parts are there."""

    partial: Path
    """Where shards go."""
    fingerprint: str
    """Of the store."""
    first: int
    """Number of the first part that is new."""
    source: dict[str, Any]
    """Marks of what is read that are told."""


def _index_parts(
    source: Source, plan: _Plan, team: Team, on_progress: OnProgress
) -> tuple[list[dict[str, Any]], int]:
    """Tokenize all parts of a source; returns their shards, and how many parts the store has with them."""
    parts = source.parts(PART_BYTES)
    partial, first = plan.partial, plan.first
    write_plan(partial, plan.fingerprint, first + len(parts), plan.source)
    watch = Watch([source.part_bytes(part, PART_BYTES) for part in parts], on_progress)
    is_one = len(parts) == 1
    reading = source.watched(watch.read) if team.is_here(is_one=is_one) else source
    shards: dict[int, list[dict[str, Any]]] = {}
    for number, found in team.run(index_part, (reading, partial), enumerate(parts, first), is_one=is_one):
        shards[number] = found
        watch.finish(number - first)
    return [shard for number in sorted(shards) for shard in shards[number]], first + len(parts)


def _nothing(source: Source, shards: list[dict[str, Any]], folder: Path) -> str:
    """Say that there is nothing to train on, and why."""
    documents = sum(shard["num_documents"] for shard in shards)
    paths = [file.path for file in source.files]
    return nothing_read(paths, documents, total(map(stored, shards)), _first_skipped(folder, shards))


def _first_skipped(folder: Path, shards: list[dict[str, Any]]) -> str | None:
    """Return the first line about what can't be read, of those that shards in a folder have."""
    for shard in shards:
        with suppress(OSError), (folder / shard["name"] / SKIPPED).open(encoding="utf-8") as listed:
            return next(listed, "").rstrip("\n") or None
    return None


def index_part(shared: tuple[Source, Path], task: tuple[int, Part]) -> tuple[int, list[dict[str, Any]]]:
    """Tokenize one part into shards of its own; returns its number, and what the shards hold."""
    (source, folder), (number, part) = shared, task
    note = folder / WORK / f"{number:05d}.json"
    finished = _finished(folder, note)
    if finished is not None:
        return number, finished
    shards: list[dict[str, Any]] = []
    writer: ShardWriter | None = None
    try:
        with disk_faults(folder):
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
    """Return the shards that an earlier run made of a part, if they are there and whole."""
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
