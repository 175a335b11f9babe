"""Weights of rows in training: gradients are those of a weighted loss written document by document, or a refusal."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import hf_models
from tests.support.rarely import mostly
from tests.support.sliced import take_gradients, tiny
from tests.support.trainers import Recorder, arguments, furthest, gradients_of, logged, packed_loader
from tests.support.training import Notes, metrics_of, start_ranks, table, write_hardware
from tests.support.weighted_rows import chats, expected, write
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig
from typer.testing import CliRunner

import varlen as vl
from varlen.adapters import hf
from varlen.adapters.hf.trainer import PackedTrainer
from varlen.adapters.megatron.batches.collate import megatron_batch
from varlen.adapters.megatron.loader import MegatronLoader
from varlen.adapters.megatron.packing.offline import MegatronPackSettings, pack_for_megatron
from varlen.adapters.torchtitan import PackedDataLoader, trainer_batch
from varlen.documents.source import open_source
from varlen.errors import SettingError
from varlen.offline.index import index_source
from varlen.train.configuration import as_settings
from varlen.train.settings import TrainSettings
from varlen.train.step import BLOCK, target_loss_sum
from varlen.train.trainer import train

ROWS = [*chats(20, 0), *chats(16, 1, weights=(0, 1))]
CAPACITY = 320


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write(folder / "a.jsonl", ROWS)
    index_source(open_source(folder / "a.jsonl", row_weights=True), folder / "store")
    return folder / "store"


def long_llama(attention: str = "varlen") -> Any:
    """A Llama of two layers that takes the longest of the chats."""
    sizes = {**hf_models.GROUPED, "vocab_size": 260, "max_position_embeddings": 512}
    return hf_models.make(LlamaConfig(**sizes), attention, torch.float32)


def by_hand(model: Any, documents: Any, weighting: str = "token") -> torch.Tensor:
    """The weighted loss of documents, each alone in the model: tokens and what each weighs.

    "token": the sum of weight times loss over the sum of weights. "document": the mean over documents of the same.
    """
    losses, sums = [], []
    for tokens, weights in documents:
        ids = torch.tensor(tokens)[None]
        told: dict[str, Any] = {}
        if model.config._attn_implementation == "varlen":
            ends = torch.tensor([0, ids.shape[1]], dtype=torch.int32)
            told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            told |= {"max_length_q": ids.shape[1], "max_length_k": ids.shape[1]}
        logits = model(input_ids=ids, use_cache=False, **told).logits[0]
        each = cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
        own = torch.tensor(weights[1:], dtype=each.dtype)
        losses.append((own * each).sum())
        sums.append(own.sum())
    if weighting == "document":
        return torch.stack([loss / whole for loss, whole in zip(losses, sums) if whole]).mean()
    return torch.stack(losses).sum() / torch.stack(sums).sum()


def first_step(make: Any) -> list[Any]:
    """Tokens and weights of the documents of a loader's first step."""
    with make() as loader:
        batches = [next(loader) for _ in range(loader.micro_batches)]
    wanted = expected(ROWS)
    return [wanted[number] for batch in batches for number in batch.document_ids.tolist()]


# transformers' Trainer.


def loader_for_trainer(args: Any, store: Path, **changes: Any) -> vl.PackedLoader:
    return packed_loader(args, store, **{"capacity": CAPACITY, "overlong": "error", **changes})


