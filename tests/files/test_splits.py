"""Which files of a folder are read where it holds several splits, against `datasets` and as told."""

import json
from pathlib import Path

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from varlen.documents.texts import read_texts
from varlen.errors import SourceError
from varlen.files.finding import Naming, find
from varlen.files.paths import Found

LAYOUTS = {
    "shards": "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet data/test-00000-of-00001.parquet",
    "shards of any name": "data/train-00000-of-00001.parquet data/random-00000-of-00001.parquet data/more.parquet",
    "one shard": "data/part-00000-of-00002.parquet data/part-00001-of-00002.parquet",
    "files": "train.jsonl test.jsonl",
    "valid": "train.jsonl valid.jsonl",
    "dev": "train.csv dev.csv",
    "behind a prefix": "wiki.train.jsonl wiki.test.jsonl",
    "between underscores": "my_train_0.jsonl my_train_1.jsonl my_eval_0.jsonl",
    "a file of no split": "train.jsonl test.jsonl extra.jsonl",
    "files below data": "data/train.csv data/validation.csv",
    "folders": "train/a.jsonl train/b.jsonl test/a.jsonl",
    "folders below data": "data/train/a.jsonl data/test/a.jsonl",
    "folders with more in their names": "train-clean/a.jsonl dev-other/a.jsonl",
    "a folder of no split": "train/a.jsonl test/b.jsonl other/c.jsonl",
    "no splits": "a.jsonl b.jsonl",
    "train alone": "train.jsonl train_2.jsonl",
    "two words in one name": "train.jsonl train-val.jsonl test.jsonl",
    "capitals": "TRAIN.jsonl TEST.jsonl",
    "C4": "en/c4-train.00000-of-00002.json en/c4-train.00001-of-00002.json en/c4-validation.00000-of-00001.json",
    "two data sets": "en/train.jsonl en/test.jsonl fr/train.jsonl fr/test.jsonl",
    "text": "train.txt test.txt",
    "words within a folder of train": "train/books-test.jsonl train/books-train.jsonl test/x.jsonl",
    "evaluation": "train/x.jsonl evaluation/x.jsonl",
    "digits at the word": "train1.jsonl test1.jsonl",
    "spaces": "my train.jsonl|my test.jsonl",
    "deep": "x/train/y/a.jsonl x/test/y/b.jsonl",
}
"""Names of files; `datasets` takes those of its split `train`."""


def write(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"text": [name]}), path)
        elif name.endswith(".csv"):
            path.write_text(f"text\n{name}\n")
        elif name.endswith((".txt", ".md", ".py", ".rst")):
            path.write_text(f"{name}\n")
        else:
            path.write_text(json.dumps({"text": name}) + "\n")
    return root


def names_of(found: Found) -> list[str]:
    return [file.name for file in found.files]


def taken(data, split: str | None = None) -> list[str]:
    return names_of(find(data, Naming(split=split)))


def reasons(found: Found) -> dict[str, tuple[int, tuple[str, ...]]]:
    return {one.why: (one.num_files, one.names) for one in found.left_out}


@pytest.fixture(scope="module")
def train_of(tmp_path_factory: pytest.TempPathFactory):
    """Return the texts of the files that `datasets` takes for `train`."""

    def load(folder: Path) -> list[str]:
        cache = tmp_path_factory.mktemp("cache")
        found = datasets.load_dataset(str(folder), cache_dir=str(cache))
        [split] = found.values() if len(found) == 1 else [found["train"]]
        return sorted(set(split["text"]))

    return load


