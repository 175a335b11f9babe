"""Daily training: several processes, saves in the background, texts, mixtures, and what a run would do."""

import json

import pytest
import torch
from tests.support.offline_packs import write_chats
from tests.support.training import (
    LLAMA,
    Notes,
    from_model,
    metrics_of,
    rewound,
    same_end,
    settings,
    start_ranks,
    table,
    tensors_of,
    weights_of,
)
from transformers import LlamaConfig, LlamaForCausalLM

from varlen.documents.source import open_source
from varlen.errors import SettingError
from varlen.offline.index import index_source
from varlen.train import dry_run
from varlen.train.configuration import as_settings, as_toml, read_config
from varlen.train.dry_run import forecast
from varlen.train.settings import TrainSettings
from varlen.train.trainer import train

STILL = {**LLAMA, "attention_dropout": 0.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(vocab_size=260, **STILL)).save_pretrained(folder)
    return folder


def test_a_checkpoint_that_is_written_in_the_background_is_the_same(store, tmp_path):
    train(settings(store, tmp_path / "at once"), Notes())
    train(settings(store, tmp_path / "later", run__save_in_background=True), Notes())
    same_end(tmp_path / "at once", tmp_path / "later")
    for step in ("step-00000002", "step-00000004"):
        names = [tmp_path / run / "checkpoints" / step for run in ("at once", "later")]
        assert tensors_of(names[0]) == tensors_of(names[1])

    copy = rewound(tmp_path / "later", 2, tmp_path / "from2")
    train(settings(store, copy, run__save_in_background=True), Notes())
    same_end(tmp_path / "at once", copy)


WAYS = {
    "ddp": {"run__parallel": "ddp"},
    "fsdp": {"run__parallel": "fsdp"},
    "stages": {"plan__pp": 2, "plan__method": "sliced", "plan__least_rows": 16},
}


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_evaluate_and_save_as_one_does(store, base, tmp_path, hardware, way):
    sets = {"eval__sets": {"same": str(store)}, "eval__every": 2, "run__save_in_background": True}
    changes = {
        **sets,
        **({"plan__hardware": str(hardware)} if way == "stages" else {"data__micro_batch_size": 1}),
    }
    one, two = tmp_path / "one", tmp_path / "two"
    train(from_model(store, base, one, **sets), Notes())
    made = {**table(store, two, **changes, **WAYS[way]), "model": {"path": str(base)}}
    processes = start_ranks([made], 2, tmp_path)
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0], [
        p.read_text() for p in tmp_path.glob("rank*")
    ]

    found, wanted = (_losses(output) for output in (two, one))
    assert found.keys() == wanted.keys() == {2, 4, 6}
    for step, loss in wanted.items():
        assert found[step] == pytest.approx(loss, rel=1e-4)
    for name, weight in weights_of(one).items():
        torch.testing.assert_close(weights_of(two)[name], weight, rtol=1e-3, atol=2e-4)


