"""Processes, data and models that a Trainer and a loader can't agree on are refused in a sentence."""

from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from tests.support.trainers import arguments, packed_loader, store_in, tiny_llama, trained
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification, Trainer
from transformers.trainer_pt_utils import LabelSmoother

from varlen.adapters.hf.mixing import check_family
from varlen.adapters.hf.trainer import PackedTrainer
from varlen.adapters.hf.trainer_checks import check_head, check_settings
from varlen.adapters.trl.dpo import PackedDPOTrainer
from varlen.errors import ModelError, SettingError
from varlen.feed.loader import PackedLoader

# TRL asks transformers for what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_in(tmp_path_factory.mktemp("documents"))


def test_processes_that_accelerate_does_not_know_of_are_refused(store, tmp_path, monkeypatch):
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


def test_data_that_nothing_would_be_read_of_is_refused(store, tmp_path):
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


def test_a_trainer_without_a_loader_is_told_what_to_pass(tmp_path):
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}]
    with pytest.raises(SettingError, match=r"PackedTrainer trains on train_loader, .*loader_for\(args, data"):
        PackedTrainer(model=tiny_llama(), args=arguments(tmp_path), train_dataset=rows)
    with pytest.raises(SettingError, match="train_loader must be a PackedLoader, got list"):
        PackedTrainer(model=tiny_llama(), args=arguments(tmp_path), train_loader=rows)


@pytest.mark.parametrize(
    ("rank", "world", "changes", "fault"),
    [
        (1, 2, {}, None),
        (0, 2, {}, "the loader is that of rank 0 of 2, but this is process 1 of 2"),
        (0, 1, {}, "the loader is that of rank 0 of 1, but this is process 1 of 2"),
        (
            1,
            2,
            {"average_tokens_across_devices": False},
            "average_tokens_across_devices=False gives every rank",
        ),
        (1, 2, {"n_gpu": 2}, "one process drives 2 GPUs"),
        (1, 2, {"auto_find_batch_size": True}, "auto_find_batch_size=True makes batches smaller"),
    ],
)
def test_settings_of_several_ranks_that_contradict_the_loader_are_refused(
    rank, world, changes, fault, store, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = {"average_tokens_across_devices": True, "n_gpu": 1, "auto_find_batch_size": False}
    said |= {"gradient_accumulation_steps": 1, "max_steps": 3, "num_train_epochs": 1}
    with PackedLoader(
        store, capacity=128, micro_batch_size=1, global_batch_size=world, dp_rank=rank, dp_world_size=world
    ) as loader:
        trainer = SimpleNamespace(
            args=SimpleNamespace(**said | changes),
            train_loader=loader,
            loss_weighting="token",
            label_smoother=None,
            accelerator=SimpleNamespace(num_processes=2, process_index=1),
            **{f"get_{name}_size": lambda: 1 for name in ("cp", "sp", "tp")},
        )
        if fault is None:
            check_settings(trainer)
            return
        with pytest.raises(SettingError, match=fault):
            check_settings(trainer)


def test_soft_prompts_which_stand_before_a_row_are_refused(store, tmp_path):
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(tiny_llama(), prompt)
    for given in (model, torch.compile(model, backend="eager")):
        with pytest.raises(
            ModelError, match=r"soft prompt of 3 tokens \(PEFT.s prompt learning\), which stands before a row"
        ):
            check_family(given)
    with packed_loader(arguments(tmp_path), store) as loader, pytest.raises(ModelError, match="soft prompt"):
        PackedTrainer(model, arguments(tmp_path), train_loader=loader)


def test_a_transformers_that_would_divide_a_loss_once_more_is_refused(tmp_path, monkeypatch):
    monkeypatch.delattr(Trainer, "loss_is_scaled_for_ga")  # as before 5.19

    with pytest.raises(SettingError, match="a step of pairs is several batches, and this transformers would"):
        trained(PackedDPOTrainer, tmp_path, attention="varlen", gradient_accumulation_steps=2)


def test_smoothed_labels_are_refused_where_transformers_takes_means_of_batches(store, tmp_path, monkeypatch):
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    with packed_loader(args, store) as loader:
        PackedTrainer(tiny_llama(), args, train_loader=loader)
        monkeypatch.setattr(LabelSmoother, "__call__", lambda self, output, labels, shift_labels=False: 0)
        with pytest.raises(SettingError, match="takes the mean over each batch in this transformers"):
            PackedTrainer(tiny_llama(), args, train_loader=loader)


def test_a_head_without_a_loss_of_the_next_token_is_refused_by_the_trainer():
    config = LlamaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    check_head(SimpleNamespace(model=LlamaForCausalLM(config)))

    with pytest.raises(SettingError, match=r"LlamaForTokenClassification has no loss of the next token"):
        check_head(SimpleNamespace(model=LlamaForTokenClassification(config)))
