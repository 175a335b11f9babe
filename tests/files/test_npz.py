"""Archives of few bytes that unpack to many: read piece by piece, and refused where they hold less than they say."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import numpy as np
import pytest
from tests.files.shared_values import PEAK

from varlen.documents.source import open_source
from varlen.errors import SourceError

LIMITED = (
    PEAK
    + """
import sys
from varlen.documents.source import open_source
source = open_source(sys.argv[1])
before = peak()
documents = tokens = 0
for part in source.parts():
    for found in source.read(part):
        documents, tokens = documents + len(found), tokens + len(found.tokens)
print(documents, tokens, (peak() - before) // 1024)
"""
)


@pytest.mark.parametrize("form", ["empty documents", "short documents", "one document"])
def test_an_npz_that_unpacks_to_much_is_read_in_little_memory(tmp_path, form):
    count = 40_000_000
    offsets = {
        "empty documents": np.zeros(count, dtype=np.int64),
        "short documents": np.arange(0, count + 1, 1000),
        "one document": np.array([0, count]),
    }[form]
    ids = np.zeros(0 if form == "empty documents" else count, dtype=np.int64)
    np.savez_compressed(tmp_path / "a.npz", input_ids=ids, offsets=offsets)
    assert (tmp_path / "a.npz").stat().st_size < 1_000_000

    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "a.npz")], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr[-2000:]
    documents, tokens, grown = map(int, done.stdout.split())
    assert documents == len(offsets) - 1
    assert tokens == len(ids)
    assert grown < (900 if form == "one document" else 250)


def test_ids_that_need_more_than_32_bits_are_still_told_in_a_long_document(tmp_path):
    ids = np.zeros(3 << 20, dtype=np.int64)
    ids[2_500_000] = 1 << 40
    np.savez_compressed(tmp_path / "a.npz", input_ids=ids, offsets=np.array([0, len(ids)]))
    source = open_source(tmp_path / "a.npz")

    with pytest.raises(SourceError, match=f"{1 << 40}|{1 << 40:,}"):
        list(source.read(source.parts()[0]))


def test_an_npz_that_holds_fewer_values_than_it_says_is_refused_before_they_are_read(tmp_path):
    count = 1_900_000_000
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name, shape, values in (("input_ids", count, [1] * 9), ("offsets", 2, [0, count])):
            with archive.open(f"{name}.npy", "w") as member:
                described = {"descr": "<i8", "fortran_order": False, "shape": (shape,)}
                np.lib.format.write_array_header_1_0(member, described)
                member.write(np.array(values, dtype=np.int64).tobytes())
    source = open_source(tmp_path / "a.npz")

    with pytest.raises(SourceError, match=r"a\.npz: `input_ids` ends too early"):
        list(source.read(source.parts()[0]))