def names_in(layout: str) -> list[str]:
    return layout.split("|" if "|" in layout else None)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_files_of_train_are_those_of_datasets(tmp_path, train_of, layout):
    write(tmp_path / "set", *names_in(layout))
    (tmp_path / "set" / "README.md").write_text("---\nlicense: mit\n---\n# A card\n")
    (tmp_path / "set" / ".gitattributes").write_text("*.parquet filter=lfs\n")

    assert taken(tmp_path / "set") == train_of(tmp_path / "set")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_taken_and_what_is_left_out_are_all_files_here_and_behind_a_url(tmp_path, layout):
    root = write(tmp_path / "set", *names_in(layout))
    for name in names_in(layout):
        with fsspec.open(f"memory://{tmp_path.name}/{name}", "wb") as file:
            file.write((root / name).read_bytes())

    here, there = find(root), find(f"memory://{tmp_path.name}")

    assert names_of(here) == names_of(there)
    assert reasons(here) == reasons(there)
    left_out = sum(one.num_files for one in here.left_out)
    assert left_out + len(here.files) == len(names_in(layout))
    num_bytes = sum(one.num_bytes for one in here.left_out) + sum(file.size for file in here.files)
    assert num_bytes == sum((root / name).stat().st_size for name in names_in(layout))
    assert taken(root, "all") == sorted(names_in(layout), key=lambda name: Path(name))


CARDS = {
    "one configuration": (
        "- config_name: default\n  data_files:\n"
        "  - split: train\n    path: a/train-*\n  - split: test\n    path: b/*\n",
        "a/train-0.jsonl a/train-1.jsonl b/c.jsonl d.jsonl",
    ),
    "the default of two": (
        "- config_name: de\n  data_files: de/*\n"
        "- config_name: en\n  default: true\n  data_files: [en/a.jsonl, en/b.jsonl]\n",
        "de/a.jsonl en/a.jsonl en/b.jsonl en/c.jsonl",
    ),
    "several paths of a split": (
        "- config_name: x\n  data_files:\n  - split: train\n    path:\n    - x/*.jsonl\n    - y/**\n"
        "  - split: dev\n    path: z/*\n",
        "x/a.jsonl y/b/c.jsonl z/d.jsonl",
    ),
}


@pytest.mark.parametrize(("configs", "layout"), CARDS.values(), ids=CARDS)
def test_a_card_says_which_files_are_meant(tmp_path, train_of, configs, layout):
    write(tmp_path / "set", *layout.split())
    (tmp_path / "set" / "README.md").write_text(
        f"---\nlicense: mit\nconfigs:\n{configs}tags: [a]\n---\n# Card\n"
    )

    found = find(tmp_path / "set")

    assert names_of(found) == train_of(tmp_path / "set")
    assert sum(one.num_files for one in found.left_out) == len(layout.split()) - len(found.files)


def card(folder: Path, configs: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return folder


def test_configurations_without_a_default_are_not_mixed(tmp_path):
    two = "- config_name: de\n  data_files: de/*\n- config_name: en\n  data_files: en/*\n"
    folder = write(card(tmp_path, two), "de/a.jsonl", "en/a.jsonl")

    with pytest.raises(SourceError, match=r"holds 2 configurations of a data set \(de, en\).*--split all"):
        find(folder)
    assert taken(folder, "all") == ["de/a.jsonl", "en/a.jsonl"]
    assert taken(folder / "de") == ["a.jsonl"]
    (folder / "en" / "a.jsonl").unlink()
    assert taken(folder) == ["de/a.jsonl"]


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        ("- [\n", "lists configurations that can't be read"),
        ("- &a {config_name: x, b: *a}\n", "can't be read .an alias inside"),
        ("- data_files: x\n", "in a form that isn't"),
        ("- config_name: x\n  data_files: [[a]]\n", "`data_files` that aren't paths"),
        ("- config_name: x\n  data_files: 5\n", "`data_files` that aren't paths"),
    ],
)
def test_a_card_that_cant_be_read_is_a_sentence(tmp_path, configs, said):
    with pytest.raises(SourceError, match=rf"README\.md .*{said}"):
        find(write(card(tmp_path, configs), "a.jsonl"))


def test_a_hub_folder_is_its_rows_alone(tmp_path):
    folder = write(tmp_path, "data/train-00000-of-00001.parquet", "docs.md", "load.py", "data/config.json")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Card\n")
    (folder / "dataset_infos.json").write_text('{"default": {"features": {}}}')
    (folder / ".gitattributes").write_text("x")

    assert taken(folder) == ["data/train-00000-of-00001.parquet"]


