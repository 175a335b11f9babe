"""PaddedSampler: epochs, ranks, places to go on from, DataLoader and Trainer."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import varlen as vl
from varlen.errors import LengthsError, SettingError, StateError

LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 300), 1, 200).astype(int).tolist()


def sampler(**changes: Any) -> vl.PaddedSampler:
    return vl.PaddedSampler(**{"lengths": LENGTHS, "max_tokens": 400, **changes})


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**64 - 1))
def test_ranks_together_give_every_document_once_an_epoch(ranks, micro_batches, seed):
    all_ranks = [
        sampler(dp_rank=rank, dp_world_size=ranks, micro_batches=micro_batches, seed=seed)
        for rank in range(ranks)
    ]
    for _ in range(2):
        given_ = [list(one) for one in all_ranks]
        assert {len(batches) for batches in given_} == {len(all_ranks[0])}
        assert sorted(index for rank in given_ for batch in rank for index in batch) == list(range(300))
        assert len(given_[0]) % micro_batches == 0
    assert {one.epoch for one in all_ranks} == {1}


def test_an_epoch_is_another_order_unless_it_is_not_shuffled():
    shuffled, ordered = sampler(), sampler(shuffle=False)

    assert list(shuffled) != list(shuffled)
    assert list(ordered) == list(ordered)
    again = sampler()
    again.set_epoch(1)
    shuffled.set_epoch(1)
    assert list(again) == list(shuffled)


@given(st.integers(0, 40), st.integers(0, 2), st.booleans())
def test_a_state_goes_on_with_the_very_batches_that_would_have_come(taken, epoch, tell):
    whole = sampler()
    whole.set_epoch(epoch)
    batches = [*whole, *whole]
    one = sampler()
    one.set_epoch(epoch)
    taken = min(taken, len(one))
    iterator = iter(one)
    for _ in range(taken if tell else min(taken + 3, len(one))):  # a DataLoader's workers fetch ahead
        next(iterator)
    state = one.state_dict() if tell else one.state_dict(taken)

    resumed = sampler()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    found = [*(resumed if taken < len(one) else ()), *resumed]
    assert found == batches[taken:][: len(found)] != []


def test_a_state_is_the_same_on_every_rank():
    ranks = [sampler(dp_rank=rank, dp_world_size=2) for rank in (0, 1)]

    assert ranks[0].state_dict(2) == ranks[1].state_dict(2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": LENGTHS[:-1]}, "data was"),
        ({"max_tokens": 401}, "max_tokens was 400 and is 401"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"dp_rank": 0, "dp_world_size": 2}, "ranks was 1 and is 2"),
    ],
)
def test_states_of_other_data_and_settings_are_refused_in_a_sentence(changes, words):
    with pytest.raises(StateError, match=words):
        sampler(**changes).load_state_dict(sampler().state_dict(1))


@pytest.mark.parametrize("state", [{}, None, {"epoch": 1, "batch": 0}])
def test_what_is_no_state_is_refused_in_a_sentence(state):
    with pytest.raises(StateError, match="isn't a state of a PaddedSampler"):
        sampler().load_state_dict(state)
    with pytest.raises(StateError, match="at batch 999"):
        sampler().load_state_dict({**sampler().state_dict(), "batch": 999})


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"max_tokens": 0}, SettingError, "max_tokens must be a whole number from 1"),
        ({"lengths": [1, -2]}, LengthsError, "is negative"),
        ({"dp_rank": 2, "dp_world_size": 2}, SettingError, "dp_rank must be"),
        ({"dp_rank": 0}, SettingError, "only dp_rank was given"),
        ({"work": (0, 0)}, SettingError, "work must be two numbers"),
        ({"window": 0}, SettingError, "window must be"),
    ],
)
def test_settings_out_of_range_are_refused_when_it_is_made(changes, kind, words):
    with pytest.raises(kind, match=words):
        sampler(**changes)


def test_several_processes_must_say_their_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingError, match=r"one of 2 processes.*dp_rank="):
        sampler()
    assert sampler(dp_rank=0, dp_world_size=1)


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Documents of the lengths above, each with a class."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [5 + index % 50] * LENGTHS[index], "label": index % 3, "index": index}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_takes_it_as_its_batch_sampler(workers):
    mine = sampler()
    loader = DataLoader(Rows(), batch_sampler=mine, collate_fn=collate, num_workers=workers)
    rows = [batch["input_ids"].shape for batch in loader]

    assert len(rows) == len(loader) == len(mine)
    assert sum(shape[0] for shape in rows) == 300
    assert max(shape.numel() for shape in rows) <= 400
    assert mine.epoch == 0
    assert len([*loader]) == len(mine)
    assert mine.epoch == 1


class Recording(Trainer):
    """A Trainer on a PaddedSampler that writes down the rows of its batches."""

    def get_train_dataloader(self) -> Any:
        sampler_ = sampler(micro_batches=2)
        return DataLoader(self.train_dataset, batch_sampler=sampler_, collate_fn=self.data_collator)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **rest: Any) -> Any:
        self.__dict__.setdefault("taken", []).append((self.state.global_step, inputs["input_ids"].tolist()))
        return super().training_step(model, inputs, *args, **rest)


def trained(folder: Any, **more: Any) -> Recording:
    args = TrainingArguments(
        str(folder), num_train_epochs=2, gradient_accumulation_steps=2, save_strategy="steps", save_steps=3,
        report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=3,
    )
    model = BertForSequenceClassification(config)
    trainer = Recording(model=model, args=args, train_dataset=Rows(), data_collator=collate)
    trainer.train(**more)
    return trainer


def test_a_trainer_goes_on_from_a_checkpoint_with_the_same_batches(tmp_path):
    whole = trained(tmp_path)
    steps = len(sampler(micro_batches=2)) // 2
    checkpoints = [3, steps // 3 * 3 + 3]  # within the first epoch, and within the second
    assert whole.state.global_step == 2 * steps

    for step in checkpoints:
        resumed = trained(tmp_path, resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.taken == [entry for entry in whole.taken if entry[0] >= step] != []
