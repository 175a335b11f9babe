"""Daily training: several processes, saves in the background, texts, mixtures, and what a run would do."""

import json
import re
from dataclasses import fields, replace

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
from torch.optim import _muon as _muon_of_torch
from transformers import LlamaConfig, LlamaForCausalLM

from varlen.cost.hardware import Hardware, save_hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.counts import as_size
from varlen.documents.source import open_source
from varlen.errors import PlanError, SettingError
from varlen.feed.loader import PackedLoader
from varlen.offline.index import index_source
from varlen.plan.one_gpu import one_gpu_plan
from varlen.simulate.api import simulate
from varlen.step_plan import Mesh
from varlen.text.tokenizer import ByteTokenizer
from varlen.train.configuration import as_settings, as_toml, read_config
from varlen.train.dry_run import _check_fits, forecast
from varlen.train.model import model_config
from varlen.train.samples import Sampler
from varlen.train.settings import TrainSettings
from varlen.train.tokens import run_tokenizer
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


def _muon(store, output, base, **changes):
    given = {"optimizer__name": "muon", "optimizer__schedule": "constant", "optimizer__warmup_steps": 0}
    made = table(store, output, run__steps=1, data__micro_batch_size=1, **given, **changes)
    return {**made, "model": {"path": str(base)}}


def _turn_in_float32():
    """Let torch's Muon iterate in float32, for as long as this process lives or a test patches it."""
    inner = _muon_of_torch._zeropower_via_newtonschulz

    def turned(gradient, *settings):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
            return inner(gradient, *settings)

    _muon_of_torch._zeropower_via_newtonschulz = turned


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_muon_turns_whole_matrices_however_ranks_share_them(store, base, tmp_path, way, monkeypatch):
    name = "_zeropower_via_newtonschulz"
    monkeypatch.setattr(_muon_of_torch, name, getattr(_muon_of_torch, name))  # put back afterwards
    _turn_in_float32()
    train(_muon(store, tmp_path / "one", base))
    runs = [_muon(store, tmp_path / "two", base, run__parallel=way)]
    for process in start_ranks(runs, 2, tmp_path, prepare=_turn_in_float32):
        process.join(120)
        assert process.exitcode == 0, [path.read_text() for path in tmp_path.glob("rank*")]

    before = LlamaForCausalLM.from_pretrained(base).state_dict()
    one, two = (weights_of(tmp_path / name) for name in ("one", "two"))
    assert one.keys() <= before.keys()
    for name, weight in one.items():
        change, other = weight - before[name], two[name] - before[name]
        # Halves of a matrix that are turned by themselves differ by a third. In bfloat16, in which torch iterates by
        # default, roundings alone make a tenth where gradients are near singular.
        assert (other - change).norm() < 1e-4 * change.norm(), name


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


def of_rows(follows):
    """A model that looks at one token alone: its logits are a column of a matrix `[260, 260]`."""
    sizes = {"vocab_size": 260, "hidden_size": 260, "intermediate_size": 8, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=0))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(260))
        model.lm_head.weight.copy_(follows)
    return model


def written(store, tmp_path, model, step=1, **changes):
    """What a model writes after a step."""
    run = settings(store, tmp_path / "run", sample__tokens=8, **changes)
    return [one.text for one in Sampler(run, run_tokenizer(run.data, run.model), {}).write(step, model)]


def test_a_text_ends_with_its_end_of_text(store, tmp_path):
    follows = torch.zeros(260, 260)
    follows[ord("."), :] = 1
    follows[:, ord(".")] = 0
    follows[256, ord(".")] = 1

    assert written(store, tmp_path, of_rows(follows), sample__prompts=["What", "What."]) == [".", ""]


def test_texts_are_drawn_by_the_seed_of_the_run_and_the_step(store, tmp_path):
    letters = torch.full((260, 260), -1e9)
    letters[ord("a") : ord("z") + 1] = 0  # all as likely
    model = of_rows(letters)
    drawn = {"sample__prompts": ["What"], "sample__temperature": 1.0}

    found = [
        written(store, tmp_path, model, step, **drawn, run__seed=seed)[0]
        for step, seed in ((1, 0), (1, 0), (2, 0), (1, 9))
    ]
    assert found[0] == found[1]
    assert len({*found}) == 3


