"""Rows in memory are a source like a file of the same rows; the spool holds those that living processes read."""

import datetime
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from tests.support.listed_files import fingerprint_files
from tests.support.memory_rows import FORMS, ITERABLES, KINDS, OF_ARRAYS, TEXTS, TOKENS, as_file

from varlen.documents import spool as spooling
from varlen.documents.source import open_source
from varlen.documents.spool import spool
from varlen.documents.texts import read_texts
from varlen.errors import SettingError, SourceError
from varlen.files.fingerprints import fingerprint
from varlen.offline.crew import Crew
from varlen.offline.index import index_source
from varlen.offline.pack import PackSettings, pack_source


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "varlen" / "rows"


def documents(data, **settings):
    source = open_source(data, "bytes", **settings)
    found = []
    for part in source.parts():
        for some in source.read(part):
            for start, stop in zip(some.offsets, some.offsets[1:]):
                mask = b"" if some.loss_mask is None else some.loss_mask[start:stop].tobytes()
                found.append((some.tokens[start:stop].tobytes(), mask))
    return found


def faults(data, **settings):
    source = open_source(data, "bytes", on_error="skip", **settings)
    return [str(fault) for part in source.parts() for some in source.read(part) for fault in some.faults]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [*FORMS, *ITERABLES])
def test_rows_of_any_form_give_the_documents_of_a_file_of_them(kind, form, tmp_path):
    rows = KINDS[kind]

    assert documents((FORMS | ITERABLES)[form](rows)) == documents(as_file(rows, tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("of", OF_ARRAYS)
def test_tokens_may_be_arrays_of_any_library(of, tmp_path):
    assert documents(OF_ARRAYS[of](TOKENS)) == documents(as_file(TOKENS, tmp_path / "rows.jsonl"))


def test_a_key_that_a_row_lacks_stays_absent_and_a_null_stays_one(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ]
        },
        {
            "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            "tools": [{"a": 1}],
        },
    ]
    marked = "{% generation %}{{ m | tojson }}{% endgeneration %}"
    template = "{% for m in messages %}" + marked + "{% endfor %}{{ tools | tojson }}"

    wanted = documents(as_file(rows, tmp_path / "rows.jsonl"), chat_template=template)
    assert documents(rows, chat_template=template) == wanted
    assert documents(
        {"messages": [r["messages"] for r in rows], "tools": [None, [{"a": 1}]]}, chat_template=template
    )


@pytest.mark.parametrize("form", [*FORMS, *ITERABLES])
def test_equal_rows_have_one_fingerprint_and_other_rows_another(form):
    make = (FORMS | ITERABLES)[form]

    prints = [fingerprint_files(open_source(make(rows), "bytes").files) for rows in (TEXTS, TEXTS, TEXTS[1:])]
    assert prints[0] == prints[1] != prints[2]


def test_a_fingerprint_follows_from_the_rows_however_a_table_is_cut():
    tables = [FORMS[form](TEXTS) for form in ("Table", "Table in chunks", "RecordBatch", "RecordBatchReader")]
    sets = [FORMS[form](TEXTS) for form in FORMS if form.startswith("Dataset") and "transformed" not in form]

    assert len({fingerprint(open_source(one, "bytes").files[0]) for one in tables}) == 1
    assert len({fingerprint(open_source(one, "bytes").files[0]) for one in sets}) == 1


