"""Who may attend to whom: loops written out, the dense mask, the mask function and the block mask all agree."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.batch.batches import Case, cases, tokens_like

import varlen as vl
from varlen.batch.packed import PackedBatch
from varlen.errors import SettingError

WINDOWS = st.sampled_from([None, 1, 2, 5, 1000])


def spelled_out(batch: PackedBatch, window: int | None) -> list[list[list[bool]]]:
    """Query by query and key by key, from the boundaries alone: segment ids and positions are not looked at."""
    rows, width = batch.input_ids.shape
    bounds = batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded
    owner: dict[int, tuple[int, int]] = {}
    segment = 0
    padding = batch.segment_ids.reshape(-1)
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        if padding[begin] < 0:
            continue
        for place in range(int(batch.document_lengths[segment])):
            owner[begin + place] = (segment, place)
        assert begin + int(batch.document_lengths[segment]) <= end
        segment += 1
    mask = [[[False] * width for _ in range(width)] for _ in range(rows)]
    for row in range(rows):
        for query in range(width):
            for key in range(width):
                at, to = row * width + query, row * width + key
                if at in owner and to in owner:
                    (mine, now), (other, then) = owner[at], owner[to]
                    mask[row][query][key] = (
                        mine == other and then <= now and (not window or now - then < window)
                    )
                elif at not in owner:
                    mask[row][query][key] = at == to
    return mask


@settings(max_examples=settings.default.max_examples // 2)
@given(cases(), WINDOWS)
def test_the_dense_mask_is_what_boundaries_spell_out(case: Case, window: int | None) -> None:
    batch = case.collate()
    mask = batch.dense_mask(window)

    assert mask.dtype == np.bool_
    assert mask.shape == (*batch.input_ids.shape, batch.input_ids.shape[1])
    assert mask.tolist() == spelled_out(batch, window)


@given(cases(), WINDOWS)
def test_the_dense_mask_of_tensors_is_that_of_arrays(case: Case, window: int | None) -> None:
    batch = case.collate()
    mask = batch.to_torch().dense_mask(window)

    assert isinstance(mask, torch.Tensor)
    assert mask.dtype == torch.bool
    assert mask.tolist() == batch.dense_mask(window).tolist()


@settings(max_examples=settings.default.max_examples // 2)
@given(cases(), WINDOWS, st.booleans())
def test_the_mask_function_is_the_dense_mask(case: Case, window: int | None, tensors: bool) -> None:
    batch = case.collate()
    rows, width = batch.input_ids.shape
    function = (batch.to_torch() if tensors else batch).mask_function(window)
    row, query, key = torch.meshgrid(
        torch.arange(rows), torch.arange(width), torch.arange(width), indexing="ij"
    )

    assert function(row, 0, query, key).tolist() == batch.dense_mask(window).tolist()


def long_batch(layout: Any) -> PackedBatch:
    """Two rows of 384: documents that cross the blocks of 128, fill one, and leave padding."""
    lengths = [100, 200, 30, 128, 128, 50]
    return vl.collate(tokens_like(lengths), vl.pack(lengths, 384, "next_fit"), layout=layout)


def from_blocks(block_mask: Any, function: Any, rows: int, width: int) -> np.ndarray:
    """The positions that a block mask lets a kernel see: all of full blocks, the mask function's of partial ones."""
    size_q, size_k = block_mask.BLOCK_SIZE
    seen = np.zeros((rows, width, width), bool)
    query, key = torch.meshgrid(torch.arange(width), torch.arange(width), indexing="ij")
    parts = (
        (block_mask.kv_num_blocks, block_mask.kv_indices, False),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, True),
    )
    for row in range(rows):
        exact = function(torch.tensor(row), torch.tensor(0), query, key).numpy()
        for counts, indices, full in parts:
            for block in range(counts.shape[-1]):
                for other in indices[row, 0, block, : counts[row, 0, block]].tolist():
                    here = np.s_[block * size_q : (block + 1) * size_q, other * size_k : (other + 1) * size_k]
                    seen[row][here] = True if full else exact[here]
    return seen


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("window", [None, 1, 40, 150])
def test_the_block_mask_lets_a_kernel_see_what_the_dense_mask_says(layout: str, window: int | None) -> None:
    batch = long_batch(layout)
    rows, width = batch.input_ids.shape
    blocks = batch.to_torch().block_mask(window)
    dense = batch.dense_mask(window)

    assert np.array_equal(from_blocks(blocks, batch.mask_function(window), rows, width), dense)
    # A block is looked at only if something in it is seen.
    padded = -(-width // 128) * 128
    held = np.zeros((rows, padded, padded), bool)
    held[:, :width, :width] = dense
    blocked = held.reshape(rows, padded // 128, 128, padded // 128, 128).any(axis=(2, 4))
    assert np.array_equal(blocks.to_dense()[:, 0].numpy().astype(bool), blocked)
    assert 0 < blocked.mean() < 1


def test_flex_attention_gives_what_dense_attention_gives() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    batch = long_batch("rows").to_torch()
    rows, width = batch.input_ids.shape
    torch.manual_seed(0)
    query, key, value = (torch.randn(rows, 2, width, 8) for _ in range(3))
    flexible = torch.compiler.disable(flex_attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that flex_attention runs unfused without compilation
        ours = flexible(query, key, value, block_mask=batch.block_mask(40))
    mask = batch.dense_mask(40)[:, None]
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("window", [0, -1, "2"])
def test_a_window_below_one_is_refused_by_every_mask(window: int) -> None:
    batch = vl.collate([[1, 2, 3]], vl.pack([3], 4))
    for make in (batch.dense_mask, batch.mask_function, batch.block_mask):
        with pytest.raises(
            SettingError, match=f"sliding_window must be a whole number of at least 1, got {window!r}"
        ):
            make(window)
