"""Files that we read back and have written ourselves: damaged at random, or finished by another process meanwhile."""

import io
import json
import os
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.support.offline_packs import pack, small_parts, write_chats
from tests.support.random_plans import random_plan

import varlen as vl
from varlen.adapters.megatron.packing.index import open_index
from varlen.adapters.megatron.packing.offline import MegatronPackSettings, pack_for_megatron
from varlen.cost.hardware import load_hardware, save_hardware
from varlen.cost.model import Hardware
from varlen.documents.source import open_source
from varlen.errors import SourceError, VarlenError
from varlen.files.written import LOCK, PARTIAL, WORK, with_checksum
from varlen.offline import index, outputs
from varlen.offline.index import index_source
from varlen.offline.outputs import check_unfinished
from varlen.plan.serialize import load_plan, plan_fingerprint, save_plan
from varlen.store.growing import PartialStore
from varlen.store.lengths import counted_lengths
from varlen.store.store import TokenStore, open_store

MOST_BYTES = 1 << 30
NOTED = ("tokens.bin", "loss_mask.bin", "loss_weights.bin", "skipped.log", ".skipped.log", "lock")
"""Files of which nothing tells a flipped bit."""


@contextmanager
def no_wait(seconds: int = 30) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError("waited")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def documents_of(store: Any) -> Any:
    """All that a reader of a store gets."""
    store.wait_for(store.num_parts)
    places = [(s, d) for s, count in enumerate(store.documents.tolist()) for d in range(count)]
    shards, documents = np.array(places, dtype=np.int64).reshape(-1, 2).T
    lengths = store.lengths(shards, documents)
    starts = np.zeros(len(shards), dtype=np.int64)
    tokens, mask = store.gather(shards, documents, starts, lengths)
    targets = store.count_targets(shards, documents, starts, lengths)
    return lengths.tolist(), len(tokens), mask is not None, targets.tolist()


def read_store(folder: Path) -> Any:
    store = open_store(folder)
    return documents_of(store), store.fingerprint


def read_table(folder: Path) -> Any:
    with vl.PackedLoader(
        folder, capacity=128, global_batch_size=2, worker="thread", window=16, epochs=2
    ) as one:
        one.seek(5)
        return len(one), one.state_dict()["at"], next(one).input_ids.shape


def read_partial(folder: Path) -> Any:
    return documents_of(PartialStore(folder / "store", patience_s=0.1, stopped_s=0.1))


def read_rows(folder: Path) -> Any:
    source = open_source(folder)
    return sum(len(one) for part in source.parts() for one in source.read(part))


def read_index(folder: Path) -> Any:
    index = open_index(folder / "index")
    rows = index.rows(range(index.num_rows))
    return rows.offsets.tolist(), rows.seq_start_id.tolist(), len(rows.input_ids)


def read_hardware(folder: Path) -> Any:
    load_hardware(folder / "hardware.json")


def read_plan(folder: Path) -> Any:
    return plan_fingerprint(load_plan(folder / "step.plan"))


def read_lengths(folder: Path) -> Any:
    found = counted_lengths(folder / "lengths.npz")
    return None if found is None else found.lengths.tolist()


@dataclass(frozen=True)
class Kind:
    """Files of one kind, and who reads them."""

    make: Callable[[Path, Path], None]
    read: Callable[[Path], Any]
    damaged: str = "**/*"
    is_told: bool = True
    """Whether a changed bit is told; else it may give something else."""


def make_store(texts: Path, folder: Path) -> None:
    index_source(open_source(str(texts)), folder)


def make_table(texts: Path, folder: Path) -> None:
    make_store(texts, folder)
    read_table(folder)


