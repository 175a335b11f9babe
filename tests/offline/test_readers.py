"""A packed folder is a data set for whatever reads folders, old ones too; what stores keep of rows' weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from tests.support.listed_files import find_files
from tests.support.offline_packs import contents, pack, table_of, write_texts
from tests.support.weighted_rows import chats, expected, read, write

from varlen.documents.source import open_source
from varlen.errors import SettingError, SourceError
from varlen.files.written import skipped_path
from varlen.offline.crew import Crew
from varlen.offline.index import index_source
from varlen.offline.pack import PackSettings, pack_source
from varlen.store.store import open_store


@pytest.fixture(scope="module", params=["packed", "dev-test/train"])
def home(request, tmp_path_factory):
    """Sets of several parts of either format, with a list of what was skipped, in folders that look like splits."""
    home = tmp_path_factory.mktemp("home")
    write_texts(home / "a.jsonl")
    with (home / "a.jsonl").open("a") as file:
        file.write("{\n")
    for format_ in ("parquet", "arrow"):
        pack(open_source(home / "a.jsonl", on_error="skip"), home / format_ / request.param, format=format_)
    return lambda format_: home / format_ / request.param


def loaded(*arguments, **named) -> list[dict]:
    return datasets.load_dataset(*arguments, split="train", **named).to_list()


READERS = {
    "pq.read_table": lambda folder: pq.read_table(folder).to_pylist(),
    "pq.ParquetDataset": lambda folder: pq.ParquetDataset(folder).read().to_pylist(),
    "pyarrow.dataset": lambda folder: pyarrow.dataset.dataset(folder).to_table().to_pylist(),
    "pandas": lambda folder: [
        {name: value.tolist() for name, value in row.items()}
        for row in pandas.read_parquet(folder).to_dict("records")
    ],
}
LOADERS = {
    "load_dataset(folder)": lambda folder, format_: loaded(str(folder)),
    "load_dataset(format, data_dir=folder)": lambda folder, format_: loaded(format_, data_dir=str(folder)),
    "load_dataset(format, data_files=glob)": lambda folder, format_: loaded(
        format_, data_files=f"{folder}/*.{format_}"
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_folder_is_a_parquet_data_set(home, reader):
    folder = home("parquet")

    assert READERS[reader](folder) == table_of(folder).to_pylist()


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_folder_is_a_data_set_of_hugging_face(home, loader, format_, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)

    assert LOADERS[loader](home(format_), format_) == table_of(home(format_)).to_pylist()


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_all_that_is_no_row_has_a_name_that_spark_and_pyarrow_pass_over(home, format_):
    names = sorted(path.name for path in home(format_).iterdir())

    assert names[:2] == [".manifest.json", ".skipped.log"]
    assert len(names) > 4
    assert {Path(name).suffix for name in names if not name.startswith((".", "_"))} == {f".{format_}"}


@pytest.fixture
def old(tmp_path):
    """A packed set as version 0.1.0 left it, with a record skipped."""
    write_texts(tmp_path / "a.jsonl", count=5)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{\n")
    pack(open_source(tmp_path / "a.jsonl", on_error="skip"), tmp_path / "old")
    as_of_0_1_0(tmp_path / "old")
    return tmp_path / "old"


def as_of_0_1_0(folder: Path) -> None:
    (folder / ".manifest.json").rename(folder / "manifest.json")
    if (folder / ".skipped.log").exists():
        (folder / ".skipped.log").rename(folder / "skipped.log")


def test_a_set_of_version_0_1_0_is_found_finished_and_replaced_on_request_alone(old):
    before = contents(old)
    source = open_source(old.parent / "a.jsonl", on_error="skip")

    again = pack(source, old)

    assert again.was_there
    assert contents(old) == before
    assert skipped_path(old).read_text().count("\n") == again.manifest["num_skipped"] == 1
    with pytest.raises(SettingError, match="holds a set made from other data or settings"):
        pack(source, old, seed=5)
    assert contents(old) == before
    pack(source, old, seed=5, overwrite=True)
    assert sorted(set(contents(old)) ^ set(before)) == [
        ".manifest.json",
        ".skipped.log",
        "manifest.json",
        "skipped.log",
    ]


@pytest.mark.parametrize("is_old", [True, False])
def test_rows_are_read_by_folder_and_glob_and_what_lies_beside_them_is_not(old, is_old):
    if not is_old:
        (old / "manifest.json").rename(old / ".manifest.json")
        (old / "skipped.log").rename(old / ".skipped.log")
    parts = sorted(path.name for path in old.glob("part-*"))

    assert [file.name for file in find_files(old)] == parts
    assert [file.name for file in find_files(f"{old}/*")] == parts
    with pytest.raises(SourceError, match="old is a packed set that varlen wrote, and would be read as data"):
        find_files(old.parent)
    with pytest.raises(SourceError, match="old is a packed set that varlen wrote"):
        find_files(f"{old.parent}/**/*")


@pytest.mark.parametrize("is_old", [True, False])
def test_pieces_are_refused_as_documents(tmp_path, is_old):
    write_texts(tmp_path / "a.jsonl")
    pack(tmp_path / "a.jsonl", tmp_path / "cut", capacity=16, overlong="split")
    if is_old:
        as_of_0_1_0(tmp_path / "cut")

    with pytest.raises(SourceError, match=r"was packed with [0-9]+ documents cut into pieces"):
        open_source(tmp_path / "cut")


def test_what_a_run_of_version_0_1_0_left_unfinished_ends_with_one_manifest(tmp_path, monkeypatch):
    write_texts(tmp_path / "a.jsonl")
    pack(tmp_path / "a.jsonl", tmp_path / "whole")

    def die(*_arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("varlen.offline.pack.finish", die)
        with pytest.raises(KeyboardInterrupt):
            pack(tmp_path / "a.jsonl", tmp_path / "out")
    left = tmp_path / "out.partial"
    (left / "manifest.json").write_text(json.dumps({"varlen": "0.1.0", "kind": "packed"}))
    (left / "skipped.log").write_text("")

    pack(tmp_path / "a.jsonl", tmp_path / "out")

    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_store_of_tokens_keeps_its_names_and_takes_either(tmp_path):
    write_texts(tmp_path / "a.jsonl")
    pack(tmp_path / "a.jsonl", tmp_path / "out", tokens=tmp_path / "tokens")
    assert (tmp_path / "tokens" / "manifest.json").is_file()
    moved = shutil.copytree(tmp_path / "tokens", tmp_path / "moved")
    (moved / "manifest.json").rename(moved / ".manifest.json")

    pack_source(
        moved, tmp_path / "again", PackSettings(capacity=256, part_tokens=1000), crew=Crew(processes=1)
    )

    assert table_of(tmp_path / "again") == table_of(tmp_path / "out")


ON = {"row_weights": True}


def stored(store: Any) -> list[Any]:
    """Every document of a store, with what its tokens weigh."""
    found = []
    for shard in range(len(store.shards)):
        count = int(store.documents[shard])
        shards, numbers = np.full(count, shard), np.arange(count)
        lengths = store.lengths(shards, numbers)
        for n, length in zip(numbers, lengths):
            tokens, mask = store.gather(shards[:1], np.array([n]), np.zeros(1, np.int64), np.array([length]))
            weights = np.ones(len(tokens)) if mask is None else mask
            found.append((tuple(tokens.tolist()), tuple(map(float, weights))))
    return found


def test_a_store_holds_weights_and_counts_labels(tmp_path):
    rows = chats(40)
    write(tmp_path / "a.jsonl", rows)

    store, _ = index_source(open_source(tmp_path / "a.jsonl", **ON), tmp_path / "store")

    wanted = expected(rows)
    assert stored(store) == wanted
    labels = [sum(weight > 0 for weight in weights[1:]) for _, weights in wanted]
    assert store.manifest["num_targets"] == sum(labels)
    shards, numbers = np.zeros(40, np.int64), np.arange(40)
    lengths = store.lengths(shards, numbers)
    assert store.count_targets(shards, numbers, np.zeros(40, np.int64), lengths).tolist() == labels
    starts, stops = lengths // 3, lengths - 1
    cut = [sum(w > 0 for w in weights[a + 1 : b]) for (_, weights), a, b in zip(wanted, starts, stops)]
    assert store.count_targets(shards, numbers, starts, stops).tolist() == cut
    assert not (tmp_path / "store" / "00000-0000" / "loss_mask.bin").exists()


def test_pieces_of_shards_with_masks_weights_and_neither_are_read_together(tmp_path):
    files = {
        "0.jsonl": chats(3, 1, weights=(1,)),
        "1.jsonl": chats(9, 2, weights=(0, 1)),
        "2.jsonl": chats(9, 3),
    }
    for name, rows in files.items():
        write(tmp_path / name, rows)
    (tmp_path / "3.txt").write_text("text " * 9)  # all of whose tokens are trained on
    for number, name in enumerate([*files, "3.txt"]):
        index_source(open_source(tmp_path / name, **ON), tmp_path / f"s{number}")
    source = open_source([str(tmp_path / name) for name in [*files, "3.txt"]], **ON)
    store, _ = index_source(source, tmp_path / "store")
    wanted = [one for rows in files.values() for one in expected(rows)] + read(tmp_path / "3.txt")

    assert stored(store) == wanted
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(len(store.documents)), store.documents)
    numbers = np.concatenate([np.arange(n) for n in store.documents])
    for _ in range(20):
        some = draw.integers(0, len(wanted), 8)
        lengths = store.lengths(owners[some], numbers[some])
        starts = draw.integers(0, lengths)
        tokens, mask = store.gather(owners[some], numbers[some], starts, lengths - starts)
        held = [wanted[n] for n in some]
        assert tokens.tolist() == [t for (ids, _), a in zip(held, starts) for t in ids[a:]]
        marks = np.ones(len(tokens)) if mask is None else mask
        assert marks.tolist() == [w for (_, weights), a in zip(held, starts) for w in weights[a:]]


def test_a_store_without_other_weights_is_what_it_was_to_the_byte(tmp_path):
    write(tmp_path / "a.jsonl", chats(20, weights=(0, 1)))

    index_source(open_source(tmp_path / "a.jsonl"), tmp_path / "off")
    index_source(open_source(tmp_path / "a.jsonl", **ON), tmp_path / "on")

    for name in ("tokens.bin", "loss_mask.bin", "offsets.npy", "targets.npy", "shard.json"):
        one, other = (tmp_path / store / "00000-0000" / name for store in ("off", "on"))
        assert one.read_bytes() == other.read_bytes(), name
    off, on = (json.loads((tmp_path / store / "manifest.json").read_text()) for store in ("off", "on"))
    assert "row_weights" not in off["source"]
    assert on["source"]["row_weights"] is True
    assert off["format"] == on["format"] == 1
    assert "has_weights" not in json.dumps(off)


def test_a_reader_that_knows_no_weights_refuses_a_store_with_some(tmp_path):
    write(tmp_path / "a.jsonl", chats(20))
    index_source(open_source(tmp_path / "a.jsonl", **ON), tmp_path / "store")

    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())

    assert manifest["format"] == 2  # version 0.1.0 takes 1 alone
    (tmp_path / "store" / "00000-0000" / "loss_weights.bin").write_bytes(b"1234")
    with pytest.raises(SourceError, match="is damaged"):
        stored(open_store(tmp_path / "store"))


def test_the_option_makes_another_store_and_off_it_makes_the_same(tmp_path):
    write(tmp_path / "a.jsonl", chats(6, weights=(0, 1)))
    usual, off, on = (
        open_source(tmp_path / "a.jsonl", **s).fingerprint for s in ({}, {"row_weights": False}, ON)
    )

    assert usual == off != on


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
@pytest.mark.parametrize("overlong", ["split", "truncate"])
def test_a_packed_set_holds_weights_that_are_read_again(format_, overlong, tmp_path):
    rows = chats(40)
    write(tmp_path / "a.jsonl", rows)
    source = open_source(tmp_path / "a.jsonl", **ON)
    settings_ = PackSettings(capacity=700, overlong=overlong, format=format_)

    made = pack_source(source, tmp_path / "packed", settings_)

    wanted = sorted((ids, (0.0, *weights[1:])) for ids, weights in expected(rows))
    assert sorted(read(made.folder, **ON)) == wanted
    assert made.manifest["num_targets"] == sum(w > 0 for _, weights in wanted for w in weights)
    with pytest.raises(SourceError, match=r"of `loss_weights`; only 0 and 1 can be kept.*row_weights=True"):
        read(made.folder)
    write(tmp_path / "a.jsonl", chats(40, weights=(0, 1)))
    with pytest.raises(SettingError, match="holds a set made from other data or settings"):
        pack_source(open_source(tmp_path / "a.jsonl"), made.folder, settings_)


def test_a_packed_set_with_weights_is_a_data_set_like_any_other(tmp_path):
    from datasets import load_dataset

    rows = chats(30)
    write(tmp_path / "a.jsonl", rows)
    settings_ = PackSettings(capacity=256, overlong="split")
    pack_source(open_source(tmp_path / "a.jsonl", **ON), tmp_path / "packed", settings_)

    folder, cache = str(tmp_path / "packed"), str(tmp_path / "cache")
    held = load_dataset("parquet", data_dir=folder, split="train", cache_dir=cache)

    assert held.column_names == ["input_ids", "labels", "seq_lengths", "loss_weights"]
    for row in held:
        assert [label != -100 for label in row["labels"]] == [weight > 0 for weight in row["loss_weights"]]
    assert sorted(read(held, **ON)) == sorted(read(tmp_path / "packed", **ON))
