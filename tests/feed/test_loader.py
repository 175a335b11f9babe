"""The loader over a token store: the same bytes from every state, in any worker, at any step that is gone to."""

import copy
import json
import threading
from functools import partial

import numpy as np
import pytest
import torch
from tests.support.rarely import IS_SOAK
from tests.support.stores import (
    NAMES,
    content,
    count_openings,
    drained,
    loader_of,
    random_store,
    streaming_of,
    write_store,
)

import varlen as vl
from varlen.errors import SettingError, StateError
from varlen.feed.indexed.table import WindowTable
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


def test_a_loader_opens_its_store_once_and_its_thread_reads_the_same_one(store, monkeypatch):
    counts = count_openings(monkeypatch, store)

    with loader_of(store, epochs=1) as loader:
        drained(loader)
        assert loader.lengths(0) is not None

    assert counts == {"opened": 1, "read": 1}


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


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def rows(loader):
    found = []
    for batch in loader:
        values = [np.asarray(getattr(batch, name).cpu()).tolist() for name in NAMES]
        found.append((values, batch.step_num_targets, loader.state_dict()))
    return found


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_tensors_on_the_cpu_hold_what_arrays_hold(store, worker):
    with (
        loader_of(store, micro_batch_size=8) as plain,
        loader_of(store, micro_batch_size=8, device="cpu", worker=worker) as loader,
    ):
        taken = rows(loader)
        expected = [
            ([getattr(b, name).tolist() for name in NAMES], b.step_num_targets, plain.state_dict())
            for b in plain
        ]
    assert taken == expected
    with loader_of(store, device="cpu") as loader:
        assert next(loader).input_ids.dtype == torch.int64


@needs_cuda
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_tensors_on_cuda_hold_what_arrays_hold_while_the_device_is_busy(store, worker):
    with loader_of(store, micro_batch_size=8, epochs=20) as plain:
        expected = [content(batch) for batch in plain]
    with loader_of(
        store, micro_batch_size=8, epochs=20, device="cuda", worker=worker, ring_slots=3
    ) as loader:
        held = []
        for batch in loader:
            torch.cuda._sleep(2_000_000)  # the trainer's stream is behind
            held.append([getattr(batch, name).clone() for name in NAMES])
    assert len(held) == len(expected)
    for tensors, plain_bytes in zip(held, expected):
        for tensor, name, one in zip(tensors, NAMES, plain_bytes):
            kind = np.int64 if name in ("document_ids", "pack_ids") else np.int32
            assert tensor.cpu().numpy().astype(kind).tobytes() == one


@needs_cuda
def test_the_ring_is_pinned_and_copies_are_asynchronous(store):
    with loader_of(store, device="cuda", worker="process") as loader:
        next(loader)
        assert loader._worker._pinned
        host = torch.from_numpy(loader._worker._worker.memory)
        assert host.is_pinned()


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


def test_the_lengths_of_all_documents_are_in_the_order_of_their_numbers(store, tmp_path):
    mixture = vl.Mixture({"a": store, "b": random_store(tmp_path / "b", seed=6)}, weights={"a": 2, "b": 1})
    for data, least in ((store, 200), (mixture, 300)):
        with loader_of(data, epochs=1, capacity=16) as loader:
            loader.seek(2)
            lengths = np.concatenate(list(loader.all_lengths()))
            steps = [loader.documents(step) for step in range(len(loader))]
        ends = np.zeros(len(lengths), np.int64)  # of the last piece that was seen
        for step in steps:
            np.maximum.at(ends, step.document_ids, step.stops)
        assert (ends > 16).any(), "some are split"
        assert (ends > 0).sum() >= least
        assert (lengths[ends > 0] == ends[ends > 0]).all()


def test_in_streaming_lengths_of_coming_steps_are_refused(texts):
    with streaming_of(texts) as loader:
        for ask in (lambda: loader.lengths(0), loader.all_lengths):
            with pytest.raises(SettingError, match=r"index them \(varlen index\)"):
                ask()


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