def test_a_card_beside_texts_is_no_document_and_another_readme_is_one(tmp_path):
    folder = write(tmp_path, "a.txt", "README.md")
    assert taken(folder) == ["README.md", "a.txt"]

    (folder / "README.md").write_text("---\nlanguage: en\n---\n# Card\n")
    assert taken(folder) == ["a.txt"]


@pytest.mark.parametrize(
    "layout",
    [
        "src/train/loop.py src/test/test_loop.py notes.md src/train/README.md src/test/README.md",
        "requirements-train.txt requirements-test.txt requirements-dev.txt setup.py",
        "src/train/CMakeLists.txt src/test/CMakeLists.txt src/test/a.cpp src/train/b.cpp",
        "docs/training.md docs/testing.md docs/evaluation.rst",
        "tests/train.txt tests/test_x.py tests/x.txt",
        "a/train.jsonl b/test.jsonl",
        "test.jsonl validation.jsonl",
    ],
)
def test_code_documentation_and_folders_without_both_are_read_whole(tmp_path, layout):
    write(tmp_path, *layout.split())

    files = [name for name in layout.split() if not name.endswith((".py", ".cpp"))]
    found = find(tmp_path)
    assert sorted(names_of(found)) == sorted(files)
    assert found.left_out == ()


def test_files_and_globs_that_are_named_are_always_read(tmp_path, monkeypatch):
    write(tmp_path, "train.jsonl", "test.jsonl", "test_x.py", "train.py")
    monkeypatch.chdir(tmp_path)

    assert taken("test.jsonl") == ["test.jsonl"]
    assert taken("*.jsonl") == ["test.jsonl", "train.jsonl"]
    assert taken(["train.jsonl", "test.jsonl"]) == ["train.jsonl", "test.jsonl"]
    assert taken("*.py") == ["test_x.py", "train.py"]
    with pytest.raises(SourceError, match=r"names no splits, .*files and globs are read as they are named"):
        taken(["test.jsonl", "*.py"], "test")


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("train", ["train.jsonl"]),
        ("training", ["train.jsonl"]),
        ("test", ["my-eval.jsonl"]),
        ("evaluation", ["my-eval.jsonl"]),
        ("validation", ["dev.jsonl"]),
        ("dev", ["dev.jsonl"]),
        ("val", ["dev.jsonl"]),
        ("all", ["dev.jsonl", "more.jsonl", "my-eval.jsonl", "train.jsonl"]),
    ],
)
def test_a_split_is_named_by_any_of_its_words(tmp_path, split, names):
    write(tmp_path, "train.jsonl", "my-eval.jsonl", "dev.jsonl", "more.jsonl")

    assert taken(tmp_path, split) == names


def test_a_split_that_isnt_there_is_told_with_those_that_are(tmp_path):
    write(tmp_path, "train.jsonl", "test.jsonl")

    with pytest.raises(SourceError, match=r"has no split dev; it has test \(1 file\), train \(1 file\)"):
        taken(tmp_path, "dev")
    write(tmp_path / "plain", "a.jsonl")
    with pytest.raises(SourceError, match="names no splits, so there is no split train to take"):
        taken(tmp_path / "plain", "train")


def test_splits_for_training_under_another_name_must_be_named(tmp_path):
    shards = [f"data/{name}-00000-of-00001.parquet" for name in ("train_sft", "train_gen", "test_sft")]
    write(tmp_path, *shards)

    with pytest.raises(SourceError, match=r"holds 3 splits, and none is called train: .*--split train_"):
        find(tmp_path)
    assert taken(tmp_path, "train_sft") == [shards[0]]
    for name in ("web", "books"):
        write(tmp_path / "other", f"data/{name}-00000-of-00001.parquet")
    assert len(taken(tmp_path / "other")) == 2


