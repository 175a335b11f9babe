"""Slices attend as the uncut document does, forward and backward, however it is cut and whatever stands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.errors import ModelError
from varlen.runtime import flash
from varlen.runtime.attention import CachedSlice, attend, slice_attention
from varlen.runtime.flash import Rule
from varlen.runtime.kv_cache import DocumentCache
from varlen.runtime.tiles import BLOCK, tiles_of

SCALE = 0.3
Qkv = list[torch.Tensor]


def whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one uncut document, with all its scores."""
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (length if window is None else window))
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * SCALE
    scores = (scores if cap is None else cap * torch.tanh(scores / cap)).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(1, -1, length, 1)], -1)
    return scores.softmax(-1)[..., :length] @ value


def document(length: int, heads: tuple[int, int], seed: int, dims: tuple[int, int] = (8, 8)) -> Qkv:
    """Random queries, keys and values, as heads of these widths."""
    made = torch.Generator().manual_seed(seed)
    query, key = heads
    sizes = [(query, dims[0]), (key, dims[0]), (key, dims[1])]
    return [torch.randn(1, n, length, dim, dtype=torch.float64, generator=made) for n, dim in sizes]


def reference(
    given: Qkv,
    gradient: torch.Tensor,
    window: int | None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[Qkv, torch.Tensor | None]:
    """Output and gradients of the uncut document, and the gradient of sinks."""
    leaves = [x.clone().requires_grad_() for x in given]
    of_sinks = None if sinks is None else sinks.clone().requires_grad_()
    out = whole(*leaves, window, cap, of_sinks)
    out.backward(gradient)
    by_sinks = None if of_sinks is None else of_sinks.grad
    return [out.detach(), *(x.grad for x in leaves)], by_sinks  # type: ignore[misc]


def in_slices(
    given: Sequence[Qkv],
    gradients: Sequence[torch.Tensor],
    steps: Sequence[Sequence[tuple[int, int, int]]],
    window: int | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[list[Qkv], torch.Tensor | None]:
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
def test_slices_attend_as_the_uncut_document(
    case: tuple[list[int], list[list[tuple[int, int, int]]], tuple[int, int], int | None],
    seed: int,
    cap: float | None,
    has_sinks: bool,
    dims: tuple[int, int],
) -> None:
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
def test_slices_longer_than_a_block_are_exact(window: int | None, cap: float | None) -> None:
    given, gradient = document(1500, (2, 1), 0), document(1500, (2, 1), 1)[0]
    cuts = [(0, 0, 3), (0, 3, 600), (0, 600, 1400), (0, 1400, 1500)]

    found, _ = in_slices([given], [gradient], [[cut] for cut in cuts], window, cap)

    for ours, uncut in zip(found[0], reference(given, gradient, window, cap)[0]):
        torch.testing.assert_close(ours, uncut, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (600, None), (None, 1.5)])
def test_half_precision_slices_are_as_near_to_float64_as_the_uncut_kernel(
    dtype: torch.dtype, window: int | None, cap: float | None
) -> None:
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
def test_forming_scores_equals_the_kernel(rows: int, keys: int, heads: tuple[int, int], seed: int) -> None:
    query, (_, key, value) = document(rows, heads, seed)[0], document(keys, heads, seed + 1)
    gradient, everything = document(rows, heads, seed + 2)[0], torch.ones(rows, keys, dtype=torch.bool)

    kernel = flash.forward(query, key, value, Rule(SCALE))
    scores = flash.forward(query, key, value, Rule(SCALE), seen=everything)
    back = flash.backward(gradient, query, key, value, kernel, Rule(SCALE))
    back_by_scores = flash.backward(gradient, query, key, value, kernel, Rule(SCALE), seen=everything)

    for ours, theirs in zip((*scores, *back_by_scores), (*kernel, *back)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_row_that_sees_nothing_weighs_nothing_when_merged() -> None:
    query, key, value = document(3, (2, 1), 0)
    blind = torch.tensor([[False] * 3, [True] * 3, [True] * 3])

    seen = flash.forward(query, key, value, Rule(SCALE))
    nothing = flash.forward(query, key, value, Rule(SCALE), seen=blind)

    assert nothing[0][:, :, 0].eq(0).all()
    assert nothing[1][:, :, 0].eq(-torch.inf).all()
    out, lse = flash.merge((nothing[0].clone(), nothing[1]), seen)
    torch.testing.assert_close(out[:, :, 0], seen[0][:, :, 0])
    torch.testing.assert_close(lse[:, :, 0], seen[1][:, :, 0])


def test_a_slice_is_two_rectangles_and_its_windows_are_blocks() -> None:
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
def test_rectangles_cover_what_rows_see_once_and_form_scores_of_blocks_alone(
    start: int, rows: int, window: int, capped: bool
) -> None:
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
def test_what_slices_do_not_compute_is_refused(arguments: dict[str, object], words: str) -> None:
    layer = SimpleNamespace(layer_idx=0)
    given: dict[str, object] = {"attention_mask": None, "slices": [], **arguments}
    with pytest.raises(ModelError, match=words):
        slice_attention(layer, *document(2, (1, 1), 0), **given)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the half-precision kernel needs a CUDA device")
def test_on_cuda_slices_in_half_precision_are_near_the_uncut_document() -> None:
    exact, gradient = document(300, (4, 2), 0), document(300, (4, 2), 1)[0]
    half = [x.bfloat16().cuda() for x in exact]
    cuts = [[(0, 0, 130)], [(0, 130, 131)], [(0, 131, 300)]]

    cut = in_slices([half], [gradient.bfloat16().cuda()], cuts)[0][0]

    true, _ = reference([x.double().cpu() for x in half], gradient.bfloat16().double(), None)
    for ours, wanted in zip(cut, true):
        assert (ours.cpu() - wanted).abs().max() < 0.02 * wanted.abs().max()
