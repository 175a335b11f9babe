"""Files that change while they are open: by both times of an inode, and by content where only those differ."""

import os
import time
from dataclasses import replace

import pytest
from tests.files.test_replaced import KINDS, SAID, by_rename, content, in_place

from varlen.errors import SourceError
from varlen.files import fingerprints
from varlen.files.finding import find_files
from varlen.files.opening import open_stored


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_rewritten_in_place_with_its_old_time_is_told_while_it_is_open(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    path.write_bytes(content(kind, "a", tmp_path))
    found = find_files(path)
    [file] = [replace(file, known=fingerprints.known_prints([file])[0]) for file in found]
    said = path.stat()
    with open_stored(file, 64) as stored:
        before = stored.read(10)
        time.sleep(0.02)  # file systems keep a time for some milliseconds
        in_place(path, content(kind, "b", tmp_path))
        os.utime(path, ns=(said.st_atime_ns, said.st_mtime_ns))
        assert len(before) == 10
        with pytest.raises(SourceError, match=SAID):
            stored.read()


def test_an_open_file_whose_name_or_rights_change_is_read_on(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content("jsonl", "a", tmp_path))
    [file] = [replace(file, known=fingerprints.known_prints([file])[0]) for file in find_files(path)]
    changes = [lambda: path.chmod(0o600), lambda: os.link(path, tmp_path / "other"), path.unlink]
    changes.insert(2, lambda: by_rename(path, content("jsonl", "a", tmp_path)))
    for change in changes:
        with open_stored(file, 64) as stored:
            before = stored.read(10)
            time.sleep(0.02)
            change()
            assert before + stored.read() == content("jsonl", "a", tmp_path)
