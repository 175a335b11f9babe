"""Attention of trees: each token sees the tokens before it in its rows, by rectangles that are merged."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.forests import rows_with_prefixes
from tests.support.kernel_stand_ins import KERNELS
from tests.support.rarely import examples
from torch.utils._python_dispatch import TorchDispatchMode

import varlen as vl
from varlen.adapters.hf.trees import spans_of
from varlen.attention.rules import LayerRules
from varlen.attention.trees import attend_in_trees
from varlen.errors import ModelError

HEADS = (4, 2)


def tensors(count, seed=0, dim=8):
    made = torch.Generator().manual_seed(seed)
    return [
        torch.randn(count, heads, dim, dtype=torch.float64, generator=made).requires_grad_()
        for heads in (HEADS[0], HEADS[1], HEADS[1])
    ]


def by_scores(query, key, value, seen, rules, sinks=None):
    """All scores of all tokens, where each sees what it may."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * rules.scale
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


@given(
    rows=rows_with_prefixes(),
    window=st.sampled_from([None, None, 1, 3, 20]),
    softcap=st.sampled_from([None, None, 0.7]),
    has_sinks=st.booleans(),
    extra=st.integers(0, 9),
    kernel=st.sampled_from([None, *KERNELS]),
)
@examples(80)
def test_output_and_gradients_are_those_of_all_scores(rows, window, softcap, has_sinks, extra, kernel):
    assume(any(rows))
    assume(kernel is None or window is None)
    # FlexAttention's own caps are rounded to float32.
    assume(kernel is None or softcap is None or (kernel != "flex" and KERNELS[kernel]().has_softcap))
    forest = vl.fold(rows)
    batch = vl.collate(forest, vl.pack_forest(forest, max(map(len, rows)) + extra))
    spans, rules = spans_of(batch), LayerRules(0.3, window, softcap)
    query, key, value = tensors(batch.input_ids.size)
    sinks = torch.linspace(-1, 1, HEADS[0], dtype=torch.float64).requires_grad_() if has_sinks else None
    real = torch.from_numpy(batch.forest_tokens.ravel() >= 0)

    seen = torch.block_diag(*torch.from_numpy(batch.visible(window))).bool()
    wanted = by_scores(query, key, value, seen, rules, sinks)[real]
    found = attend_in_trees(
        query, key, value, spans=spans, rules=rules, sinks=sinks, kernel=kernel and KERNELS[kernel]()
    )[real]

    assert torch.allclose(found, wanted, atol=1e-12, rtol=0)
    weight = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given_to = [query, key, value, *([] if sinks is None else [sinks])]
    for ours, theirs in zip(
        torch.autograd.grad((found * weight).sum(), given_to),
        torch.autograd.grad((wanted * weight).sum(), given_to),
    ):
        assert torch.allclose(ours, theirs, atol=1e-12, rtol=0)


def test_windows_of_long_segments_are_cut_into_blocks():
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 9, 700).tolist()
    rows = [trunk + rng.integers(0, 9, size).tolist() for size in (900, 30, 650)]
    forest = vl.fold(rows)
    batch = vl.collate(forest, vl.pack_forest(forest, forest.num_tokens))
    given_to = tensors(forest.num_tokens, dim=4)
    for window in (40, 600, 1200):
        rules = LayerRules(0.3, window)
        found = attend_in_trees(*given_to, spans=spans_of(batch), rules=rules)
        wanted = by_scores(*given_to, torch.from_numpy(batch.visible(window)[0]), rules)
        assert torch.allclose(found, wanted, atol=1e-12, rtol=0)


class Calls(TorchDispatchMode):
    """Counts the calls of operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_no_key_or_value_is_copied_by_index_and_attention_is_a_call_for_each_rectangle():
    forest = vl.fold([[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6], [7]])
    batch = vl.collate(forest, vl.pack_forest(forest, forest.num_tokens))
    with Calls() as calls:
        out = attend_in_trees(*tensors(forest.num_tokens), spans=spans_of(batch), rules=LayerRules(0.3))
        out.sum().backward()
    by_index = ("index", "index_select", "gather", "take", "embedding", "index_put", "index_put_", "scatter")
    assert not [name for name in calls.counts if name in by_index]
    segments, forks = 6, 2
    assert calls.counts["_scaled_dot_product_flash_attention_for_cpu"] == segments + forks


def test_a_call_for_each_depth_and_one_for_all_diagonals():
    forest = vl.fold([[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6], [7], [8, 9], [8, 1]])
    spans = spans_of(vl.collate(forest, vl.pack_forest(forest, forest.num_tokens)))
    assert len(spans.by_depth) == 2
    for lengths in spans.by_depth:
        assert sum(lengths.queries) == sum(lengths.keys) == forest.num_tokens
    # A chain without a fork is one segment.
    chain = vl.fold([[1, 2, 3, 4], [1, 2], [1, 2, 3]])
    alone = spans_of(vl.collate(chain, vl.pack_forest(chain, 4)))
    assert alone.by_depth == []
    assert alone.segments == [(0, 4, 4)]


def test_dropout_and_both_directions_are_refused():
    spans = spans_of(vl.collate(forest := vl.fold([[1, 2]]), vl.pack_forest(forest, 2)))
    for rules in (LayerRules(0.3, dropout=0.1), LayerRules(0.3, is_causal=False)):
        with pytest.raises(ModelError, match="causal attention without dropout"):
            attend_in_trees(*tensors(2), spans=spans, rules=rules)