def make_partial(texts: Path, folder: Path) -> None:
    make_store(texts, folder / "store")
    manifest = json.loads((folder / "store/manifest.json").read_text())
    partial = folder / f"store{PARTIAL}"
    (folder / "store").rename(partial)
    (partial / "manifest.json").unlink()
    (partial / WORK).mkdir()
    plan = {name: manifest[name] for name in ("fingerprint", "num_parts")}
    (partial / WORK / "plan.json").write_text(json.dumps(with_checksum({**plan, "tokenizer": {}})))
    for number in range(manifest["num_parts"]):
        mine = [one for one in manifest["shards"] if one["name"].startswith(f"{number:05d}-")]
        (partial / WORK / f"{number:05d}.json").write_text(json.dumps(mine))


def make_rows(texts: Path, folder: Path) -> None:
    pack(str(texts), folder)


def make_index(texts: Path, folder: Path) -> None:
    make_store(texts, folder / "store")
    settings = MegatronPackSettings(pack_size=256, format="index")
    pack_for_megatron(folder / "store", folder / "index", settings)


def make_hardware(_: Path, folder: Path) -> None:
    folder.mkdir()
    save_hardware(Hardware.named("h100"), folder / "hardware.json")


def make_plan(_: Path, folder: Path) -> None:
    folder.mkdir()
    save_plan(random_plan(3), folder / "step.plan")


def make_lengths(_: Path, folder: Path) -> None:
    folder.mkdir()
    np.savez(folder / "lengths.npz", lengths=np.arange(100))