@pytest.mark.parametrize("weighting", ["token", "document"])
@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_a_trainers_step_is_that_of_the_weighted_loss(attention, weighting, store, tmp_path):
    recorder = Recorder()
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 1}
    args = arguments(tmp_path, **changes)
    trainer = PackedTrainer(
        model=long_llama(attention),
        args=args,
        train_loader=loader_for_trainer(args, store),
        loss_weighting=weighting,
        callbacks=[recorder],
    )
    trainer.train()

    model = long_llama().train()
    loss = by_hand(model, first_step(lambda: loader_for_trainer(args, store)), weighting)

    assert logged(trainer)[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert furthest(recorder.gradients[0], gradients_of(model, loss)) < 5e-5


def test_a_loss_of_anothers_is_refused_beside_weights(store, tmp_path):
    args = arguments(tmp_path, gradient_accumulation_steps=3, label_smoothing_factor=0.1)

    with pytest.raises(
        SettingError, match=r"label_smoothing_factor changes the loss, and so does row_weights=True"
    ):
        PackedTrainer(model=long_llama(), args=args, train_loader=loader_for_trainer(args, store))


def test_a_models_own_loss_is_given_no_labels_that_weigh(store):
    with loader_for_trainer(arguments("nowhere"), store) as loader:
        batch = next(batch for batch in loader if batch.target_weights is not None)

    inputs = hf.model_inputs(batch, long_llama())

    assert "labels" not in inputs
    assert "labels" in hf.model_inputs(batch.replace(columns={}), long_llama())


# varlen train.


def run_table(store: Any, output: Path, **changes: Any) -> dict[str, Any]:
    usual = {
        "data__capacity": CAPACITY,
        "data__overlong": "error",
        "run__steps": 2,
        "optimizer__max_grad_norm": 0.0,
    }
    usual |= {"run__checkpoint_every": 0, "optimizer__warmup_steps": 0, "optimizer__schedule": "constant"}
    made = table(store, output, **{**usual, **changes})
    made["model"]["settings"] = {
        **made["model"]["settings"],
        "max_position_embeddings": 512,
        "attention_dropout": 0.0,
    }
    return made


def run(store: Any, output: Path, **changes: Any) -> Any:
    notes = Notes()
    train(as_settings(TrainSettings, run_table(store, output, **changes), ""), notes)
    return notes


@pytest.mark.parametrize("micro_batch_size", mostly([3], [1, 3, 6]))
def test_the_loss_of_varlen_train_is_weighted(micro_batch_size, store, tmp_path):
    notes = run(store, tmp_path / "run", data__micro_batch_size=micro_batch_size)
    settings = {
        "capacity": CAPACITY,
        "global_batch_size": 6,
        "worker": "thread",
        "seed": 0,
        "overlong": "error",
    }

    found = first_model(store, tmp_path / "first")
    documents = first_step(lambda: vl.PackedLoader(str(store), **settings))
    loss = by_hand(found, documents)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in found.parameters() if p.grad is not None]).norm()

    assert notes.steps[0].loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert notes.steps[0].grad_norm == pytest.approx(float(norm), rel=1e-4)


def first_model(store: Path, folder: Path) -> Any:
    """The model that a run begins with: that of one whose learning rate is 0."""
    from transformers import AutoModelForCausalLM

    run(store, folder, run__steps=1, optimizer__learning_rate=0.0)
    return AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager").train()


def test_documents_and_the_store_of_them_are_trained_alike(store, tmp_path):
    rows = store.parent / "a.jsonl"
    of_store = run(store, tmp_path / "a")
    of_rows = run(
        rows, tmp_path / "b", data__row_weights=True, data__mode="indexed", data__cache=str(tmp_path / "c")
    )

    assert [step.loss for step in of_store.steps] == [step.loss for step in of_rows.steps]
    with pytest.raises(vl.VarlenError, match="row_weights=True, --row-weights"):
        run(rows, tmp_path / "d")


@pytest.mark.parametrize("parallel", mostly(["fsdp"], ["ddp", "fsdp"]))
def test_ranks_divide_by_the_weights_of_all(parallel, store, tmp_path):
    alone = run(store, tmp_path / "one", data__micro_batch_size=1)
    made = run_table(store, tmp_path / "two", data__micro_batch_size=1, run__parallel=parallel)

    for process in start_ranks([made], 2, tmp_path):
        process.join(240)
        assert process.exitcode == 0, list(tmp_path.glob("*"))

    together = metrics_of(tmp_path / "two")
    for one, other in zip(alone.steps, together, strict=True):
        assert other["loss"] == pytest.approx(one.loss, rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one.grad_norm, rel=1e-4)