def _losses(output):
    lines = [json.loads(line) for line in (output / "evaluations.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_train_the_adapter_that_one_does(store, base, tmp_path, way):
    adapter = {"adapter__rank": 4, "adapter__export": "merged"}
    one, two = tmp_path / "one", tmp_path / "two"
    train(from_model(store, base, one, **adapter), Notes())
    changes = {"data__micro_batch_size": 1, "run__parallel": way}
    made = {**table(store, two, **adapter, **changes), "model": {"path": str(base)}}
    processes = start_ranks([made], 2, tmp_path)
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0], [
        p.read_text() for p in tmp_path.glob("rank*")
    ]

    losses = [[line["loss"] for line in metrics_of(output)] for output in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for name, weight in weights_of(one).items():
        torch.testing.assert_close(weights_of(two)[name], weight, rtol=1e-3, atol=2e-4)


def test_texts_are_written_and_nothing_else_changes(store, tmp_path):
    notes = Notes()
    sample = {"sample__prompts": ["What is 2 + 2?", "Why"], "sample__every": 4, "sample__tokens": 5}
    train(settings(store, tmp_path / "run", **sample), notes)
    train(settings(store, tmp_path / "plain"), Notes())

    same_end(tmp_path / "plain", tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (step, prompt) for step in (4, 6) for prompt in ("What is 2 + 2?", "Why")
    ]
    assert [sentence for sentence in notes.said if sentence.startswith("after step 4: Why|")]


def test_a_text_is_the_one_that_transformers_generates(store, tmp_path):
    sample = {"sample__prompts": ["What is"], "sample__every": 0, "sample__tokens": 8}
    train(settings(store, tmp_path / "run", **sample), Notes())
    model = LlamaForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    ids = torch.tensor([list(b"What is")])
    theirs = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=256, pad_token_id=257)
    written = json.loads((tmp_path / "run" / "samples.jsonl").read_text())["text"]
    wanted = bytes(token for token in theirs[0, ids.shape[1] :].tolist() if token < 256)
    assert written.encode("utf-8", "replace")[:4] == wanted.decode("utf-8", "replace").encode()[:4]


def test_a_mixture_is_trained_by_its_weights(store, tmp_path):
    write_chats(tmp_path / "more.jsonl", 40)
    index_source(open_source(str(tmp_path / "more.jsonl")), tmp_path / "more")
    parts = {"many": {"source": str(store), "weight": 3}, "few": {"source": str(tmp_path / "more")}}
    made = table(store, tmp_path / "run")
    made["data"] = {name: value for name, value in made["data"].items() if name != "source"} | {
        "mixture": parts
    }
    asked = as_settings(TrainSettings, made, "")
    notes = Notes()
    train(asked, notes)

    assert len(notes.steps) == 6
    assert read_config_of(asked, tmp_path) == asked


def read_config_of(asked, folder):
    (folder / "printed.toml").write_text(as_toml(asked))
    return read_config(folder / "printed.toml")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, r"\[data\] names neither a source nor a mixture"),
        ({"source": "a", "mixture": {"b": {"source": "b"}}}, r"\[data\] names both a source and a mixture"),
        (
            {"mixture": {"b": {"source": "b", "weight": 0}}},
            "data.mixture.b.weight must be a number above 0, got 0",
        ),
        ({"mixture": {"b": {"source": "b", "wait": 1}}}, "data.mixture.b.wait is no setting"),
        ({"mixture": {"b": "b"}}, "data.mixture.b must be a table with a source and a weight, got 'b'"),
    ],
)
def test_mixtures_that_cant_be_are_refused(store, tmp_path, data, words):
    made = table(store, tmp_path)
    made["data"] = {name: value for name, value in made["data"].items() if name != "source"} | data
    with pytest.raises(SettingError, match=words):
        as_settings(TrainSettings, made, "")


def test_a_dry_run_says_what_the_run_does(store, base, tmp_path):
    changes = {"eval__sets": {"same": str(store)}, "adapter__rank": 4, "run__epochs": 1}
    made = table(store, tmp_path / "run", **changes)
    del made["run"]["steps"]
    asked = as_settings(TrainSettings, {**made, "model": {"path": str(base)}}, "")
    found = forecast(asked)
    notes = Notes()
    summary = train(asked, notes)

    assert found.steps == summary.steps
    assert (found.parameters, found.trained) == (
        notes.overviews[0].num_parameters,
        notes.overviews[0].num_trained,
    )
    assert (found.tokens, found.targets) == (notes.steps[0].tokens, notes.steps[0].supervised_tokens)
    assert found.fill == pytest.approx(notes.steps[0].fill)
    assert all(len(line) <= 80 for line in found.words().splitlines())


def test_too_little_memory_is_a_sentence_with_the_way_out(store, tmp_path, monkeypatch):
    monkeypatch.setattr(dry_run, "_device", lambda device: (1e6, "a small card"))
    words = r"has 0.0 GB \(a small card\): .* run.checkpoint_activations = true, .* need less"
    with pytest.raises(SettingError, match=words):
        forecast(settings(store, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("processes", [1, 3])
def test_a_dry_run_of_more_processes_divides_a_step_as_they_would(store, tmp_path, processes):
    found = forecast(settings(store, tmp_path / "run"), processes)
    assert found.processes == processes
    assert found.targets == forecast(settings(store, tmp_path / "run")).targets
