"""What files, folders and URLs stand for, in which order; and files that change after they were listed."""

import gzip
import json
import os
import sys
from pathlib import Path

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.listed_files import find_files, fingerprint_files

from varlen.documents.source import open_source
from varlen.documents.texts import read_texts
from varlen.errors import MissingExtraError, SettingError, SourceError
from varlen.files import fingerprints
from varlen.files.fingerprints import fingerprint, quick_fingerprint
from varlen.files.opening import open_stored
from varlen.files.paths import File, kind_of
from varlen.files.retry import Retry, is_passing, retried, within


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


def names_of(data) -> list[str]:
    return [file.name for file in find_files(data)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", ("jsonl", None)),
        ("A.JSON.GZ", ("json", "gzip")),
        ("a.b.csv.zst", ("csv", "zstd")),
        ("a.tsv.zstd", ("tsv", "zstd")),
        ("a.pq", ("parquet", None)),
        ("a.feather", ("arrow", None)),
        ("a.npz", ("npz", None)),
        ("a.py", ("text", None)),
        ("a.gz", ("text", "gzip")),
        ("jsonl", ("text", None)),
    ],
)
def test_the_end_of_a_name_says_format_and_compression(name, kind):
    assert kind_of(name) == kind


def test_a_folder_gives_its_files_sorted_and_leaves_out_what_is_hidden_unknown_or_about_the_data(tmp_path):
    touch(
        tmp_path,
        "b.jsonl",
        "a/z.parquet",
        "a/.hidden.jsonl",
        ".git/x.jsonl",
        "c.bin",
        "README.md",
        "LICENSE.txt",
    )
    touch(tmp_path, "notes.md", "dataset_info.json", "readme.txt.gz", "d.txt.zst")

    assert names_of(tmp_path) == ["a/z.parquet", "b.jsonl", "d.txt.zst", "notes.md"]


def test_a_readme_is_data_where_a_folder_holds_nothing_but_text(tmp_path):
    touch(tmp_path, "README.md", "a.txt")

    assert names_of(tmp_path) == ["README.md", "a.txt"]


def test_globs_and_several_entries_give_their_files_in_the_order_they_were_named(tmp_path, monkeypatch):
    touch(tmp_path, "in/b.csv", "in/a.csv", "in/deep/c.csv", "d.csv")
    monkeypatch.chdir(tmp_path)

    assert names_of([tmp_path / "d.csv", f"{tmp_path}/in/*.csv"]) == ["d.csv", "a.csv", "b.csv"]
    assert names_of("in/**/*.csv") == ["a.csv", "b.csv", "deep/c.csv"]
    assert names_of("*/[ab].csv") == ["in/a.csv", "in/b.csv"]
    assert names_of("in/../*/?.csv") == ["in/a.csv", "in/b.csv"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "no data was named"),
        ("missing", "does not exist; pass a JSONL"),
        ("~nobody-of-this-name/a.jsonl", "can't be a path or a glob"),
        ("in/**.csv", "can't be a path or a glob"),
        ("x" * 5000, "can't be read: File name too long"),
        ("a\0b", "does not exist"),
        ("in/*.json", "no file matches"),
        ("empty", "is a folder without any"),
        (["in/a.csv", "in/*.csv"], "in/a.csv is named twice"),
        (["in/a.csv", "in/../in/a.csv"], "a.csv is named twice"),
        ("memory://nowhere-at-all/x.jsonl", "does not exist"),
        ("memory://nowhere-at-all/*.jsonl", "no file matches"),
        ("nothing://a", "nothing://a can't be read: Protocol not known"),
    ],
)
def test_where_nothing_is_found_a_sentence_says_so(tmp_path, monkeypatch, data, said):
    touch(tmp_path, "in/a.csv")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SourceError, match=said):
        find_files(data)