def test_a_planned_run_trains_the_weighted_loss(store, tmp_path):
    alone = run(store, tmp_path / "one")
    made = run_table(store, tmp_path / "two") | {"plan": {"slice_tokens": 24}}
    notes = Notes()

    train(as_settings(TrainSettings, made, ""), notes)

    for one, other in zip(alone.steps, notes.steps, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)


def planned_table(store, output, plan):
    sets = {"eval__sets": {"same": str(store)}, "eval__every": 1, "eval__lengths": [40, 80]}
    return run_table(store, output, data__micro_batch_size=1, **sets) | (
        {} if plan is None else {"plan": plan}
    )


def evaluations_of(output: Path) -> list[Any]:
    return [
        json.loads(line)["sets"]["same"] for line in (output / "evaluations.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ({"slice_tokens": 24}, 1),
        ({"method": "sliced", "pp": 2, "least_rows": 16}, 2),
        ({"method": "micropack", "least_rows": 16}, 2),
    ],
    ids=["slices", "stages", "ranks"],
)
def test_slices_evaluate_the_weighted_loss_of_whole_packs(store, tmp_path, plan, ranks):
    if "slice_tokens" not in plan:
        plan = plan | {"hardware": write_hardware(tmp_path / "slow.json")}
    tables = [planned_table(store, tmp_path / name, how) for name, how in (("packs", None), ("plans", plan))]
    train(as_settings(TrainSettings, tables[0], ""), Notes())
    for process in start_ranks([tables[1]], ranks, tmp_path):
        process.join(240)
        assert process.exitcode == 0, [path.read_text() for path in tmp_path.glob("rank*")]

    whole, planned = (evaluations_of(tmp_path / name) for name in ("packs", "plans"))
    for one, other in zip(whole, planned, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["targets"] == pytest.approx(one["targets"])
        assert other["targets"] != round(other["targets"])  # weights aren't all 1
        for part, same in zip(one["by_length"], other["by_length"], strict=True):
            assert (same["documents"], same["targets"]) == (part["documents"], pytest.approx(part["targets"]))
            assert same["loss"] == (None if part["loss"] is None else pytest.approx(part["loss"], rel=1e-4))


def test_losses_in_blocks_are_those_of_all_logits():
    torch.manual_seed(0)
    logits = torch.randn(2, BLOCK, 5, requires_grad=True)
    labels, weights = torch.randint(0, 5, (2, BLOCK)), torch.rand(2, BLOCK)
    labels[:, ::3] = -100

    found = target_loss_sum(logits, labels, weights)

    each = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(found, (each * weights[:, 1:].flatten()).sum())
    ones = target_loss_sum(logits, labels, torch.ones_like(weights))
    torch.testing.assert_close(ones, target_loss_sum(logits, labels))


# The engine of slices.


@pytest.mark.parametrize("weighting", ["token", "document"])
def test_a_step_in_slices_is_that_of_the_weighted_loss(weighting):
    draw = np.random.default_rng(0)
    lengths = [50, 9, 31, 4, 77]
    documents = [draw.integers(0, 61, n).tolist() for n in lengths]
    weights = [draw.choice([0, 0.25, 1, 2], n).tolist() for n in lengths]
    model = tiny("llama")
    batch = vl.collate(documents, vl.pack(lengths, capacity=96), target_weights=weights)
    model.set_attn_implementation("sdpa")
    loss = by_hand(model, list(zip(documents, weights)), weighting)
    loss.backward()
    wanted = take_gradients(model)

    stats = vl.SliceEngine(model, 16, weighting=weighting).step(batch)

    assert stats.loss == pytest.approx(float(loss.detach()), rel=1e-6)  # weights are float32
    for name, gradient in take_gradients(model).items():
        assert (gradient - wanted[name]).norm() <= 1e-6 * wanted[name].norm(), name
    part = batch.replace(step_num_targets=batch.num_targets + 1)
    with pytest.raises(
        SettingError, match=r"target_weights \(row_weights\) needs .* give the whole step as one"
    ):
        vl.SliceEngine(model, 16).step(part)


# A loop of one's own, as docs/batches.md has it.


def test_the_documented_loop_trains_the_weighted_loss(store):
    model = long_llama("sdpa").train()
    make = lambda: vl.PackedLoader(  # noqa: E731
        str(store),
        capacity=CAPACITY,
        global_batch_size=6,
        micro_batch_size=2,
        worker="thread",
        overlong="error",
    )
    with make() as loader:
        batches = [next(loader) for _ in range(loader.micro_batches)]
    wanted = gradients_of(model, by_hand(model, first_step(make)))

    model.zero_grad()
    whole = sum(float(batch.loss_weights().sum(dtype=np.float64)) for batch in batches)
    for batch in (batch.to_torch() for batch in batches):
        inputs = {name: value for name, value in hf.model_inputs(batch, model).items() if name != "labels"}
        logits = model(**inputs).logits
        losses = cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="none")
        (losses * batch.loss_weights()[:, 1:].flatten()).sum().div(whole).backward()

    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert furthest(found, wanted) < 5e-5


