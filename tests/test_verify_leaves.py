"""What vl.verify finds set it leaves so, and what runs is decided by the device that the model is on."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from typing import Any

import pytest
import torch
from hf_models import SMALL, make
from test_verify_odd_models import changed, first_cell, llama
from torch.nn.attention import flex_attention
from transformers import MixtralConfig

import varlen as vl
from varlen.adapters import hf
from varlen.verify.models.backends import computed_in


@pytest.mark.parametrize("before", [False, True])
def test_flex_attention_is_compiled_afterwards_as_before(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", before)
    cell = first_cell(llama(), "flex_attention", gradients=False)

    assert cell.verdict == "isolated", cell.reason
    assert flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is before


@pytest.mark.parametrize(
    ("backend", "package"),
    [("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn_interface")],
)
def test_on_a_cpu_plain_pytorch_stands_in_for_flash_attention_that_is_installed(
    backend: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = importlib.util.find_spec

    def found(name: str, *more: Any) -> Any:
        return importlib.machinery.ModuleSpec(name, None) if name == package else plain(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    cell = first_cell(llama(), backend, gradients=False)

    assert cell.verdict == "isolated", cell.reason
    assert cell.stand_in == ("flash_attn_varlen_func",)


def test_what_is_coupled_is_coupled_in_every_call_and_leaks_in_none_that_isolates() -> None:
    model = changed(llama(), lambda x: x + 0.1 * x.mean((0, 1)))
    report = vl.verify(model, backends=["sdpa"], layouts=["flat"], gradients=False)

    verdicts = {cell.call: cell.verdict for cell in report.calls}
    assert verdicts["position_ids, use_cache=False"] == "coupled"
    assert report.cells[0].verdict == "coupled"


def test_a_live_model_has_its_attention_and_experts_afterwards_as_before() -> None:
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=None)
    model = make(config, "eager", torch.float64)
    experts = model.config._experts_implementation_internal
    tried = vl.verify(
        model,
        backends=["sdpa", "varlen", "flash_attention_2"],
        layouts=["rows"],
        calls=False,
        gradients=False,
    )

    assert len(tried.cells) == 3
    assert hf.implementation(model) == "eager"
    assert model.config._experts_implementation_internal == experts != "eager"


def test_the_coarsest_dtype_of_all_products_says_how_far_rounding_may_go() -> None:
    fine, coarse = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)

    assert computed_in(lambda: (fine @ fine, coarse @ coarse, fine @ fine))[1] is torch.bfloat16
    assert computed_in(lambda: fine + fine)[1] is None
