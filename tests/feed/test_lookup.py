"""Any step can be gone to, counted and looked into: what is found there is what batches held."""

import json
from functools import partial

import numpy as np
import pytest
from tests.feed.streaming.test_loader import loader_of as streaming_of
from tests.store.test_store import write_store
from tests.support.loaders import content, drained, loader_of, random_store

import varlen as vl
from varlen.errors import SettingError
from varlen.feed.indexed.table import WindowTable


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return random_store(tmp_path_factory.mktemp("feed"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    lines = [{"text": f"{n} " * int(n % 50)} for n in range(400)]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def by_step(loader):
    """The content of the batches of each step, and what the batches say of its documents."""
    found, held = {}, {}
    while (batch := (loader.step, next(loader, None)))[1] is not None:
        step, batch = batch
        found.setdefault(step, []).append(content(batch))
        counts = np.repeat(batch.pack_ids, np.diff(batch.pack_offsets))
        pieces = zip(counts.tolist(), batch.document_ids.tolist(), batch.document_starts.tolist())
        held.setdefault(step, []).extend(zip(pieces, batch.document_lengths.tolist()))
    return found, held


def looked_up(found):
    packs = np.repeat(found.pack_ids, np.diff(found.offsets)).tolist()
    lengths = (found.stops - found.starts).tolist()
    return list(zip(zip(packs, found.document_ids.tolist(), found.starts.tolist()), lengths))


@pytest.mark.parametrize("made", ["indexed", "streaming"])
def test_any_step_can_be_gone_to_and_skipped_to(store, texts, made):
    new = partial(streaming_of, texts, micro_batch_size=4)
    if made == "indexed":
        new = partial(loader_of, store, micro_batch_size=8)
    with new() as loader:
        whole, _ = by_step(loader)
    steps = sorted(whole)
    assert len(steps) > 4
    with new() as loader:
        for step in (steps[2], steps[-1], 0, steps[3], steps[-1] + 1, steps[1]):
            loader.seek(step)
            assert loader.step == step
            assert by_step(loader)[0] == {s: whole[s] for s in steps if s >= step}
        loader.seek(steps[1])
        next(loader)
        loader.seek(loader.step + 2)  # past a bad stretch, within a loop
        state = loader.state_dict()
        assert content(next(loader)) == whole[steps[3]][0]
    with new() as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert content(next(loader)) == whole[steps[3]][0]


def test_the_documents_of_any_step_are_those_that_its_batches_held(store):
    with loader_of(store, micro_batch_size=8) as loader:
        held = by_step(loader)[1]
        for step in held:
            assert sorted(looked_up(loader.documents(step))) == sorted(held[step])
        first = loader.documents(0).document_ids[0]
        assert loader.where(first).startswith("document ")
        with pytest.raises(SettingError, match=f"{max(held) + 1} would be the next"):
            loader.documents(max(held) + 1)
        with pytest.raises(SettingError, match="none of the"):
            loader.documents(10**6)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_lengths_of_any_step_are_those_that_all_ranks_then_get(store, world):
    def taken(rank, loader):
        """Lengths of each piece of each step by pack, document and place, of one rank."""
        return {step: dict(held) for step, held in by_step(loader)[1].items()}

    changes = {"dp_world_size": world, "micro_batch_size": 4, "capacity": 16}  # so that some are split
    with loader_of(store, capacity=16) as loader:
        loader.load_state_dict(drained(loader)[1][1])
        known, state = {}, loader.state_dict()
        while (lengths := loader.lengths(len(known))) is not None:
            known[len(known)] = lengths
        pieces = {step: [key for key, _ in looked_up(loader.documents(step))] for step in known}
        assert loader.lengths(10**6) is None
        assert loader.state_dict() == state
        assert len(known) == len(loader)
    held = {step: {} for step in known}
    for rank in range(world):
        with loader_of(store, dp_rank=rank, **changes) as loader:
            loader.seek(2)
            later = taken(rank, loader)
            loader.seek(0)
            whole = taken(rank, loader)
            assert later == {step: found for step, found in whole.items() if step >= 2}
        for step, found in whole.items():
            held[step] |= found
    for step, lengths in known.items():
        assert lengths.dtype == np.int32
        assert dict(zip(pieces[step], lengths.tolist(), strict=True)) == held[step]


def test_the_lengths_of_a_mixture_are_those_of_its_batches(store, tmp_path):
    mixture = vl.Mixture({"a": store, "b": random_store(tmp_path / "b", seed=6)}, weights={"a": 2, "b": 1})
    with loader_of(mixture, epochs=1) as loader:
        held = by_step(loader)[1]
        loader.seek(1)
        for step in held:
            assert sorted(loader.lengths(step)) == sorted(length for _, length in held[step])
        assert loader.lengths(max(held) + 1) is None


def test_in_streaming_lengths_of_coming_steps_are_refused(texts):
    with streaming_of(texts) as loader, pytest.raises(SettingError, match=r"index them \(varlen index\)"):
        loader.lengths(0)


def test_finding_a_step_makes_the_tables_of_the_epochs_up_to_it_and_no_others(store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made, real = [], WindowTable._make
    monkeypatch.setattr(
        WindowTable, "_make", lambda table, *which: made.append(which[0]) or real(table, *which)
    )
    with loader_of(store, epochs=50) as loader:
        loader.seek(1)
        loader.documents(2)
        assert made == [0]
        once = int(loader._lookup._table.epoch(0, 4).num_packs) // 24
        loader.seek(once + 2)
        assert made == [0, 1]


def test_the_end_can_be_gone_to_and_no_step_behind_it(store):
    with loader_of(store, epochs=2) as loader:
        count = len(loader)
        loader.seek(count)
        assert next(loader, None) is None
        for step in (count + 1, 10**9):
            with pytest.raises(SettingError, match=f"none of the {count} steps"):
                loader.seek(step)


def test_in_streaming_the_documents_of_the_last_rounds_are_found(texts):
    with streaming_of(texts, micro_batch_size=4, epochs=1) as loader:
        held = by_step(loader)[1]
        for step in held:
            assert sorted(looked_up(loader.documents(step))) == sorted(held[step])
        where = loader.where(loader.documents(0).document_ids[0])
        assert "record " in where
        assert where.endswith("a.jsonl")
        with pytest.raises(SettingError, match="isn't one of the last rounds"):
            loader.documents(max(held) + 5)


def test_the_length_is_the_number_of_batches_and_a_loader_is_true(store, texts):
    for changes in (
        {},
        {"micro_batch_size": 4},
        {"micro_batch_size": 2, "dp_rank": 1, "dp_world_size": 3},
        {"epochs": 1},
    ):
        with loader_of(store, **changes) as loader:
            assert len(loader) == len(drained(loader)[0]) == len(loader)
    with loader_of(store, epochs=None) as loader, pytest.raises(TypeError, match="without end"):
        len(loader)
    with streaming_of(texts) as loader, pytest.raises(TypeError, match="isn't known"):
        len(loader)
    with streaming_of(texts) as loader:
        assert loader
        loader.seek(10**6)
        assert list(loader) == []


def test_a_state_within_a_step_after_one_that_was_left_out_is_exact(tmp_path):
    documents = [([1] * 9, None)] * 4 + [([2] * 9, [0] * 9)] * 4 + [([n] * 9, None) for n in range(3, 11)]
    silent = write_store(tmp_path, [[documents]]).folder
    settings = {"capacity": 10, "global_batch_size": 4, "micro_batch_size": 1, "shuffle": False, "epochs": 1}
    with loader_of(silent, **settings) as loader:
        whole, states = drained(loader)
    assert [state["step"] for state in states] == [0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 3, 3, 4]
    for taken, state in enumerate(states):
        with loader_of(silent, **settings) as loader:
            loader.load_state_dict(state)
            assert drained(loader)[0] == whole[taken:]


def test_in_streaming_a_step_behind_one_that_was_left_out_is_gone_to_exactly(tmp_path):
    early = ["abc00", "abc00", "abc01", "abc01", "a", "a"]  # one token gives no label
    texts = [*early, *(f"abc{n:02}" for n in range(2, 16)), "a", "a", "abcd", "abce"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {"capacity": 8, "global_batch_size": 2, "micro_batch_size": 1, "lanes": 1, "epochs": 1}
    settings |= {"shuffle": False, "max_documents": 1, "append_eos": False, "window": 8}
    with streaming_of(tmp_path, **settings) as loader:
        taken = [int(batch.pack_ids[0]) for batch in loader]
    assert set(range(24)) > set(taken)
    for step in range(12):
        with streaming_of(tmp_path, **settings) as loader:
            loader.seek(step)
            assert [int(batch.pack_ids[0]) for batch in loader] == [n for n in taken if n >= 2 * step]