# What knows no weights refuses them.


def weighed_batch() -> vl.PackedBatch:
    return vl.collate([[5, 6, 7], [8, 9]], vl.pack([3, 2], capacity=8), target_weights=[[1, 0.5, 2], [1, 3]])


def test_torchtitan_is_given_no_weights(store):
    with pytest.raises(SettingError, match="torchtitan's loss knows none"):
        PackedDataLoader(
            PackedDataLoader.Config(source=str(store)),
            dp_world_size=1,
            dp_rank=0,
            seq_len=CAPACITY,
            local_batch_size=2,
        )
    with pytest.raises(SettingError, match="torchtitan's loss knows no weights"):
        trainer_batch(weighed_batch())


def test_a_batch_of_megatrons_holds_weights_in_its_loss_mask():
    batch = megatron_batch(weighed_batch())

    assert batch["loss_mask"].tolist() == [[0.5, 2.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]]
    mean = megatron_batch(weighed_batch(), weights=weighed_batch().loss_weights("document"))
    assert mean["loss_mask"].sum() == pytest.approx(2)
    given = weighed_batch()
    given = given.replace(columns={**given.columns, "advantages": given.target_weights})
    with pytest.raises(SettingError, match=r"weigh as their rows say .* and by the column 'advantages'"):
        megatron_batch(given, weights="advantages")


def test_megatrons_loader_and_files_take_no_weights(store, tmp_path):
    with (
        vl.PackedLoader(
            str(store), capacity=CAPACITY, global_batch_size=2, micro_batch_size=1, worker="thread"
        ) as loader,
        pytest.raises(SettingError, match=r"\(row_weights\), and Megatron divides"),
    ):
        MegatronLoader(loader)
    settings = MegatronPackSettings(pack_size=CAPACITY)
    for source in (store, open_source(store.parent / "a.jsonl", row_weights=True)):
        with pytest.raises(SettingError, match="Megatron's packed files have a mask of 0 and 1 alone"):
            pack_for_megatron(source, tmp_path / "packed", settings)
    assert not (tmp_path / "packed").exists()


# The command line.


def test_every_verb_that_reads_rows_takes_their_weights(store, tmp_path, monkeypatch):
    from varlen.cli.app import app

    monkeypatch.chdir(tmp_path)
    rows = str(store.parent / "a.jsonl")
    for verb in (
        ["index", rows, "-o", "s"],
        ["pack", rows, "-o", "p", "--capacity", "512"],
        ["inspect", rows, "--json"],
    ):
        refused = CliRunner().invoke(app, verb)
        assert refused.exit_code == 2, verb
        assert "row_weights=True, --row-weights" in " ".join(refused.output.split())
        assert not list(tmp_path.glob(verb[3])) if "-o" in verb else True
        taken = CliRunner().invoke(app, [*verb, "--row-weights"])
        assert taken.exit_code == 0, taken.output
    manifest = json.loads((tmp_path / "p" / ".manifest.json").read_text())
    assert manifest["source"]["row_weights"] is True
    again = CliRunner().invoke(app, ["inspect", rows, "--row-weights", "--json"])
    assert "--row-weights" in again.output
