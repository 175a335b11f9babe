"""The loader on rows in memory gives the batches of a file of the same rows, in every mode, worker and rank."""

import itertools
import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from tests.support.memory_rows import FORMS, ITERABLES, KINDS, TEXTS, TOKENS, as_file
from tests.support.ranks import as_ranks
from tests.support.rarely import IS_SOAK, mostly
from tests.support.stores import content, drained

import varlen as vl
from varlen.adapters.hf.trainer import loader_for
from varlen.adapters.megatron.loader import external_loaders
from varlen.adapters.torchtitan import PackedDataLoader
from varlen.errors import InputError, SourceError, StateError

TABLES = {"RecordBatch", "RecordBatchReader"}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def loader_of(data, **changes):
    usual = {"capacity": 128, "global_batch_size": 4, "window": 8, "seed": 3, "worker": "thread", "epochs": 2}
    return vl.PackedLoader(data, changes.pop("tokenizer", "bytes"), **{**usual, **changes})


def is_table(form):
    return form in TABLES or form.startswith("Table") or (form.startswith("Dataset") and "trans" not in form)


def as_ipc(rows, path, form):
    """Write rows as an Arrow file of the same types and batches as ours; returns the path."""
    table = pa.Table.from_pylist(rows)
    if form.startswith("Dataset"):
        table = datasets.Dataset.from_list(rows).with_format("arrow")[:].replace_schema_metadata(None)
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, 1024)
    return path


CELLS = [*itertools.product(FORMS, KINDS, ("indexed", "streaming"))]
EVERY_KIND = ("list", "Dataset", "Table", "dict of columns")


@pytest.mark.parametrize(
    ("form", "kind", "mode"),
    mostly([one for one in CELLS if one[1] == "texts" or one[0] in EVERY_KIND], CELLS),
)
def test_batches_are_those_of_a_file_of_the_same_rows(form, kind, mode, tmp_path):
    rows = KINDS[kind]
    # Streaming cuts files where their format does, and so a table is compared with a table.
    if mode == "streaming" and is_table(form):
        file = as_ipc(rows, tmp_path / "rows.arrow", form)
    else:
        file = as_file(rows, tmp_path / "rows.jsonl")
    data = FORMS[form](rows)
    if form == "list of sources" and mode == "streaming":
        file = [as_file(rows[:70], tmp_path / "a.jsonl"), as_file(rows[70:], tmp_path / "b.jsonl")]

    with loader_of(data, mode=mode) as ours, loader_of(file, mode=mode) as theirs:
        wanted, found = drained(theirs)[0], drained(ours)[0]
    assert found == wanted
    assert len(found) > 5


IN_PROCESSES = [
    (form, mode)
    for form in ("list", "Dataset by indices", "DataFrame")
    for mode in ("indexed", "streaming", "auto")
]


