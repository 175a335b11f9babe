"""Megatron's loop takes micro-batches from the loader, saves its place, and goes on with another number of ranks."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.adapters.titan import numbered_store, numbers, step_rows

import varlen as vl
from varlen.adapters.megatron import (
    MegatronLoader,
    external_loaders,
    last_checkpoint,
    loader_batch_size,
    saved_state,
)
from varlen.errors import SettingError, StateError

DOCUMENTS, SEQ_LENGTH, GLOBAL = 90, 64, 8
PLACES = {"bridge": "iter_{:07d}", "lm": "iter_{:07d}/mp_rank_00"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return numbered_store(tmp_path_factory.mktemp("data") / "store", DOCUMENTS)


def loaders_of(store, rank=0, world=1, **changes):
    usual = {"seq_length": SEQ_LENGTH, "global_batch_size": GLOBAL, "worker": "thread"}
    return external_loaders(store, **{**usual, **changes}, dp_rank=rank, dp_world_size=world)


def trains_of(store, world, **changes):
    return [loaders_of(store, rank, world, **changes)[0] for rank in range(world)]


class Rerun:
    """What Megatron puts around an external loader: it takes from it, and saves what its `save_state` returns."""

    def __init__(self, iterable):
        self.iterable = iterable

    def __next__(self):
        return next(self.iterable)

    def save(self, folder, iteration, dp_rank, place):
        file = Path(folder) / place.format(iteration) / f"train_dataloader_dprank{dp_rank:03d}.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"dataloader_state_dict": self.iterable.save_state()}, file)


def trained(loaders, steps=None, packs=lambda _: GLOBAL):
    """Take what Megatron's steps take, each micro-batch by itself; returns each step's tokens by rank."""
    iterators, found = [Rerun(loader) for loader in loaders], []
    while steps is None or len(found) < steps:
        micro_batches = packs(len(found)) // len(loaders)
        try:
            found.append(
                [
                    np.concatenate([next(it)["tokens"].numpy() for _ in range(micro_batches)])
                    for it in iterators
                ]
            )
        except SettingError as error:
            assert "all epochs of the data are over" in str(error)  # noqa: PT017
            break
    return found


@pytest.mark.parametrize("dialect", ["0.4", "0.5", "0.6"])
def test_a_micro_batch_is_a_row_in_the_dialect_whose_boundaries_are_those_of_its_documents(store, dialect):
    (loader,) = trains_of(store, 1, dialect=dialect)
    with vl.PackedLoader(
        store, capacity=SEQ_LENGTH, global_batch_size=GLOBAL, micro_batch_size=1, worker="thread"
    ) as plain:
        for micro_batch, batch in zip(loader, plain):
            name = "cu_seqlens_q" if dialect == "0.6" else "cu_seqlens"
            bounds = [bound for bound in micro_batch[name].reshape(-1).tolist() if bound >= 0]
            tokens = micro_batch["tokens"]

            assert (
                tokens.shape
                == micro_batch["labels"].shape
                == micro_batch["loss_mask"].shape
                == (1, SEQ_LENGTH)
            )
            assert tokens.dtype == torch.int64
            assert int(micro_batch["loss_mask"].sum()) == batch.num_targets
            assert bounds[: batch.num_segments + 1] == batch.cu_seqlens[: batch.num_segments + 1].tolist()
            if len(bounds) > batch.num_segments + 1:
                break
        else:
            raise AssertionError("no row had padding")


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1), (1, 8)])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_goes_on_from_megatrons_checkpoint_on_other_ranks_and_every_document_comes_once(
    store, tmp_path, before, after, place
):
    whole = trained(trains_of(store, 1))
    first = trains_of(store, before)
    begun = trained(first, steps=2)
    for rank, loader in enumerate(first):
        Rerun(loader).save(tmp_path, 2, rank, PLACES[place])
    rest = trained(trains_of(store, after, dataloader_save=tmp_path, iteration=2))

    assert numbers(np.concatenate([one for step in begun + rest for one in step])) == list(range(DOCUMENTS))
    assert [step_rows(step) for step in begun + rest] == [step_rows(step) for step in whole]
    assert len(list(tmp_path.rglob("*.pt"))) == before


def test_without_a_saved_state_the_consumed_samples_say_where_to_go_on(store, tmp_path):
    whole = trained(trains_of(store, 2))
    anew = trained(
        trains_of(store, 2, consumed_train_samples=2 * GLOBAL, dataloader_save=tmp_path, iteration=2)
    )

    assert [step_rows(step) for step in anew] == [step_rows(step) for step in whole[2:]]
    assert saved_state(tmp_path, 2) is None
    (loader,) = trains_of(store, 1)
    with pytest.raises(SettingError, match=r"12 consumed samples aren't whole steps of 8 packs.*: 8 or 16"):
        loader.seek(12)
    with pytest.raises(SettingError, match=r"4,294,967,297 consumed samples aren't whole steps"):
        loader.seek(2**32 + 1)


def test_megatrons_trackers_say_which_checkpoint_a_run_goes_on_from(store, tmp_path):
    whole = trained(trains_of(store, 2))
    bridge, lm, none = (tmp_path / name for name in ("bridge", "lm", "none"))
    for folder in (bridge, lm, none):
        folder.mkdir()
    counts = {"step": torch.tensor(2), "consumed_train_samples": torch.tensor(2 * GLOBAL)}
    torch.save(counts, bridge / "latest_train_state.pt")
    (lm / "latest_checkpointed_iteration.txt").write_text("2\n")
    first = trains_of(store, 1)
    trained(first, steps=2)
    Rerun(first[0]).save(tmp_path / "saved", 2, 0, PLACES["lm"])

    for found in (
        {"load": bridge},
        {"load": lm, "dataloader_save": tmp_path / "saved"},
        {"load": lm, "consumed_train_samples": 2 * GLOBAL},
    ):
        rest = trained(trains_of(store, 2, **found))
        assert [step_rows(step) for step in rest] == [step_rows(step) for step in whole[2:]]
    assert last_checkpoint(none) == (0, 0)
    assert len(trained(trains_of(store, 1, load=none))) == len(whole)
    assert len(trained(trains_of(store, 1, load=bridge, iteration=0))) == len(whole)
    (lm / "latest_checkpointed_iteration.txt").write_text("release")
    assert last_checkpoint(lm) == (0, 0)


def test_a_run_whose_place_nobody_knows_is_refused_and_does_not_begin_anew(store, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(
        SettingError, match=r"after iteration 7, but no dataloader_save was given.*start over"
    ):
        loaders_of(store, load=tmp_path)
    with pytest.raises(SettingError, match="saved holds no state of the loader"):
        loaders_of(store, load=tmp_path, dataloader_save=tmp_path / "saved")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("seven")
    with pytest.raises(StateError, match=r"latest_checkpointed_iteration.txt doesn't say which checkpoint"):
        last_checkpoint(tmp_path)


def test_peers_of_a_replica_take_the_same_and_a_stage_that_takes_nothing_starts_nothing(
    store, fresh_children
):
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text() if children.exists() else ""
    first, last, middle = (loaders_of(store, 1, 2, worker="process")[0] for _ in range(3))
    try:
        assert (children.read_text() if children.exists() else "") == before
        for one, other, _ in zip(first, last, range(3)):
            assert all(torch.equal(one[name], other[name]) for name in ("tokens", "labels", "loss_mask"))
        assert middle.save_state() != first.save_state() == last.save_state()
    finally:
        for loader in (first, last, middle):
            loader.close()


def test_a_batch_size_that_ramps_up_takes_whole_steps_of_the_loader_and_every_document_once(store):
    def packs(step):
        return min(4 + 2 * step, 12)

    ramp = {"global_batch_size": 12, "rampup_batch_size": [4, 2, 60]}
    loaders = trains_of(store, 2, **ramp)
    begun = trained(loaders, steps=3, packs=packs)
    consumed = 4 + 6 + 8
    state = loaders[1].save_state()
    again = trains_of(store, 1, **ramp, consumed_train_samples=consumed)
    rest = trained(again, packs=lambda step: 10 if step == 0 else 2)

    assert loaders[0].loader.settings.global_batch_size == 2
    assert state["step"] * 2 == consumed
    assert numbers(np.concatenate([one for step in begun + rest for one in step])) == list(range(DOCUMENTS))


@pytest.mark.parametrize(
    ("whole", "ramp", "message"),
    [
        (64, [16, 10, 100], "begins at 16, and steps of 10 don't lead to global_batch_size 64"),
        (8, [16, 8, 100], "begins at 16"),
        (64, [16, 8], "three numbers"),
    ],
)
def test_a_ramp_that_leads_nowhere_is_refused(whole, ramp, message):
    with pytest.raises(SettingError, match=message):
        loader_batch_size(whole, ramp)


def test_a_ramp_whose_sizes_the_ranks_cannot_share_is_refused_by_its_own_name(store):
    with pytest.raises(
        SettingError,
        match=r"rampup_batch_size \[4, 2, 60\] leads to .* multiples of 2, which 4 data-parallel",
    ):
        loaders_of(store, 0, 4, global_batch_size=12, rampup_batch_size=[4, 2, 60])


def test_finite_data_ends_on_all_ranks_at_once_and_too_long_a_training_is_refused_before_it_begins(store):
    loaders = trains_of(store, 4)
    steps = trained(loaders)
    for loader in loaders:
        with pytest.raises(SettingError, match=f"over after {len(steps) * GLOBAL:,} packs"):
            next(loader)

    assert len(loaders[0]) == len(steps) * GLOBAL // 4
    loaders_of(store, num_samples=[len(steps) * GLOBAL, 0, 0])
    with pytest.raises(SettingError, match=f"asks for 800 samples.*set train_iters to {len(steps)} at most"):
        loaders_of(store, num_samples=(800, 0, 0))
    for samples in (80, (), (None, 0, 0)):
        with pytest.raises(SettingError, match=r"num_samples"):
            loaders_of(store, num_samples=samples)
    endless = loaders_of(store, num_samples=(800, 0, 0), epochs=None)[0]
    assert len(trained([endless], steps=100)) == 100


def test_every_evaluation_sees_the_same_data_from_the_beginning(store):
    train, valid, test = loaders_of(store, 1, 2, valid=store, test=None, eval_iters=3)
    evaluations = [trained_alone(valid, 3 * GLOBAL // 2) for _ in range(2)]
    long = loaders_of(store, valid=store, eval_iters=100)[1]
    smaller = loaders_of(store, 1, 2, valid=store, eval_iters=3, eval_global_batch_size=GLOBAL // 2)[1]
    ours = [trained_alone(smaller, 3 * GLOBAL // 4) for _ in range(2)]
    assert ours[0] == ours[1]

    assert test is None
    assert evaluations[0] == evaluations[1]
    assert len(set(evaluations[0])) == 3 * GLOBAL // 2
    assert train.save_state()["step"] == 0
    assert len(trained_alone(long, 100 * GLOBAL)) == 100 * GLOBAL  # goes round


def trained_alone(loader, micro_batches):
    return [next(loader)["tokens"].numpy().tobytes() for _ in range(micro_batches)]


def test_documents_take_slots_that_context_and_sequence_parallel_ranks_can_share(store):
    loader = loaders_of(
        store, context_parallel_size=2, tensor_model_parallel_size=8, sequence_parallel=True, dialect="0.6"
    )[0]
    micro_batch = next(loader)
    physical, logical = (micro_batch[f"cu_seqlens_q{name}"].reshape(-1).numpy() for name in ("_padded", ""))

    assert (physical % 16 == 0).all()
    assert (np.diff(logical) <= np.diff(physical)).all()
    assert not (logical % 16 == 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 2}, "micro_batch_size is 2: Megatron takes packed rows one per micro-batch"),
        ({"layout": "flat", "micro_batch_size": 1}, 'layout="rows"'),
        ({"dialect": "0.2"}, "names no dialect"),
        ({"restart_after": 0}, "restart_after"),
    ],
)
def test_a_loader_that_megatron_cannot_read_is_refused(store, changes, message):
    taken = {name: changes.pop(name) for name in ("dialect", "restart_after") if name in changes}
    settings = {"micro_batch_size": 1, "capacity": SEQ_LENGTH, "global_batch_size": 4, "worker": "thread"}
    with (
        vl.PackedLoader(store, **{**settings, **changes}) as loader,
        pytest.raises(SettingError, match=message),
    ):
        MegatronLoader(loader, **taken)


def test_what_follows_from_megatrons_settings_is_not_given_twice(store):
    with pytest.raises(SettingError, match="capacity follows from Megatron's own settings"):
        loaders_of(store, capacity=9)
    with pytest.raises(SettingError, match="8 doesn't divide among 3 ranks"):
        loaders_of(store, 0, 3)


def test_states_that_cannot_be_read_or_differ_are_refused_by_name(store, tmp_path):
    (loader,) = trains_of(store, 1)
    Rerun(loader).save(tmp_path, 1, 0, PLACES["bridge"])
    next(loader)
    Rerun(loader).save(tmp_path, 1, 1, PLACES["bridge"])
    with pytest.raises(
        StateError, match=r"iter_0000001 holds states of different loaders.*differ in micro_batch"
    ):
        saved_state(tmp_path, 1)
    (tmp_path / "iter_0000002").mkdir()
    file = tmp_path / "iter_0000002" / "train_dataloader_dprank000.pt"
    file.write_bytes(b"no file of torch's")
    with pytest.raises(StateError, match=r"dprank000\.pt is no state of a MegatronLoader.*seek"):
        saved_state(tmp_path, 2)
    torch.save({"dataloader_state_dict": {"cursor": torch.ones(2)}}, file)
    with pytest.raises(StateError, match="iter_0000002 holds states of different loaders, or of others"):
        saved_state(tmp_path, 2)
    with pytest.raises(StateError, match="capacity was 64 and is 128"):
        loaders_of(store, seq_length=128)[0].restore_state(loader.save_state_rank())


def test_a_state_is_read_back_with_torch_and_nothing_of_it_is_code(store, tmp_path):
    (loader,) = trains_of(store, 1)
    trained([loader], steps=1)
    torch.save(loader.save_state(), tmp_path / "state.pt")

    assert torch.load(tmp_path / "state.pt", weights_only=True) == loader.save_state()
