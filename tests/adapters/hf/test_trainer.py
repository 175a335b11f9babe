"""A loader under transformers' Trainer: the loss of documents one by one, nothing replayed, what is refused."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.trainers import (
    CAPACITY,
    CountingTrainer,
    Recorder,
    StopAt,
    arguments,
    furthest,
    gradients_of,
    logged,
    losses_one_by_one,
    packed_loader,
    pieces,
    pieces_of,
    store_in,
    tiny_llama,
)
from transformers import Trainer, TrainerCallback

import varlen as vl
from varlen.adapters.hf.trainer import LoaderPlace, PackedTrainer
from varlen.errors import SettingError, StateError


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_in(tmp_path_factory.mktemp("documents"))


def trainer_for(folder: Any, store: Any, *, loader: Any = None, model: Any = None, **changes: Any) -> Any:
    args = arguments(folder, **{k: v for k, v in changes.items() if k not in ("loss_weighting", "callbacks")})
    ours = {k: v for k, v in changes.items() if k in ("loss_weighting", "callbacks")}
    loader = packed_loader(args, store) if loader is None else loader
    return CountingTrainer(model=model or tiny_llama(), args=args, train_loader=loader, **ours)


def first_step(store: Any) -> list[Any]:
    with packed_loader(arguments("nowhere"), store) as loader:
        return [next(loader) for _ in range(loader.micro_batches)]


# The loss.


@pytest.mark.parametrize("attention", ["varlen", "sdpa", "eager"])
def test_loss_and_gradients_of_a_step_are_those_of_its_documents_one_by_one(attention, store, tmp_path):
    recorder = Recorder()
    trainer = trainer_for(tmp_path, store, model=tiny_llama(attention), max_steps=1, callbacks=[recorder])
    trainer.train()

    model = tiny_llama().train()
    alone = torch.cat(losses_one_by_one(model, first_step(store))).mean()

    assert logged(trainer)[0] == pytest.approx(float(alone.detach()), rel=1e-6)
    assert furthest(recorder.gradients[0], gradients_of(model, alone)) < 2e-5


def test_the_number_of_items_is_what_the_trainer_itself_would_count(store, tmp_path):
    trainer = trainer_for(tmp_path, store)
    found = iter(trainer.get_train_dataloader())

    for _ in range(3):
        batches, number = trainer.get_batch_samples(found, 4, trainer.args.device)

        assert number == Trainer._get_num_items_in_batch(trainer, batches, trainer.args.device)
        assert number == batches[0]["packed"].step_num_targets > 0


@pytest.mark.parametrize("weighting", ["document", "longalign"])
def test_documents_can_count_the_same_whatever_their_length(weighting, store, tmp_path):
    recorder = Recorder()
    trainer = trainer_for(tmp_path, store, max_steps=1, loss_weighting=weighting, callbacks=[recorder])
    trainer.train()

    model = tiny_llama().train()
    batches = first_step(store)
    means = [[x.mean() for x in losses_one_by_one(model, [batch]) if len(x)] for batch in batches]
    if weighting == "document":
        expected = torch.stack([mean for held in means for mean in held]).mean()
    else:  # every batch has as many packs
        expected = torch.stack([torch.stack(held).mean() for held in means]).mean()

    assert logged(trainer)[0] == pytest.approx(float(expected.detach()), rel=1e-6)
    assert furthest(recorder.gradients[0], gradients_of(model, expected)) < 2e-5


class WithoutLossArguments(torch.nn.Module):
    """A model that takes no num_items_in_batch, around one that does."""

    accepts_loss_kwargs = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_llama()
        self.config, self.device, self.dtype = self.inner.config, self.inner.device, self.inner.dtype
        self.get_input_embeddings, self.get_decoder = self.inner.get_input_embeddings, self.inner.get_decoder
        self._can_set_attn_implementation = self.inner._can_set_attn_implementation

    def forward(self, input_ids: Any, position_ids: Any = None, labels: Any = None, **rest: Any) -> Any:
        return self.inner(input_ids=input_ids, position_ids=position_ids, labels=labels, **rest)


def test_a_model_that_is_told_no_number_of_items_has_the_same_loss(store, tmp_path):
    usual = trainer_for(tmp_path / "a", store, max_steps=2)
    usual.train()
    other = trainer_for(tmp_path / "b", store, max_steps=2, model=WithoutLossArguments())
    other.train()

    assert logged(other) == pytest.approx(logged(usual), rel=1e-5)


# The documents.


@pytest.mark.parametrize(("packs", "steps"), [(6, 6), (5, 7)])  # two epochs of as many steps, and not
def test_every_document_comes_once_an_epoch_and_the_learning_rate_ends_with_the_data(
    packs, steps, store, tmp_path
):
    changes = {"per_device_train_batch_size": packs, "include_num_input_tokens_seen": "non_padding"}
    loader = packed_loader(arguments(tmp_path, **changes), store)
    trainer = trainer_for(tmp_path, store, loader=loader, **changes)
    trainer.train()

    took = Counter(piece for _, held in trainer.taken for piece in held)
    assert took == pieces_of(store, trainer.args)
    assert trainer.state.global_step == trainer.state.max_steps == len(trainer.train_loader) // 4 == steps
    assert set(trainer.lr_scheduler.get_last_lr()) == {0.0}
    assert trainer.state.epoch == pytest.approx(2, abs=0.3)
    assert trainer.state.num_input_tokens_seen == trainer.train_loader.stats().tokens


def test_from_every_checkpoint_the_rest_is_the_same_and_nothing_is_drawn_again(store, tmp_path):
    whole = trainer_for(tmp_path, store, save_strategy="steps", save_steps=1)
    whole.train()
    steps = whole.state.global_step

    for step in range(1, steps):
        resumed = trainer_for(tmp_path / "on", store)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))

        assert resumed.taken == [entry for entry in whole.taken if entry[0] >= step], step
        assert resumed.train_loader.stats().batches == 4 * (steps - step)
        assert resumed.state.epoch == whole.state.epoch
        for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters()):
            assert torch.equal(ours, theirs), step


def test_true_goes_on_from_the_newest_checkpoint_in_the_same_process_too(store, tmp_path):
    trainer = trainer_for(tmp_path, store, save_strategy="steps", save_steps=2, callbacks=[StopAt(3)])
    trainer.train()
    assert trainer.train_loader.step == 3
    trainer.remove_callback(StopAt)

    trainer.train(resume_from_checkpoint=True)

    again = [step for step, _ in trainer.taken]
    assert again[:24] == [step for step in (0, 1, 2, 2, 3, 4) for _ in range(4)]
    assert trainer.taken[8:12] == trainer.taken[12:16]
    assert trainer.state.global_step == trainer.state.max_steps


def test_callbacks_that_are_restored_keep_the_place(store, tmp_path):
    first = trainer_for(tmp_path, store, save_strategy="steps", save_steps=2)
    first.train()

    again = trainer_for(
        tmp_path / "on",
        store,
        restore_callback_states_from_checkpoint=True,
        save_strategy="steps",
        save_steps=2,
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    saved = json.loads((tmp_path / "on" / "checkpoint-4" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["LoaderPlace"]["attributes"]["place"]["step"] == 4
    assert [step for step, _ in again.taken][:4] == [2] * 4


class SavesInAStep(TrainerCallback):
    """Asks for the place where the Trainer has drawn the batches of a step that it hasn't made."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.places: list[tuple[int, int]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        (place,) = (c for c in self.trainer.callback_handler.callbacks if isinstance(c, LoaderPlace))
        self.places.append((state.global_step, place.state()["attributes"]["place"]["step"]))


