"""Processes, data and models that a Trainer and a loader can't agree on are refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from preferences import trained
from trainers import arguments, packed_loader, store_in, tiny_llama
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from varlen.adapters.hf.model import check_family
from varlen.adapters.hf.trainer import PackedTrainer
from varlen.adapters.trl.dpo import PackedDPOTrainer
from varlen.errors import ModelError, SettingError

# TRL asks transformers for what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_in(tmp_path_factory.mktemp("documents"))


def test_processes_that_accelerate_does_not_know_of_are_refused(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path)
    assert args.world_size == 1  # accelerate has looked before, as it would on CPUs that nobody told it of
    with packed_loader(args, store) as loader:
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(
            SettingError, match=r"one of 2 processes \(WORLD_SIZE\).*knows of 1.*use_cpu=True"
        ):
            PackedTrainer(model=tiny_llama(), args=args, train_loader=loader)

        monkeypatch.setenv("WORLD_SIZE", "1")
        assert PackedTrainer(model=tiny_llama(), args=args, train_loader=loader).train_loader is loader


def test_data_that_nothing_would_be_read_of_is_refused(store: Path, tmp_path: Path) -> None:
    args, rows = arguments(tmp_path), [{"input_ids": [1, 2], "labels": [1, 2]}]
    with packed_loader(args, store) as loader:
        for given, named in (((None, rows), {}), ((), {"train_dataset": rows})):
            with pytest.raises(SettingError, match=r"a train_dataset \(list\) was given beside train_loader"):
                PackedTrainer(tiny_llama(), args, *given, train_loader=loader, **named)
        for data in (loader, {"short": rows, "long": loader}):
            with pytest.raises(
                SettingError, match="eval_dataset is a PackedLoader, and a Trainer evaluates on"
            ):
                PackedTrainer(tiny_llama(), args, train_loader=loader, eval_dataset=data)


def test_soft_prompts_which_stand_before_a_row_are_refused(store: Path, tmp_path: Path) -> None:
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(tiny_llama(), prompt)
    for given in (model, torch.compile(model, backend="eager")):
        with pytest.raises(
            ModelError, match=r"soft prompt of 3 tokens \(PEFT.s prompt learning\), which stands before a row"
        ):
            check_family(given)
    with packed_loader(arguments(tmp_path), store) as loader, pytest.raises(ModelError, match="soft prompt"):
        PackedTrainer(model, arguments(tmp_path), train_loader=loader)


def test_a_transformers_that_would_divide_a_loss_once_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Trainer, "loss_is_scaled_for_ga")  # as before 5.19

    with pytest.raises(SettingError, match="a step of pairs is several batches, and this transformers would"):
        trained(PackedDPOTrainer, tmp_path, attention="varlen", gradient_accumulation_steps=2)


def test_smoothed_labels_are_refused_where_transformers_takes_means_of_batches(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    with packed_loader(args, store) as loader:
        PackedTrainer(tiny_llama(), args, train_loader=loader)
        monkeypatch.setattr(LabelSmoother, "__call__", lambda self, output, labels, shift_labels=False: 0)
        with pytest.raises(SettingError, match="takes the mean over each batch in this transformers"):
            PackedTrainer(tiny_llama(), args, train_loader=loader)