@pytest.mark.parametrize(
    ("form", "mode"),
    mostly([one for one in IN_PROCESSES if "auto" not in one or "list" in one], IN_PROCESSES),
)
def test_a_process_gives_the_same_batches_from_any_state(form, mode):
    with (
        loader_of(FORMS[form](TEXTS), mode=mode, micro_batch_size=2) as thread,
        loader_of(FORMS[form](TEXTS), mode=mode, micro_batch_size=2, worker="process") as process,
    ):
        whole, states = drained(thread)
        assert drained(process)[0] == whole
        for taken in (1, len(whole) // 2, len(whole)):
            process.load_state_dict(json.loads(json.dumps(states[taken])))
            assert drained(process)[0] == whole[taken:]


OF_RANKS = [("indexed", "list"), ("streaming", "function")] + [("streaming", "Dataset")] * IS_SOAK


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """What came to each rank of a job that reads rows of several forms, one after the other."""
    folder = tmp_path_factory.mktemp("ranks")
    as_ranks(
        Path(__file__).with_name("memory_job.py"),
        folder,
        *itertools.chain(*OF_RANKS),
        libraries="torch,varlen.feed.loader",
        XDG_CACHE_HOME=str(folder / "cache"),
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("mode", "form"), OF_RANKS)
def test_ranks_of_a_job_share_the_steps_of_rows_in_memory(of_ranks, mode, form):
    said = [rank[f"{mode} {form}"] for rank in of_ranks]

    with loader_of((FORMS | ITERABLES)[form](TEXTS), mode=mode) as alone:
        expected = [
            [int(pack) // 4, sha256(ids.tobytes()).hexdigest(), int(batch.step_num_targets)]
            for batch in alone
            for pack, ids in zip(batch.pack_ids, batch.input_ids)
        ]

    assert said[0]["state"] == said[1]["state"]
    assert len(said[0]["rows"]) == len(said[1]["rows"])
    assert sorted(said[0]["rows"] + said[1]["rows"]) == sorted(expected)


@pytest.mark.parametrize("mode", ["indexed", "streaming"])
@pytest.mark.parametrize("form", ["list", "Table", "map-style"])
def test_two_ranks_share_the_steps_of_one(form, mode):
    with loader_of(FORMS[form](TEXTS), mode=mode, micro_batch_size=2) as alone:
        whole = [content(batch) for batch in alone]
    ranks = []
    for rank in range(2):
        data = FORMS[form](TEXTS)
        with loader_of(data, mode=mode, micro_batch_size=2, dp_rank=rank, dp_world_size=2) as one:
            ranks.append([(batch.pack_ids.tobytes(), batch.input_ids.tobytes()) for batch in one])

    assert len(ranks[0]) == len(ranks[1]) == len(whole) // 2
    with loader_of(FORMS[form](TEXTS), mode=mode, micro_batch_size=2) as alone:
        rows = {int(i): row.tobytes() for batch in alone for i, row in zip(batch.pack_ids, batch.input_ids)}
    taken = {}
    for one in ranks:
        for ids, tokens in one:
            numbers = np.frombuffer(ids, np.int64)
            taken |= {
                int(i): row.tobytes()
                for i, row in zip(numbers, np.frombuffer(tokens, np.int32).reshape(2, -1))
            }
    assert taken == rows


@pytest.mark.parametrize("mode", ["indexed", "streaming"])
@pytest.mark.parametrize("form", ["list", "Dataset", "Table"])
def test_a_state_goes_on_with_equal_rows_alone(form, mode):
    with loader_of(FORMS[form](TEXTS), mode=mode) as loader:
        whole = [content(batch) for batch in loader]
    with loader_of(FORMS[form](TEXTS), mode=mode) as loader:
        next(loader)
        state = json.loads(json.dumps(loader.state_dict()))
    with loader_of(FORMS[form](json.loads(json.dumps(TEXTS))), mode=mode) as again:
        again.load_state_dict(state)
        assert [content(batch) for batch in again] == whole[1:]
    with (
        loader_of(FORMS[form](TEXTS[::-1]), mode=mode) as others,
        pytest.raises(StateError, match=r"other data|fingerprint"),
    ):
        others.load_state_dict(state)


def test_nothing_is_left_behind_when_a_loader_is_closed(tmp_path):
    for worker in ("thread", "process"):
        for mode in ("indexed", "streaming"):
            loader = loader_of(TOKENS, tokenizer=None, mode=mode, worker=worker, cache=tmp_path / "own")
            next(loader)
            assert mode == "indexed" or len(list((tmp_path / "own" / "rows").iterdir())) == 1
            loader.close()
            assert list((tmp_path / "own" / "rows").iterdir()) == []


def test_tables_of_tokens_are_read_where_they_lie_without_a_store(tmp_path):
    with loader_of(pa.Table.from_pylist(TOKENS), tokenizer=None, cache=tmp_path) as loader:
        assert loader.mode == "indexed"
        assert sum(batch.num_tokens for batch in loader) == 2 * sum(len(row["input_ids"]) for row in TOKENS)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize("mode", ["indexed", "streaming"])
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_bad_rows_are_errors_or_counted(mode, worker):
    rows = [*TEXTS[:50], {"text": 5}, {"text": b"bytes"}, None, *TEXTS[50:]]

    with (
        pytest.raises(InputError, match=r"memory \(list of 203 rows\) row 51"),
        loader_of(rows, mode=mode, worker=worker) as one,
    ):
        list(one)
    with (
        loader_of(rows, mode=mode, worker=worker, on_error="skip") as loader,
        loader_of(TEXTS, mode=mode) as sound,
    ):
        tokens = sum(batch.num_tokens for batch in loader)
        assert tokens == sum(batch.num_tokens for batch in sound)
        assert mode == "indexed" or loader.stats().skipped == 3


def test_rows_are_sources_of_a_mixture(tmp_path):
    def mixture(one, two):
        return vl.Mixture({"a": one, "b": two}, {"a": 1, "b": 2}, until="all")

    files = (as_file(TEXTS, tmp_path / "a.jsonl"), as_file(TEXTS[::2], tmp_path / "b.jsonl"))
    with loader_of(mixture(TEXTS, pa.Table.from_pylist(TEXTS[::2])), epochs=1) as ours:
        found = drained(ours)[0]
    with loader_of(mixture(*files), epochs=1) as theirs:
        assert found == drained(theirs)[0]


def test_importing_varlen_and_a_loader_of_dicts_loads_no_data_library():
    program = """
import sys, varlen as vl
with vl.PackedLoader([{"text": "abc"}] * 40, "bytes", capacity=64, global_batch_size=2, worker="thread") as loader:
    print(sum(batch.num_tokens for batch in loader))
print(sorted({"datasets", "pandas", "torch", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "160\n[]\n"


def test_where_a_document_lies_is_said_in_words_of_the_rows():
    with loader_of(TEXTS) as loader:
        batch = next(loader)
        assert "memory (list of 200 rows)" in loader.where(int(batch.document_ids[0]))


def test_rows_without_a_column_are_refused_before_anything_is_made():
    with pytest.raises(SourceError, match=r"memory \(list of 1 row\) has no column of documents"):
        loader_of([{"body": "abc"}], mode="indexed")


class _Arguments:
    """What a Trainer of transformers says of a run."""

    per_device_train_batch_size, gradient_accumulation_steps, world_size, process_index = 2, 2, 1, 0
    max_steps, num_train_epochs, seed, data_seed = -1, 2, 3, None


def _of_hf(data):
    return loader_for(_Arguments(), data, "bytes", capacity=128, worker="thread")


def _of_megatron(data):
    settings = {
        "seq_length": 128,
        "global_batch_size": 4,
        "dp_rank": 0,
        "dp_world_size": 1,
        "worker": "thread",
    }
    return external_loaders(data, tokenizer="bytes", **settings)[0]


def _of_torchtitan(data):
    settings = {"text_tokenizer": "bytes", "global_batch_size": 4, "worker": "thread"}
    config = PackedDataLoader.Config(source=data, **settings)
    return config.build(dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=128, local_batch_size=4)


@pytest.mark.parametrize("adapter", [_of_hf, _of_megatron, _of_torchtitan])
@pytest.mark.parametrize("form", ["list", "Dataset", "function"])
def test_adapters_take_rows_as_the_loader_does(adapter, form):
    loader = adapter((FORMS | ITERABLES)[form](TEXTS))
    try:
        assert sum(1 for _ in itertools.islice(loader, 16)) == 16
    finally:
        loader.close()