def test_a_file_system_whose_package_is_missing_is_named(monkeypatch):
    def no_such(name: str) -> None:
        raise ImportError("Install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec.core, "url_to_fs", no_such)

    with pytest.raises(MissingExtraError, match="gs://a/b can't be opened: Install gcsfs"):
        find_files("gs://a/b")


def test_files_that_are_all_empty_are_an_error_and_one_beside_others_is_none(tmp_path):
    for name in ("a.jsonl", "b.csv"):
        (tmp_path / name).write_text("")
    with pytest.raises(SourceError, match=r"a\.jsonl is empty \(0 bytes\), and 1 file beside it is too"):
        find_files(tmp_path)
    with pytest.raises(SourceError, match=r"b\.csv is empty \(0 bytes\); was it"):
        find_files(tmp_path / "b.csv")

    touch(tmp_path, "c.txt")

    assert names_of(tmp_path) == ["a.jsonl", "b.csv", "c.txt"]


@pytest.mark.parametrize(
    ("names", "content", "kind"),
    [
        (["manifest.json", "part-00000.parquet"], '{"varlen": "1", "kind": "packed"}', "a packed set"),
        (["manifest.json", "0/shard.json"], '{"varlen": "1", "kind": "tokens"}', "a token store"),
        ([".work/lock", "part-00000.parquet"], "", "an unfinished output"),
    ],
)
def test_a_result_of_varlen_in_a_subfolder_is_no_data_of_the_folder(tmp_path, names, content, kind):
    touch(tmp_path, "in/a.jsonl", "in/deep/b.jsonl")
    result = tmp_path / "in" / "deep" / "out.partial"
    touch(result, *names)
    (result / names[0]).write_text(content)

    said = (
        rf"out\.partial is {kind} that varlen wrote, and would be read as data beside .*/in; name the files"
    )
    with pytest.raises(SourceError, match=said):
        find_files(tmp_path / "in")
    if kind == "an unfinished output":
        with pytest.raises(SourceError, match=r"out\.partial is an unfinished output; run the command"):
            find_files(result)
    else:
        assert names_of(result) == names[1:]
    result.rename(tmp_path / "out.partial")
    assert names_of(tmp_path / "in") == ["a.jsonl", "deep/b.jsonl"]


def test_several_results_in_subfolders_are_counted_and_what_others_wrote_is_read(tmp_path):
    touch(tmp_path, "a.jsonl", "x.partial/b.jsonl", ".hidden/manifest.json", "y/.work/c.jsonl")
    touch(tmp_path, "z.partial/.work/lock")
    for name in ("theirs", ".hidden"):
        touch(tmp_path, f"{name}/manifest.json", f"{name}/d.jsonl")
    (tmp_path / "theirs" / "manifest.json").write_text('{"name": "theirs"}')
    (tmp_path / ".hidden" / "manifest.json").write_text('{"varlen": "1"}')
    assert names_of(tmp_path) == ["a.jsonl", "theirs/d.jsonl", "x.partial/b.jsonl"]

    for name in ("one", "two"):
        touch(tmp_path, f"{name}/manifest.json")
        (tmp_path / name / "manifest.json").write_text('{"varlen": "1", "kind": "packed"}')

    with pytest.raises(
        SourceError, match=r"one is a packed set that varlen wrote \(2 such folders lie there\)"
    ):
        find_files(tmp_path)


def test_folders_that_are_links_are_followed_each_place_once(tmp_path):
    touch(tmp_path, "in/a.jsonl", "elsewhere/b.jsonl", "elsewhere/deep/c.jsonl")
    (tmp_path / "in" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "deep" / "back").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "twice").symlink_to(tmp_path / "elsewhere" / "deep")

    assert names_of(tmp_path / "in") == ["a.jsonl", "more/b.jsonl", "more/deep/c.jsonl"]


def test_a_glob_reads_results_alone_but_not_beside_other_data(tmp_path):
    touch(tmp_path, "a.parquet", "one/manifest.json", "one/b.parquet", "two/manifest.json", "two/c.parquet")
    for name in ("one", "two"):
        (tmp_path / name / "manifest.json").write_text('{"varlen": "1", "kind": "packed"}')

    assert names_of(f"{tmp_path}/*/*.parquet") == ["one/b.parquet", "two/c.parquet"]
    with pytest.raises(
        SourceError, match=r"one is a packed set .* \(2 such folders lie there\).*\*\*/\*\.parquet"
    ):
        find_files(f"{tmp_path}/**/*.parquet")


