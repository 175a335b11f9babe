"""States of parameters: what is trained, what its optimizer keeps, what is gathered, and what travels of it."""

from dataclasses import replace

import numpy as np
import pytest

from varlen.cost import kernels
from varlen.cost.hardware import Hardware
from varlen.cost.memory import LOGIT_BYTES, LOGIT_ROWS
from varlen.cost.model import CostModel
from varlen.cost.rates import (
    FORWARD_HEAD,
    FORWARD_LAYER,
    INPUT_HEAD,
    INPUT_LAYER,
    WEIGHT_HEAD,
    WEIGHT_LAYER,
)
from varlen.cost.shape import ModelShape
from varlen.cost.states import bytes_per_parameter
from varlen.errors import SettingError
from varlen.step_plan import Mesh

LLAMA, H100 = ModelShape.named("llama-3-8b"), Hardware.named("h100")
COST = CostModel(model=LLAMA, hardware=H100)


@pytest.mark.parametrize(
    ("sharding", "expected"), [("none", 18.0), ("optimizer", 6 + 12 / 8), ("parameters", 18 / 8)]
)
def test_a_parameter_has_the_bytes_of_its_sharding(sharding, expected):
    assert bytes_per_parameter(Mesh(dp=4, cp=2, sharding=sharding)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ("masters", [18, 6 + 12 / 8, 18 / 8]),
        ("weights", [12, 12, 12 / 8]),
        ("float32", [16, 8 + 12 / 8, 16 / 8]),
    ],
)
def test_states_are_what_an_optimizer_updates(states, expected):
    meshes = [Mesh(dp=4, cp=2, sharding=sharding) for sharding in ("none", "optimizer", "parameters")]  # type: ignore[arg-type]

    assert [bytes_per_parameter(mesh, states) for mesh in meshes] == expected
    cost = COST.replace(states=states)
    assert cost.memory(Mesh(sharding="none")).state_bytes / expected[0] == pytest.approx(
        COST.memory(Mesh(sharding="none")).state_bytes / 18, rel=0.05
    )
    with pytest.raises(SettingError, match=r"cost states='halves'; it must be .*float32"):
        COST.replace(states="halves")


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ("masters", [2, 2, 2 / 8]),
        ("weights", [2, 2, 2 / 8]),
        ("float32", [4, 4, 4 / 8]),
    ],
)
def test_a_frozen_parameter_is_its_weight(states, expected):
    meshes = [Mesh(dp=4, cp=2, sharding=sharding) for sharding in ("none", "optimizer", "parameters")]  # type: ignore[arg-type]

    assert [bytes_per_parameter(mesh, states, is_trained=False) for mesh in meshes] == expected
    by_step = [
        bytes_per_parameter(meshes[2], states, "step", precision, is_trained=False)  # type: ignore[arg-type]
        for precision in ("bf16", "fp32")
    ]
    assert by_step == [expected[2] + 2, expected[2] + 4]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ("masters", [6 + 4 + 1, 6 + 5 / 8, 11 / 8]),
        ("weights", [8 + 1, 8 + 1, 9 / 8]),
        ("float32", [8 + 1, 8 + 5 / 8, 9 / 8]),
    ],
)
def test_an_optimizer_keeps_as_many_bytes_as_is_said(states, expected):
    meshes = [Mesh(dp=4, cp=2, sharding=sharding) for sharding in ("none", "optimizer", "parameters")]  # type: ignore[arg-type]

    assert [bytes_per_parameter(mesh, states, optimizer_bytes=1.0) for mesh in meshes] == expected


@pytest.mark.parametrize(("sharding", "each", "frozen"), [("none", 12.0, 2.0), ("parameters", 12 / 8, 2 / 8)])
def test_adapters_are_all_that_is_trained(sharding, each, frozen):
    mesh = Mesh(dp=8, pp=2, sharding=sharding)
    cost = COST.replace(adapter_share=0.01, optimizer_bytes=2.0)

    states = cost.memory(mesh).state_bytes.sum()

    adapters = 0.01 * LLAMA.parameters_per_layer
    gathered = 2 * 4 * (LLAMA.parameters_per_layer + adapters) * (sharding == "parameters")
    own = frozen * LLAMA.num_parameters + each * 32 * adapters
    assert states == pytest.approx(own + gathered + LOGIT_ROWS * LOGIT_BYTES * LLAMA.vocab, rel=1e-12)


