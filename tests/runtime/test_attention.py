"""Slices attend as the uncut document does, by formulas and by kernels, forward and backward."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.kernel_stand_ins import KERNELS, SCALE, aten_backward, aten_forward, whole
from tests.support.rarely import examples
from tests.support.sliced import tiny

import varlen as vl
from varlen.errors import ModelError, SettingError
from varlen.runtime import attention, choice, flash
from varlen.runtime.attention import CachedSlice, attend, slice_attention
from varlen.runtime.choice import BY_SCORES, ByScores, chosen, error_on_a_small_case
from varlen.runtime.decoder import DecoderParts
from varlen.runtime.flash import Rule
from varlen.runtime.kernels import Flex, Lengths, Qkv, seen_by
from varlen.runtime.kv_cache import DocumentCache
from varlen.runtime.tiles import BLOCK, tiles_of

Tensors = list[torch.Tensor]


def document(length: int, heads: tuple[int, int], seed: int, dims: tuple[int, int] = (8, 8)) -> Tensors:
    made = torch.Generator().manual_seed(seed)
    query, key = heads
    sizes = [(query, dims[0]), (key, dims[0]), (key, dims[1])]
    return [torch.randn(1, n, length, dim, dtype=torch.float64, generator=made) for n, dim in sizes]


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
        out = attend(*leaves, slices, layer=0, rule=Rule(SCALE, window, cap), sinks=of_sinks)
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

    found, by_sinks = in_slices(given, gradients, steps, window, cap, sinks)

    wanted = [reference(one, gradient, window, cap, sinks) for one, gradient in zip(given, gradients)]
    for parts, (uncut, _) in zip(found, wanted):
        for ours, known in zip(parts, uncut):
            torch.testing.assert_close(ours, known, rtol=0, atol=1e-12)
    if by_sinks is not None:
        torch.testing.assert_close(by_sinks, sum(x for _, x in wanted), rtol=0, atol=1e-11)


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


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([(1, 1), (4, 2)]), st.integers(0, 9))
@settings(max_examples=40)
def test_forming_scores_equals_the_kernel(rows, keys, heads, seed):
    query, (_, key, value) = document(rows, heads, seed)[0], document(keys, heads, seed + 1)
    gradient, everything = document(rows, heads, seed + 2)[0], torch.ones(rows, keys, dtype=torch.bool)

    kernel = flash.forward(query, key, value, Rule(SCALE))
    scores = flash.forward(query, key, value, Rule(SCALE), seen=everything)
    back = flash.backward(gradient, query, key, value, kernel, Rule(SCALE))
    back_by_scores = flash.backward(gradient, query, key, value, kernel, Rule(SCALE), seen=everything)

    for ours, theirs in zip((*scores, *back_by_scores), (*kernel, *back)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_row_that_sees_nothing_weighs_nothing_when_merged():
    query, key, value = document(3, (2, 1), 0)
    blind = torch.tensor([[False] * 3, [True] * 3, [True] * 3])

    seen = flash.forward(query, key, value, Rule(SCALE))
    nothing = flash.forward(query, key, value, Rule(SCALE), seen=blind)

    assert nothing[0][:, :, 0].eq(0).all()
    assert nothing[1][:, :, 0].eq(-torch.inf).all()
    out, lse = flash.merge((nothing[0].clone(), nothing[1]), seen)
    torch.testing.assert_close(out[:, :, 0], seen[0][:, :, 0])
    torch.testing.assert_close(lse[:, :, 0], seen[1][:, :, 0])


def test_a_slice_is_two_rectangles_and_its_windows_are_blocks():
    assert [tuple(tile) for tile in tiles_of(0, 9, Rule(1.0))] == [(0, 9, 0, 9, "causal")]
    assert [tile.sight for tile in tiles_of(4, 9, Rule(1.0, 9))] == ["causal", "all"]
    assert [tuple(tile) for tile in tiles_of(1000, 2000, Rule(1.0, 100))] == [
        (0, 512, 901, 1512, "band"),
        (512, 1000, 1413, 2000, "band"),
    ]
    assert [tuple(tile) for tile in tiles_of(1000, 1512, Rule(1.0, 600))] == [
        (0, 512, 1000, 1512, "causal"),
        (0, 512, 912, 1000, "all"),
        (0, 512, 401, 912, "band"),
    ]
    assert [tuple(tile) for tile in tiles_of(600, 1200, Rule(1.0, None, 2.0))] == [
        (0, 512, 600, 1112, "causal"),
        (0, 512, 0, 512, "all"),
        (0, 512, 512, 600, "all"),
        (512, 600, 1112, 1200, "causal"),
        (512, 600, 0, 512, "all"),
        (512, 600, 512, 1024, "all"),
        (512, 600, 1024, 1112, "all"),
    ]


@given(st.integers(0, 1500), st.integers(1, 1200), st.integers(1, 1400), st.booleans())
@settings(max_examples=40)
def test_rectangles_cover_what_rows_see_once_and_form_scores_of_blocks_alone(start, rows, window, capped):
    rule = Rule(1.0, window, 2.0 if capped else None)
    row, key = torch.arange(start, start + rows)[:, None], torch.arange(start + rows)
    times = torch.zeros(rows, start + rows, dtype=torch.int32)
    for tile in tiles_of(start, start + rows, rule):
        at = (slice(tile.first_row, tile.stop_row), slice(tile.first_key, tile.stop_key))
        far = (row[at[0]] - key[at[1]]) < window
        near = row[at[0]] >= key[at[1]]
        if tile.sight == "causal":
            assert start + tile.first_row == tile.first_key
            assert tile.stop_row - tile.first_row == tile.stop_key - tile.first_key
        times[at] += {"all": torch.ones_like(near), "causal": near, "band": near & far}[tile.sight].int()
        if tile.sight == "band" or capped:
            assert max(tile.stop_row - tile.first_row, tile.stop_key - tile.first_key) < 2 * BLOCK

    assert torch.equal(times, ((row >= key) & (row - key < window)).int())


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


CPU = torch.device("cpu")


@pytest.mark.parametrize("name", KERNELS)
@given(case=packed_slices(), seed=st.integers(0, 99), with_sinks=st.booleans())
@examples(10, 25)
def test_a_kernel_of_whole_slices_attends_as_the_uncut_document(name, case, seed, with_sinks):
    lengths, steps, heads, window = case
    cap = 1.5 if name != "varlen" and seed % 2 else None
    sinks = torch.linspace(-1, 1, heads[0], dtype=torch.float64) if with_sinks else None
    documents = [document(length, heads, seed + d) for d, length in enumerate(lengths)]
    gradients = [document(length, heads, seed + 50 + d)[0] for d, length in enumerate(lengths)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "chosen", lambda *_: KERNELS[name]())
        found, by_sinks = in_slices(documents, gradients, steps, window, cap, sinks)

    wanted = [reference(x, g, window, cap, sinks) for x, g in zip(documents, gradients)]
    for parts, (uncut_parts, _) in zip(found, wanted):
        for ours, uncut in zip(parts, uncut_parts):
            torch.testing.assert_close(ours, uncut, rtol=0, atol=1e-11)
    if by_sinks is not None:
        torch.testing.assert_close(by_sinks, sum(x for _, x in wanted), rtol=0, atol=1e-11)


def test_short_documents_are_one_call_and_slices_with_earlier_tokens_one_each():
    calls: list[Lengths] = []

    class Counting(ByScores):
        def forward(self, given: Qkv, lengths: Lengths, rule: Rule) -> Any:
            calls.append(lengths)
            return super().forward(given, lengths, rule)

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


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("window", [None, 3])
def test_the_small_case_tells_right_from_wrong(name, window):
    rule, heads = Rule(0.4, window), (4, 2, 8)

    def wrong(change: Callable[[Qkv, Lengths, Rule], tuple[Qkv, Lengths, Rule]]) -> float:
        class Wrong:
            def forward(self, *given: Any) -> Any:
                return BY_SCORES.forward(*change(*given))

            def backward(self, gradient: Any, given: Any, merged: Any, *rest: Any) -> Any:
                changed = change(given, *rest)
                return BY_SCORES.backward(gradient, changed[0], merged, *changed[1:])

        return error_on_a_small_case(Wrong(), heads, rule, CPU, torch.float64)

    assert error_on_a_small_case(KERNELS[name](), heads, rule, CPU, torch.float64) < 1e-12
    assert wrong(lambda given, lengths, _: (given, lengths, Rule(0.4, window, 2.0))) > 0.05
    assert wrong(lambda given, lengths, _: (given, lengths, Rule(0.4, 2))) > 0.05
    assert wrong(lambda given, lengths, rule: (given, Lengths((4, 9), (4, 16)), rule)) > 0.05
    assert wrong(lambda given, lengths, rule: (given._replace(key=given.key.flip(1)), lengths, rule)) > 0.05
    assert (
        wrong(lambda given, lengths, rule: (given._replace(key=given.key * torch.nan), lengths, rule)) > 0.05
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_of_this_torch_masks_as_it_is_told():
    from torch.nn.attention.flex_attention import flex_attention

    lengths, rule = Lengths((4, 9), (11, 9)), Rule(0.4, 5, 2.0)
    made = torch.Generator().manual_seed(0)
    given = Qkv(*(torch.randn(n, h, 8, generator=made) for n, h in ((13, 4), (20, 2), (20, 2))))

    found = Flex(flex_attention).forward(given, lengths, rule)

    for ours, known in zip(found, BY_SCORES.forward(given, lengths, rule)):
        torch.testing.assert_close(ours, known, rtol=0, atol=1e-5)


def test_rows_see_their_document_up_to_themselves_from_the_bottom_right():
    assert seen_by(Lengths((2, 1), (3, 1)), None, CPU).int().tolist() == [
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [0, 0, 0, 1],
    ]
    assert seen_by(Lengths((2,), (4,)), 2, CPU).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_arguments_of_this_torch_are_those_of_the_stand_in():
    for kernel, stand_in in (
        (torch.ops.aten._flash_attention_forward, aten_forward),
        (torch.ops.aten._flash_attention_backward, aten_backward),
    ):
        theirs = [argument.name for argument in kernel.default._schema.arguments]
        ours = stand_in.__code__.co_varnames[
            : stand_in.__code__.co_argcount + stand_in.__code__.co_kwonlyargcount
        ]
        assert [x for x in theirs if x in ours] == list(ours)
        assert theirs[: stand_in.__code__.co_argcount] == list(ours[: stand_in.__code__.co_argcount])


def test_kernels_that_cannot_are_refused_by_name_and_auto_finds_one_that_can():
    query, key, value = document(4, (2, 1), 0)

    assert chosen(query, key, value, Rule(1.0), "auto") is None
    assert chosen(query, key, value, Rule(1.0), "sdpa") is None
    with pytest.raises(
        ModelError, match=r'kernels="varlen" .* half precision on CUDA, and this is torch.float64 on cpu'
    ):
        chosen(query, key, value, Rule(1.0), "varlen")
    with pytest.raises(SettingError, match="kernels='fast'; there are auto, sdpa, varlen, flash_attn, flex"):
        DecoderParts.of(None, "fast")  # type: ignore[arg-type]


def test_what_a_kernel_cannot_take_is_said_before_it_is_called():
    cuda, half = torch.device("cuda"), torch.bfloat16

    assert "4 and 8 wide" in choice._tried("varlen", cuda, half, (2, 1, 4, 8), False, False)[1]
    assert "12 and 12 wide" in choice._tried("flex", cuda, half, (2, 1, 12, 12), False, False)[1]
    assert choice._tried("varlen", cuda, half, (2, 1, 8, 8), False, True)[1] == "it knows no soft cap"
    if not torch.cuda.is_available():
        assert choice._tried("varlen", cuda, half, (2, 1, 8, 8), False, False)[0] is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of whole slices run on CUDA")
@pytest.mark.parametrize("name", ["varlen", "flex"])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("capped", [False, True])
def test_on_cuda_a_kernel_agrees_with_scores(name, windowed, capped):
    if capped and name == "varlen":
        pytest.skip("it knows no soft cap")
    cuda, half, heads = torch.device("cuda"), torch.bfloat16, (4, 2, 64)
    kernel, fault = choice._tried(name, cuda, half, (*heads, 64), windowed, capped)
    assert kernel is not None, fault
    rule = Rule(0.125, 100 if windowed else None, 5.0 if capped else None)
    for lengths in (Lengths((96,), (96,)), Lengths((96, 204), (300, 204)), Lengths((130, 7), (130, 700))):
        assert choice.error_of(kernel, lengths, heads, rule, cuda, half) < 0.05, lengths


def test_an_engine_is_told_which_kernels_and_stops_where_they_cannot():
    model, batch = tiny("llama"), vl.collate([np.arange(9)], vl.pack([9], capacity=16))

    with pytest.raises(SettingError, match="kernels='fast'"):
        vl.SliceEngine(model, kernels="fast")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match='kernels="varlen" doesn\'t compute this attention'):
        vl.SliceEngine(model, kernels="varlen").step(batch)
    assert model.config._attn_implementation == "sdpa"
    assert vl.SliceEngine(model, kernels="sdpa").step(batch).num_targets == 8