KINDS = {
    "store": Kind(make_store, read_store),
    "window table": Kind(make_table, read_table, ".tables/*"),
    "unfinished store": Kind(make_partial, read_partial),
    "packed rows": Kind(make_rows, read_rows, ".manifest.json", is_told=False),
    "index of packs": Kind(make_index, read_index, "index/*"),
    "hardware": Kind(make_hardware, read_hardware, is_told=False),
    "plan": Kind(make_plan, read_plan),
    "lengths": Kind(make_lengths, read_lengths),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Any]]]:
    """One of each kind, and what it gives."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        small_parts(patch, 1500)
        write_chats(folder / "chats.jsonl", 60)
        (folder / "texts.jsonl").write_text("".join(json.dumps({"text": "ab" * n}) + "\n" for n in range(80)))
        found = {}
        for name, kind in KINDS.items():
            place = folder / name.replace(" ", "-")
            kind.make(folder / ("texts.jsonl" if name == "packed rows" else "chats.jsonl"), place)
            found[name] = place, kind.read(place)
        yield found


def damaged(made: dict[str, tuple[Path, Any]], name: str, number: int, folder: Path) -> None:
    """Damage one file of a kind, by a number, and read."""
    random, kind = Random(number), KINDS[name]
    place, expected = made[name]
    copy = folder / "copy" / place.name
    shutil.rmtree(folder / "copy", ignore_errors=True)
    shutil.copytree(place, copy)
    files = sorted(path for path in copy.glob(kind.damaged) if path.is_file())
    path = random.choice(files)
    how = damage(path, random, [one for one in files if one != path])
    said, other, found = None, "", None
    try:
        with no_wait():
            found = kind.read(copy)
    except VarlenError as error:
        said = str(error)
    except BaseException:
        other = traceback.format_exc()
    assert not other, f"{name} {number}: {how}\n{other}"
    if said is not None:
        assert "\n" not in said, (name, number, how, said)
        return
    # As version 0.1.0 wrote it: nothing tells another number of parts.
    is_old = path.name == "plan.json" and how.endswith(("checksum none", "checksum anew"))
    is_noted = path.name in NOTED or how.endswith(": grow") or is_old or found is None
    if kind.is_told and not is_noted:
        assert found == expected, (name, number, how)


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_of_ours_gives_what_was_written_or_a_sentence(made, name, tmp_path):
    for number in range(60):
        damaged(made, name, number, tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 4 * MOST_BYTES


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS)
def test_thousands_of_damaged_files_of_ours_give_what_was_written_or_a_sentence(made, name, tmp_path):
    for number in range(1000, 2500):
        damaged(made, name, number, tmp_path)


def edited(folder: Path, checksum: bool, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    told = json.loads(path.read_text())
    change(told)
    told.pop("checksum")
    path.write_text(json.dumps(with_checksum(told) if checksum else told))


def fewer(told: dict[str, Any]) -> None:
    one = told["shards"][0]
    told["num_documents"] -= one["num_documents"] - 1
    told["num_tokens"] -= one["num_tokens"] - 5
    one["num_documents"], one["num_tokens"] = 1, 5


def more(told: dict[str, Any]) -> None:
    told["shards"][0]["num_documents"] += 7
    told["num_documents"] += 7


def counted(count: Any, name: str = "num_documents") -> Callable[[dict[str, Any]], None]:
    def change(told: dict[str, Any]) -> None:
        if isinstance(count, int):
            told[name] += count - told["shards"][0][name]
        told["shards"][0][name] = count

    return change


def less_shards(told: dict[str, Any]) -> None:
    gone = told["shards"].pop()
    told["num_documents"] -= 0 * gone["num_documents"]


LIES = {
    "fewer documents": fewer,
    "more documents": more,
    "none": counted(0),
    "2^40": counted(2**40),
    "2^62": counted(2**62),
    "2^80": counted(2**80),
    "negative": counted(-1),
    "a text": counted("5"),
    "a fraction": counted(5.0),
    "more tokens": counted(10**9, "num_tokens"),
    "a shard less": less_shards,
    "a shard twice": lambda told: told["shards"].append(told["shards"][0]),
    "a shard elsewhere": lambda told: told["shards"][0].update(name="../00000-0000"),
    "another dtype": lambda told: told["shards"][0].update(dtype="int32"),
}


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_one_sentence_wherever_it_is_read(made, lie, checksum, tmp_path):
    copy = tmp_path / "store"
    shutil.copytree(made["store"][0], copy)
    edited(copy, checksum, LIES[lie])
    with pytest.raises(SourceError, match=str(copy)):
        read_store(copy)
    with pytest.raises(SourceError, match=str(copy)):
        read_table(copy)
    with pytest.raises(SourceError, match=str(copy)):
        pack(copy, tmp_path / "out")


def test_shards_of_one_store_are_not_those_of_another(made, tmp_path):
    copy = tmp_path / "store"
    shutil.copytree(made["store"][0], copy)
    names = sorted(path.name for path in copy.iterdir() if path.is_dir() and path.name[0] == "0")
    assert len(names) > 1
    (copy / names[0]).rename(copy / "kept")
    (copy / names[1]).rename(copy / names[0])
    (copy / "kept").rename(copy / names[1])
    with pytest.raises(SourceError, match="and the manifest of its store says"):
        read_store(copy)


@pytest.mark.parametrize("how", ["gone", "cut", "fifo"])
def test_a_packed_set_without_one_of_its_parts_is_refused(made, how, tmp_path):
    copy = tmp_path / "set"
    shutil.copytree(made["packed rows"][0], copy)
    part = sorted(copy.glob("part-*"))[0]
    content = part.read_bytes()
    part.unlink()
    if how == "cut":
        part.write_bytes(content[:-1])
    elif how == "fifo":
        os.mkfifo(part)
    with pytest.raises(SourceError, match=part.name):
        read_rows(copy)


def test_stores_without_checksums_are_read(made, tmp_path):
    """As version 0.1.0 wrote them."""
    copy = tmp_path / "store"
    shutil.copytree(made["store"][0], copy)
    told = json.loads((copy / "manifest.json").read_text())
    told.pop("checksum")
    for one in told["shards"]:
        one.pop("crc32")
    (copy / "manifest.json").write_text(json.dumps(told))
    for path in copy.glob("*/shard.json"):
        counts = json.loads(path.read_text())
        counts.pop("crc32")
        path.write_text(json.dumps(counts))
    assert isinstance(open_store(copy), TokenStore)
    assert read_store(copy) == made["store"][1]


CALLS = (
    (os, "mkdir"),
    (os, "open"),
    (os, "scandir"),
    (os, "listdir"),
    (os, "stat"),
    (os, "lstat"),
    (io, "open"),
)


def begin(folder: Path) -> Path:
    """Make an unfinished store with one shard; returns its folder."""
    partial = folder.with_name(folder.name + PARTIAL)
    shard = partial / "00000-0000"
    shard.mkdir(parents=True)
    (shard / "tokens.bin").write_bytes(b"\1" * 8)
    (partial / WORK).mkdir()
    (partial / WORK / LOCK).touch()
    (partial / WORK / "state.json").write_text(json.dumps({"varlen": "1", "fingerprint": "f"}))
    return partial


LOOKS = {
    "locked": lambda folder: outputs._locked(folder.with_name(folder.name + PARTIAL), folder).close(),
    "written": lambda folder: index._written(folder),
    "marked": lambda folder: check_unfinished(folder.with_name(folder.name + PARTIAL)),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_folder_that_is_finished_at_any_moment_is_no_fault(tmp_path, monkeypatch, name):
    moment, has_moved = 0, True
    while has_moved:
        folder = tmp_path / f"{moment}" / "po"
        partial, left = begin(folder), moment
        has_moved = False

        def counted(call):
            def inner(*args, **kwargs):
                nonlocal left, has_moved
                if left == 0 and not has_moved:
                    has_moved = True
                    partial.rename(folder)  # noqa: B023
                left -= 1
                return call(*args, **kwargs)

            return inner

        with monkeypatch.context() as patched:
            for module, one in CALLS:
                patched.setattr(module, one, counted(getattr(module, one)))
            LOOKS[name](folder)
        moment += 1
    assert moment > 3


VALUES: list[Any] = [
    None,
    -1,
    0,
    1,
    2**31,
    2**62,
    2**80,
    1.5,
    float("inf"),
    "",
    "x",
    "../x",
    [],
    {},
    [1],
    True,
]


def damage(path: Path, random: Random, others: list[Path]) -> str:
    """Damage a file; returns how."""
    is_json = path.suffix == ".json"
    ways = ["flip", "cut", "grow", "fifo", "folder", "gone", "swap", "garbage"] + ["json"] * (
        8 if is_json else 0
    )
    way = random.choice(ways)
    content = path.read_bytes()
    if way == "json":
        return f"{path.name}: {_edit(path, random)}"
    path.unlink()
    if way == "fifo":
        os.mkfifo(path)
    elif way == "folder":
        path.mkdir()
    elif way == "flip" and content:
        changed = bytearray(content)
        for _ in range(random.randint(1, 3)):
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        path.write_bytes(changed)
    elif way == "cut":
        path.write_bytes(content[: random.randrange(len(content) + 1)])
    elif way == "grow":
        path.write_bytes(content + random.randbytes(random.randint(1, 40)))
    elif way == "swap" and others:
        shutil.copy(random.choice(others), path)
    elif way != "gone":
        path.write_bytes(
            random.choice([b"", b"[" * 50_000, b"\x93NUMPY\1\0", b"\xff\0", random.randbytes(300)])
        )
    return f"{path.name}: {way}"


def _edit(path: Path, random: Random) -> str:
    """Change, or take out, one value of a JSON file, at any depth; checksums are made anew, left or taken out."""
    told = json.loads(path.read_bytes())
    at, names = told, []
    while isinstance(at, dict | list) and at:
        name = random.choice(list(at) if isinstance(at, dict) else range(len(at)))
        names.append(str(name))
        if not isinstance(at[name], dict | list) or not at[name] or random.random() < 0.3:
            how = random.choice(["drop", "value", "value"])
            if how == "drop":
                del at[name]
            else:
                at[name] = random.choice(VALUES)
            break
        at = at[name]
    checksum = random.choice(["kept", "anew", "none"])
    if isinstance(told, dict) and "checksum" in told and checksum != "kept":
        told.pop("checksum")
        told = with_checksum(told) if checksum == "anew" else told
    path.write_text(json.dumps(told))
    return f"{'.'.join(names)}, checksum {checksum}"
