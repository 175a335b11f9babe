"""Kernels, rectangles and the choice between them: exact, told apart from wrong ones, and refused by name."""

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.kernel_stand_ins import KERNELS, SCALE, aten_backward, aten_forward, document
from torch.nn.attention.flex_attention import create_block_mask

from varlen.attention import choice, kernels, rectangles
from varlen.attention.choice import (
    BY_SCORES,
    KernelChoice,
    check_kernels,
    chosen,
    error_of,
    error_on_a_small_case,
)
from varlen.attention.kernels import MAKERS, Flex, Lengths, Qkv, TorchVarlen, seen_by
from varlen.attention.rules import LayerRules
from varlen.attention.tiles import BLOCK, tiles_of
from varlen.errors import ModelError, SettingError

CPU = torch.device("cpu")


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([(1, 1), (4, 2)]), st.integers(0, 9))
@settings(max_examples=40)
def test_forming_scores_equals_the_kernel(rows, keys, heads, seed):
    query, (_, key, value) = document(rows, heads, seed)[0], document(keys, heads, seed + 1)
    gradient, everything = document(rows, heads, seed + 2)[0], torch.ones(rows, keys, dtype=torch.bool)

    kernel = rectangles.forward(query, key, value, LayerRules(SCALE))
    scores = rectangles.forward(query, key, value, LayerRules(SCALE), seen=everything)
    back = rectangles.backward(gradient, query, key, value, kernel, LayerRules(SCALE))
    back_by_scores = rectangles.backward(
        gradient, query, key, value, kernel, LayerRules(SCALE), seen=everything
    )

    for ours, theirs in zip((*scores, *back_by_scores), (*kernel, *back)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_row_that_sees_nothing_weighs_nothing_when_merged():
    query, key, value = document(3, (2, 1), 0)
    blind = torch.tensor([[False] * 3, [True] * 3, [True] * 3])

    seen = rectangles.forward(query, key, value, LayerRules(SCALE))
    nothing = rectangles.forward(query, key, value, LayerRules(SCALE), seen=blind)

    assert nothing[0][:, :, 0].eq(0).all()
    assert nothing[1][:, :, 0].eq(-torch.inf).all()
    out, lse = rectangles.merge((nothing[0].clone(), nothing[1]), seen)
    torch.testing.assert_close(out[:, :, 0], seen[0][:, :, 0])
    torch.testing.assert_close(lse[:, :, 0], seen[1][:, :, 0])


def test_a_slice_is_two_rectangles_and_its_windows_are_blocks():
    assert [tuple(tile) for tile in tiles_of(0, 9, LayerRules(1.0))] == [(0, 9, 0, 9, "causal")]
    assert [tile.sight for tile in tiles_of(4, 9, LayerRules(1.0, 9))] == ["causal", "all"]
    assert [tuple(tile) for tile in tiles_of(1000, 2000, LayerRules(1.0, 100))] == [
        (0, 512, 901, 1512, "band"),
        (512, 1000, 1413, 2000, "band"),
    ]
    assert [tuple(tile) for tile in tiles_of(1000, 1512, LayerRules(1.0, 600))] == [
        (0, 512, 1000, 1512, "causal"),
        (0, 512, 912, 1000, "all"),
        (0, 512, 401, 912, "band"),
    ]
    assert [tuple(tile) for tile in tiles_of(600, 1200, LayerRules(1.0, None, 2.0))] == [
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
    rules = LayerRules(1.0, window, 2.0 if capped else None)
    row, key = torch.arange(start, start + rows)[:, None], torch.arange(start + rows)
    times = torch.zeros(rows, start + rows, dtype=torch.int32)
    for tile in tiles_of(start, start + rows, rules):
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


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), min_size=1, max_size=4),
    st.sampled_from([None, 1, 100, 300]),
    st.booleans(),
)
@settings(max_examples=30)
def test_masks_of_blocks_are_those_that_flex_attention_makes_of_all_pairs(slices, window, sees_all):
    rows, before = zip(*slices)
    keys = tuple(b + 1 if sees_all else a + b for a, b in zip(rows, before))
    window = None if sees_all else window
    lengths = Lengths(rows, keys, sees_all)

    found = kernels._block_mask(lengths, window, CPU)

    wanted = create_block_mask(found.mask_mod, None, None, sum(rows), sum(keys), device="cpu")
    assert torch.equal(found.to_dense(), wanted.to_dense())
    assert found.seq_lengths == (sum(rows), sum(keys))
    for of_kind in ("kv", "full_kv", "q", "full_q"):
        counts, order = (getattr(found, f"{of_kind}_{name}") for name in ("num_blocks", "indices"))
        other_counts, other_order = (
            getattr(wanted, f"{of_kind}_{name}") for name in ("num_blocks", "indices")
        )
        assert torch.equal(counts, other_counts)
        for line, count in enumerate(counts[0, 0].tolist()):
            assert torch.equal(order[0, 0, line, :count], other_order[0, 0, line, :count])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("window", [None, 3])