def test_another_process_gives_the_same_fingerprint(tmp_path):
    program = (
        "from varlen.documents.source import open_source; from varlen.files.fingerprints import fingerprint;"
        "print(fingerprint(open_source([{'text': 'a'}, {'text': 'b'}], 'bytes').files[0]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == fingerprint(open_source([{"text": "a"}, {"text": "b"}], "bytes").files[0])
    assert done.stdout.strip() == fingerprint(
        open_source(as_file([{"text": "a"}, {"text": "b"}], tmp_path / "a.jsonl"), "bytes").files[0]
    )


class Thing:
    """Of no library."""


HELD = {
    "NaN or infinity in `text[1]`": float("nan"),
    "bytes in `text[1]`; decode": b"abc",
    "datetime.datetime in `text[1]`": datetime.datetime(2026, 1, 1),
    "Thing in `text[1]`": Thing(),
    "set in `text[1]`": {1, 2},
    "numpy.ndarray in `text[1]`": np.array(["2026-01-01"], dtype="datetime64[D]"),
    "bytes in `text[1].a[0]`": {"a": np.array([b"x"], dtype=object)},
    "an object in `text[1]` whose keys aren't all strings": {(1, 2): 3},
}


@pytest.mark.parametrize("said", HELD)
def test_what_json_cannot_hold_costs_its_row_alone_and_is_named(said):
    rows = [{"text": "a"}, {"text": ["x", HELD[said]]}, {"text": "b"}]

    found = faults(rows)
    assert len(found) == 1
    assert said.partition(";")[0] in found[0]
    assert found[0].startswith("memory (list of 3 rows) row 2 holds ")
    assert len(documents(rows, on_error="skip")) == 2
    with pytest.raises(SourceError, match=r"memory .list of 3 rows. row 2 holds"):
        documents(rows)


def test_what_no_document_is_made_of_may_be_anything():
    rows = [
        {"text": f"t{n}", "when": datetime.datetime.now(), "raw": b"1", "thing": Thing(), 7: 1}
        for n in range(4)
    ]
    table = pa.table({"text": ["a", "b"], "when": [datetime.datetime.now()] * 2, "raw": [b"\xff"] * 2})

    assert len(documents(rows)) == 4
    assert len(documents(pd.DataFrame(rows))) == 4
    assert len(documents(table)) == 2


def test_rows_that_are_none_are_faults_of_their_own():
    nested: list = []
    nested.append(nested)
    rows = [{"text": "a"}, None, 5, "text", {"other": 1}, {"text": nested}, {"text": "\ud800"}]

    found = faults(rows)
    assert [f.partition(") ")[2][:5] for f in found] == ["row 2", "row 3", "row 4", "row 5", "row 6", "row 7"]
    assert "has no `text`; it has `other`" in found[3]
    assert "holds itself" in found[4]
    assert "half a character" in found[5]


def test_pictures_and_sounds_are_refused_only_where_documents_would_be_made_of_them():
    features = datasets.Features({"text": datasets.Value("string"), "picture": datasets.Image()})
    rows = datasets.Dataset.from_dict({"text": ["a"], "picture": [None]}, features=features)

    assert len(documents(rows)) == 1
    with pytest.raises(SourceError, match="holds Image in `picture`"):
        documents(rows, columns={"text": "picture"})
    inside = datasets.Features(
        {"messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Image()})}
    )
    with pytest.raises(SourceError, match="holds Image in `messages`"):
        documents(datasets.Dataset.from_dict({"messages": [[]]}, features=inside))


def test_a_data_set_gives_the_rows_that_it_shows():
    rows = datasets.Dataset.from_list([{"text": "a", "body": "b"}] * 3)

    assert len(documents(rows.with_format("numpy", columns=["body"]), columns={"text": "body"})) == 3
    with pytest.raises(SourceError, match="no column"):
        documents(rows.with_format("numpy", columns=["body"]))
    upper = rows.with_transform(lambda batch: {"text": [text.upper() for text in batch["text"]]})
    assert documents(upper) == documents([{"text": "A"}] * 3)
    assert documents(rows.rename_column("text", "t").rename_column("body", "text")) == documents(
        [{"text": "b"}] * 3
    )
    assert documents(rows.cast_column("text", datasets.Value("large_string"))) == documents(
        [{"text": "a"}] * 3
    )


def test_splits_are_train_or_asked_for(caplog):
    one = datasets.Dataset.from_list([{"text": "a"}])
    caplog.set_level("INFO")

    assert (
        documents({"train": one, "test": one}) == documents(datasets.DatasetDict(only=one)) == documents(one)
    )
    assert "`train` is read; left out: `test`" in caplog.text
    with pytest.raises(SourceError, match=r"`a`, `b`.*none called `train`; pass one: data\['a'\]"):
        documents(datasets.DatasetDict(a=one, b=one))


WRONG = {
    'to pass texts, use .."text": text. for text in texts': ["one text\nof two lines"],
    "data is text": "one text\nof two lines",
    'if it is a text, pass rows: .."text"': ["a text of one line"],
    'say so: .."input_ids": ids. for ids': [[1, 2], [3]],
    'say so: .."messages": messages. for': [[{"role": "user", "content": "q"}]],
    "for one row pass a list of it": {"text": "a"},
    "has 2 values in `text` and 1 in `other`": {"text": ["a", "b"], "other": [1]},
    "holds no row; pass some": {"text": []},
    "a int is no source": 5,
    "a list of their own": [{"text": "a"}, pa.table({"text": ["b"]})],
    "several columns of the name `text`": pa.table([pa.array(["a"]), pa.array(["b"])], ["text", "text"]),
    "no column of documents": pa.table({"a": [1]}),
    "has no column `body`": pa.table({"text": ["a"]}),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_no_source_is_refused_with_the_line_to_write(said):
    columns = {"text": "body"} if "body" in said else None

    with pytest.raises(SourceError, match=said):
        open_source(WRONG[said], "bytes", columns=columns)


def test_sources_of_several_kinds_are_read_one_after_the_other(tmp_path):
    file = as_file(TEXTS[:20], tmp_path / "a.jsonl")
    rest = TEXTS[60:]

    mixed = [str(file), TEXTS[20:40], pa.Table.from_pylist(TEXTS[40:60]), lambda: iter(rest)]
    assert documents(mixed) == documents(TEXTS)


def test_texts_for_who_makes_tokens_of_its_own_are_read_from_rows_too():
    assert list(read_texts(TEXTS)) == [row["text"] for row in TEXTS]


def test_json_types_and_categories_are_read_as_from_files(tmp_path):
    category = pd.DataFrame({"text": pd.Categorical([row["text"] for row in TEXTS])})
    coded = pa.table({"text": pa.array([row["text"] for row in TEXTS]).dictionary_encode()})

    assert documents(category) == documents(coded) == documents(TEXTS)
    views = pa.table({"text": pa.array([row["text"] for row in TEXTS], pa.string_view())})
    assert documents(views) == documents(TEXTS)


def test_long_rows_are_cut_into_batches_of_bounded_size(cache):
    rows = pa.table({"text": ["x" * 300_000] * 64})
    source = open_source(rows, "bytes")

    with pa.ipc.open_file(source.files[0].local_path) as file:
        sizes = [file.get_batch(n).nbytes for n in range(file.num_record_batches)]
    assert max(sizes) <= 5 << 20
    assert len(sizes) >= 4
    assert len(documents(rows)) == 64
    assert (
        json.loads((cache / source.files[0].local_path).with_name("varlen.json").read_text())["kind"]
        == "rows"
    )


def test_packed_sets_and_stores_are_made_of_rows_as_of_files(tmp_path):
    file = as_file(TEXTS, tmp_path / "rows.jsonl")
    settings = PackSettings(capacity=256)
    found = {}
    for name, data in {"file": file, "list": TEXTS, "iterable": lambda: iter(TEXTS)}.items():
        packed = pack_source(open_source(data, "bytes"), tmp_path / name, settings)
        store, _ = index_source(open_source(data, "bytes"), tmp_path / f"{name}-store")
        found[name] = (
            [path.read_bytes() for path in sorted(packed.folder.glob("*.parquet"))],
            [path.read_bytes() for path in sorted(store.folder.rglob("*.npy"))],
        )
    assert found["file"] == found["list"] == found["iterable"]
    again = pack_source(open_source(list(TEXTS), "bytes"), tmp_path / "list", settings)
    assert again.was_there


def test_processes_that_make_a_store_read_the_rows(tmp_path):
    rows = [{"text": "word " * 40_000}] * 400  # two parts
    store, _ = index_source(open_source(rows, "bytes"), tmp_path / "store", crew=Crew(processes=2))

    assert int(store.documents.sum()) == 400


ROWS = [{"text": "a"}, {"text": "b"}]
HOLDER = """
import sys
from varlen.documents.source import open_source
source = open_source([{"text": "a"}, {"text": "b"}], "bytes")
print(source.files[0].local_path, flush=True)
sys.stdin.readline()
"""


def holder():
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, Path(process.stdout.readline().strip())


def test_a_file_is_there_as_long_as_a_source_of_it(cache):
    first, second = open_source(ROWS, "bytes"), open_source(ROWS, "bytes")
    place = Path(first.files[0].local_path)

    assert place == Path(second.files[0].local_path)
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

    assert Path(source.files[0].local_path) == place
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

    assert Path(source.files[0].local_path).exists()


def test_a_source_in_another_process_holds_nothing_there():
    source = open_source(ROWS, "bytes")
    other = pickle.loads(pickle.dumps(source))

    assert other.files[0].hold is None
    assert other.files == source.files
    del other
    gc.collect()
    assert Path(source.files[0].local_path).exists()


def test_where_the_cache_is_no_folder_the_temporary_folder_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    source = open_source(ROWS, "bytes", cache=tmp_path / "file" / "cache")
    place = Path(source.files[0].local_path)

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

    assert not Path(source.files[0].local_path).is_relative_to(tmp_path / f"varlen-{os.getuid()}")


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
    name = Path(source.files[0].local_path).parent.name
    source.files[0].hold.release()
    (cache / name).mkdir()
    (cache / name / "thesis.txt").write_text("mine")
    spooling_tries, spooling._TRIES = spooling._TRIES, 2
    try:
        again = open_source(ROWS, "bytes")
    finally:
        spooling._TRIES = spooling_tries

    assert Path(again.files[0].local_path).exists()
    assert (cache / name / "thesis.txt").read_text() == "mine"