def test_what_is_to_be_written_is_left_out_of_the_folder_that_holds_it(tmp_path, monkeypatch):
    touch(
        tmp_path,
        "a.jsonl",
        "out/manifest.json",
        "out/p.parquet",
        "tokens.partial/.work/x",
        "tokens.partial/t.txt",
    )
    (tmp_path / "out" / "manifest.json").write_text('{"varlen": "1", "kind": "packed"}')
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)

    for place in (tmp_path, Path(), tmp_path / "link"):
        for out in (tmp_path, Path(), Path("..", tmp_path.name), Path("link")):
            found = find_files(place, leave_out=[out / "out", out / "tokens"])
            assert [file.name for file in found] == ["a.jsonl"]
    found = find_files("**/*.[jp]*", leave_out=[Path("out"), Path("tokens")])
    assert [file.name for file in found] == ["a.jsonl"]


def save_set(folder: Path, names: list[object], state: object = None) -> Path:
    touch(folder, "dataset_info.json", "cache-1.arrow", "b.arrow", "a.arrow")
    described = {"_data_files": [{"filename": name} for name in names]} if state is None else state
    (folder / "state.json").write_text(json.dumps(described))
    return folder


def test_a_saved_data_set_gives_the_files_that_it_names_in_its_order(tmp_path):
    assert names_of(save_set(tmp_path, ["b.arrow", "a.arrow"])) == ["b.arrow", "a.arrow"]


@pytest.mark.parametrize(
    ("names", "state", "said"),
    [
        (["c.arrow"], None, "names c.arrow, which isn't there"),
        ([None], None, "names None, which isn't there"),
        (["/etc/hostname"], None, "which isn't there"),
        ([], None, "names no files"),
        ([], {}, "no list `_data_files`"),
        ([], {"_data_files": 5}, "is not a list of files"),
        ([], {"_data_files": [5]}, "is not a list of files"),
        ([], [], "doesn't describe a saved data set"),
    ],
)
def test_a_saved_data_set_that_is_not_whole_is_an_error(tmp_path, names, state, said):
    with pytest.raises(SourceError, match=said):
        find_files(save_set(tmp_path, names, state))


@pytest.mark.parametrize("key", ["_indices_data_files", "_indices_files"])
def test_a_saved_data_set_whose_rows_are_chosen_by_indices_is_refused(tmp_path, key):
    state = {"_data_files": [{"filename": "a.arrow"}], key: []}
    assert names_of(save_set(tmp_path, [], state)) == ["a.arrow"]

    with pytest.raises(
        SourceError, match=r"names files of indices, .* call flatten_indices\(\) and save it again"
    ):
        find_files(save_set(tmp_path, [], state | {key: [{"filename": "indices.arrow"}]}))


def test_a_data_set_that_was_selected_from_and_shuffled_is_read_as_it_was_saved(tmp_path):
    texts = [str(number) for number in range(20)]
    chosen = datasets.Dataset.from_dict({"text": texts}).select(range(3, 17)).shuffle(seed=1)
    chosen.save_to_disk(tmp_path / "saved")

    found = list(read_texts(tmp_path / "saved"))

    assert found == chosen["text"][:]
    assert found != sorted(found, key=int)


def save_splits(folder: Path, *splits: str) -> Path:
    for split in splits:
        save_set(folder / split, ["a.arrow"])
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def test_of_several_splits_train_is_taken_and_without_it_one_must_be_named(tmp_path):
    several = save_splits(tmp_path / "x", "train", "test")
    assert [file.path for file in find_files(several)] == [str(several / "train" / "a.arrow")]
    assert names_of(save_splits(tmp_path / "y", "dev")) == ["a.arrow"]

    with pytest.raises(SourceError, match=r"holds several splits \(dev, test\); name one"):
        find_files(save_splits(tmp_path / "z", "dev", "test"))
    assert [file.path for file in find_files(f"file://{several}")] == [
        f"file://{several / 'train' / 'a.arrow'}"
    ]
    (several / "train").rename(several / "elsewhere")
    with pytest.raises(SourceError, match="names the split train, which isn't there"):
        find_files(several)
    with pytest.raises(SourceError, match="lists no splits, so the data set is empty; save it again"):
        find_files(save_splits(tmp_path))