def test_the_small_case_tells_right_from_wrong(name, window):
    rules, heads = LayerRules(0.4, window), (4, 2, 8)

    def wrong(change: Callable[[Qkv, Lengths, LayerRules], tuple[Qkv, Lengths, LayerRules]]) -> float:
        class Wrong:
            def forward(self, *given: Any) -> Any:
                return BY_SCORES.forward(*change(*given))

            def backward(self, gradient: Any, given: Any, merged: Any, *rest: Any) -> Any:
                changed = change(given, *rest)
                return BY_SCORES.backward(gradient, changed[0], merged, *changed[1:])

        return error_on_a_small_case(Wrong(), heads, rules, CPU, torch.float64)

    assert error_on_a_small_case(KERNELS[name](), heads, rules, CPU, torch.float64) < 1e-12
    assert wrong(lambda given, lengths, _: (given, lengths, LayerRules(0.4, window, 2.0))) > 0.05
    assert wrong(lambda given, lengths, _: (given, lengths, LayerRules(0.4, 2))) > 0.05
    others = {Lengths((4, 9), (11, 9)): Lengths((4, 9), (4, 16))}
    assert wrong(lambda given, lengths, rules: (given, others.get(lengths, lengths), rules)) > 0.05
    unseen = wrong(lambda given, lengths, rules: (given, lengths._replace(sees_all=False), rules))
    assert unseen > 0.05 or window is not None  # rows of a window never see all
    assert wrong(lambda given, lengths, rules: (given._replace(key=given.key.flip(1)), lengths, rules)) > 0.05
    assert (
        wrong(lambda given, lengths, rules: (given._replace(key=given.key * torch.nan), lengths, rules))
        > 0.05
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_of_this_torch_masks_as_it_is_told():
    from torch.nn.attention.flex_attention import flex_attention

    lengths, rules = Lengths((4, 9), (11, 9)), LayerRules(0.4, 5, 2.0)
    made = torch.Generator().manual_seed(0)
    given = Qkv(*(torch.randn(n, h, 8, generator=made) for n, h in ((13, 4), (20, 2), (20, 2))))

    found = Flex(flex_attention).forward(given, lengths, rules)

    for ours, known in zip(found, BY_SCORES.forward(given, lengths, rules)):
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

    for name in ("auto", "sdpa"):
        choice = KernelChoice(name)
        assert chosen(query, key, value, LayerRules(1.0), choice) is None
        assert choice.used == {"sdpa": 1}
    with pytest.raises(
        ModelError, match=r'kernels="varlen" .* half precision on CUDA, and this is torch.float64 on cpu'
    ):
        chosen(query, key, value, LayerRules(1.0), KernelChoice("varlen"))
    with pytest.raises(SettingError, match='kernels=\'fast\'; it must be "auto", "sdpa"'):
        check_kernels("fast")


def test_cudnn_computes_the_slices_that_have_many_earlier_tokens(monkeypatch):
    monkeypatch.setattr(choice, "_shape_fault", lambda *_: "")
    monkeypatch.setattr(choice, "CUDNN_PAIRS", 40)
    for name in ("varlen", "cudnn"):
        monkeypatch.setitem(MAKERS, name, KERNELS[name])
        monkeypatch.setattr(KERNELS[name], "has_softcap", False, raising=False)
        monkeypatch.setattr(KERNELS[name], "has_window", name == "varlen", raising=False)
    monkeypatch.delitem(MAKERS, "flash_attn_3")
    choice._tried.cache_clear()
    query = SimpleNamespace(is_cuda=True, device=CPU, dtype=torch.float64, shape=(1, 4, 9, 8))
    key = SimpleNamespace(shape=(1, 2, 9, 8))
    found = KernelChoice()

    kernel = chosen(query, key, key, LayerRules(0.4), found)
    windowed = chosen(query, key, key, LayerRules(0.4, 3), KernelChoice())

    choice._tried.cache_clear()
    assert isinstance(kernel, choice.LongByCudnn)
    assert isinstance(windowed, TorchVarlen)
    for lengths, name in (
        (Lengths((9, 30), (9, 30)), "varlen"),
        (Lengths((4, 9), (13, 9)), "varlen"),
        (Lengths((4, 9), (14, 9)), "cudnn"),
        (Lengths((4,), (10,), sees_all=True), "cudnn"),
    ):
        found.used.clear()
        assert error_of(kernel, lengths, (4, 2, 8), LayerRules(0.4), CPU, torch.float64) < 1e-12
        assert found.used == {name: 1}


def test_cudnn_is_told_sizes_lengths_and_offsets_of_slices_with_empty_ones_behind():
    sizes, rows, keys = kernels._cudnn_lengths(Lengths((3, 70, 1), (3, 200, 1)), CPU)

    assert sizes == (4, 96, 256, 96, 256)
    assert rows.tolist() == [3, 70, 1, 0]
    assert keys.tolist() == [3, 200, 1, 0]
    assert kernels._cudnn_offsets((3, 70, 1), 4, 8, CPU).tolist() == [0, 24, 584, 592, 592]
    rules = LayerRules(1.0, 5)
    assert kernels._cudnn_sight(Lengths((4,), (9,)), rules)["diagonal_alignment"] == "BOTTOM_RIGHT"
    assert kernels._cudnn_sight(Lengths((4,), (4,)), rules)["diagonal_alignment"] == "TOP_LEFT"
    assert kernels._cudnn_sight(Lengths((4,), (9,), sees_all=True), LayerRules(1.0)) == {}


def test_what_a_kernel_cannot_take_is_said_before_it_is_called():
    cuda, half = torch.device("cuda"), torch.bfloat16

    assert "4 and 8 wide" in choice._tried("varlen", cuda, half, (2, 1, 4, 8), False, False)[1]
    assert "12 and 12 wide" in choice._tried("flex", cuda, half, (2, 1, 12, 12), False, False)[1]
    assert choice._tried("varlen", cuda, half, (2, 1, 8, 8), False, True)[1] == "it knows no soft cap"
    assert choice._tried("cudnn", cuda, half, (2, 1, 8, 8), True, False)[1] == "it is slow with windows"
    if not torch.cuda.is_available():
        assert choice._tried("varlen", cuda, half, (2, 1, 8, 8), False, False)[0] is None


@pytest.mark.parametrize(("off", "is_refused"), [(1.02, False), (1.1, True)])
def test_a_kernel_that_is_a_little_wrong_is_refused(monkeypatch, off, is_refused):
    class Off(type(BY_SCORES)):
        def backward(self, *given_: Any) -> Qkv:
            return Qkv(*(off * x for x in super().backward(*given_)))

    monkeypatch.setattr(choice, "_shape_fault", lambda *_: "")
    monkeypatch.setitem(choice.MAKERS, "varlen", Off)
    choice._tried.cache_clear()

    kernel, fault = choice._tried("varlen", CPU, torch.bfloat16, (4, 2, 64, 64), True, False)

    choice._tried.cache_clear()
    assert (kernel is None) == is_refused
    assert ("it is off by 0.1 on a small case" in fault) == is_refused


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of whole slices run on CUDA")
@pytest.mark.filterwarnings("ignore")  # of what compiles FlexAttention
@pytest.mark.parametrize("name", ["varlen", "flex", "cudnn"])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("capped", [False, True])
def test_on_cuda_a_kernel_agrees_with_scores(name, windowed, capped):
    if capped and not MAKERS[name].has_softcap:
        pytest.skip("it knows no soft cap")
    if windowed and not MAKERS[name].has_window:
        pytest.skip("it is slow with windows")
    if name == "cudnn" and find_spec("cudnn") is None:
        pytest.skip("nvidia-cudnn-frontend isn't installed")
    cuda, half, heads = torch.device("cuda"), torch.bfloat16, (4, 2, 64)
    kernel, fault = choice._tried(name, cuda, half, (*heads, 64), windowed, capped)
    assert kernel is not None, fault
    rules = LayerRules(0.125, 100 if windowed else None, 5.0 if capped else None)
    for lengths in (Lengths((96,), (96,)), Lengths((96, 204), (300, 204)), Lengths((130, 7), (130, 700))):
        assert choice.error_of(kernel, lengths, heads, rules, cuda, half) < 0.05, lengths