def test_what_a_user_says_is_answered_by_the_chat_template(store, tmp_path):
    notes = Notes()
    sample = {"sample__chats": ["What is 2 + 2?"], "sample__prompts": ["Why"], "sample__every": 0}
    given = settings(store, tmp_path / "run", **sample, sample__tokens=8)
    train(given, notes)

    prompt, chat = (
        json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    )
    assert (prompt["prompt"], prompt["is_chat"], chat["prompt"], chat["is_chat"]) == (
        "Why",
        False,
        "What is 2 + 2?",
        True,
    )
    model = LlamaForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    turn, end = 258, 259
    asked = [turn, *b"user\nWhat is 2 + 2?", end, *b"\n", turn, *b"assistant\n"]
    theirs = model.generate(torch.tensor([asked]), max_new_tokens=8, do_sample=False, pad_token_id=257)
    assert model.generation_config.eos_token_id == [256, end]
    assert chat["text"] == ByteTokenizer().decode(theirs[0, len(asked) :].tolist())
    assert f"after step 6: What is 2 + 2? → {chat['text']}" in notes.said


@pytest.mark.parametrize("way", ["run", "dry run"])
def test_chats_to_answer_without_a_chat_template_are_refused(tmp_path, way):
    (tmp_path / "texts.jsonl").write_text((json.dumps({"text": "hello you " * 9}) + "\n") * 40)
    index_source(open_source(str(tmp_path / "texts.jsonl")), tmp_path / "store")
    given = settings(tmp_path / "store", tmp_path / "run", sample__chats=["Why?"])
    with pytest.raises(SettingError, match=r"sample\.chats needs a chat template: .* use sample\.prompts"):
        forecast(given) if way == "dry run" else train(given, Notes())
    with pytest.raises(SettingError, match=r"sample\.prompts or sample\.chats must hold texts"):
        settings(tmp_path / "store", tmp_path / "run", sample__every=1)


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


def test_printed_settings_are_all_there_with_a_value_or_by_name(store, tmp_path):
    asked = settings(store, tmp_path / "run")
    tables = re.split(r"^\[(\w+)\]$", as_toml(asked), flags=re.MULTILINE)
    for name, text in zip(tables[1::2], tables[2::2], strict=True):
        known = {one.name for one in fields(getattr(asked, name))}
        given = set(re.findall(r"^(\w+) = ", text, re.MULTILINE))
        comment = " ".join(line for line in text.splitlines() if line.startswith("#"))
        unset = set(re.findall(r"\w+", comment.removeprefix("# at their defaults:")))
        maps = {one for one in known if isinstance(getattr(getattr(asked, name), one), dict)}
        assert given | unset | maps >= known, name
        assert not known & given & unset


def test_settings_that_were_emptied_are_printed(store, tmp_path):
    asked = settings(store, tmp_path / "run", eval__sets={"same": str(store)}, eval__lengths=[])

    assert asked.eval.lengths == ()
    assert "\nlengths = []\n" in as_toml(asked)
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


def test_too_little_memory_is_a_sentence_with_the_way_out(store, tmp_path):
    words = r"a batch of 256 tokens; a run may use 0.9 MB of 1.0 MB \(as given\), .*activations = true .* need less"
    with pytest.raises(SettingError, match=words) as caught:
        forecast(settings(store, tmp_path / "run"), memory_bytes=1e6)
    assert not (tmp_path / "run").exists()
    ways = {
        "run.checkpoint_activations = true": {"run__checkpoint_activations": True},
        'run.precision = "bf16"': {"run__precision": "bf16"},
        'optimizer.name = "adafactor"': {"optimizer__name": "adafactor"},
    }
    for way, changes in ways.items():
        asked = settings(store, tmp_path / "run", **changes)
        assert f"{way} ({as_size(forecast(asked, memory_bytes=1e9).needed_bytes)})" in str(caught.value)
    assert str(caught.value).endswith("MB, still too much")


