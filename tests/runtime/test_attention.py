"""Slices attend as the uncut document does, by formulas and by kernels, forward and backward."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.kernel_stand_ins import KERNELS, SCALE, Tensors, document, whole
from tests.support.rarely import examples
from tests.support.sliced import tiny

import varlen as vl
from varlen.attention import tiles
from varlen.attention.choice import ByScores
from varlen.attention.kernels import Lengths, Qkv
from varlen.attention.rules import LayerRules
from varlen.errors import ModelError, SettingError
from varlen.runtime import attention
from varlen.runtime.attention import attend, slice_attention
from varlen.runtime.kv_cache import CachedSlice, DocumentCache


def reference(
    given: Tensors,
    gradient: torch.Tensor,
    window: int | None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[Tensors, torch.Tensor | None]:
    """Output and gradients of the uncut document, and the gradient of sinks."""
    leaves = [x.clone().requires_grad_() for x in given]
    of_sinks = None if sinks is None else sinks.clone().requires_grad_()
    out = whole(*leaves, window, cap, of_sinks)
    out.backward(gradient)
    by_sinks = None if of_sinks is None else of_sinks.grad
    return [out.detach(), *(x.grad for x in leaves)], by_sinks  # type: ignore[misc]


def in_slices(
    given: Sequence[Tensors],
    gradients: Sequence[torch.Tensor],
    steps: Sequence[Sequence[tuple[int, int, int]]],
    window: int | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[list[Tensors], torch.Tensor | None]:
    """The same by MicroPacks of (document, start, stop), all forward and then all backward, last to first."""
    caches = [DocumentCache(x[0].shape[2]) for x in given]
    found = [[torch.zeros_like(g), *(torch.zeros_like(y) for y in x)] for x, g in zip(given, gradients)]
    of_sinks = None if sinks is None else sinks.clone().requires_grad_()
    graphs = []
    for step in steps:
        leaves = [
            torch.cat([given[d][i][:, :, a:b] for d, a, b in step], 2).requires_grad_() for i in range(3)
        ]
        slices = [CachedSlice(cache=caches[d], start=a, stop=b) for d, a, b in step]
        out = attend(*leaves, slices, layer=0, rules=LayerRules(SCALE, window, cap), sinks=of_sinks)
        graphs.append((step, leaves, out))
    for step, leaves, out in reversed(graphs):
        out.backward(torch.cat([gradients[d][:, :, a:b] for d, a, b in step], 2))
        row = 0
        for d, a, b in step:
            for into, part in zip(found[d], [out.detach(), *(x.grad for x in leaves)]):
                into[:, :, a:b] = part[:, :, row : row + b - a]
            row += b - a
    assert all(not cache.pairs and not cache.gradients for cache in caches)
    return found, None if of_sinks is None else of_sinks.grad


@st.composite
def packed_slices(
    draw: st.DrawFn,
) -> tuple[list[int], list[list[tuple[int, int, int]]], tuple[int, int], int | None]:
    """Documents cut anywhere, their slices in order in MicroPacks of one or several slices."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    queues = []
    for d, length in enumerate(lengths):
        cuts = sorted({0, length, *draw(st.lists(st.integers(1, length), max_size=3))})
        queues.append([(d, a, b) for a, b in zip(cuts, cuts[1:])])
    steps: list[list[tuple[int, int, int]]] = []
    while any(queues):
        picked = draw(
            st.lists(st.sampled_from([d for d, q in enumerate(queues) if q]), min_size=1, max_size=3)
        )
        step = [queues[d].pop(0) for d in picked if queues[d]]
        steps.append(step)
    heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 3), (4, 1)]))
    return lengths, steps, heads, draw(st.sampled_from([None, 1, 5, 30]))