def test_a_url_gives_names_sizes_and_no_local_path(tmp_path):
    for name, content in (("b.jsonl", b"12"), ("in/a.csv.gz", b"123"), ("README.md", b"1")):
        with fsspec.open(f"memory://{tmp_path.name}/{name}", "wb") as file:
            file.write(content)

    files = find_files(f"memory://{tmp_path.name}")

    assert [(file.name, file.size, file.format) for file in files] == [
        ("b.jsonl", 2, "jsonl"),
        ("in/a.csv.gz", 3, "csv"),
    ]
    assert all(file.is_remote for file in files)
    assert names_of(f"memory://{tmp_path.name}/b.jsonl") == ["b.jsonl"]


def test_a_fingerprint_changes_with_the_content_and_not_with_the_name(tmp_path):
    marks = []
    for name, content in (("a.txt", "one"), ("b.txt", "one"), ("c.txt", "two")):
        (tmp_path / name).write_text(content)
        marks.append(fingerprint(find_files(tmp_path / name)[0]))

    assert marks[0] == marks[1] != marks[2]


def test_a_file_that_is_gone_when_it_is_opened_is_an_error(tmp_path):
    touch(tmp_path, "a.jsonl")
    [file] = find_files(tmp_path)
    (tmp_path / "a.jsonl").unlink()

    with pytest.raises(SourceError, match=r"a\.jsonl can't be read: it was there .* and is gone now"):
        fingerprint(file)
    with pytest.raises(SourceError, match="memory://gone/a can't be read"):
        fingerprint(File(path="memory://gone/a", name="a", size=1, format="text"))


@pytest.mark.parametrize("link", ["b.jsonl", "deep/b.jsonl"])
def test_links_to_one_file_are_one_file_named_twice(tmp_path, link):
    touch(tmp_path, "in/a.jsonl")
    (tmp_path / "in" / link).parent.mkdir(exist_ok=True)
    (tmp_path / "in" / link).symlink_to(tmp_path / "in" / "a.jsonl")

    with pytest.raises(SourceError, match=r"b\.jsonl and .*a\.jsonl are links to one file; .*name it once"):
        find_files(tmp_path / "in")

    assert names_of(tmp_path / "in" / link) == ["b.jsonl"]


@pytest.mark.parametrize("key", ["_indices_data_files", "_indices_files"])
def test_a_saved_data_set_behind_a_url_whose_rows_are_chosen_by_indices_is_refused(tmp_path, key):
    folder = f"memory://{tmp_path.name}/set"
    contents = {"data.arrow": b"x", "dataset_info.json": b"{}", "state.json": json.dumps({key: [1]}).encode()}
    for name, content in contents.items():
        with fsspec.open(f"{folder}/{name}", "wb") as file:
            file.write(content)

    for named in (folder, folder.rpartition("/")[0]):
        with pytest.raises(SourceError, match=r"state\.json names files of indices, .* flatten_indices"):
            find_files(named)

    with fsspec.open(f"{folder}/state.json", "wb") as file:
        file.write(b'{"_data_files": [{"filename": "data.arrow"}]}')
    assert names_of(folder) == ["data.arrow"]


@pytest.mark.parametrize("content", [b"[{", b"\xff"])
def test_a_description_behind_a_url_that_is_none_is_named(tmp_path, content):
    folder = f"memory://{tmp_path.name}/set"
    for name in ("data.arrow", "dataset_info.json", "state.json"):
        with fsspec.open(f"{folder}/{name}", "wb") as file:
            file.write(content)

    with pytest.raises(SourceError, match=r"state\.json doesn't describe a saved data set"):
        find_files(folder)


def test_a_pattern_in_a_folder_whose_name_holds_brackets_is_one_there(tmp_path, monkeypatch):
    folder = tmp_path / "[en]" / "v?"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "b.jsonl").write_text('{"text": "b"}')
    monkeypatch.chdir(tmp_path)

    for pattern in ("[en]/v?/*.jsonl", f"{tmp_path}/[en]/**/*.jsonl", "[en]/*/a.jsonl"):
        assert [Path(file.path).resolve() for file in find_files(pattern)] == [folder / "a.jsonl"]
    assert [file.path for file in find_files("[e]/*.jsonl")] == ["e/b.jsonl"]


LINES = b"".join(b'{"text": "%d"}\n' % number for number in range(5000))


