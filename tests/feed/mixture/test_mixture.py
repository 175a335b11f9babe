"""A mixture: shares that are kept all along, every source in epochs of its own, and exact from any state."""

import json

import numpy as np
import pytest
from tests.support.loaders import content, drained, random_store
from tests.support.rarely import IS_SOAK

import varlen as vl
from varlen.errors import InputError, StateError
from varlen.feed.mixture.stream import MixedStream
from varlen.store.store import open_store

WEIGHTS = {"web": 6.0, "code": 3.0, "books": 1.0}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    sizes = {"web": (4, 90), "code": (2, 60), "books": (1, 25)}
    return {
        name: random_store(folder / name, shards=shards, documents=documents, seed=number)
        for number, (name, (shards, documents)) in enumerate(sizes.items())
    }


def loader_of(stores, until="first", unit="tokens", weights=None, **changes):
    usual = {"capacity": 32, "global_batch_size": 12, "window": 40, "seed": 3, "worker": "thread"}
    mixture = vl.Mixture(stores, WEIGHTS if weights is None else weights, unit, until)
    return vl.PackedLoader(mixture, **{**usual, **changes})


def bounds_of(stores):
    """Number of the first document of each source within the mixture, and of all."""
    return np.cumsum([0, *(int(open_store(path).documents.sum()) for path in stores.values())])


def lengths_of(path):
    """Lengths of a store's documents."""
    store = open_store(path)
    return np.concatenate([np.diff(store.shard(number).offsets) for number in range(len(store.shards))])


def taken_by(stores, batches):
    """Pieces of each source: (document within the source, first token, tokens)."""
    bounds = bounds_of(stores)
    found = [[] for _ in stores]
    for batch in batches:
        for document, start, length in zip(batch.document_ids, batch.document_starts, batch.document_lengths):
            source = int(np.searchsorted(bounds, document, side="right")) - 1
            found[source].append((int(document - bounds[source]), int(start), int(length)))
    return found


@pytest.mark.parametrize("unit", ["tokens", "documents"])
def test_every_source_keeps_to_its_share_from_window_to_window(stores, unit):
    with loader_of(stores, "endless", unit, epochs=None, global_batch_size=4) as loader:
        taken = np.zeros(3)
        for _, batch in zip(range(400), loader):
            for source, pieces in enumerate(taken_by(stores, [batch])):
                taken[source] += sum(n for _, _, n in pieces) if unit == "tokens" else len(pieces)
    # A document is off at most, and the window that is being taken; in documents, empty ones aren't seen.
    shares = np.array([0.6, 0.3, 0.1])
    assert np.abs(taken - shares * taken.sum()).max() < (40 * 30 if unit == "tokens" else 0.04 * taken.sum())


def test_the_first_source_that_is_over_ends_it_and_no_document_comes_twice(stores):
    with loader_of(stores, "first") as loader:
        pieces = taken_by(stores, loader)
        assert len(loader) * 12 >= loader.stats().masked_packs
        stats = loader.stats()
    lengths = [lengths_of(path) for path in stores.values()]
    assert any(len({d for d, _, _ in found}) == np.count_nonzero(n) for found, n in zip(pieces, lengths))
    assert all(len(set(found)) == len(found) for found in pieces)
    assert stats.ledger.repeated == 0
    assert stats.ledger.check().packed == stats.tokens


def test_all_sources_are_read_once_and_repeats_are_counted(stores):
    with loader_of(stores, "all") as loader:
        pieces = taken_by(stores, loader)
        ledger = loader.stats().ledger
    for found, path in zip(pieces, stores.values()):
        assert {d for d, _, _ in found} == set(np.flatnonzero(lengths_of(path)).tolist())
    again = sum(sum(n for _, _, n in found) - sum(n for _, _, n in set(found)) for found in pieces)
    assert ledger.repeated == again > 0