def assert_attends_as_uncut(documents, gradients, steps, window, cap, sinks, tolerance):
    found, by_sinks = in_slices(documents, gradients, steps, window, cap, sinks)

    wanted = [reference(x, g, window, cap, sinks) for x, g in zip(documents, gradients)]
    for parts, (uncut_parts, _) in zip(found, wanted):
        for ours, uncut in zip(parts, uncut_parts):
            torch.testing.assert_close(ours, uncut, rtol=0, atol=tolerance)
    if by_sinks is not None:
        torch.testing.assert_close(by_sinks, sum(x for _, x in wanted), rtol=0, atol=1e-11)


@given(
    packed_slices(),
    st.integers(0, 99),
    st.sampled_from([None, 1.5]),
    st.booleans(),
    st.sampled_from([(8, 8), (8, 5), (4, 8)]),
)
@settings(max_examples=60)
def test_slices_attend_as_the_uncut_document(case, seed, cap, has_sinks, dims):
    lengths, steps, heads, window = case
    given = [document(length, heads, seed + d, dims) for d, length in enumerate(lengths)]
    gradients = [document(length, heads, seed + 50 + d, dims[1:] * 2)[0] for d, length in enumerate(lengths)]
    sinks = torch.linspace(-1, 1, heads[0], dtype=torch.float64) if has_sinks else None

    assert_attends_as_uncut(given, gradients, steps, window, cap, sinks, 1e-12)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3, 700, 1100])
def test_slices_longer_than_a_block_are_exact(window, cap):
    given, gradient = document(1500, (2, 1), 0), document(1500, (2, 1), 1)[0]
    cuts = [(0, 0, 3), (0, 3, 600), (0, 600, 1400), (0, 1400, 1500)]

    found, _ = in_slices([given], [gradient], [[cut] for cut in cuts], window, cap)

    for ours, uncut in zip(found[0], reference(given, gradient, window, cap)[0]):
        torch.testing.assert_close(ours, uncut, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (600, None), (None, 1.5)])
def test_half_precision_slices_are_as_near_to_float64_as_the_uncut_kernel(dtype, window, cap):
    half = [x.to(dtype) for x in document(1400, (2, 1), 0)]
    gradient = document(1400, (2, 1), 1)[0].to(dtype)
    true, _ = reference([x.double() for x in half], gradient.double(), window, cap)
    kernel = in_slices([half], [gradient], [[(0, 0, 1400)]])[0][0]
    uncut, _ = reference([x.double() for x in half], gradient.double(), None)

    cuts = [[(0, 0, 640)], [(0, 640, 641)], [(0, 641, 1400)]]
    found = in_slices([half], [gradient], cuts, window, cap)[0][0]

    for ours, wanted, whole_kernel, exact in zip(found, true, kernel, uncut):
        rounding = (whole_kernel - exact).norm() / exact.norm()
        # Two parts are rounded, and then their sum.
        assert (ours - wanted).norm() / wanted.norm() < 1.5 * rounding


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"slices": None}, "called without"),
        ({"attention_mask": torch.ones(1)}, "no mask"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"indices": torch.ones(1)}, "passes indices"),
    ],
)
def test_what_slices_do_not_compute_is_refused(arguments, words):
    layer = SimpleNamespace(layer_idx=0)
    given: dict[str, object] = {"attention_mask": None, "slices": [], **arguments}
    with pytest.raises(ModelError, match=words):
        slice_attention(layer, *document(2, (1, 1), 0), **given)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the half-precision kernel needs a CUDA device")
