"""Rows in memory are a source like a file of the same rows, whatever they are rows of."""

import datetime
import json
import subprocess
import sys

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from tests.support.memory_rows import FORMS, ITERABLES, KINDS, OF_ARRAYS, TEXTS, TOKENS, as_file

from varlen.documents.source import open_source
from varlen.documents.texts import read_texts
from varlen.errors import SourceError
from varlen.files.fingerprints import fingerprint, fingerprint_files
from varlen.offline.crew import Crew
from varlen.offline.index import index_source
from varlen.offline.pack import PackSettings, pack_source


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
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
    'pass .."text": text. for text in texts': ["one text\nof two lines"],
    "data is a text": "one text\nof two lines",
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

    with pa.ipc.open_file(source.files[0].place) as file:
        sizes = [file.get_batch(n).nbytes for n in range(file.num_record_batches)]
    assert max(sizes) <= 5 << 20
    assert len(sizes) >= 4
    assert len(documents(rows)) == 64
    assert json.loads((cache / source.files[0].place).with_name("varlen.json").read_text())["kind"] == "rows"


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