def test_every_state_gives_the_rest_after_json_and_any_step_is_found(stores):
    with loader_of(stores, "all", micro_batch_size=4) as loader:
        whole, states = drained(loader)
        assert len(loader) == len(whole)
        for step in (0, 3, len(whole) // 3):
            loader.seek(step)
            assert drained(loader)[0] == whole[3 * step :]
            assert len(loader.documents(min(step, len(whole) // 3 - 1)).pack_ids)
        assert "shard" in loader.where(0)
    with loader_of(stores, "all", micro_batch_size=4) as loader:
        for taken in range(0, len(states), 3 if IS_SOAK else 7):
            loader.load_state_dict(json.loads(json.dumps(states[taken])))
            assert drained(loader)[0] == whole[taken:]
    with loader_of(stores, "all", micro_batch_size=4, worker="process") as loader:
        assert drained(loader) == (whole, states)


def test_every_world_size_trains_the_same_sets(stores):
    def rows(size):
        found = {}
        for rank in range(size):
            with loader_of(stores, dp_rank=rank, dp_world_size=size, micro_batch_size=1) as loader:
                for batch in loader:
                    found.setdefault(int(batch.pack_ids[0]) // 12, []).append(content(batch))
        return {step: sorted(taken) for step, taken in found.items()}

    assert rows(3) == rows(1)


def test_texts_become_a_store_and_other_shares_or_sources_are_refused(stores, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "abc " * n}) + "\n" for n in range(20)))
    mixed = {"web": stores["web"], "mine": tmp_path / "a.jsonl"}
    with loader_of(mixed, weights={"web": 1, "mine": 1}, cache=tmp_path / "cache", window=8) as loader:
        next(loader)
        state = loader.state_dict()
    with loader_of(mixed, weights={"web": 2, "mine": 2}, cache=tmp_path / "cache", window=8) as loader:
        loader.load_state_dict(state)
    other = loader_of(mixed, weights={"web": 2, "mine": 1}, cache=tmp_path / "cache", window=8)
    with other, pytest.raises(StateError, match="shares was"):
        other.load_state_dict(state)
    for changes, said in (
        ({"mode": "streaming"}, "known lengths"),
        ({"scope": "all", "window": None}, "known lengths"),
        ({"epochs": None}, "endless"),
    ):
        with pytest.raises(InputError, match=said):
            loader_of(stores, **changes)


BAD = [
    (({}, {}), "by name"),
    (({"a": "x"}, {"b": 1}), "a weight for each source"),
    (({"a": "x"}, {"a": 0}), "positive number"),
    (({"a": "x"}, {"a": float("nan")}), "positive number"),
    (({"a": "x"}, {"a": 1}, "lines"), "unit must be one of"),
    (({"a": "x"}, {"a": 1}, "tokens", "last"), "until must be one of"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD)
def test_what_is_no_mixture_is_refused(arguments, said):
    with pytest.raises(InputError, match=said):
        vl.Mixture(*arguments)


def test_a_place_that_was_changed_to_none_of_the_mixture_is_refused(stores):
    with loader_of(stores, "all") as loader:
        next(loader)
        state = loader.state_dict()
        loader.load_state_dict(state)
        web, *others = state["at"]["sources"]
        for change in (
            {"pack": 10**9},
            {"sources": [{**web, "group": 9}, *others]},
            {"sources": [{**web, "window": 99}, *others]},
            {"sources": [{**web, "document": 41}, *others]},
        ):
            with pytest.raises(StateError, match="it was changed"):
                loader.load_state_dict({**state, "at": {**state["at"], **change}})
        assert loader.state_dict() == state


def test_a_step_near_the_one_that_training_is_in_is_found_without_going_back_to_the_first(
    stores, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    looked, real = [], MixedStream.look
    monkeypatch.setattr(
        MixedStream, "look", lambda one, position: looked.append(position.window) or real(one, position)
    )
    settings = {"until": "endless", "epochs": None, "global_batch_size": 4}
    with loader_of(stores, **settings) as loader:
        states = [loader.state_dict()]
        for _, batch in zip(range(80), loader):
            states.append(loader.state_dict())
            if loader.step == 70:
                expected = content(batch)
        windows = [state["at"]["window"] if state["at"] else 0 for state in states]
        assert windows[60] > 5
        for step in (76, 50, 62):
            loader.seek(step)
            assert loader.state_dict()["at"] == states[step]["at"]
        assert looked == [] or min(looked) >= windows[50]
    looked.clear()
    with loader_of(stores, **settings) as loader:
        loader.load_state_dict(states[60])
        loader.seek(69)
        assert content(next(loader)) == expected
        assert windows[60] <= min(looked) <= max(looked) <= windows[70]
