"""vl.verify on gradients: those of weights with small ones count as much, and no backward is no proof."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.verify.models.test_odd_models import Backward, changed, first_cell, llama


def test_a_wrong_gradient_is_found_where_all_gradients_are_small() -> None:
    def wrong_where_packed(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 + 0.05 * (len(gradient) > 1))

    clean = first_cell(changed(llama(), lambda x: 1e-2 * x))
    cell = first_cell(changed(llama(), lambda x: 1e-2 * Backward.apply(x, wrong_where_packed)))

    assert clean.verdict == "isolated", clean.reason
    assert cell.verdict == "leaks"
    assert cell.gradients.worst.startswith(
        ("model.layers.1.mlp.", "model.layers.1.post_attention_layernorm.")
    )
    assert cell.gradients.difference == pytest.approx(0.05, rel=0.01)


@pytest.fixture
def forward_only() -> Iterator[Any]:
    """An operator without a backward, of which PyTorch only warns, and goes on."""
    library = torch.library.Library("varlen_tests", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: 2 * x, "CPU")
    yield torch.ops.varlen_tests.doubled
    library._destroy()


def test_an_operator_without_a_backward_is_told_and_not_compared(forward_only: Any) -> None:
    cell = first_cell(changed(llama(), forward_only))

    assert cell.verdict == "isolated"
    assert cell.gradients.difference is None
    assert (
        "no backward: varlen_tests::doubled: an autograd kernel was not registered" in cell.gradients.reason
    )
