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
from varlen.runtime.cache import DocumentCache
from varlen.runtime.flash import Rule
from varlen.runtime.tiles import tiles_of

SCALE = 0.3
Qkv = list[torch.Tensor]


def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention of one uncut document, with all its scores."""
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (length if window is None else window))
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return (query @ key.transpose(-1, -2) * SCALE).masked_fill(~seen, -torch.inf).softmax(-1) @ value


def document(length: int, heads: tuple[int, int], seed: int) -> Qkv:
    made = torch.Generator().manual_seed(seed)
    query, key = heads
    return [
        torch.randn(1, count, length, 8, dtype=torch.float64, generator=made) for count in (query, key, key)
    ]


def reference(given: Qkv, gradient: torch.Tensor, window: int | None) -> Qkv:
    """Output and gradients of the uncut document."""
    leaves = [x.clone().requires_grad_() for x in given]
    out = whole(*leaves, window)
    out.backward(gradient)
    return [out.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]


def in_slices(
    given: Sequence[Qkv],
    gradients: Sequence[torch.Tensor],
    steps: Sequence[Sequence[tuple[int, int, int]]],
    window: int | None = None,
) -> list[Qkv]:
    """The same by MicroPacks of (document, start, stop), all forward and then all backward, last to first."""
    caches = [DocumentCache(x[0].shape[2]) for x in given]
    found = [[torch.zeros_like(x[0]), *(torch.zeros_like(y) for y in x)] for x in given]
    graphs = []
    for step in steps:
        leaves = [
            torch.cat([given[d][i][:, :, a:b] for d, a, b in step], 2).requires_grad_() for i in range(3)
        ]
        slices = [CachedSlice(cache=caches[d], start=a, stop=b) for d, a, b in step]
        graphs.append((step, leaves, attend(*leaves, slices, layer=0, rule=Rule(SCALE, window))))
    for step, leaves, out in reversed(graphs):
        out.backward(torch.cat([gradients[d][:, :, a:b] for d, a, b in step], 2))
        row = 0
        for d, a, b in step:
            for into, part in zip(found[d], [out.detach(), *(x.grad for x in leaves)]):
                into[:, :, a:b] = part[:, :, row : row + b - a]
            row += b - a
    assert all(not cache.pairs and not cache.gradients for cache in caches)
    return found


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


@given(packed_slices(), st.integers(0, 99))
def test_slices_attend_as_the_uncut_document(
    case: tuple[list[int], list[list[tuple[int, int, int]]], tuple[int, int], int | None], seed: int
) -> None:
    lengths, steps, heads, window = case
    given = [document(length, heads, seed + d) for d, length in enumerate(lengths)]
    gradients = [document(length, heads, seed + 50 + d)[0] for d, length in enumerate(lengths)]

    found = in_slices(given, gradients, steps, window)

    for one, gradient, parts in zip(given, gradients, found):
        for ours, uncut in zip(parts, reference(one, gradient, window)):
            torch.testing.assert_close(ours, uncut, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 700])
def test_slices_longer_than_a_block_of_the_kernel_are_exact(window: int | None) -> None:
    given, gradient = document(1500, (4, 2), 0), document(1500, (4, 2), 1)[0]
    cuts = [(0, 0, 3), (0, 3, 600), (0, 600, 1400), (0, 1400, 1500)]

    found = in_slices([given], [gradient], [[cut] for cut in cuts], window)

    for ours, uncut in zip(found[0], reference(given, gradient, window)):
        torch.testing.assert_close(ours, uncut, rtol=0, atol=1e-12)


def test_bfloat16_slices_are_as_near_to_float64_as_the_uncut_document() -> None:
    exact, gradient = document(96, (4, 2), 0), document(96, (4, 2), 1)[0]
    half = [x.bfloat16() for x in exact]
    uncut = in_slices([half], [gradient.bfloat16()], [[(0, 0, 96)]])[0]
    cut = in_slices([half], [gradient.bfloat16()], [[(0, 0, 40)], [(0, 40, 41)], [(0, 41, 96)]])[0]

    for ours, one, true in zip(cut, uncut, reference([x.double() for x in half], gradient, None)):
        assert (ours - true).abs().max() < 2 * (one - true).abs().max() + 0.01


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
    assert [tile.causal for tile in tiles_of(0, 9)] == [True]
    assert [tile.causal for tile in tiles_of(4, 9)] == [False, True]
    blocks = list(tiles_of(1000, 2100, window=100))
    assert [(b.first_row, b.stop_row) for b in blocks] == [(0, 512), (512, 1024), (1024, 1100)]
    assert [(b.first_key, b.stop_key) for b in blocks] == [(901, 1512), (1413, 2024), (1925, 2100)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"slices": None}, "called without"),
        ({"attention_mask": torch.ones(1)}, "no mask"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"softcap": 30.0}, "passes softcap"),
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

    cut = in_slices([half], [gradient.bfloat16().cuda()], cuts)[0]

    true = reference([x.double().cpu() for x in half], gradient.bfloat16().double(), None)
    for ours, wanted in zip(cut, true):
        assert (ours.cpu() - wanted).abs().max() < 0.02 * wanted.abs().max()