def test_ends_may_be_updated_by_another_optimizer():
    mesh = Mesh(sharding="none")
    states = COST.replace(optimizer_bytes=4.0, end_optimizer_bytes=8.0).memory(mesh).state_bytes[0]

    least = COST.memory(mesh).state_bytes[0] - 4 * 32 * LLAMA.parameters_per_layer
    assert states == pytest.approx(least, rel=1e-12)
    alike = COST.replace(optimizer_bytes=8.0).memory(mesh)
    assert alike.state_bytes.tolist() == COST.memory(mesh).state_bytes.tolist()


def test_gradients_of_adapters_alone_are_computed_and_travel():
    cost = COST.replace(adapter_share=0.01)
    slices = [np.array(each, np.int32) for each in ([0, 1], [0], [4096], [1])]
    whole, frozen = (kernels.price(*slices, each.rates(Mesh(tp=8)))[0] for each in (COST, cost))
    launch_s = H100.launch_s

    same = [FORWARD_LAYER, FORWARD_HEAD, INPUT_LAYER, INPUT_HEAD]
    assert frozen[same].tolist() == whole[same].tolist()
    assert frozen[WEIGHT_HEAD] == launch_s
    assert frozen[WEIGHT_LAYER] - launch_s == pytest.approx(0.01 * (whole[WEIGHT_LAYER] - launch_s))
    trained = 32 * 0.01 * LLAMA.parameters_per_layer
    assert cost.gradient_sync_s(Mesh(dp=8, sharding="none"))[0] == pytest.approx(
        2 * (4 * trained * 7 / 8 / 360e9 + 3 * 10e-6)
    )
    mesh = Mesh(dp=4, pp=2, sharding="parameters")
    reduced = [each.traffic_s(mesh, splits_backward=True)[2, 1] for each in (COST, cost)]
    assert reduced[1] < 0.05 * reduced[0]


def test_float32_takes_twice_the_bytes_of_half_precision_where_it_is_no_float32_already():
    half, wide = COST.replace(kernels="eager"), COST.replace(kernels="eager", precision="fp32")
    mesh = Mesh(dp=2, pp=2)

    kv, each = 4 * 8 * 128, 32 * 4096
    assert wide.replace(recompute="full").memory(mesh).held_bytes.sum() == 32 * 2 * kv + 4 * each
    assert wide.memory(mesh).gradient_bytes.tolist() == half.memory(mesh).gradient_bytes.tolist()
    assert wide.memory(mesh).state_bytes.tolist() == half.memory(mesh).state_bytes.tolist()
    assert wide.send_s(mesh)[1] == 2 * half.send_s(mesh)[1]
    names = ("key_value_bytes", "key_value_back_bytes", "host_s_per_token", "host_back_s_per_token")
    ours, theirs = (each.replace(offload="kv").rates(mesh) for each in (wide, half))
    assert [getattr(ours, name) / getattr(theirs, name) for name in names] == [2, 4 / 3, 2, 4 / 3]
    sharded = replace(mesh, sharding="parameters")
    gathered = [each.traffic_s(sharded)[0, 0] for each in (half, wide)]
    assert 1.9 < gathered[1] / gathered[0] < 2


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_states_add_up_to_the_model(virtual_stages):
    mesh = Mesh(dp=2, pp=4, virtual_stages=virtual_stages, sharding="none")

    states = COST.memory(mesh).state_bytes

    assert states.sum() == 18 * LLAMA.num_parameters + LOGIT_ROWS * LOGIT_BYTES * LLAMA.vocab


def test_tensor_parallel_gpus_divide_states():
    whole, eighth = (COST.memory(Mesh(pp=2, tp=tp)).state_bytes for tp in (1, 8))

    assert (8 * eighth).tolist() == whole.tolist()


def test_sharded_parameters_keep_one_gathered_layer():
    mesh = Mesh(dp=8, pp=2, sharding="parameters")

    states = COST.memory(mesh).state_bytes

    own = 18 / 8 * LLAMA.num_parameters + LOGIT_ROWS * LOGIT_BYTES * LLAMA.vocab
    assert states.sum() == own + 2 * 4 * LLAMA.parameters_per_layer


def test_a_tied_matrix_stands_at_both_ends_of_a_pipeline_and_once_without():
    cost = CostModel(model=ModelShape.named("gpt-7b"), hardware=H100)
    logits = LOGIT_ROWS * LOGIT_BYTES * 50304

    one = cost.memory(Mesh(sharding="none")).state_bytes.sum() - logits
    two = cost.memory(Mesh(pp=2, sharding="none")).state_bytes.sum() - logits

    assert one == 18 * cost.model.num_parameters
    assert two == one + 18 * cost.model.head_parameters