def test_on_cuda_slices_in_half_precision_are_near_the_uncut_document():
    exact, gradient = document(300, (4, 2), 0), document(300, (4, 2), 1)[0]
    half = [x.bfloat16().cuda() for x in exact]
    cuts = [[(0, 0, 130)], [(0, 130, 131)], [(0, 131, 300)]]

    cut = in_slices([half], [gradient.bfloat16().cuda()], cuts)[0][0]

    true, _ = reference([x.double().cpu() for x in half], gradient.bfloat16().double(), None)
    for ours, wanted in zip(cut, true):
        assert (ours.cpu() - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.parametrize("name", KERNELS)
@given(case=packed_slices(), seed=st.integers(0, 99), with_sinks=st.booleans())
@examples(10, 25)
def test_a_kernel_of_whole_slices_attends_as_the_uncut_document(name, case, seed, with_sinks):
    lengths, steps, heads, window = case
    cap = 1.5 if KERNELS[name]().has_softcap and seed % 2 else None
    sinks = torch.linspace(-1, 1, heads[0], dtype=torch.float64) if with_sinks else None
    documents = [document(length, heads, seed + d) for d, length in enumerate(lengths)]
    gradients = [document(length, heads, seed + 50 + d)[0] for d, length in enumerate(lengths)]

    kernel, most = KERNELS[name](), [0]
    of_kernel = kernel.backward

    def backward(gradient: Any, qkv: Qkv, merged: Any, call: Lengths, rules: LayerRules) -> Any:
        most.append(call.keys[0] - call.queries[0] * (not call.sees_all))
        return of_kernel(gradient, qkv, merged, call, rules)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "chosen", lambda *_: kernel)
        patch.setattr(kernel, "backward", backward)
        patch.setattr(tiles, "BACKWARD_KEYS", 3)
        assert_attends_as_uncut(documents, gradients, steps, window, cap, sinks, 1e-11)
    assert window is not None or max(most) <= 3


def test_half_precision_kernels_are_as_exact_over_many_blocks_of_keys_as_over_few(monkeypatch):
    half, gradient = ([x.bfloat16() for x in document(1024, (4, 2), seed)] for seed in (0, 1))
    true = reference([x.double() for x in half], gradient[0].double(), None)[0][1]
    monkeypatch.setattr(attention, "chosen", lambda *_: ByScores())

    def error(keys: int) -> float:
        monkeypatch.setattr(tiles, "BACKWARD_KEYS", keys)
        by_query = in_slices([half], gradient[:1], [[(0, 0, 960)], [(0, 960, 1024)]])[0][0][1]
        off, size = (x[:, :, 960:].norm() for x in (by_query - true, true))
        return float(off / size)

    assert error(16) < 2 * error(1024)  # parts are rounded, and then their sum


def test_short_documents_are_one_call_and_slices_with_earlier_tokens_one_each():
    calls: list[Lengths] = []

    class Counting(ByScores):
        def forward(self, given: Qkv, lengths: Lengths, rules: LayerRules) -> Any:
            calls.append(lengths)
            return super().forward(given, lengths, rules)

    documents = [document(length, (2, 1), length) for length in (20, 3, 4, 5, 6)]
    gradients = [document(len(x[0][0, 0]), (2, 1), 9)[0] for x in documents]
    steps = [[(0, 0, 8), (1, 0, 3)], [(0, 8, 20), (2, 0, 4), (3, 0, 5), (4, 0, 6)]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "chosen", lambda *_: Counting())
        in_slices(documents, gradients, steps)
        in_slices([documents[0]], [gradients[0]], [[(0, 0, 8)], [(0, 8, 20)]], window=3)

    assert calls == [
        Lengths((8, 3), (8, 3)),
        Lengths((12,), (20,)),
        Lengths((4, 5, 6), (4, 5, 6)),
        Lengths((8,), (8,)),
        Lengths((12,), (14,)),
    ]


def test_an_engine_is_told_which_kernels_and_stops_where_they_cannot(caplog):
    model, batch = tiny("llama"), vl.collate([np.arange(9)], vl.pack([9], capacity=16))

    with pytest.raises(SettingError, match="kernels='fast'"):
        vl.SliceEngine(model, kernels="fast")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match='kernels="varlen" doesn\'t compute this attention'):
        vl.SliceEngine(model, kernels="varlen").step(batch)
    assert model.config._attn_implementation == "sdpa"
    with caplog.at_level("INFO", "varlen.runtime.engine"):
        engine = vl.SliceEngine(model, kernels="sdpa")
        stats = engine.step(batch)
        model.zero_grad()
        engine.step(batch)
    assert caplog.messages == ['attention is computed by "sdpa"']
    assert (stats.num_targets, stats.kernels, stats.refused_kernels) == (8, ("sdpa",), {})
