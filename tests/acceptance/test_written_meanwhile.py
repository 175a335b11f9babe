"""Another process finishes a result while this one looks at its folder: at every system call, the folder is gone."""

import io
import json
import os
from pathlib import Path

import pytest

from varlen.feed import opening
from varlen.files.written import LOCK, PARTIAL, WORK
from varlen.offline import outputs
from varlen.offline.outputs import check_unfinished

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
    "written": lambda folder: opening._written(folder),
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
