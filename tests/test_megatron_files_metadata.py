"""The metadata beside packed files: what runs of the releases say of their packs, read, checked and written."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_rows import many_rows

from varlen.adapters.megatron import (
    PackCounts,
    combined_metadata,
    metadata_entry,
    metadata_path,
    read_metadata,
    write_metadata,
)
from varlen.adapters.megatron.files.reader import from_dicts
from varlen.errors import LengthsError, SettingError, SourceError

PACKS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=6)
TRAIN = {
    "dataset_max_seqlen": 4000,
    "max_samples_per_bin": 12,
    "packing_factor": 5.25,
    "packing_efficiency": 99.01,
    "pack_size": 4096,
    "min_packed_seqlen": 3100,
}
VALID = TRAIN | {"dataset_max_seqlen": 3900, "max_samples_per_bin": 15, "min_packed_seqlen": 100}


def told_by_the_release(packs: list[list[int]], pack_size: int) -> dict[str, float]:
    """What a release of Megatron-Bridge says of packs, told in plain Python."""
    everything = [length for pack in packs for length in pack]
    sums = [sum(pack) for pack in packs]
    return {
        "dataset_max_seqlen": max(everything),
        "max_samples_per_bin": max(len(pack) for pack in packs),
        "packing_factor": round(len(everything) / len(packs), 2),
        "packing_efficiency": round(sum(sums) / len(sums) / pack_size * 100, 2),
        "pack_size": pack_size,
        "min_packed_seqlen": min(sums),
    }


@given(PACKS, st.integers(9, 99))
def test_an_entry_says_what_a_release_says_also_added_up_pack_by_pack(packs, pack_size):
    lengths = [length for pack in packs for length in pack]
    offsets = [sum(map(len, packs[:number])) for number in range(len(packs) + 1)]
    counts = PackCounts()
    for pack in packs:
        rows = from_dicts(
            [
                {
                    "input_ids": [0] * (sum(pack) + len(pack)),
                    "loss_mask": [0] * (sum(pack) + len(pack)),
                    "seq_start_id": [sum(pack[:number]) + number for number in range(len(pack))],
                }
            ]
        )
        counts.add_rows(rows)

    expected = told_by_the_release(packs, pack_size)
    assert list(metadata_entry(lengths, offsets, pack_size).items()) == list(expected.items())
    assert counts.entry(pack_size) == expected


def test_entries_of_several_runs_are_read_and_combined_as_the_releases_do(tmp_path):
    path = tmp_path / "4096_metadata.jsonl"
    for text in (
        json.dumps([TRAIN, VALID]),
        f"{json.dumps(TRAIN)}\n{json.dumps(VALID)}\n",
        f"{json.dumps([TRAIN])}\n\n{json.dumps([VALID])}",
    ):
        path.write_text(text)
        assert read_metadata(path, pack_size=4096) == [TRAIN, VALID]
    path.write_text(json.dumps(TRAIN, indent=2))
    assert read_metadata(path) == [TRAIN]
    assert combined_metadata([TRAIN, VALID]) == {
        "max_samples_per_bin": 15,
        "dataset_max_seqlen": 4000,
        "min_packed_seqlen": 100,
    }
    with pytest.raises(SettingError, match="no entries"):
        combined_metadata([])


def test_a_run_that_is_repeated_adds_nothing_unless_it_is_asked_for(tmp_path):
    path = metadata_path(tmp_path / "packed" / "training_4096.idx.parquet", 4096)
    assert path == tmp_path / "packed" / "4096_metadata.jsonl"

    for entry in (TRAIN, VALID, TRAIN):
        write_metadata(path, entry)
    assert path.read_text() == json.dumps([TRAIN, VALID])  # the bytes that the releases write
    write_metadata(path, TRAIN, repeat=True)
    assert read_metadata(path) == [TRAIN, VALID, TRAIN]
    write_metadata(path, VALID, append=False)
    assert read_metadata(path) == [VALID]
    assert [file.name for file in path.parent.iterdir()] == ["4096_metadata.jsonl"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"pack_size": 8192},
            "entry 2: `pack_size` is 8,192, but entry 1 has 4,096; each pack size has a file",
        ),
        ({"pack_size": "4096"}, "entry 2: `pack_size` must be a whole number from 1 on, got '4096'"),
        (
            {"max_samples_per_bin": 1.5},
            "entry 2: `max_samples_per_bin` must be a whole number from 1 on, got 1.5",
        ),
        (
            {"dataset_max_seqlen": True},
            "entry 2: `dataset_max_seqlen` must be a whole number from 0 on, got True",
        ),
        ({"min_packed_seqlen": -1}, "entry 2: `min_packed_seqlen` must be a whole number from 0 on, got -1"),
        ({"packing_factor": "x"}, "entry 2: `packing_factor` must be a number from 0 on, got 'x'"),
        ({"dataset_max_seqlen": 4097}, "`dataset_max_seqlen` is 4,097, more than `pack_size`, 4,096"),
        ({"min_packed_seqlen": 5000}, "`min_packed_seqlen` is 5,000, more than `pack_size`, 4,096"),
        ({"packing_factor": 99.0}, "`packing_factor` is 99.0, more than `max_samples_per_bin`"),
        ({"packing_efficiency": 120}, "`packing_efficiency` is 120, more than percent of a pack, 100"),
        (
            {"dataset_max_seqlen": 10, "max_samples_per_bin": 6},
            "`min_packed_seqlen` is 3,100, more than `max_samples_per_bin` documents of `dataset_max_seqlen`, 60",
        ),
        (
            {"dataset_max_seqlen": None, "min_packed_seqlen": None},
            "has no `dataset_max_seqlen` (2 keys of 4 missing)",
        ),
    ],
)
def test_entries_that_can_not_be_are_refused_by_file_entry_and_key(tmp_path, change, said):
    path = tmp_path / "4096_metadata.jsonl"
    entry = {key: value for key, value in (TRAIN | change).items() if value is not None}
    path.write_text(json.dumps([TRAIN, entry]))

    with pytest.raises(SourceError, match=re.escape(said)) as caught:
        read_metadata(path)
    assert str(path) in str(caught.value)


def test_files_that_hold_no_entries_are_refused(tmp_path):
    path = tmp_path / "m.jsonl"
    with pytest.raises(SourceError, match=r"m\.jsonl isn't there: constant shapes \(pad_cu_seqlens\)"):
        read_metadata(path)
    for text, said in (
        ("[]", "holds no entry"),
        ("", "holds no entry"),
        (json.dumps([TRAIN])[:-5], "isn't JSON, or was cut off"),
        (f"{json.dumps(TRAIN)}\n{{", "isn't JSON, or was cut off: line 2"),
        ("[1]", "entry 1 must be an object, got int"),
        ("[" * 5000, "isn't JSON"),
    ):
        path.write_text(text)
        with pytest.raises(SourceError, match=said):
            read_metadata(path)
    path.write_bytes(b"\xff")
    with pytest.raises(SourceError, match="can't be read"):
        read_metadata(path)


def test_an_entry_that_contradicts_what_is_there_or_itself_is_not_written(tmp_path):
    path = tmp_path / "m.jsonl"
    write_metadata(path, TRAIN)
    with pytest.raises(SourceError, match="`pack_size` is 4,096, but packed_sequence_size is 8,192"):
        write_metadata(path, TRAIN | {"pack_size": 8192})
    with pytest.raises(SourceError, match="the entry contradicts itself"):
        write_metadata(path, TRAIN | {"dataset_max_seqlen": 5000}, append=False)
    assert read_metadata(path) == [TRAIN]


def test_packs_that_no_entry_can_be_made_of_are_refused():
    with pytest.raises(LengthsError, match="there are no packs"):
        metadata_entry([], [0], 8)
    with pytest.raises(LengthsError, match="a document has 9 positions, but the pack size is 8"):
        metadata_entry([9], [0, 1], 8)
    with pytest.raises(LengthsError, match="there are no packs"):
        PackCounts().add_rows(from_dicts([])).entry(8)
    assert PackCounts().add_rows(from_dicts(many_rows(3, 9))).num_packs == 3
