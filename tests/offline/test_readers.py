"""A packed folder is a data set for whatever reads folders of Parquet or Arrow; sets of 0.1.0 stay results."""

import json
import shutil
from pathlib import Path

import datasets
import pandas
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from tests.support.offline_packs import contents, pack, table_of, write_texts

from varlen.documents.source import open_source
from varlen.errors import SettingError, SourceError
from varlen.files.finding import find_files
from varlen.files.written import skipped_path
from varlen.offline.crew import Crew
from varlen.offline.pack import PackSettings, pack_source


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
