"""The examples for transformers and TRL run as they stand, with the loss and gradients of documents alone."""

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import both
from tests.support.rarely import mostly
from tests.support.trainers import Recorder, furthest, gradients_of, logged, losses_one_by_one

import varlen as vl

# TRL asks transformers for what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


def example(root: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, root / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(root: Path, name: str, *words: Any) -> str:
    printed, said = both(root / "examples" / f"{name}.py", *words, ranks=1)
    assert "copied" not in said  # by a loader whose ring is too small
    return printed


def first_step(trainer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train one step without clipping; returns its loss and gradients."""
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.args.max_steps, trainer.args.max_grad_norm, trainer.args.logging_steps = 1, 0.0, 1
    trainer.args.save_strategy = "no"
    trainer.train()
    return logged(trainer), recorder.gradients[0]


def check_against(model: Any, batches: list[Any], loss: list[float], gradients: Any) -> None:
    alone = torch.cat(losses_one_by_one(model.train(), batches)).mean()

    assert loss == pytest.approx([float(alone.detach())], rel=1e-5)
    assert furthest(gradients, gradients_of(model, alone)) < 5e-5


@pytest.mark.soak
def test_the_trainer_s_example_runs_and_goes_on_to_the_same_end(root, tmp_path, capsys):
    whole = run(root, "transformers_trainer", tmp_path / "run")
    for step in (44, 40, 35, 30, 25):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    example(root, "transformers_trainer").main(tmp_path / "run")
    resumed = capsys.readouterr().out

    told = r"44 steps, 2 epochs\nthis rank: (\d+) batches"
    assert re.search(told, whole)[1] == "88"  # type: ignore[index]
    assert re.search(told, resumed)[1] == "48"  # type: ignore[index]
    assert whole.splitlines()[-1] == resumed.splitlines()[-1]


def test_the_trainer_s_example_has_the_loss_and_gradients_of_documents_alone(root, tmp_path):
    module = example(root, "transformers_trainer")
    trainer = module.make_trainer(tmp_path)
    with trainer.train_loader as loader:
        batches = [next(loader) for _ in range(loader.micro_batches)]
        loader.seek(0)
        loss, gradients = first_step(trainer)

    check_against(module.make_model(), batches, loss, gradients)


WAYS = {"packed": "400 documents in 68 rows", "collator": "", "loader": r"packs are 9\d\.\d % full"}
"""Each way of the SFT example, and what it says beside its steps."""


@pytest.mark.parametrize("way", mostly(["loader"], WAYS))
def test_the_sft_example_runs_each_way(way, root, capsys):
    example(root, "trl_sft").main(way)
    told = capsys.readouterr().out

    assert re.findall(r"(\w+): 34 steps, 34,576 tokens", told) == [way]
    assert re.search(WAYS[way], told)


@pytest.mark.parametrize("way", ["packed", "collator", "loader"])
def test_the_sft_example_has_the_loss_and_gradients_of_documents_alone(way, root, tmp_path):
    module = example(root, "trl_sft")
    trainer = module.make_trainer(way, str(tmp_path))
    took: list[Any] = []
    step = trainer.training_step

    def taking(model: Any, inputs: Any, *args: Any, **rest: Any) -> Any:
        batch = inputs.get("packed") or inputs
        took.append(documents_in(batch))
        return step(model, inputs, *args, **rest)

    trainer.training_step = taking
    loss, gradients = first_step(trainer)
    if way == "loader":
        trainer.train_loader.close()

    (documents,) = took
    assert len(documents) > 20
    packing = vl.pack([len(document) for document in documents], 256)
    check_against(module.make_model(), [vl.collate(documents, packing)], loss, gradients)


def documents_in(batch: Any) -> list[list[int]]:
    """The documents of a PackedBatch, or of a collator's flat row, by their boundaries."""
    if isinstance(batch, dict):
        ids, ends, owned = (
            batch["input_ids"].reshape(-1),
            batch["cu_seq_lens_q"],
            batch["labels"].reshape(-1) * 0,
        )
    else:
        ids, ends, owned = batch.input_ids.reshape(-1), batch.cu_seqlens, batch.segment_ids.reshape(-1)
    bounds = zip(ends[:-1].tolist(), ends[1:].tolist())
    return [ids[first:last].tolist() for first, last in bounds if owned[first] >= 0]


def test_the_dpo_example_runs_and_counts_what_padding_would_take(root, tmp_path, capsys):
    example(root, "trl_dpo").main(str(tmp_path))
    told = capsys.readouterr().out

    assert "200 pairs in 28 packs of 5 to 9\n13,947 tokens in the models, 31,300 with padding\n" in told
    said = (root / "docs" / "frameworks" / "trl.md").read_text(encoding="utf-8")
    assert "take 13,947 tokens in the models; padded, the same batches take\n31,300." in said


def test_the_dpo_example_has_trl_s_loss_and_gradients(root, tmp_path):
    from trl import DPOTrainer

    module = example(root, "trl_dpo")
    ours = module.make_trainer(str(tmp_path))
    held = [ours.train_dataset[number] for number in range(len(ours.train_dataset))]
    took: list[Any] = []
    step = ours.training_step

    def taking(model: Any, inputs: Any, *args: Any, **rest: Any) -> Any:
        took.append({name: value for name, value in inputs.items() if name != "packed"})
        return step(model, inputs, *args, **rest)

    ours.training_step = taking
    loss, gradients = first_step(ours)
    theirs = DPOTrainer(
        model=module.make_model(),
        ref_model=module.make_model(),
        args=ours.args,
        train_dataset=module.make_pairs(),
        processing_class=module.make_tokenizer(),
    )
    theirs.model.set_attn_implementation("sdpa")
    theirs.ref_model.set_attn_implementation("sdpa")
    pairs = [len(batch["input_ids"]) // 2 for batch in took]
    losses = [theirs.compute_loss(theirs.model, batch) for batch in took]
    expected = sum(loss * number for loss, number in zip(losses, pairs)) / sum(pairs)

    assert sum(map(len, held)) == 200
    assert len(took) == 4
    assert len(set(pairs)) > 1
    assert loss == pytest.approx([float(expected.detach())], rel=1e-5)
    assert furthest(gradients, gradients_of(theirs.model, expected)) < 1e-4