def test_settings_that_are_refused_are_no_way_out(store, tmp_path):
    asked = settings(store, tmp_path / "run")
    limits = {"memory_bytes": 1e6, "limit_bytes": 9e5, "device": "as given", "decided_by": "a batch"}
    found = replace(forecast(asked), **limits, state_bytes=1e6, activation_bytes=1e6)

    def count(other):
        if other.adapter is not None or other.run.checkpoint_activations:
            raise SettingError("refused")
        return found if other.run.precision == "fp32" else replace(found, activation_bytes=5e5)

    with pytest.raises(SettingError) as caught:
        _check_fits(found, asked, model_config(asked.model, 260), count)
    assert 'run.precision = "bf16" (1.5 MB)' in str(caught.value)
    assert not any(word in str(caught.value) for word in ("[adapter]", "checkpoint_activations", "adafactor"))


@pytest.mark.parametrize("processes", [1, 3])
def test_a_dry_run_of_more_processes_divides_a_step_as_they_would(store, tmp_path, processes):
    found = forecast(settings(store, tmp_path / "run"), processes)
    assert found.processes == processes
    assert found.targets == forecast(settings(store, tmp_path / "run")).targets


def card(path, memory_bytes):
    """A file of hardware with so much memory."""
    save_hardware(replace(Hardware.named("h100"), name="small", memory_bytes=memory_bytes), path)
    return str(path)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_dry_run_shows_the_plan_that_the_run_makes(store, hardware, tmp_path, precision):
    plan = {"plan__hardware": hardware, "plan__least_rows": 16, "plan__quick": "micropack"}
    asked = settings(
        store, tmp_path / "run", model__settings=STILL, run__precision=precision, run__steps=4, **plan
    )
    found = forecast(asked)
    assert not (tmp_path / "run").exists()
    notes = Notes()
    train(asked, notes)

    assert found.plan.words == notes.overviews[0].plans
    assert found.plan.steps == 4
    assert found.plan.step_s == pytest.approx(
        sum(step.plan_simulated_s for step in notes.steps) / 4, rel=1e-6
    )
    tokens = sum(step.tokens for step in notes.steps)
    assert found.plan.tokens_per_s * found.plan.step_s * 4 == pytest.approx(tokens)
    assert found.state_bytes < found.needed_bytes < found.limit_bytes < found.memory_bytes
    text = found.words()
    assert '"micropack" on dp 1 x pp 1' in text
    assert "tokens/s" in text
    assert f"of {found.memory_bytes / 1e9:.1f} GB (slow)" in " ".join(text.split())
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_dry_run_plans_for_more_processes(store, hardware, tmp_path):
    plan = {"plan__hardware": hardware, "plan__least_rows": 16}
    one, four = (
        forecast(settings(store, tmp_path / "run", model__settings=STILL, **plan, **more), processes)
        for processes, more in ((1, {}), (4, {"plan__pp": 2}))
    )

    assert "dp 2 x pp 2" in four.plan.words
    assert (four.tokens, four.documents, four.targets) == (one.tokens, one.documents, one.targets)
    assert one.plan.step_s / 4 <= four.plan.step_s * 1.0001 < one.plan.step_s
    assert four.state_bytes < one.state_bytes


def test_a_dry_run_measures_this_machine_and_writes_nothing(store, tmp_path):
    said = []
    plan = {"plan__method": "micropack", "plan__calibrate_s": 0.01}
    found = forecast(settings(store, tmp_path / "run", model__settings=STILL, **plan), note=said.append)

    assert "measuring this machine's kernels" in said[0]
    assert "rates of this machine's CPU" in found.plan.words
    assert not (tmp_path / "run").exists()


def test_slices_of_one_process_have_no_prices(store, tmp_path):
    found = forecast(settings(store, tmp_path / "run", model__settings=STILL, plan__slice_tokens=64))
    assert found.plan.words == 'slices of up to 64 tokens, recompute "full"'
    assert (found.plan.steps, found.plan.tokens_per_s) == (0, None)
    assert "predicted" not in found.words()
    assert found.needed_bytes < found.limit_bytes == pytest.approx(0.92 * found.memory_bytes)


def of_lengths(folder, lengths):
    """A store of documents of so many tokens; the end of a document is one more."""
    folder = folder / f"of {len(lengths)}"
    folder.mkdir()
    rows = [{"text": "a" * (length - 1)} for length in lengths]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index_source(open_source(str(folder / "texts.jsonl")), folder / "store")
    return folder / "store"