def saved(folder: Path, *splits: str) -> Path:
    data = {split: datasets.Dataset.from_dict({"text": [f"{split} text"]}) for split in splits}
    datasets.DatasetDict(data).save_to_disk(folder)
    return folder


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_saved_set_of_several_splits_is_read_as_its_files_are(tmp_path, scheme):
    folder = f"{scheme}{saved(tmp_path / 'set', 'train', 'test', 'validation')}"

    found = find(folder)
    assert names_of(found) == ["data-00000-of-00001.arrow"]
    assert "/set/train/" in found.files[0].path
    assert sorted(reasons(found)) == ["split test", "split validation"]
    assert list(read_texts(folder, "dev")) == ["validation text"]
    assert list(read_texts(folder, "all")) == ["train text", "test text", "validation text"]
    with pytest.raises(SourceError, match="has no split other; it has train"):
        find(folder, Naming(split="other"))


def test_a_cache_of_datasets_is_its_own_files_and_not_the_results_beside_them(tmp_path):
    write(tmp_path / "set", "train.jsonl", "test.jsonl")
    loaded = datasets.load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))
    mapped = loaded.map(lambda row: {"text": row["text"].upper()})
    assert mapped["train"]["text"][0] == "TRAIN.JSONL"
    loaded["train"].select([0]).shuffle(seed=1)
    cached = [path for path in (tmp_path / "cache").rglob("*.arrow") if path.name.startswith("cache-")]
    assert cached

    found = find(cached[0].parent)

    assert [Path(name).name for name in names_of(found)] == ["set-train.arrow"]
    assert reasons(found)["split test"][0] == 1
    assert reasons(found)["cached result of `datasets`"][0] == len(cached)
    assert list(read_texts(tmp_path / "cache")) == ["train.jsonl"]
    assert list(read_texts(tmp_path / "cache", "test")) == ["test.jsonl"]
    assert next(iter(read_texts(str(cached[0])))).endswith(".JSONL")
    datasets.load_dataset(str(write(tmp_path / "two", "a.jsonl")), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(SourceError, match="holds 2 data sets, or versions of one, that `datasets` keeps"):
        find(tmp_path / "cache")


def test_indices_of_other_rows_are_told(tmp_path):
    table = pa.table({"indices": pa.array([3, 1], pa.uint64())})
    with pa.ipc.new_stream(tmp_path / "cache-1.arrow", table.schema) as writer:
        writer.write_table(table)

    with pytest.raises(
        SourceError, match=r"cache-1\.arrow has the column `indices` alone: .*flatten_indices"
    ):
        list(read_texts(tmp_path / "cache-1.arrow"))


def test_a_saved_set_below_the_folder_is_read_without_its_cached_results(tmp_path):
    data = datasets.Dataset.from_dict({"text": ["a", "b"]})
    data.save_to_disk(tmp_path / "sets" / "one")
    datasets.load_from_disk(tmp_path / "sets" / "one").map(lambda row: {"text": row["text"] * 2})
    assert list((tmp_path / "sets" / "one").glob("cache-*.arrow"))

    for folder in (tmp_path / "sets", f"file://{tmp_path}/sets", tmp_path / "sets" / "one"):
        assert list(read_texts(folder)) == ["a", "b"]
        assert list(reasons(find(folder))) == ["cached result of `datasets`"]


@pytest.mark.parametrize("is_folder", [False, True])
def test_links_that_lead_nowhere_are_told(tmp_path, is_folder):
    write(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (tmp_path / "c.jsonl").symlink_to("c.jsonl")

    with pytest.raises(
        SourceError, match=r"b\.jsonl is a link to something that isn't there \(2 such links\)"
    ):
        find(tmp_path if is_folder else f"{tmp_path}/*.jsonl")
    with pytest.raises(SourceError, match=r"b\.jsonl is a link to something that isn't there; put it back"):
        find(tmp_path / "b.jsonl")


def test_links_that_lead_nowhere_and_would_not_be_read_are_counted(tmp_path):
    write(tmp_path, "train.jsonl", "a.jsonl")
    for name in ("test.jsonl", "model.bin", ".hidden.jsonl"):
        (tmp_path / name).symlink_to("gone")

    assert reasons(find(tmp_path)) == {
        "split test": (1, ("test.jsonl",)),
        "no split": (1, ("a.jsonl",)),
        "link that leads nowhere": (1, ("model.bin",)),
    }
