"""The loader over a token store: the same bytes from every state, in a thread and in a process, on any ranks."""

import copy
import json
import threading

import numpy as np
import pytest
from tests.support.loaders import content, drained, loader_of, random_store
from tests.support.rarely import IS_SOAK

import varlen as vl
from varlen.errors import SettingError, StateError
from varlen.store.store import open_store

WORLDS = (1, 2, 3, 4, 6, 8)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return random_store(tmp_path_factory.mktemp("feed"))


def test_every_state_gives_the_rest_twice_after_json(store):
    with loader_of(store, micro_batch_size=4) as loader:
        whole, states = drained(loader)
        assert list(loader) == []

    assert len(whole) > 20
    with loader_of(store, micro_batch_size=4) as loader:
        for taken in [*reversed(range(len(states)))][:: 1 if IS_SOAK else 3]:
            for _ in range(2):
                loader.load_state_dict(json.loads(json.dumps(states[taken])))
                assert loader.state_dict() == states[taken]
                assert drained(loader)[0] == whole[taken:]


def test_a_process_gives_the_same_batches_as_a_thread(store):
    with (
        loader_of(store, micro_batch_size=4) as thread,
        loader_of(store, micro_batch_size=4, worker="process") as process,
    ):
        whole, states = drained(thread)
        assert drained(process) == (whole, states)
        for taken in (0, len(whole) // 2, len(whole)):
            process.load_state_dict(json.loads(json.dumps(states[taken])))
            assert drained(process)[0] == whole[taken:]
        process.load_state_dict(states[0])
        for batch, expected in zip(process, whole):  # and in the middle of a loop
            assert content(batch) == expected
            if expected == whole[5]:
                break
        process.load_state_dict(states[3])
        assert drained(process)[0] == whole[3:]


@pytest.mark.parametrize("world", WORLDS)
def test_every_world_size_trains_the_same_sets_and_has_the_same_state(store, world):
    def rows(size, state=None):
        """Rows of each step whoever takes them, and the last state of each rank."""
        found, ends = {}, []
        for rank in range(size):
            with loader_of(store, dp_rank=rank, dp_world_size=size, micro_batch_size=1) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for _ in range(10**6):
                    step, batch = loader.step, next(loader, None)
                    if batch is None:
                        break
                    found.setdefault(step, []).append(content(batch))
                ends.append(loader.state_dict())
        assert all(end == ends[0] for end in ends)
        return {step: sorted(taken) for step, taken in found.items()}

    alone = rows(1)
    with loader_of(store) as loader:
        states = drained(loader)[1]
    assert rows(world) == alone
    later = states[len(states) // 2]
    assert rows(world, later) == {step: taken for step, taken in alone.items() if step >= later["step"]}


def test_every_token_comes_once_an_epoch_and_the_denominators_add_up(store):
    kept = open_store(store)
    with loader_of(store, overlong="split", micro_batch_size=4) as loader:
        steps = {}
        tokens = 0
        pieces = []
        for batch in loader:
            tokens += batch.num_tokens
            steps.setdefault((batch.pack_ids[0] // 24, batch.step_num_targets), []).append(batch.num_targets)
            pieces += zip(batch.document_ids.tolist(), batch.document_starts.tolist())
        stats = loader.stats()

    assert tokens == 2 * sum(kept.shard(k).counts.num_tokens for k in range(4)) == stats.tokens
    assert len(set(pieces)) * 2 == len(pieces)
    assert all(step_targets == sum(found) for (_, step_targets), found in steps.items())
    assert stats.batches == sum(map(len, steps.values()))
    assert stats.targets == sum(map(sum, steps.values()))


def test_a_loader_that_is_closed_or_dropped_leaves_no_thread(store):
    before = set(threading.enumerate())
    with loader_of(store) as loader:
        next(loader)
    with pytest.raises(SettingError, match="closed"):
        next(loader)
    dropped = loader_of(store)
    next(dropped)
    del dropped
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) <= before


def test_a_loader_says_what_it_is_and_is_not_copied(store):
    with loader_of(store) as loader:
        next(loader)
        assert repr(loader) == "PackedLoader(indexed, 24 packs of 32 a step, rank 0 of 1, at step 1)"
        with pytest.raises(SettingError, match="load this one's state_dict"):
            copy.deepcopy(loader)


def test_a_loader_that_can_not_be_made_leaves_no_worker(store):
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError):
        loader_of(store, worker="process", device="no such device")
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) <= before


def test_an_error_comes_out_where_the_batch_would_have(store, tmp_path):
    damaged = random_store(tmp_path)
    name = open_store(damaged).shards[2]
    for worker in ("thread", "process"):
        with loader_of(damaged, shuffle=False, worker=worker, window=60) as loader:
            good = next(loader)
            assert good.num_tokens > 0
            (damaged / name / "tokens.bin").write_bytes(b"")
            with pytest.raises(vl.VarlenError, match=name):
                drained(loader)
        random_store(tmp_path / worker)
        damaged = tmp_path / worker


def test_scopes_and_orders_hold_every_document(store):
    kept = open_store(store)
    longer = int(np.count_nonzero(np.concatenate([np.diff(kept.shard(k).offsets) for k in range(4)])))
    whole = {}
    for scope, layout in (("window", "rows"), ("all", "rows"), ("minibatch", "flat")):
        window = None if scope == "all" else 50
        with loader_of(store, scope=scope, layout=layout, window=window, epochs=1) as loader:
            batches = [(b.document_ids.tolist(), b.num_tokens) for b in loader]
        ids = [d for ids, _ in batches for d in ids]
        assert len(set(ids)) == len(ids)
        whole[scope] = (
            sum(len(ids) for ids, _ in batches),
            sum(tokens for _, tokens in batches),
            len(batches),
        )

    assert whole["window"][:2] == whole["all"][:2] == whole["minibatch"][:2]
    assert whole["minibatch"][2] == -(-longer // 24)  # as many steps as minibatches of 24 documents
    assert whole["all"][2] <= whole["window"][2] < whole["minibatch"][2]
    with loader_of(store, shuffle=False, method="next_fit", epochs=1) as loader:
        ids = [d for batch in loader for d in batch.document_ids.tolist()]
    assert ids == sorted(ids)
    with loader_of(store, shuffle=False, method="next_fit", epochs=1, micro_batch_size=4) as loader:
        assert [d for batch in loader for d in batch.document_ids.tolist()] == ids


def test_a_state_of_other_data_or_settings_is_refused(store, tmp_path):
    other = random_store(tmp_path, seed=6)
    with loader_of(store, micro_batch_size=4) as loader:
        next(loader)
        state = loader.state_dict()
    for changes, said in (
        ({"capacity": 64}, "capacity was 32 and is 64"),
        ({"seed": 4}, "seed was 3 and is 4"),
    ):
        with (
            loader_of(store, **{"micro_batch_size": 4, **changes}) as loader,
            pytest.raises(StateError, match=said),
        ):
            loader.load_state_dict(state)
    with (
        loader_of(other, micro_batch_size=4) as loader,
        pytest.raises(StateError, match="didn't grow from it"),
    ):
        loader.load_state_dict(state)
    with (
        loader_of(store, micro_batch_size=8) as loader,
        pytest.raises(StateError, match="micro_batch_size was 4"),
    ):
        loader.load_state_dict(state)
    with loader_of(store, micro_batch_size=4, epochs=5) as loader:
        loader.load_state_dict(state)


def test_the_states_of_all_ranks_are_one(store):
    states = []
    for rank in range(3):
        with loader_of(store, dp_rank=rank, dp_world_size=3, micro_batch_size=8) as loader:
            next(loader)
            states.append(loader.state_dict())
            next(loader)
            later = loader.state_dict()
    assert vl.merge_states(states) == states[0]
    for wrong, said in (
        ([], "at least one"),
        (states[0], "list of the states"),
        ([*states, later], "0 and 3 .* in step"),
    ):
        with pytest.raises(StateError, match=said):
            vl.merge_states(wrong)


def test_a_flat_batch_of_masked_packs_has_positions_that_a_model_can_run_on(store):
    found = []
    for rank in range(6):
        settings = {"dp_rank": rank, "dp_world_size": 6, "micro_batch_size": 1, "epochs": 1}
        with loader_of(store, layout="flat", pad_to_multiple_of=4, worker="thread", **settings) as loader:
            found += [batch for batch in loader if batch.num_segments == 0]
    assert found
    for batch in found:
        assert batch.input_ids.shape == batch.labels.shape == (1, 4)
        assert batch.layout == "flat"
        assert batch.cu_seqlens.tolist() == [0, 4]
        assert (batch.labels == -100).all()
        assert len(batch.pack_ids) == 1
        assert batch.pack_offsets.tolist() == [0, 0]


def test_a_flat_batch_may_be_padded_further_than_its_packs_are_long(store):
    with loader_of(
        store, layout="flat", pad_to_multiple_of=1024, worker="process", global_batch_size=4
    ) as loader:
        assert next(loader).input_ids.shape == (1, 1024)


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_trainer_may_change_its_folder(store, tmp_path, monkeypatch, worker):
    monkeypatch.chdir(store.parent)
    with loader_of(store.name, worker=worker) as loader:
        monkeypatch.chdir(tmp_path)
        assert next(loader).num_tokens > 0