def test_a_checkpoint_saved_within_a_step_begins_with_that_step(store, tmp_path):
    saver = SavesInAStep()
    saver.trainer = trainer_for(tmp_path, store, max_steps=4, callbacks=[saver])
    saver.trainer.train()

    assert saver.places == [(step, step) for step in range(4)]


def test_fewer_steps_than_there_are_end_the_run_sooner(store, tmp_path):
    for changes, share in (({"max_steps": 3}, None), ({"num_train_epochs": 0.5}, 0.25)):
        trainer = trainer_for(tmp_path, store, loader=packed_loader(arguments(tmp_path), store), **changes)
        trainer.train()

        whole = len(trainer.train_loader) // 4
        assert trainer.state.global_step == (changes.get("max_steps") or round(share * whole))
        assert set(trainer.lr_scheduler.get_last_lr()) == {0.0}


def test_a_stream_needs_max_steps_and_ends_where_it_is_over(tmp_path):
    (tmp_path / "texts.txt").write_text("".join(f"{n} words and more\n" for n in range(80)))
    usual = {"capacity": 64, "tokenizer": "bytes", "text_cut": "line"}

    def made(folder: str, **changes: Any) -> Any:
        sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
        args = arguments(tmp_path / folder, save_strategy="steps", save_steps=4, **sizes, **changes)
        stream = packed_loader(args, tmp_path / "texts.txt", **usual, epochs=1)
        return CountingTrainer(model=tiny_llama(), args=args, train_loader=stream)

    with pytest.raises(ValueError, match="max_steps must be set"):
        made("refused", num_train_epochs=1).train()
    whole = made("whole", max_steps=60)
    whole.train()
    resumed = made("on", max_steps=60)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))

    took = Counter(piece[0] for _, held in whole.taken for piece in held)
    assert set(took.values()) == {1}
    assert len(took) == 80
    assert 4 < whole.state.global_step < 60
    assert resumed.taken == [entry for entry in whole.taken if entry[0] >= 4]