def write(path: Path, kind: str) -> Path:
    if kind == "parquet":
        pq.write_table(pa.table({"text": [str(number) for number in range(5000)]}), path)
    else:
        path.write_bytes(gzip.compress(LINES) if kind == "jsonl.gz" else LINES)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "csv", "txt"])
@pytest.mark.parametrize("change", ["shorter", "longer", "empty", "gone"])
def test_a_file_that_is_not_what_was_listed_is_named_with_both_sizes(tmp_path, kind, change):
    path = write(tmp_path / f"a.{kind}", kind)
    size = path.stat().st_size
    source = open_source(path)
    new_size = {"shorter": size - 100, "longer": size + 1, "empty": 0, "gone": size}[change]
    os.truncate(path, new_size)
    said = f"has changed since the files were listed: it had {size:,} bytes then, now {new_size:,};"
    if change == "gone":
        path.unlink()
        said = "can't be read: it was there when the files were listed, and is gone now"

    with pytest.raises(SourceError, match=f"{path} {said}"):
        list(source.read(source.parts()[0]))


@pytest.mark.parametrize("count", [-1, 1 << 18, 50 << 20])
def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path, count):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES * 50)
    [file] = find_files(path)

    with open_stored(file) as stored:
        stored.read(1 << 20)
        os.truncate(path, 1 << 20)
        with pytest.raises(SourceError, match=r"bytes then, now [\d,]+; let it be written"):
            list(iter(lambda: stored.read(count), b""))


@pytest.mark.parametrize("size", [-1, 5, 70_000])
def test_a_file_in_memory_that_changed_is_named(size):
    url = "memory://changes/a.jsonl"
    with fsspec.open(url, "wb") as sink:
        sink.write(LINES)
    [file] = find_files(url)
    fsspec.filesystem("memory").pipe_file("/changes/a.jsonl", (LINES * 2)[:size])

    with pytest.raises(SourceError, match=f"{url} has changed since the files were listed"):
        open_stored(file).read()


