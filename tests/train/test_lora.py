"""Adapters learn what peft's own loop learns, go on from checkpoints, and are exported or merged."""

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from tests.support.training import LLAMA, Notes, from_model, rewound, tensors_of
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import varlen as vl
from varlen.errors import SettingError, StateError
from varlen.train.dry_run import forecast
from varlen.train.trainer import train

# peft itself, by which these tests compare, uses a name that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

STILL = {**LLAMA, "attention_dropout": 0.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A saved model."""
    folder = tmp_path_factory.mktemp("base") / "model"
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(vocab_size=260, **STILL)).save_pretrained(folder)
    return folder


def given(store, base, output, **changes):
    adapter = {"rank": 4, "alpha": 8.0, **changes.pop("adapter", {})}
    changes |= {f"adapter__{name}": value for name, value in adapter.items()}
    return from_model(store, base, output, **changes)


@pytest.fixture(scope="module")
def run(store, base, tmp_path_factory):
    output = tmp_path_factory.mktemp("lora") / "run"
    notes = Notes()
    train(given(store, base, output), notes)
    return output, notes


def peft_loop(store, base, asked, method):
    """Losses and weights of an adapter that peft and a plain loop train on documents one by one."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=sorted(targets), use_dora=method == "dora")
    torch.manual_seed(0)
    model = get_peft_model(model, config)
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in learned.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in learned.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], betas=(0.9, 0.95), fused=True
    )
    losses = []
    data = asked.data
    options = {
        "capacity": data.capacity,
        "global_batch_size": data.global_batch_size,
        "worker": "thread",
        "seed": 0,
    }
    with vl.PackedLoader(data.source, **options) as loader:
        for step, batch in zip(range(1, 4), loader):
            total = 0.0
            for begin, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:]):
                ids = torch.from_numpy(batch.input_ids.reshape(-1)[begin:end]).long()
                labels = torch.from_numpy(batch.labels.reshape(-1)[begin:end]).long()
                if (labels != -100).any():
                    logits = model(input_ids=ids[None]).logits[0, :-1]
                    loss = cross_entropy(logits, labels[1:], reduction="sum") / batch.step_num_targets
                    loss.backward()
                    total += loss.item()
            torch.nn.utils.clip_grad_norm_(learned.values(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * [0.5, 1.0, 0.75][step - 1]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    return losses, {name: p.detach() for name, p in learned.items()}


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_adapter_learns_what_peft_s_own_loop_learns(store, base, tmp_path, method):
    asked = given(store, base, tmp_path / "run", adapter={"method": method})
    notes = Notes()
    train(asked, notes)
    losses, wanted = peft_loop(store, base, asked, method)

    assert [step.loss for step in notes.steps[:3]] == pytest.approx(losses, rel=1e-5)
    copy = rewound(tmp_path / "run", 2, tmp_path / "two")
    names = {name for checkpoint in (copy / "checkpoints").iterdir() for name in tensors_of(checkpoint)}
    assert all(".lora_" in name for name in names)
    assert len(wanted) == sum("model." in name.split()[1][:6] for name in names)


def test_going_on_ends_with_the_same_bits(run, store, base, tmp_path):
    output, _ = run
    copy = rewound(output, 2, tmp_path / "from2")
    train(given(store, base, copy), Notes())
    name = "step-00000006"
    assert tensors_of(output / "checkpoints" / name) == tensors_of(copy / "checkpoints" / name)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (output / "model" / file).read_bytes() == (copy / "model" / file).read_bytes()


def test_the_exported_adapter_is_loaded_by_peft_and_merged_it_is_the_same_model(run, store, base, tmp_path):
    output, _ = run
    train(given(store, base, tmp_path / "merged", adapter={"export": "merged"}), Notes())

    ids = torch.arange(5, 45)[None]
    adapted = AutoPeftModelForCausalLM.from_pretrained(output / "model").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "model").eval()
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for model in (adapted, merged, plain)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    assert (logits[0] - logits[2]).abs().max() > 1e-2
    assert merged.state_dict().keys() == plain.state_dict().keys()


def test_slices_train_the_same_adapter(run, store, base, tmp_path):
    _, notes = run
    sliced = Notes()
    train(given(store, base, tmp_path / "run", plan__slice_tokens=48), sliced)
    assert [step.loss for step in sliced.steps] == pytest.approx(
        [step.loss for step in notes.steps], rel=1e-5
    )


def test_only_the_adapter_is_trained_and_this_is_shown(run):
    _, notes = run
    overview = notes.overviews[0]
    assert 0 < overview.num_trained < 0.5 * overview.num_parameters


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (
            {"targets": ["q_prj"]},
            r"names 'q_prj', which no layer of this model is called; the nearest is 'q_proj'",
        ),
        ({"rank": 0}, "adapter.rank must be at least 1"),
        ({"alpha": 0.0}, "adapter.alpha must be above 0"),
        ({"method": "qlora"}, 'adapter.method must be "lora" or "dora"'),
    ],
)
def test_adapters_that_cant_be_are_refused(store, base, tmp_path, adapter, words):
    with pytest.raises(SettingError, match=words):
        train(given(store, base, tmp_path / "run", adapter=adapter), Notes())


@pytest.mark.parametrize("target", ["q_prj", "model.layers.7.mlp.up_proj", "self_attn.q", "Q_PROJ"])
@pytest.mark.parametrize("asked", [forecast, train], ids=["dry run", "run"])
def test_a_target_that_matches_nothing_is_refused_with_the_layers_that_there_are(
    store, base, tmp_path, target, asked
):
    words = (
        rf"names '{target}', which no layer of this model is called; the nearest is .* \(its linear layers: "
    )
    with pytest.raises(SettingError, match=words):
        asked(given(store, base, tmp_path / "run", adapter={"targets": ["v_proj", target]}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", [{"rank": 8}, None])
def test_a_checkpoint_of_another_adapter_is_refused(run, store, base, tmp_path, change):
    output, _ = run
    copy = rewound(output, 2, tmp_path / "run")
    asked = from_model(store, base, copy) if change is None else given(store, base, copy, adapter=change)
    words = r"\[adapter\] was 'there' and is 'not there'" if change is None else "adapter.rank was 4 and is 8"
    with pytest.raises(StateError, match=words):
        train(asked, Notes())


def test_dropout_of_the_adapter_is_drawn_anew_each_step_and_alike_after_a_stop(store, base, tmp_path):
    asked = {"adapter": {"dropout": 0.3}, "run__steps": 4}
    train(given(store, base, tmp_path / "whole", **asked), Notes())
    copy = rewound(tmp_path / "whole", 2, tmp_path / "two")
    train(given(store, base, copy, **asked), Notes())
    name = "step-00000004"
    one, other = (tensors_of(each / "checkpoints" / name) for each in (tmp_path / "whole", copy))
    assert one == other
