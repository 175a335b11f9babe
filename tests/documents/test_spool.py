"""The spool holds the rows that living processes read, and nothing else; what isn't ours stays."""

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from varlen.documents import spool as spooling
from varlen.documents.source import open_source
from varlen.documents.spool import spool
from varlen.errors import SettingError, SourceError

ROWS = [{"text": "a"}, {"text": "b"}]
HOLDER = """
import sys
from varlen.documents.source import open_source
source = open_source([{"text": "a"}, {"text": "b"}], "bytes")
print(source.files[0].place, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "varlen" / "rows"


def holder():
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, Path(process.stdout.readline().strip())


def test_a_file_is_there_as_long_as_a_source_of_it(cache):
    first, second = open_source(ROWS, "bytes"), open_source(ROWS, "bytes")
    place = Path(first.files[0].place)

    assert place == Path(second.files[0].place)
    assert place.parent.parent == cache
    assert place.read_text() == '{"text": "a"}\n{"text": "b"}\n'
    del first
    gc.collect()
    assert place.exists()
    del second
    gc.collect()
    assert list(cache.iterdir()) == []


def test_processes_share_a_file_and_the_last_one_removes_it(cache):
    process, place = holder()
    source = open_source(ROWS, "bytes")

    assert Path(source.files[0].place) == place
    assert len(list(cache.iterdir())) == 1
    process.communicate("\n", timeout=60)
    assert place.exists()
    del source
    gc.collect()
    assert list(cache.iterdir()) == []


def test_many_processes_that_make_one_file_at_once_find_one(cache):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    places = {process.stdout.readline().strip() for process in started}

    assert len(places) == 1
    assert len(list(cache.iterdir())) == 1
    for process in started:
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
    assert list(cache.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_nothing_else(cache):
    process, place = holder()
    process.kill()
    process.communicate(timeout=60)
    foreign = cache / "thesis"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    (foreign / "lock").write_text("")
    beside = cache / "marked"
    beside.mkdir()
    (beside / "varlen.json").write_text(json.dumps({"varlen": "0", "kind": "rows"}))
    (beside / "lock").write_text("")
    (beside / "thesis.txt").write_text("mine too")
    assert place.exists()

    open_source([{"text": "others"}], "bytes")
    gc.collect()
    assert not place.exists()
    assert {path.name for path in cache.rglob("thesis.txt")} == {"thesis.txt"}
    assert (foreign / "thesis.txt").exists()
    assert (beside / "thesis.txt").exists()


def test_a_fork_that_ends_leaves_the_file_to_the_process_that_made_it():
    source = open_source(ROWS, "bytes")
    child = os.fork()
    if child == 0:
        source.files[0].hold.release()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)

    assert Path(source.files[0].place).exists()


def test_a_source_in_another_process_holds_nothing_there():
    source = open_source(ROWS, "bytes")
    other = pickle.loads(pickle.dumps(source))

    assert other.files[0].hold is None
    assert other.files == source.files
    del other
    gc.collect()
    assert Path(source.files[0].place).exists()


def test_where_the_cache_is_no_folder_the_temporary_folder_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    source = open_source(ROWS, "bytes", cache=tmp_path / "file" / "cache")
    place = Path(source.files[0].place)

    assert place.is_relative_to(tmp_path / f"varlen-{os.getuid()}")
    assert place.exists()
    assert (tmp_path / f"varlen-{os.getuid()}").stat().st_mode & 0o077 == 0
    del source
    gc.collect()
    assert not place.exists()


def test_a_temporary_folder_that_others_can_write_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"varlen-{os.getuid()}").mkdir()
    (tmp_path / f"varlen-{os.getuid()}").chmod(0o777)
    (tmp_path / "file").write_text("")
    source = open_source(ROWS, "bytes", cache=tmp_path / "file" / "cache")

    assert not Path(source.files[0].place).is_relative_to(tmp_path / f"varlen-{os.getuid()}")


def test_a_full_disk_is_said_and_nothing_half_written_is_left(cache):
    def write(sink):
        sink.write(b"abc")
        raise OSError(28, "No space left on device")

    with pytest.raises(SettingError, match=r"the disk is full \(.* MB free\); make room, or name a folder"):
        spool(write, spooling.TEXT_ROWS, None)
    assert list(cache.iterdir()) == []


def test_rows_that_fail_leave_nothing(cache):
    def rows():
        yield {"text": "a"}
        raise KeyError("gone")

    with pytest.raises(SourceError, match=r"memory .rows. failed after row 1: KeyError: 'gone'"):
        open_source(rows, "bytes")
    assert list(cache.iterdir()) == []


def test_a_released_file_is_refused_with_a_sentence():
    source = open_source(ROWS, "bytes")
    source.files[0].hold.release()

    with pytest.raises(SourceError, match=r"memory \(list of 2 rows\) can't be read any more"):
        list(source.read(source.parts()[0]))


def test_something_else_under_the_name_of_the_content_is_left_alone(cache):
    source = open_source(ROWS, "bytes")
    name = Path(source.files[0].place).parent.name
    source.files[0].hold.release()
    (cache / name).mkdir()
    (cache / name / "thesis.txt").write_text("mine")
    spooling_tries, spooling._TRIES = spooling._TRIES, 2
    try:
        again = open_source(ROWS, "bytes")
    finally:
        spooling._TRIES = spooling_tries

    assert Path(again.files[0].place).exists()
    assert (cache / name / "thesis.txt").read_text() == "mine"
