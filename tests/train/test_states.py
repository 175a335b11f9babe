"""What a run is said to hold of its parameters, beside what it holds."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.pipelines import batch_of
from tests.support.products import wide_products
from tests.support.training import LLAMA, settings

from varlen.cost.hardware import Hardware, save_hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.errors import PlanError
from varlen.plan.one_gpu import one_gpu_plan
from varlen.runtime.clock import TrackedBytes
from varlen.runtime.main_grads import local
from varlen.simulate.api import simulate
from varlen.train.dry_run import forecast
from varlen.train.loaders import open_loader
from varlen.train.lora import add_adapter
from varlen.train.model import build_model, embedding_names, model_config
from varlen.train.optimizers import make_optimizer, named_tensors
from varlen.train.parallel import Ranks
from varlen.train.plans import SliceGradients, even_slices, mesh_of, shape_of
from varlen.train.states import meta_model, states_of
from varlen.train.tokens import run_tokenizer

CARD = Hardware.named("h100")
DEEP = {**LLAMA, "attention_dropout": 0.0, "hidden_size": 64, "intermediate_size": 256}
FULL = {}
LORA = {"adapter__rank": 4, "adapter__export": "merged"}
DORA = LORA | {"adapter__method": "dora"}


def asked_of(store, folder, optimizer, adapter, precision, **changes):
    given = {"model__settings": DEEP, "optimizer__name": optimizer, "run__precision": precision}
    return settings(store, folder / "run", **given | adapter | changes)


def built(asked):
    """The gradients and the optimizer of a run in slices, as the run makes them, and its configuration."""
    tokenizer = run_tokenizer(asked.data, asked.model)
    config = model_config(asked.model, tokenizer.vocab_size)
    model = build_model(config, asked.model, 0, weights=True, is_sliced=True)
    if asked.adapter is not None:
        add_adapter(model, asked.adapter)
    embeddings, device = embedding_names(model), torch.device("cpu")
    gradients = SliceGradients(model, asked, Ranks())
    return gradients, make_optimizer(gradients.parameters, asked.optimizer, device, embeddings), config


def held_bytes(gradients, optimizer):
    """Bytes of weights, masters, gradients, and all that the optimizer keeps but numbers of steps."""
    updated = gradients.parameters.values()
    tensors = [
        tensor for _, each in enumerate(updated) for _, tensor in named_tensors(optimizer.state_of(each))
    ]
    for each in (*gradients.model.parameters(), *updated):
        tensors += [each.detach(), each.grad, getattr(each, "main_grad", None)]
    storages = [local(each).untyped_storage() for each in tensors if each is not None]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("adapter", [FULL, LORA, DORA], ids=["full", "lora", "dora"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "muon", "adafactor"])
def test_states_are_what_a_run_holds_after_a_step(store, tmp_path, optimizer, adapter, precision):
    asked = asked_of(store, tmp_path, optimizer, adapter, precision, plan__slice_tokens=64)
    gradients, updates, config = built(asked)
    tokenizer = run_tokenizer(asked.data, asked.model)
    with open_loader(asked, config, tokenizer, Ranks(), even_slices(asked.plan).given) as loader:
        gradients.add(next(loader), is_last=True)

    states, mesh = states_of(asked, meta_model(asked, config)), mesh_of(asked.plan, asked.run, 1)
    shape = shape_of(config, mesh, lambda _: None)
    cost = CostModel(model=shape, hardware=CARD, kernels="eager", precision=precision, **states.priced(shape))
    held = held_bytes(gradients, updates)
    assert states.bytes_on(mesh) == held
    assert cost.memory(mesh).state_bytes.tolist() == pytest.approx([held], rel=1e-12)
    found = forecast(asked)
    assert found.state_bytes == held
    assert found.trained == sum(each.numel() for each in gradients.parameters.values())


WIDE = {**DEEP, "hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 5}
WAYS = [
    ("adamw", LORA, "bf16", "full"),
    ("muon", LORA, "fp32", "none"),
    ("adafactor", LORA, "bf16", "selective"),
    ("adamw", DORA, "bf16", "none"),
    ("muon", FULL, "fp32", "full"),
    ("adafactor", FULL, "bf16", "none"),
]


@pytest.mark.parametrize(("optimizer", "adapter", "precision", "recompute"), WAYS)
def test_peaks_of_steps_are_predicted_whatever_is_trained(
    store, tmp_path, optimizer, adapter, precision, recompute
):
    asked = asked_of(store, tmp_path, optimizer, adapter, precision, plan__slice_tokens=300)
    asked = replace(asked, model=replace(asked.model, settings=WIDE))
    plan = one_gpu_plan(np.array([300] * 4, np.int32), 600, recompute=recompute)
    plan, batch = replace(plan, mesh=mesh_of(asked.plan, asked.run, 1)), batch_of(plan)
    with wide_products(), TrackedBytes() as meter:
        gradients, updates, config = built(asked)
        for _ in range(2):
            peak = gradients._engine.step(batch, plan, meter=meter).peaks_bytes.max()
            updates.step(1e-3)
            gradients.publish()
            updates.zero_grad()

    shape = ModelShape.from_config(config)
    told = states_of(asked, meta_model(asked, config)).priced(shape)
    cost = CostModel(model=shape, hardware=CARD, kernels="eager", precision=precision, **told)
    assert simulate(plan, cost.as_planned(plan)).peak_bytes == pytest.approx(float(peak), rel=0.02)


def planned(store, tmp_path, memory_bytes, adapter, precision="bf16", **changes):
    """The settings of a run of priced plans on cards of so much memory."""
    card = tmp_path / "card.json"
    save_hardware(replace(CARD, name="small", memory_bytes=memory_bytes), card)
    plan = {"plan__hardware": str(card), "plan__least_rows": 16, "plan__quick": "micropack"}
    return asked_of(store, tmp_path, "adamw", adapter, precision, **plan, **changes)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_dry_run_of_plans_fits_an_adapter_where_all_weights_do_not(store, tmp_path, precision):
    with pytest.raises(PlanError, match=r"parameters, gradients and optimizer states take 2\.[58] MB"):
        forecast(planned(store, tmp_path, 2.3e6, FULL, precision))

    found = forecast(planned(store, tmp_path, 2.3e6, LORA, precision))
    assert found.plan.steps == 4
    assert found.state_bytes < found.needed_bytes < found.limit_bytes == pytest.approx(0.92 * 2.3e6)
    even = forecast(asked_of(store, tmp_path, "adamw", LORA, precision, plan__slice_tokens=64))
    assert found.state_bytes == pytest.approx(even.state_bytes)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_dry_run_of_several_processes_counts_what_each_trains(store, tmp_path, parallel):
    given = {"plan__pp": 2, "run__parallel": parallel}
    full, lora = (
        forecast(planned(store, tmp_path, 80e9, adapter, **given), processes=4) for adapter in (FULL, LORA)
    )

    weight = {"ddp": 2, "fsdp": 4 / 2}[parallel]
    each = {"ddp": 2 + 4 + 12 / 2, "fsdp": 16 / 2}[parallel]
    layer, end = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256 + 2 * 64, 260 * 64
    adapter = lora.trained / 2
    gathered = {"ddp": (0, 0), "fsdp": (2 * 2 * layer, 2 * 2 * (layer + adapter))}[parallel]
    assert full.state_bytes == pytest.approx(each * (layer + end + 64) + gathered[0], rel=0.01)
    assert lora.state_bytes == pytest.approx(
        weight * (layer + end + 64) + each * adapter + gathered[1], rel=0.01
    )


def test_an_adapter_recomputes_no_more_than_memory_requires(store, tmp_path):
    """Where all weights were priced, it would recompute."""
    given = {
        "data__global_batch_size": 1,
        "model__settings": {**DEEP, "hidden_size": 256, "num_hidden_layers": 8},
    }
    full = forecast(planned(store, tmp_path, 80e9, FULL, **given))
    lora = forecast(planned(store, tmp_path, 80e9, LORA, **given))
    room = lora.needed_bytes * 1.02 / 0.92
    tight = forecast(planned(store, tmp_path, room, LORA, **given))

    assert room < full.state_bytes / 0.92
    assert tight.plan.chosen == 'recompute "none", offload "none"'
    assert lora.plan.step_s < full.plan.step_s  # no gradients of frozen weights are computed
