"""Gradients of queries don't depend on how many blocks of keys they are summed over."""

import pytest
import torch
from tests.support.kernel_stand_ins import SCALE, document

from varlen.attention import tiles
from varlen.attention.rules import LayerRules

LENGTH, START = 1024, 960


def by_query(dtype: torch.dtype, rules: LayerRules) -> torch.Tensor:
    query, key, value = (x.to(dtype) for x in document(LENGTH, (4, 2), seed=3))
    query, gradient = (
        query[:, :, START:],
        torch.randn_like(query[:, :, START:], dtype=torch.float64).to(dtype),
    )
    merged = tiles.forward(query, (key, value), START, rules)
    earlier = tuple(
        torch.zeros(1, 2, START, 8, dtype=torch.promote_types(dtype, torch.float32)) for _ in "kv"
    )
    found, _, _ = tiles.backward(
        gradient, query, (key, value), merged, START, rules, earlier=earlier, own=None
    )
    return found.double()


@pytest.mark.parametrize(
    "rules", [LayerRules(SCALE), LayerRules(SCALE, softcap=2.0), LayerRules(SCALE, window=900)]
)
def test_sums_over_many_blocks_are_as_exact_as_over_few(monkeypatch, rules):
    def error(block: int, keys: int) -> float:
        monkeypatch.setattr(tiles, "BLOCK", block)
        monkeypatch.setattr(tiles, "BACKWARD_KEYS", keys)
        torch.manual_seed(0)
        true = by_query(torch.float64, rules)
        torch.manual_seed(0)
        return float((by_query(torch.bfloat16, rules) - true).norm() / true.norm())

    assert error(16, 16) < 1.25 * error(LENGTH, LENGTH)