def test_evaluation_is_the_trainer_s_own(store, tmp_path):
    from varlen.adapters.hf import DataCollatorWithFlattening

    rows = [{"input_ids": list(range(n, n + 9)), "labels": list(range(n, n + 9))} for n in range(8)]
    args = arguments(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    trainer = PackedTrainer(
        model=tiny_llama(),
        args=args,
        train_loader=packed_loader(args, store),
        eval_dataset=rows,
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
    )
    trainer.train()
    found = trainer.evaluate()["eval_loss"]

    model = trainer.model.eval()
    ends = torch.tensor([0, 9], dtype=torch.int32)
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
    with torch.no_grad():
        alone = [model(**{k: torch.tensor([v]) for k, v in row.items()}, **told).loss for row in rows]
    assert found == pytest.approx(float(torch.stack(alone).mean()), rel=1e-5)


# What is refused.


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"gradient_accumulation_steps": 2}, {"micro_batch_size": 2}, "gives each rank 6 batches per step"),
        ({}, {"dp_rank": 1, "dp_world_size": 2}, "trained on twice or never"),
        (
            {},
            {"epochs": 1},
            "num_train_epochs=2, but the loader ends after epochs=1; pass num_train_epochs=1",
        ),
        ({"auto_find_batch_size": True}, {}, "leave it out"),
        ({"max_steps": 1000}, {"epochs": 2}, "max_steps=1,000, but the loader has"),
    ],
)
def test_settings_that_contradict_the_loader_s_are_refused(changes, settings, words, store, tmp_path):
    args = arguments(tmp_path, **changes)
    with pytest.raises(SettingError, match=words):
        trainer_for(tmp_path, store, loader=packed_loader(args, store, **settings), **changes).train()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"loss_weighting": "pair"},
            "must be one of token, document, longalign.*; got 'pair', which needs groups",
        ),
        ({"loss_weighting": "mean"}, "must be one of token, document, longalign.*; got 'mean'$"),
        (
            {"loss_weighting": "document", "label_smoothing_factor": 0.1},
            "label_smoothing_factor changes the loss",
        ),
        ({"loader": "store"}, "must be a PackedLoader, got str"),
    ],
)
def test_losses_and_loaders_that_can_t_be_are_refused(changes, words, store, tmp_path):
    with pytest.raises(SettingError, match=words):
        trainer_for(tmp_path, store, **changes)


def test_a_loader_within_a_step_or_at_its_end_is_refused(store, tmp_path):
    trainer = trainer_for(tmp_path, store)
    next(trainer.train_loader)
    with pytest.raises(StateError, match=r"given 1 of 4 batches of step 0.*seek\(0\)"):
        trainer.train()

    trainer.train_loader.seek(0)
    for _ in trainer.train_loader:
        pass
    with pytest.raises(SettingError, match="given all its batches"):
        trainer.train()


def test_a_checkpoint_of_another_trainer_is_refused_unless_the_place_is_said(store, tmp_path):
    first = trainer_for(tmp_path, store, save_strategy="steps", save_steps=2, callbacks=[StopAt(2)])
    first.train()
    saved = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(saved.read_text())
    del state["stateful_callbacks"]["LoaderPlace"]
    saved.write_text(json.dumps(state))

    with pytest.raises(StateError, match=r"holds no loader state.*seek\(2\), and pass ignore_data_skip=True"):
        trainer_for(tmp_path / "on", store).train(str(saved.parent))
    loader = packed_loader(first.args, store)
    loader.seek(2)
    told = trainer_for(
        tmp_path / "on", store, loader=loader, ignore_data_skip=True, save_strategy="steps", save_steps=2
    )
    told.train(str(saved.parent))

    assert told.taken[0][1] == pieces(_nth_batch(store, 8))
    assert told.state.global_step == told.state.max_steps
    assert (tmp_path / "on" / "checkpoint-4").is_dir()


def _nth_batch(store: Any, number: int) -> Any:
    with packed_loader(arguments("nowhere"), store) as loader:
        return [next(loader) for _ in range(number + 1)][-1]


def test_a_checkpoint_of_other_data_is_refused(store, tmp_path):
    first = trainer_for(tmp_path, store, save_strategy="steps", save_steps=2, callbacks=[StopAt(2)])
    first.train()
    args = arguments(tmp_path)

    other = packed_loader(args, store, capacity=CAPACITY * 2)
    with pytest.raises(StateError, match="capacity was 32 and is 64"):
        trainer_for(tmp_path, store, loader=other).train(resume_from_checkpoint=True)
    shutil.copytree(store, tmp_path / "copy")
    moved = packed_loader(args, tmp_path / "copy")
    trainer_for(tmp_path, store, loader=moved).train(resume_from_checkpoint=True)


def test_the_arguments_say_the_loader_s_settings(store, tmp_path):
    args = arguments(tmp_path, num_train_epochs=1.5, data_seed=7)
    with (
        packed_loader(args, store) as loader,
        packed_loader(arguments(tmp_path, max_steps=9), store) as endless,
    ):
        settings = loader.settings

        assert (settings.micro_batch_size, settings.global_batch_size, settings.epochs) == (6, 24, 2)
        assert (settings.seed, settings.ring_slots, settings.ranks) == (7, 10, (0, 1))
        assert endless.settings.epochs is None
        assert isinstance(loader, vl.PackedLoader)
