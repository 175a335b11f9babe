"""Ids that the model doesn't know: refused before training where the first tell, else with the batch that has one."""

import json
import os
from itertools import product
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feed.indexed.test_windows import Store
from tests.store.test_bin_idx import write_pair
from tests.store.test_store import write_store
from tests.support.loaders import loader_of
from tests.support.rarely import mostly

import varlen as vl
from varlen.documents.source import Mixture
from varlen.errors import InputError, ModelError, SourceError
from varlen.feed import checks
from varlen.feed.batches import BatchSettings, Contents, fill_batch
from varlen.feed.checks import check_first_ids

MODEL = SimpleNamespace(vocab_size=64)


def write_tokens(folder, kind, documents):
    """Documents of ids as a file that says nothing of its vocabulary; returns what names it."""
    folder.mkdir()
    if kind == "megatron":
        write_pair(folder / "a", [[ids] for ids in documents])
        return folder / "a"
    if kind == "arrow":
        table = pa.table({"input_ids": pa.array(documents, pa.list_(pa.int32()))})
        with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as out:
            out.write_table(table)
        return folder / "a.arrow"
    return write_store(folder / "a", [[[(ids, None) for ids in documents]]]).folder


KINDS = ("megatron", "arrow", "store")


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_beyond_the_model_among_the_first_is_refused_when_the_loader_is_made(tmp_path, kind):
    documents = [[1, 2], [3, 63, 4], [5, 64, 6], [65]]
    data = write_tokens(tmp_path / kind, kind, documents)
    said = r"document 2 of .* holds the id 64, but the model knows 64 ids, from 0 to 63; take the model"
    with pytest.raises(ModelError, match=said):
        loader_of(data, model=MODEL)
    with pytest.raises(ModelError, match=said):
        vl.PackedLoader(Mixture({"a": data}, {"a": 1}), capacity=32, global_batch_size=4, model=MODEL)
    loader_of(data, model=SimpleNamespace(vocab_size=66)).close()
    loader_of(data, model=SimpleNamespace()).close()


def test_first_documents_that_cannot_be_read_are_masked_later_where_that_is_asked_for(tmp_path):
    data = write_tokens(tmp_path / "megatron", "megatron", [[7] * 9] * 20)
    os.truncate(tmp_path / "megatron" / "a.bin", 100)
    with pytest.raises(SourceError, match=r"a\.idx is damaged|a\.bin ends"):
        loader_of(data, model=MODEL)
    with loader_of(data, model=MODEL, on_error="skip", epochs=1) as loader:
        assert sum(batch.num_tokens for batch in loader) == 180
        assert loader.stats().skipped == 15


@pytest.mark.parametrize(
    ("kind", "worker"),
    mostly([*product(KINDS, ["thread"]), ("arrow", "process")], product(KINDS, ("thread", "process"))),
)
def test_another_id_beyond_the_model_is_refused_with_its_batch(tmp_path, monkeypatch, kind, worker):
    monkeypatch.setattr(checks, "_DOCUMENTS", 3)
    data = write_tokens(tmp_path / kind, kind, [[7] * 32] * 48 + [[7] * 31 + [70]])
    with loader_of(data, model=MODEL, shuffle=False, worker=worker) as loader:
        assert [next(loader).num_tokens for _ in range(2)] == [24 * 32] * 2
        with pytest.raises(
            ModelError, match=r"document 48 of .* holds the id 70, but the model knows 64 ids"
        ):
            next(loader)


def ids_of_letters(texts):
    """A tokenizer that doesn't say how many ids it has."""
    return [[ord(letter) for letter in text] for text in texts]


def test_streaming_refuses_such_an_id_too_and_names_its_record(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("19", "2z", "45"))
    )
    settings = {"tokenizer": ids_of_letters, "append_eos": False, "global_batch_size": 1, "shuffle": False}
    with (
        loader_of(tmp_path / "a.jsonl", model=MODEL, **settings) as loader,
        pytest.raises(
            ModelError, match=r"record 1 of .*a\.jsonl.* holds the id 122, but the model knows 64 ids"
        ),
    ):
        next(loader)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(1, 10)
)
def test_the_first_unknown_id_is_found_and_its_document(documents, vocab_size):
    lengths = np.array(list(map(len, documents)))
    contents = Contents(
        tokens=np.array([i for ids in documents for i in ids], dtype=np.int32),
        mask=None,
        lengths=lengths,
        offsets=np.array([0, len(lengths)]),
        document_ids=np.arange(len(lengths)) + 100,
        document_starts=np.zeros(len(lengths), dtype=np.int64),
        pack_ids=np.array([0]),
    )
    settings = BatchSettings(
        capacity=32, global_batch_size=1, micro_batch_size=1, dp_world_size=1, vocab_size=vocab_size
    )
    unknown = [(n + 100, i) for n, ids in enumerate(documents) for i in ids if i >= vocab_size]
    if not unknown:
        fill_batch(contents, 1, settings)
        return
    with pytest.raises(ModelError, match=rf"^document {unknown[0][0]} holds the id {unknown[0][1]}, "):
        fill_batch(contents, 1, settings)


def test_no_more_is_looked_at_before_training_than_the_bound_says(monkeypatch):
    class Read(Store):
        def gather(self, shards, documents, starts, lengths):
            assert shards.tolist() == [1] * len(shards)
            assert not starts.any()
            self.read = lengths.tolist()
            return np.zeros(int(lengths.sum()), dtype=np.int32), None

    monkeypatch.setattr(checks, "_TOKENS", 12)
    store = Read([[], [5, 4, 9, 7], [3]])
    check_first_ids(store, 1)
    assert store.read == [5, 4, 3, 0]
    monkeypatch.setattr(checks, "_DOCUMENTS", 2)
    check_first_ids(store, 1)
    assert store.read == [5, 4]
    check_first_ids(Read([[]]), 1)


def test_padding_that_the_model_does_not_know_is_refused_when_the_loader_is_made(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    model = SimpleNamespace(vocab_size=300)
    with pytest.raises(InputError, match="pad_id 300 is none of the 300 ids that the model knows"):
        loader_of(tmp_path / "a.jsonl", model=model, pad_id=300)
    loader_of(tmp_path / "a.jsonl", model=model, pad_id=299).close()
