"""What a loader can't be asked for is refused in a sentence; ids that the model doesn't know, too."""

import json
import os
import re
from itertools import product
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feed.windows import Store
from tests.support.rarely import mostly
from tests.support.stores import loader_of, random_store, write_pair, write_store

import varlen as vl
from varlen.documents.source import Mixture
from varlen.errors import InputError, ModelError, SettingError, SourceError, StateError
from varlen.feed import batches
from varlen.feed.batches import BatchSettings, Contents, fill_batch
from varlen.feed.opening import check_first_ids


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return random_store(tmp_path_factory.mktemp("feed"))


def test_an_unknown_argument_names_the_nearest_one(store):
    with pytest.raises(SettingError, match=r"'batch_size'; the nearest is micro_batch_size$"):
        vl.PackedLoader(store, capacity=4, batch_size=2)


BAD = [
    ({"capacity": 0}, "capacity"),
    ({"shuffle": "false"}, "shuffle must be True or False, got 'false'"),
    ({"global_batch_size": 10, "micro_batch_size": 4}, "multiple of 4: 8 or 12"),
    ({"dp_rank": 0, "dp_world_size": 5}, "multiple of 5: 20 or 25"),
    ({"dp_rank": 0}, "only dp_rank was given"),
    ({"dp_world_size": 2}, "only dp_world_size was given"),
    ({"dp_rank": 2, "dp_world_size": 2}, "dp_rank"),
    ({"mode": "fast"}, "mode must be one of"),
    ({"mode": "streaming"}, "holds tokens already"),
    ({"tokenizer": "bytes"}, "holds tokens already"),
    ({"supervise": "all"}, "which supervise can't change"),
    ({"append_eos": False}, "which append_eos can't change"),
    ({"columns": {"text": "body"}}, "which columns can't change"),
    ({"scope": "minibatch"}, 'layout="flat"'),
    ({"scope": "all"}, "whole data set at once, which window=50 can't change; leave window out"),
    (
        {"scope": "minibatch", "layout": "flat", "max_documents": 5},
        "each document a pack of its own, which max_documents=5 can't change; leave max_documents out",
    ),
    ({"layout": "column"}, "layout must be one of"),
    ({"worker": "fork"}, "worker must be one of"),
    ({"ring_slots": 1}, "ring_slots"),
    ({"epochs": 0}, "epochs"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": True}, "seed"),
    ({"pad_id": -1}, "pad_id"),
    ({"epochs": 1.5}, "epochs"),
    ({"capacity": None}, "capacity"),
    ({"deadline_s": 0}, "deadline_s must be a positive number"),
    ({"deadline_s": float("inf")}, "deadline_s must be a positive number of seconds, and finite, got inf"),
    ({"deadline_s": float("nan")}, "deadline_s must be .* finite, got nan"),
    ({"read_ahead_s": float("inf")}, "read_ahead_s must be .* finite, got inf"),
    ({"document_multiple_of": 5}, "document_multiple_of"),
    ({"overlong": "error", "capacity": 16}, "but capacity is 16 .* overlong="),
    ({"model": SimpleNamespace(max_position_embeddings=16)}, "longer than the 16 positions"),
    (
        {"model": SimpleNamespace(config=SimpleNamespace(vocab_size=64)), "capacity": 40},
        "260 tokens, but the model knows 64",
    ),
]


@pytest.mark.parametrize(("changes", "said"), BAD)
def test_what_cannot_be_is_refused_when_the_loader_is_made(store, changes, said):
    with pytest.raises(InputError, match=said):
        loader_of(store, **changes)


def test_only_the_longest_document_needs_the_positions_of_the_model(tmp_path):
    rows = [{"text": "a" * length} for length in (40, 7, 100, 12)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def loader(positions, source=tmp_path / "texts.jsonl", **changes):
        model = SimpleNamespace(max_position_embeddings=positions)
        options = {"capacity": 128, "global_batch_size": 2, "cache": tmp_path / "cache", "mode": "indexed"}
        return vl.PackedLoader(source, "bytes", model=model, **options | changes)

    with loader(101) as found:
        assert max(batch.max_seqlen for batch in found) == 101
    loader(50, overlong="drop", capacity=64).close()
    mixture = vl.Mixture({"texts": tmp_path / "texts.jsonl"}, {"texts": 1})
    for source in (tmp_path / "texts.jsonl", mixture):
        with pytest.raises(InputError, match="the 100 positions of the model, and a document has 101 tokens"):
            loader(100, source)
    with pytest.raises(
        InputError, match=r"and lengths .* aren't known here.* capacity=101 at most; or index"
    ):
        loader(101, mode="streaming")


@pytest.mark.parametrize(
    ("changes", "out"), [({"tokenizer": "bytes"}, "tokenizer"), ({"mode": "streaming"}, "mode")]
)
def test_tokens_of_megatron_and_of_a_store_in_the_making_are_not_taken_for_documents(tmp_path, changes, out):
    write_pair(tmp_path / "corpus", [[[1, 2, 3]]] * 9)
    (tmp_path / "folder").mkdir()
    write_pair(tmp_path / "folder" / "a", [[[1, 2, 3]]] * 9)
    (tmp_path / "store.partial" / ".work").mkdir(parents=True)
    plan = {"fingerprint": "f", "num_parts": 2}
    (tmp_path / "store.partial" / ".work" / "plan.json").write_text(json.dumps(plan))
    for name in ("corpus", "corpus.bin", "corpus.idx", "store", "corpus.*", "folder"):
        said = rf"{re.escape(name)} holds tokens already, which .* can't change; leave {out}.* out"
        with pytest.raises(InputError, match=said):
            loader_of(tmp_path / name, **changes)
    with pytest.raises(InputError, match=r"corpus holds tokens already"):
        loader_of([tmp_path / "corpus", tmp_path / "corpus.bin"], **changes)
    with pytest.raises(InputError, match=r"nothing does not exist"):
        loader_of(tmp_path / "nothing", **changes)
    (tmp_path / "both").mkdir()
    write_pair(tmp_path / "both" / "a", [[[1, 2, 3]]] * 9)
    (tmp_path / "both" / "a.txt").write_text("one two")
    with pytest.raises(InputError, match=r"holds Megatron|holds tokens already"):
        loader_of([tmp_path / "corpus", tmp_path / "both"], **changes)
    with loader_of(tmp_path / "both", mode="streaming") as loader:
        assert sum(batch.num_tokens for batch in loader) == 2 * 8


def letters(texts):
    """A tokenizer that names no token which ends a document, and doesn't say how many ids it has."""
    return [[ord(letter) for letter in text] for text in texts]


@pytest.mark.parametrize("mode", ["streaming", "indexed"])
def test_a_tokenizer_that_names_no_end_is_refused_when_the_loader_is_made(tmp_path, mode):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
    settings = {"mode": mode, "tokenizer": letters, "cache": tmp_path / "cache", "epochs": 1}
    with pytest.raises(InputError, match=r"letters names no token that ends .*eos=.*append_eos=False"):
        loader_of(tmp_path / "a.jsonl", **settings)
    for way_out in ({"eos": 0}, {"append_eos": False}):
        with loader_of(tmp_path / "a.jsonl", **settings, **way_out) as loader:
            assert next(loader).num_tokens == 4 - ("append_eos" in way_out)
    (tmp_path / "b.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3, 4, 5]}) + "\n")
    with loader_of(tmp_path / "b.jsonl", **settings) as loader:  # nothing is to be ended
        assert next(loader).num_tokens == 5


def test_forgotten_ranks_under_torchrun_are_refused(store, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match=r"dp_rank=int\(os\.environ\[.RANK.\]\)"):
        loader_of(store)
    loader_of(store, dp_rank=1, dp_world_size=4).close()
    monkeypatch.setenv("WORLD_SIZE", "1")
    loader_of(store).close()


def test_documents_are_indexed_once_into_the_cache_and_found_there(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("one\n\ntwo\n\nthree")
    counts = []
    for cache in (tmp_path / "cache", str(tmp_path / "cache")):
        loader = vl.PackedLoader(
            tmp_path / "data", capacity=8, global_batch_size=1, mode="indexed", worker="thread", cache=cache
        )
        with loader:
            counts.append(sum(batch.num_tokens for batch in loader))
        stores = list((tmp_path / "cache" / "stores").iterdir())
        assert len(stores) == 1
        marks = (stores[0] / "manifest.json").stat().st_mtime_ns
        counts.append(marks)
    assert counts[0] == counts[2] == 14
    assert counts[1] == counts[3]


@pytest.mark.parametrize(
    ("changes", "window"), [({"window": None}, 65_536), ({}, 50), ({"scope": "all", "window": None}, None)]
)
def test_a_state_names_the_window_that_is_in_effect_also_where_none_was_asked_for(store, changes, window):
    with loader_of(store, **changes) as loader:
        assert loader.state_dict()["belongs_to"]["window"] == window


def test_a_streaming_state_names_its_window_and_is_refused_behind_the_batches_of_a_step(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    with loader_of(tmp_path / "a.txt", window=None, lanes=4) as loader:
        state = loader.state_dict()
        assert state["belongs_to"]["window"] == 32
        with pytest.raises(StateError, match="1 batches of step 0 were taken, which has 1"):
            loader.load_state_dict({**state, "micro_batch": 1})


def test_numbers_of_numpy_are_as_good_as_others(store):
    plain = {
        "capacity": 32,
        "global_batch_size": 12,
        "micro_batch_size": 4,
        "window": 40,
        "max_documents": 5,
        "epochs": 2,
        "seed": 7,
        "pad_id": 1,
        "pad_to_multiple_of": 4,
        "document_multiple_of": 2,
        "ring_slots": 3,
        "dp_rank": 0,
        "dp_world_size": 1,
    }
    states = []
    for worker in ("thread", "process"):
        settings = {name: np.int64(value) for name, value in plain.items()} if worker == "process" else plain
        with loader_of(store, worker=worker, **settings) as loader:
            next(loader)
            states.append(json.dumps(loader.state_dict()))
    assert states[0] == states[1]


@pytest.mark.parametrize("more", [{"mode": "indexed"}, {"scope": "all", "window": None}])
def test_the_arguments_of_streaming_serve_indexed_mode_too_and_change_nothing(store, more):
    """A program switches modes by one argument; a state goes on with lanes and without."""
    with loader_of(store, epochs=1, **more) as loader:
        whole = [b.input_ids.tolist() for b in loader]
    with loader_of(store, epochs=1, lanes=3, **more) as loader:
        first = next(loader).input_ids.tolist()
        state = loader.state_dict()
    with loader_of(store, epochs=1, lanes=7, **more) as loader:
        loader.load_state_dict(state)
        rest = [b.input_ids.tolist() for b in loader]

    assert [first, *rest] == whole


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
        loader_of(Mixture({"a": data}, {"a": 1}), model=MODEL)
    rows = tmp_path / "rows.jsonl"  # of ids, which the built-in tokenizer didn't make
    rows.write_text(json.dumps({"input_ids": [1, 63]}))
    loader_of(Mixture({"a": rows}, {"a": 1}), model=MODEL, cache=tmp_path).close()
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
    monkeypatch.setattr(batches, "_DOCUMENTS", 3)
    data = write_tokens(tmp_path / kind, kind, [[7] * 32] * 48 + [[7] * 31 + [70]])
    with loader_of(data, model=MODEL, shuffle=False, worker=worker) as loader:
        assert [next(loader).num_tokens for _ in range(2)] == [24 * 32] * 2
        with pytest.raises(
            ModelError, match=r"document 48 of .* holds the id 70, but the model knows 64 ids"
        ):
            next(loader)


def test_streaming_refuses_such_an_id_too_and_names_its_record(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("19", "2z", "45"))
    )
    settings = {"tokenizer": letters, "append_eos": False, "global_batch_size": 1, "shuffle": False}
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

    monkeypatch.setattr(batches, "_TOKENS", 12)
    store = Read([[], [5, 4, 9, 7], [3]])
    check_first_ids(store, 1)
    assert store.read == [5, 4, 3, 0]
    monkeypatch.setattr(batches, "_DOCUMENTS", 2)
    check_first_ids(store, 1)
    assert store.read == [5, 4]
    check_first_ids(Read([[]]), 1)


def test_padding_that_the_model_does_not_know_is_refused_when_the_loader_is_made(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    model = SimpleNamespace(vocab_size=300)
    with pytest.raises(InputError, match="pad_id 300 is none of the 300 ids that the model knows"):
        loader_of(tmp_path / "a.jsonl", model=model, pad_id=300)
    loader_of(tmp_path / "a.jsonl", model=model, pad_id=299).close()
