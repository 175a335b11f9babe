"""FLOPs: closed forms against counting, and the model's own apart from the hardware's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape, mfu, pairs_of, slice_flops, step_flops
from varlen.errors import SettingError

TINY = ModelShape(
    hidden=8, layers=3, heads=4, kv_heads=2, head_dim=2, ffn=16, vocab=11, window=5, windowed_layers=1
)


def counted(shape: ModelShape, start: int, stop: int) -> tuple[float, float]:
    """Forward FLOPs of attention and of the rest, multiplication by multiplication."""
    attention = 0
    for layer in range(shape.layers):
        for query in range(start, stop):
            seen = min(query + 1, shape.window) if layer < shape.windowed_layers else query + 1
            attention += seen * shape.heads * 2 * (shape.head_dim + shape.value_head_dim)
    projections = shape.hidden * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    weights = shape.layers * (projections + 3 * shape.hidden * shape.ffn) + shape.hidden * shape.vocab
    return float(attention), float((stop - start) * 2 * weights)


@given(st.integers(0, 40), st.integers(1, 40))
def test_slices_have_the_flops_that_counting_gives(start: int, length: int) -> None:
    attention, rest = counted(TINY, start, start + length)

    forward, backward = slice_flops(TINY, [start], [start + length])[0]

    assert forward == attention + rest
    assert backward == 2.5 * attention + 2 * rest


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 60))
def test_slices_of_a_document_have_its_pairs(lengths: list[int], window: int) -> None:
    ends = np.cumsum(lengths, dtype=np.float64)
    starts = np.append(0.0, ends[:-1])

    parts = pairs_of(starts, ends, window)

    assert parts.sum() == pairs_of(np.zeros(1), ends[-1:], window)[0]


def test_a_step_counts_the_model_apart_from_the_hardware() -> None:
    lengths = [7, 30]
    each = [counted(TINY, 0, length) for length in lengths]
    attention, rest = (sum(part) for part in zip(*each))
    head = 2 * TINY.head_parameters * sum(lengths)

    none, full = step_flops(TINY, lengths), step_flops(TINY, lengths, "full")

    assert none.model == full.model == 3 * (attention + rest)
    assert none.hardware == 3.5 * attention + 3 * rest
    assert none.attention == 3.5 * attention
    assert full.hardware == 4.5 * attention + 4 * rest - head


def test_experts_count_those_that_a_token_visits() -> None:
    dense = ModelShape(hidden=8, layers=2, heads=2, vocab=11, ffn=32)
    sparse = ModelShape(
        hidden=8, layers=2, heads=2, vocab=11, experts=16, experts_per_token=2, expert_ffn=12, shared_ffn=8
    )

    apart = slice_flops(sparse, [0], [10])[0] - slice_flops(dense, [0], [10])[0]

    # The router's 8 x 16 matrix is all that differs: twice a layer and row forward.
    assert apart.tolist() == [2 * 2 * 8 * 16 * 10, 4 * 2 * 8 * 16 * 10]
    assert sparse.num_parameters - dense.num_parameters == 2 * (14 * 3 * 8 * 12 + 8 * 16)


def test_latent_attention_counts_both_dimensions() -> None:
    shape = ModelShape.named("deepseek-v3")

    late, early = slice_flops(shape, [4096], [4097])[0, 0], slice_flops(shape, [0], [1])[0, 0]

    assert late - early == pytest.approx(61 * 4096 * 2 * 128 * (192 + 128))


def test_the_published_rule_of_six_flops_a_parameter_holds_for_short_documents() -> None:
    shape = ModelShape.named("llama-3-8b")

    per_token = step_flops(shape, [128]).model / 128

    assert per_token == pytest.approx(6 * shape.num_active_parameters, rel=0.01)


@pytest.mark.parametrize(
    ("column", "cuts"), [(0, [78_465, 119_589, 151_458]), (1, [80_874, 121_618, 153_088])]
)
def test_published_cuts_of_a_document_into_eight_have_equal_flops(column: int, cuts: list[int]) -> None:
    """256K tokens through the layers of Llama-3-8B; the head is apart."""
    shape = ModelShape.named("llama-3-8b")
    head = 2 * shape.head_parameters * (1 + column)
    whole = slice_flops(shape, [0], [262_144])[0, column] - head * 262_144

    for number, cut in enumerate(cuts, start=1):
        first = slice_flops(shape, [0], [cut])[0, column] - head * cut
        assert first / whole == pytest.approx(number / 8, rel=3e-5)


def test_mfu_is_the_share_of_the_peak() -> None:
    cost = CostModel(model=ModelShape.named("llama-3-8b"), hardware=Hardware.named("h100"), recompute="full")
    flops = cost.flops([8192] * 64)

    share = mfu(flops, 3.0, 16, cost.hardware.peak_tflops)

    assert share == pytest.approx(flops.model / (3 * 16 * 989e12))
    assert flops.hardware > 1.3 * flops.model
    with pytest.raises(SettingError, match=r"MFU of 0 s on 16 GPUs"):
        mfu(flops, 0, 16, 989.0)
