"""Files of ready tokens that are read where they lie: what tells that they, or their index, were changed."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.store.test_bin_idx import write_pair

import varlen as vl
from varlen.errors import SourceError, StateError
from varlen.store import token_files
from varlen.store.open import open_tokens

NUM = 500_000
"""Documents, of which an index takes 10 MB: more than samples cover."""
SAID = "was replaced or rewritten since the files were listed"


@pytest.fixture
def pair(tmp_path) -> Path:
    """A large index, two of whose lengths and places between all samples can be swapped."""
    lengths = np.full(NUM, 4, dtype=np.int32)
    begins = (np.cumsum(np.concatenate([[0], lengths]))[:-1] * 2).astype(np.int64)
    prefix = tmp_path / "data"
    Path(f"{prefix}.bin").write_bytes((np.arange(NUM * 4) % 60_000).astype(np.uint16).tobytes())
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, NUM, NUM + 1))
        file.write(lengths.tobytes() + begins.tobytes() + np.arange(NUM + 1, dtype=np.int64).tobytes())
    return prefix


def between_samples(size: int) -> int:
    """Return a document whose length and whose next one's place no sample holds."""
    starts = (size - token_files._SAMPLE_BYTES) * np.arange(64) // 63
    numbers = np.arange(NUM - 2)
    held = np.zeros(len(numbers), dtype=bool)
    for places in (34 + 4 * numbers, 34 + 4 * NUM + 8 * (numbers + 1)):
        for more in (0, 7):
            at = places + more
            sample = np.searchsorted(starts, at, side="right") - 1
            held |= at < starts[sample] + token_files._SAMPLE_BYTES
    return int(np.flatnonzero(~held)[0])


def rewrite(path: Path, *, keep_times: bool = False) -> None:
    """Make one document shorter and the next one longer, at the same size and between all samples."""
    said, at = path.stat(), between_samples(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(34 + 4 * at)
        file.write(np.array([3, 5], dtype=np.int32).tobytes())
        file.seek(34 + 4 * NUM + 8 * (at + 1))
        file.write(np.array([8 * (at + 1) - 2], dtype=np.int64).tobytes())
    if keep_times:
        os.utime(path, ns=(said.st_atime_ns, said.st_mtime_ns))


def loader_of(prefix: Path, **others: object) -> vl.PackedLoader:
    given = {"capacity": 4096, "global_batch_size": 4, "worker": "thread", "window": 4096, **others}
    return vl.PackedLoader(f"{prefix}.idx", mode="indexed", **given)


def test_an_index_is_told_by_all_of_it_and_its_window_table_with_it(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with loader_of(pair) as loader:
        next(loader)
        state, before = loader.state_dict(), len(loader)
    tables = set((tmp_path / "cache/varlen/tables").iterdir())
    sampled = token_files.sampled_mark(f"{pair}.idx")

    rewrite(Path(f"{pair}.idx"))

    assert token_files.sampled_mark(f"{pair}.idx") == sampled, "the change lies between the samples"
    with loader_of(pair) as loader:
        with pytest.raises(StateError, match="didn't grow from it"):
            loader.load_state_dict(state)
        assert len(loader) <= before + 1
        assert set((tmp_path / "cache/varlen/tables").iterdir()) - tables, "a table of its own"


def test_a_state_of_an_earlier_version_goes_on_with_a_sentence(pair, monkeypatch, caplog):
    with monkeypatch.context() as patched:
        patched.setattr("varlen.store.bin_idx.whole_mark", token_files.sampled_mark)
        with loader_of(pair) as loader:
            next(loader)
            state, expected = loader.state_dict(), next(loader).input_ids.tobytes()
    with loader_of(pair) as loader:
        loader.load_state_dict(state)
        assert next(loader).input_ids.tobytes() == expected
        assert loader.state_dict()["at"]["grown"] != state["at"]["grown"]
    assert "the state is of an earlier version" in caplog.text


def test_marks_of_small_indices_are_what_they_were(tmp_path):
    write_pair(tmp_path / "small", [[[1, 2]], [[3]]])
    assert token_files.whole_mark(tmp_path / "small.idx") == token_files.sampled_mark(tmp_path / "small.idx")


@pytest.mark.parametrize("keep_times", [False, True])
def test_an_index_that_is_rewritten_while_it_is_read_is_told(pair, keep_times):
    store = open_tokens(f"{pair}.idx")
    assert store is not None
    assert store.fingerprint
    store.lengths(np.array([0]), np.array([0]))
    rewrite(Path(f"{pair}.idx"), keep_times=keep_times)
    with pytest.raises(SourceError, match=f"data.idx {SAID}: its content is another"):
        store.lengths(np.array([1]), np.array([0]))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_tokens_that_are_replaced_while_they_are_read_are_told(tmp_path, suffix):
    write_pair(tmp_path / "data", [[[n % 100] * 9] for n in range(5000)])
    path = tmp_path / f"data{suffix}"
    with loader_of(tmp_path / "data", capacity=64, window=64, epochs=3) as loader:
        next(loader)
        content = path.read_bytes()
        (tmp_path / "other").write_bytes(content[:-8] + bytes(8))
        (tmp_path / "other").replace(path)
        with pytest.raises(SourceError, match=f"data{suffix} {SAID}"):
            list(loader)


def test_tokens_that_are_touched_are_read_on(tmp_path):
    write_pair(tmp_path / "data", [[[n % 100] * 9] for n in range(5000)])
    with loader_of(tmp_path / "data", capacity=64, window=64) as loader:
        expected = [batch.input_ids.tobytes() for batch in loader]
    with loader_of(tmp_path / "data", capacity=64, window=64) as loader:
        found = [next(loader).input_ids.tobytes()]
        for suffix in (".bin", ".idx"):
            os.utime(tmp_path / f"data{suffix}")
        found += [batch.input_ids.tobytes() for batch in loader]
    assert found == expected


def write_arrow(path: Path, add: int) -> None:
    table = pa.table({"input_ids": [[(n + add) % 100] * 50 for n in range(5000)]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=500)


def test_a_mapped_arrow_file_that_is_replaced_or_rewritten_is_told(tmp_path):
    path, other = tmp_path / "data.arrow", tmp_path / "other.arrow"
    write_arrow(other, 1)
    for in_place in (False, True):
        write_arrow(path, 0)
        with vl.PackedLoader(
            path,
            capacity=512,
            global_batch_size=2,
            worker="thread",
            window=64,
            mode="indexed",
            epochs=3,
        ) as loader:
            next(loader)
            if in_place:
                with path.open("r+b") as file:
                    file.write(other.read_bytes())
            else:
                (tmp_path / "copy").write_bytes(other.read_bytes())
                (tmp_path / "copy").replace(path)
            with pytest.raises(SourceError, match=SAID):
                list(loader)


def test_a_fifo_in_place_of_a_pair_is_told(tmp_path):
    write_pair(tmp_path / "data", [[[1, 2]]])
    store = open_tokens(tmp_path / "data.bin")
    assert store is not None
    (tmp_path / "data.bin").unlink()
    os.mkfifo(tmp_path / "data.bin")
    with pytest.raises(SourceError):
        store.gather(np.array([0]), np.array([0]), np.array([0]), np.array([2]))
