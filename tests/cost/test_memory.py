"""Bytes, stages and traffic: published formulas, what divides them, and what each setting moves where."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.cost.hardware import Hardware
from varlen.cost.memory import HEAD, LOGIT_BYTES, LOGIT_ROWS, NEAR, OWN, activation_bytes, bytes_per_parameter
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape, stages_of
from varlen.errors import SettingError
from varlen.step_plan import Mesh

H100 = Hardware.named("h100")
LLAMA = ModelShape.named("llama-3-8b")
COST = CostModel(model=LLAMA, hardware=H100)


def test_a_token_of_llama_3_8b_leaves_139_kb_in_a_layer() -> None:
    assert activation_bytes(LLAMA) == 12 * 4096 + 4 * 8 * 128 + 6 * 14336 + 4 * 32 == 139_392
    assert round(activation_bytes(LLAMA) * 32 / 1e6, 2) == 4.46
    # Megatron's estimate for the same layer, h·(18 + 4f/h), counts no attention apart.
    assert activation_bytes(LLAMA) == pytest.approx(4096 * 18 + 4 * 14336, rel=0.07)


def test_everything_held_is_what_a_layer_leaves_times_layers() -> None:
    memory = COST.memory(Mesh(pp=4))

    layers = COST.stages(Mesh(pp=4)).layers
    assert memory.held_bytes[:3].tolist() == (139_392 * layers[:3]).tolist()
    # The last chunk holds the final norm's input and output too.
    assert memory.held_bytes[3] == 139_392 * layers[3] + 4 * 4096


def test_full_recomputation_holds_a_layers_input_and_its_keys_and_values() -> None:
    memory = COST.replace(recompute="full").memory(Mesh(pp=4))

    layers = COST.stages(Mesh(pp=4)).layers
    assert memory.held_bytes[0] == layers[0] * (2 * 4096 + 4 * 8 * 128)
    # One layer lives whole while it runs, and the gradients of its widest activations; no other has begun.
    begins = memory.backward_peaks[0, :, OWN].max()
    assert begins == 139_392 + 6 * 14336 + 4 * 4096


def test_selective_recomputation_drops_norm_outputs_and_the_product() -> None:
    none, some = COST.memory(Mesh(pp=4)), COST.replace(recompute="selective").memory(Mesh(pp=4))

    layers = COST.stages(Mesh(pp=4)).layers
    np.testing.assert_allclose(none.held_bytes - some.held_bytes, layers * (4 * 4096 + 2 * 14336), rtol=1e-12)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_offload_leaves_keys_and_values_of_two_layers_and_of_what_runs(recompute: str) -> None:
    cost = COST.replace(recompute=recompute)
    near, far = cost.memory(Mesh(pp=4)), cost.replace(offload="kv").memory(Mesh(pp=4))

    layers = COST.stages(Mesh(pp=4)).layers
    kv = 4 * 8 * 128
    np.testing.assert_allclose(near.held_bytes - far.held_bytes, kv * layers)
    assert near.gradient_bytes.tolist() == (2 * kv * layers).tolist()
    assert far.gradient_bytes.tolist() == near.near_bytes.tolist() == [0] * 4
    assert far.near_bytes.tolist() == [2 * kv] * 4
    assert far.backward_peaks[:, :, NEAR].max(axis=1).tolist() == [2 * kv] * 4
    # A stage of two layers has nothing to offload, and fetches nothing.
    thin, plain = cost.replace(offload="kv"), Mesh(pp=32)
    assert thin.memory(plain).held_bytes.tolist() == cost.memory(plain).held_bytes.tolist()
    assert thin.rates(plain).host_s_per_token == 0 < thin.rates(Mesh(pp=4)).host_s_per_token


def test_weight_gradients_apart_keep_what_goes_into_products_and_comes_back() -> None:
    kept = COST.memory(Mesh(pp=32)).kept_for_weight_bytes[0]

    # Both norms' outputs, attention's output, the product; gradients of both outputs, queries, keys and values,
    # the gate and the other branch.
    assert kept == 4 * 4096 + 2 * 4096 + 2 * 14336 + 4 * 4096 + 2 * 4096 + 4 * 8 * 128 + 4 * 14336


def test_tensor_parallel_gpus_divide_rows_but_copy_heads_that_are_too_few() -> None:
    whole = COST.memory(Mesh(pp=4))
    eighth, sixteenth = COST.memory(Mesh(pp=4, tp=8)), COST.memory(Mesh(pp=4, tp=16))

    layers = COST.stages(Mesh(pp=4)).layers
    assert eighth.held_bytes.tolist() == (whole.held_bytes / 8).tolist()
    copied = layers * 4 * 8 * 128 * (1 / 8 - 1 / 16)
    np.testing.assert_allclose(sixteenth.held_bytes, whole.held_bytes / 16 + copied)
    assert sixteenth.gradient_bytes.tolist() == eighth.gradient_bytes.tolist()


def test_latent_attention_holds_latents_for_later_slices() -> None:
    cost = CostModel(model=ModelShape.named("deepseek-v3"), hardware=H100, recompute="full")

    assert cost.memory(Mesh()).held_bytes[0] == 61 * (2 * 7168 + 2 * 576) + 4 * 7168


@pytest.mark.parametrize(
    ("sharding", "expected"), [("none", 18.0), ("optimizer", 6 + 12 / 8), ("parameters", 18 / 8)]
)
def test_a_parameter_has_the_bytes_of_its_sharding(sharding: str, expected: float) -> None:
    assert bytes_per_parameter(Mesh(dp=4, cp=2, sharding=sharding)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_states_add_up_to_the_model(virtual_stages: int) -> None:
    mesh = Mesh(dp=2, pp=4, virtual_stages=virtual_stages, sharding="none")

    states = COST.memory(mesh).state_bytes

    assert states.sum() == 18 * LLAMA.num_parameters + LOGIT_ROWS * LOGIT_BYTES * LLAMA.vocab


def test_tensor_parallel_gpus_divide_states() -> None:
    whole, eighth = (COST.memory(Mesh(pp=2, tp=tp)).state_bytes for tp in (1, 8))

    assert (8 * eighth).tolist() == whole.tolist()


def test_sharded_parameters_keep_one_gathered_layer() -> None:
    mesh = Mesh(dp=8, pp=2, sharding="parameters")

    states = COST.memory(mesh).state_bytes

    own = 18 / 8 * LLAMA.num_parameters + LOGIT_ROWS * LOGIT_BYTES * LLAMA.vocab
    assert states.sum() == own + 2 * 4 * LLAMA.parameters_per_layer


def test_a_tied_matrix_stands_at_both_ends_of_a_pipeline_and_once_without() -> None:
    cost = CostModel(model=ModelShape.named("gpt-7b"), hardware=H100)
    logits = LOGIT_ROWS * LOGIT_BYTES * 50304

    one = cost.memory(Mesh(sharding="none")).state_bytes.sum() - logits
    two = cost.memory(Mesh(pp=2, sharding="none")).state_bytes.sum() - logits

    assert one == 18 * cost.model.num_parameters
    assert two == one + 18 * cost.model.head_parameters


def test_the_limit_is_a_share_of_the_card() -> None:
    assert COST.memory(Mesh()).limit_bytes == 0.92 * 80e9
    assert COST.replace(memory_fraction=0.5).memory(Mesh()).limit_bytes == 40e9


def test_arrays_of_stages_and_memory_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        COST.memory(Mesh()).held_bytes[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        COST.stages(Mesh()).layers[0] = 1


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 4_000))
def test_no_other_cut_has_a_lighter_heaviest_stage(layers: int, pp: int, vocab: int) -> None:
    layers = max(layers, pp)
    shape = ModelShape(hidden=16, layers=layers, heads=2, ffn=32, vocab=vocab + 1)
    head = shape.head_parameters / shape.linear_parameters_per_layer

    def heaviest(counts: tuple[int, ...]) -> float:
        return max(*counts[:-1], counts[-1] + head) if pp > 1 else counts[0] + head

    ours = tuple(int(count) for count in stages_of(shape, Mesh(pp=pp)).layers)
    others = itertools.product(range(1, layers + 1), repeat=pp)

    assert sum(ours) == layers
    assert heaviest(ours) <= min(heaviest(cut) for cut in others if sum(cut) == layers) + 1e-9


def test_llama_3_8b_moves_two_layers_off_the_stage_with_the_head() -> None:
    assert stages_of(LLAMA, Mesh(pp=4)).layers.tolist() == [8, 9, 9, 6]
    assert stages_of(LLAMA, Mesh(pp=4)).has_head.tolist() == [False, False, False, True]
    assert stages_of(LLAMA, Mesh(pp=4)).has_embedding.tolist() == [True, False, False, False]


def test_chunks_of_interleaved_stages_share_their_stages_layers() -> None:
    stages = stages_of(LLAMA, Mesh(pp=4, virtual_stages=2))

    assert stages.layers.sum() == 32
    assert stages.layers.reshape(2, 4).sum(axis=0).tolist() == [8, 9, 9, 6]
    assert stages.layers.tolist() == [4, 5, 5, 3, 4, 4, 4, 3]


def test_a_boundary_sends_a_part_of_each_row_over_the_slowest_link() -> None:
    near, far = COST.send_s(Mesh(pp=2, tp=4)), COST.send_s(Mesh(dp=2, pp=2, tp=4))

    assert near == (10e-6, pytest.approx(2 * 4096 / 4 / 360e9))
    assert far == (20e-6, pytest.approx(2 * 4096 / 4 / 50e9))


def test_gradients_travel_as_their_sharding_says() -> None:
    whole, optimizer, parameters = (
        COST.gradient_sync_s(Mesh(dp=8, sharding=sharding))
        for sharding in ("none", "optimizer", "parameters")
    )
    gradients = LLAMA.num_parameters * 4 * 7 / 8 / 360e9

    assert whole[0] == pytest.approx(2 * (gradients + 3 * 10e-6))
    assert optimizer[0] == pytest.approx(1.5 * gradients + 2 * 3 * 10e-6)
    assert parameters.tolist() == [0]
    assert COST.gradient_sync_s(Mesh()).tolist() == [0]


def test_parameters_are_gathered_for_every_micropack_where_they_are_sharded() -> None:
    gathered = COST.gather_s(Mesh(dp=4, pp=2, tp=2, sharding="parameters"))
    parameters = COST.memory(Mesh(pp=2, sharding="none"))

    assert COST.gather_s(Mesh(dp=4, pp=2)).tolist() == [0, 0]
    first = parameters.state_bytes[0] / 18
    assert gathered[0] == pytest.approx(2 * first / 2 * 3 / 4 / 360e9 + 2 * 10e-6)


def test_gpus_of_several_nodes_synchronize_over_the_network() -> None:
    near, far = COST.gradient_sync_s(Mesh(dp=8)), COST.gradient_sync_s(Mesh(dp=8, tp=2))

    # Half the parameters each, at 50 GB/s.
    assert far[0] == pytest.approx(near[0] / 2 * 360 / 50, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"recompute_share": 0.5},
            "recompute_share=0.5 with recompute='none'; .* and 1 unless recompute='full'",
        ),
        ({"recompute": "full", "recompute_share": "half"}, "recompute_share='half' .* must be a number"),
        ({"recompute": "full", "recompute_share": True}, "recompute_share=True .* must be a number"),
        ({"recompute": "full", "recompute_share": 0}, "recompute_share=0 with .* must be a number above 0"),
        ({"recompute": "some"}, "cost recompute='some'; there are none, selective, full"),
        ({"offload": "all"}, "cost offload='all'; there are none, kv"),
        ({"mode": "guess"}, "cost mode='guess'; there are calibrated, flops"),
        ({"tp_overlap": 1.5}, "tp_overlap=1.5; it must be from 0 to 1"),
        ({"exchange_overlap": -0.5}, "exchange_overlap=-0.5; it must be from 0 to 1"),
        ({"memory_fraction": 0}, "memory_fraction=0; it must be above 0 and at most 1"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        COST.replace(**changes)


@pytest.mark.parametrize("ask", ["rates", "stages", "memory", "send_s", "gradient_sync_s", "gather_s"])
def test_a_mesh_that_does_not_divide_the_model_is_refused_whatever_is_asked(ask: str) -> None:
    with pytest.raises(SettingError, match="tp=3 doesn't divide 32 query heads"):
        getattr(COST, ask)(Mesh(tp=3))


def test_eager_layers_leave_their_norms_in_float32_and_the_gate_twice() -> None:
    eager = COST.replace(kernels="eager")
    fused, memory = COST.memory(Mesh()), eager.memory(Mesh())

    more = 8 * 4096 + 8 + 2 * 14336
    assert memory.held_bytes[0] - fused.held_bytes[0] == 32 * more + 4 * 128
    recomputed = eager.replace(recompute="full").memory(Mesh())
    assert recomputed.held_bytes[0] == 32 * (2 * 4096 + 4 * 8 * 128)
    # The layer made again without the keys and values in the cache, its ends and positions, and its gradients.
    begins = 139_392 + more - 4 * 8 * 128 + 4 * 4096 + 4 * 128 + 8 + 4 * 14336
    assert recomputed.backward_peaks[0, :, OWN].max() == begins
    assert memory.backward_peaks[0, :, OWN].max() == 4 * 14336 + 2 * 4096
    # Logits, which are there in backward tasks alone, and the norm beside them.
    assert memory.backward_peaks[0, :, HEAD].max() == 6 * LLAMA.vocab + 10 * 4096
    assert fused.state_bytes[0] - memory.state_bytes[0] == 1024 * 6 * LLAMA.vocab
    assert eager.fingerprint != COST.fingerprint


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(SettingError, match="cost kernels='slow'; there are fused, eager"):
        COST.replace(kernels="slow")
