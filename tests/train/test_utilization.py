"""FLOPs of MFU are those that PyTorch's own counter sees, within 2 %, and of an adapter's run those of an adapter."""

import numpy as np
import pytest
import torch
from tests.support.training import LLAMA, Notes, from_model, settings
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from varlen.train import train
from varlen.train.lora import add_adapter, backward_share
from varlen.train.metrics import Utilization
from varlen.train.model import checkpoint_activations
from varlen.train.settings import AdapterSettings

MARGIN = 0.02
CPU = torch.device("cpu")
# Wide enough for matrix products to outweigh all else; the first layer's projections of a frozen model, which need no
# gradients of their inputs, are then 2 % of it.
LARGE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
TOKENS = 256


def model_with(adapter=None):
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(LlamaConfig(**LARGE), attn_implementation="eager").train()
    if adapter is not None:
        add_adapter(model, adapter)
    return model


def counted(model):
    """FLOPs of a document forward and backward by PyTorch's counter, of attention and of all other products."""
    ids = torch.arange(TOKENS)[None] % LARGE["vocab_size"]
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids).logits
        logits.float().logsumexp(-1).sum().backward()
    found = counter.get_flop_counts()["Global"]
    attention = sum(flops for kind, flops in found.items() if "bmm" in str(kind))
    return attention, sum(found.values()) - attention


def expected(model, adapter=None):
    """FLOPs by `Utilization`, with attention over all pairs, as the counter sees it, in place of causal ones."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    of_adapter = {"adapter_parameters": trained, "backward_share": backward_share(model)} if adapter else {}
    found = Utilization(model.config, CPU, 1.0, **of_adapter)
    one = found.flops([np.array([1])])
    whole = found.flops([np.array([TOKENS])])
    pairs = TOKENS * (TOKENS + 1) / 2
    # f(n) = linear * n + attention * n (n + 1) / 2, solved for both by n = 1 and n = TOKENS.
    attention = (whole - TOKENS * one) / (pairs - TOKENS)
    return attention * TOKENS**2, (one - attention) * TOKENS


def test_a_whole_model_is_counted():
    model = model_with()
    assert expected(model) == pytest.approx(counted(model), rel=MARGIN)


@pytest.mark.parametrize("rank", [8, 64])
def test_frozen_weights_have_no_gradients_and_an_adapter_has(rank):
    adapter = AdapterSettings(rank=rank)
    model = model_with(adapter)
    attention, linear = counted(model)
    found = expected(model, adapter)

    assert found[0] == pytest.approx(attention, rel=MARGIN)
    assert found[1] == pytest.approx(linear, rel=MARGIN)
    of_adapter = 6 * sum(p.numel() for p in model.parameters() if p.requires_grad) * TOKENS
    assert (linear - of_adapter) / counted(model_with())[1] == pytest.approx(2 / 3, rel=0.06)


def test_layers_below_the_lowest_adapted_one_have_no_backward_pass():
    adapter = AdapterSettings(rank=8, targets=("model.layers.4.mlp.up_proj", "model.layers.6.mlp.up_proj"))
    model = model_with(adapter)

    assert backward_share(model) == 0.5
    attention, linear = counted(model_with())
    one_layer = (2 * attention + linear) / 3 / LARGE["num_hidden_layers"]
    # Of the lowest adapted layer, everything is counted.
    assert 0 <= sum(expected(model, adapter)) - sum(counted(model)) <= one_layer


def test_what_is_computed_again_isnt_counted():
    model = model_with()
    plain = counted(model)
    checkpoint_activations(model)
    again = counted(model)

    assert sum(again) > 1.2 * sum(plain)  # the hardware does more
    assert expected(model) == pytest.approx(plain, rel=MARGIN)


@pytest.mark.parametrize("changes", [{}, {"adapter__rank": 4}, {"run__checkpoint_activations": True}])
def test_every_step_of_a_run_has_its_share_of_the_peak(store, tmp_path, changes):
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(vocab_size=260, **LLAMA)).save_pretrained(tmp_path / "base")
    notes = Notes()
    train(from_model(store, tmp_path / "base", tmp_path / "run", log__peak_tflops=1e-3, **changes), notes)

    hidden, inner = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    shared = LLAMA["num_key_value_heads"] / LLAMA["num_attention_heads"]
    layer = (2 + 2 * shared) * hidden**2 + 3 * hidden * inner
    products = LLAMA["num_hidden_layers"] * layer + 260 * hidden
    ends = (2 * 2 * hidden + 2 * (1 + shared) * hidden) + 3 * (
        hidden + inner
    )  # inputs and outputs of projections
    adapted = LLAMA["num_hidden_layers"] * changes.get("adapter__rank", 0) * ends
    for step in notes.steps:
        flops = step.mfu * step.step_s * 1e9 / step.tokens
        # Attention to short documents comes to that.
        assert 1 < flops / (4 * products + 6 * adapted if adapted else 6 * products) < 1.2


def test_the_share_isnt_known_without_a_peak(store, tmp_path):
    notes = Notes()
    train(settings(store, tmp_path / "run", run__steps=1), notes)
    assert notes.steps[0].mfu is None