def sliced(lengths, tmp_path, **changes):
    model = {**STILL, "num_hidden_layers": 4}
    given = {"plan__slice_tokens": 32, "data__global_batch_size": 1, "run__precision": "bf16"}
    return settings(of_lengths(tmp_path, lengths), tmp_path / "run", model__settings=model, **given | changes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_longest_document_decides_wherever_it_comes(tmp_path, precision):
    lengths = [20] * 40 + [65, 121] + [30] * 40
    asked = sliced(lengths, tmp_path, run__precision=precision)
    found = [forecast(replace(asked, data=replace(asked.data, seed=seed))) for seed in range(4)]

    assert len({one.tokens for one in found}) > 1, "first steps differ"
    assert len({one.needed_bytes for one in found}) == 1
    assert found[0].decided_by.startswith("the longest document, of 121 tokens (document 41 of ")
    assert (
        forecast(sliced([20] * 40, tmp_path, run__precision=precision)).needed_bytes < found[0].needed_bytes
    )


@pytest.mark.parametrize("offload", ["none", "kv"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_slices_need_what_the_step_that_takes_most_does(tmp_path, recompute, offload):
    lengths = [*range(20, 128, 3), 65, 64, 64, 97, 96]
    asked = sliced(lengths, tmp_path, plan__recompute=recompute, plan__offload=offload, run__steps=1)
    found = forecast(asked)

    shape = ModelShape.from_config(LlamaConfig(vocab_size=260, **asked.model.settings))
    cost = CostModel(model=shape, hardware=Hardware.named("h200"), kernels="eager", states="float32")
    with PackedLoader(asked.data.source, capacity=128, global_batch_size=1) as loader:
        steps = [loader.lengths(step) for step in range(len(loader))]
    plans = [one_gpu_plan(each, 32, recompute=recompute, offload=offload) for each in steps]
    most = max(simulate(each, cost.as_planned(each)).peak_bytes for each in plans)
    assert found.activation_bytes == pytest.approx(most - cost.memory(Mesh()).state_bytes.max(), rel=0.02)


def test_a_document_counts_as_its_pack_holds_it(tmp_path):
    asked = sliced([500, 100, *[30] * 9], tmp_path)
    found = {
        overlong: forecast(replace(asked, data=replace(asked.data, overlong=overlong))).decided_by
        for overlong in ("split", "truncate", "drop")
    }
    assert all(
        "the longest document, of 128 tokens (document 0 of" in found[way] for way in ("split", "truncate")
    )
    assert "the longest document, of 100 tokens (document 1 of" in found["drop"]


def test_slices_that_need_more_than_their_share_of_memory_are_refused(tmp_path):
    asked = sliced([20] * 40 + [121], tmp_path, plan__memory_fraction=0.01)
    words = (
        r"the longest document, of 121 tokens \(document 40 of .*\); a run may use 0.0 MB of 1.0 MB "
        r"\(as given\), and plan.offload = \"kv\" \(.* MB\), or \[adapter\], .* would need less"
    )
    with pytest.raises(SettingError, match=words):
        forecast(asked, memory_bytes=1e6)


def test_a_longest_document_that_no_plan_fits_is_refused_before_it_comes(tmp_path):
    plan = {"plan__hardware": card(tmp_path / "small.json", 9e5), "plan__least_rows": 16}
    few, all_of_them = (
        settings(
            of_lengths(tmp_path, [16] * 120 + last),
            tmp_path / "run",
            **{"model__settings": STILL, "data__global_batch_size": 1, "data__shuffle": False},
            **plan,
        )
        for last in ([], [128])
    )
    assert forecast(few).decided_by == "these steps"
    with pytest.raises(
        PlanError, match=r"the longest document, document 120 of .*, alone in a step: .* too many"
    ):
        forecast(all_of_them)
    found = forecast(all_of_them, memory_bytes=1.2e6)
    assert found.memory_bytes == pytest.approx(1.2e6)


def test_too_little_memory_for_plans_is_a_sentence_with_the_way_out(store, tmp_path):
    plan = {"plan__hardware": card(tmp_path / "small.json", 8e5), "plan__recompute": "none"}
    words = r"plan\.recompute = \"none\" and plan\.offload = \"auto\" limit what fits; set both to \"auto\""
    with pytest.raises(PlanError, match=words):
        forecast(settings(store, tmp_path / "run", model__settings=STILL, **plan))
    assert not (tmp_path / "run").exists()