def test_small_sets_are_told_by_every_byte_wherever_they_lie(tmp_path):
    prints = set()
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.jsonl", "jsonl")
        os.utime(tmp_path / folder / "a.jsonl", (1, 1 if folder == "x" else 2))
        prints.add(fingerprint_files(find_files(tmp_path / folder)))
    assert len(prints) == 1

    content = bytearray(LINES)
    for place in (0, len(LINES) // 3, len(LINES) - 1):
        content[place] ^= 1
        (tmp_path / "y" / "a.jsonl").write_bytes(content)
        prints.add(fingerprint_files(find_files(tmp_path / "y")))
    (tmp_path / "y" / "a.jsonl").rename(tmp_path / "y" / "b.jsonl")
    prints.add(fingerprint_files(find_files(tmp_path / "y")))

    assert len(prints) == 5


def test_the_order_of_files_is_part_of_their_fingerprint(tmp_path):
    files = [find_files(write(tmp_path / name, "jsonl"))[0] for name in ("a.jsonl", "b.jsonl")]

    assert fingerprint_files(files) != fingerprint_files(files[::-1])


def sparse(path: Path, size: int, changed: int | None = None) -> File:
    """A large file of zeros that takes no disk, and one byte that isn't."""
    with path.open("wb") as sink:
        sink.truncate(size)
        if changed is not None:
            sink.seek(changed)
            sink.write(b"\1")
    return find_files(path)[0]


PIECE = 64 << 10
SIZE = (300 << 20) + 12_345
STARTS = [(SIZE - PIECE) * index // 63 for index in range(64)]


@settings(max_examples=15, deadline=None)
@given(piece=st.integers(0, 63), inside=st.integers(0, PIECE - 1), longer=st.integers(-PIECE, PIECE))
def test_a_large_file_is_told_by_its_size_and_what_stands_in_its_pieces(
    tmp_path_factory, piece, inside, longer
):
    folder = tmp_path_factory.mktemp("large")
    path = folder / "a.jsonl"
    before = quick_fingerprint(sparse(path, SIZE))

    assert quick_fingerprint(sparse(path, SIZE, STARTS[piece] + inside)) != before
    assert (quick_fingerprint(sparse(path, SIZE + longer)) == before) == (longer == 0)
    path.unlink()


def test_large_sets_are_sampled_and_small_ones_read_whole(tmp_path):
    between = STARTS[1] - 1
    plain = fingerprint_files([sparse(tmp_path / "a.jsonl", SIZE)])

    assert fingerprint_files([sparse(tmp_path / "a.jsonl", SIZE, between)]) == plain
    assert fingerprint_files([sparse(tmp_path / "a.jsonl", SIZE, STARTS[-1])]) != plain

    whole = fingerprint_files([sparse(tmp_path / "a.jsonl", 9 << 20)])
    assert fingerprint_files([sparse(tmp_path / "a.jsonl", 9 << 20, PIECE + 1)]) != whole


def test_samples_read_four_megabytes_and_no_more(tmp_path):
    file = sparse(tmp_path / "a.jsonl", SIZE)
    seen = []
    file = fingerprints.File(
        path=file.path,
        name=file.name,
        size=file.size,
        format=file.format,
        on_read=lambda _, start, stop: seen.append(stop - start),
    )

    quick_fingerprint(file)

    assert sum(seen) == 64 * PIECE


def test_a_remote_file_without_a_mark_is_told_by_its_size_in_haste_and_else_by_its_content():
    prints = []
    for content in (b"abc", b"abd", b"abcd"):
        fsspec.filesystem("memory").pipe_file("/prints/a.txt", content)
        [file] = find_files("memory://prints/a.txt")
        prints.append((quick_fingerprint(file), fingerprint(file)))

    assert [quick for quick, _ in prints] == ["size:3", "size:3", "size:4"]
    assert len({whole for _, whole in prints}) == 3


@pytest.mark.parametrize(
    ("url", "package", "command"),
    [
        ("gs://bucket/a.jsonl", "gcsfs", "pip install gcsfs"),
        ("hf://datasets/org/name/a.jsonl", "huggingface_hub", "pip install huggingface_hub"),
        ("s3://bucket/a.jsonl", "s3fs", 'pip install "varlen[s3]"'),
        ("https://host/a.jsonl", "fsspec.implementations.http", "pip install aiohttp"),
    ],
)
def test_urls_whose_package_is_missing_say_how_to_install_it(monkeypatch, url, package, command):
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url.partition("://")[0], raising=False)
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(MissingExtraError) as caught:
        find_files(url)

    assert str(caught.value).startswith(f"{url} can't be opened: ")
    assert str(caught.value).endswith(f"; run: {command}")


@pytest.mark.parametrize("name", ["attempts", "first_s", "most_s", "silence_s", "deadline_s"])
def test_settings_of_tries_are_above_zero(name):
    with pytest.raises(SettingError, match=f"{name} must be"):
        Retry(**{name: 0})


@given(failures=st.integers(1, 10_000))
def test_waits_double_up_to_the_longest_and_are_shortened_by_half_at_most(failures):
    retry = Retry(first_s=0.5, most_s=20)
    longest = min(0.5 * 2 ** min(failures - 1, 50), 20)

    assert longest / 2 <= retry.wait_s(failures) <= longest


@pytest.mark.parametrize("fails", [0, 3, 4])
def test_a_call_is_made_again_as_often_as_said(fails):
    calls = []

    def call() -> str:
        calls.append(1)
        if len(calls) <= fails:
            raise ConnectionResetError("gone")
        return "here"

    retry = Retry(attempts=4, first_s=0.001)
    if fails < 4:
        assert retried(call, "x://y", retry) == "here"
    else:
        with pytest.raises(SourceError, match=r"x://y can't be read: gone; tried 4 times in \d\.\d s"):
            retried(call, "x://y", retry)
    assert len(calls) == min(fails + 1, 4)


def test_a_call_that_is_slower_than_its_limit_is_given_up():
    import threading

    done = threading.Event()
    with pytest.raises(TimeoutError, match=r"no full answer within 0\.05 s"):
        within(0.05, done.wait)
    done.set()


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TimeoutError(), True),
        (BrokenPipeError(), True),
        (OSError(5, "I/O error"), False),
        (FileNotFoundError("x"), False),
        (PermissionError("x"), False),
        (ValueError("x"), False),
    ],
)
def test_what_may_pass_is_told_from_what_lasts(error, passes):
    assert is_passing(error) == passes
    wrapped = RuntimeError("outer")
    wrapped.__cause__ = error
    assert is_passing(wrapped) == passes
