"""What is free on a full disk is measured while it is full, before what can't be finished is removed."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.offline_packs import write_texts
from tests.support.training import Notes, settings, write_store

from varlen.documents import spool as spool_module
from varlen.documents.source import open_source
from varlen.errors import VarlenError
from varlen.files import ours
from varlen.offline import index as index_module
from varlen.offline import pack
from varlen.offline.index import index_source
from varlen.offline.pack import PackSettings, pack_source
from varlen.train import checkpoint, model
from varlen.train.trainer import train


def fill(patch, folder):
    """A disk that has 9 MB as soon as nothing is in the making on it."""

    def usage(_):
        is_making = any(folder.rglob("*.part")) or any(folder.rglob(".making-*"))
        return SimpleNamespace(free=0 if is_making else 9_000_000)

    patch.setattr(shutil, "disk_usage", usage)


def raising(*given, **_):
    for one in given:
        if isinstance(one, Path):
            one.touch()  # what is in the making is there when the disk is full
    raise OSError(errno.ENOSPC, "No space left on device")


def packed(folder):
    write_texts(folder / "a.jsonl")
    pack_source(open_source(str(folder / "a.jsonl")), folder / "out", PackSettings(capacity=128))


def indexed(folder):
    write_texts(folder / "a.jsonl")
    index_source(open_source(str(folder / "a.jsonl")), folder / "out")


def trained(folder):
    train(settings(write_store(folder / "data"), folder / "run", run__steps=1), Notes())


def spooled(folder):
    spool_module.spool(lambda sink: raising(), "rows.jsonl", folder / "cache")


PLACES = {
    "tokens of a shard": (index_module.ShardWriter, "append", indexed),
    "a shard": (index_module.ShardWriter, "close", indexed),
    "rows": (pack, "write_table", packed),
    "a note": (ours, "sync", indexed),
    "rows in memory": (None, "", spooled),
    "a checkpoint": (checkpoint, "sync", trained),
    "a model": (model, "sync", trained),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_full_disk_says_what_was_free_when_it_was_full(tmp_path, monkeypatch, name):
    where, function, run = PLACES[name]
    (tmp_path / "data").mkdir()
    if run is trained:
        write_store(tmp_path / "data")  # before the disk is full
    fill(monkeypatch, tmp_path)
    if where is not None:
        monkeypatch.setattr(where, function, raising)

    with pytest.raises(VarlenError, match=r"\(0 MB free\)"):
        run(tmp_path)
