"""The report of vl.verify: its text, its JSON, the attention it draws, and the kernels it names."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hf_models import verified

import varlen as vl
from varlen.verify.models.backends import AttentionPicture, kernels_of

FUSED = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(scope="module")
def llama() -> vl.VerifyReport:
    return verified("llama")


def test_the_attention_between_documents_is_drawn(llama: vl.VerifyReport) -> None:
    picture = llama.attention
    assert picture is not None
    kept, without = picture.between(picture.kept_apart), picture.between(picture.without)  # type: ignore[arg-type]
    outside = ~np.eye(len(kept), dtype=bool)
    assert (kept[outside] == 0).all()
    assert (without[np.tril_indices(len(without), -1)] > 0).all()
    assert (kept.diagonal() > 0).all()
    assert str(picture).splitlines()[1].startswith("█ · · ·")


def test_a_shade_is_a_dot_only_for_exactly_nothing() -> None:
    weights = np.array([[1.0, 1e-30], [0.0, 0.5]], np.float32)
    picture = AttentionPicture(owner=np.array([0, 1]), kept_apart=weights, without=None)

    assert [line.split() for line in str(picture).splitlines()[1:]] == [["█", "░"], ["·", "▓"]]


def test_the_report_reads_well_and_is_json(llama: vl.VerifyReport) -> None:
    text = str(llama)
    assert text.startswith("isolated: LlamaForCausalLM (llama), 24,800 weights, float32 on cpu")
    for words in (
        "isolated with varlen's arguments; 6 of the other ways of calling it leak",
        "flash_attention_2 *",
        "* plain PyTorch stood in for flash_attn_varlen_func",
        "… use_cache=True",
        "tried on 10 documents of 163 tokens, the longest of 52 tokens: rows [4, 52], flat [1, 163]",
        "eager: position_ids=int64 [4, 52], use_cache=False, attention_mask=float32 [4, 1, 52, 52]",
        "varlen, flash_attention_2: position_ids=int64 [4, 52], use_cache=False, cu_seq_lens_q=int32",
        "flex_attention: gradients weren't compared: FlexAttention does not support backward on CPU",
        "leaks/isolated",
        "a/b: a in rows, b in flat",
        'fix: del batch["attention_mask"]',
        "Attention between the documents of a row",
    ):
        assert words in text, text
    assert max(map(len, text.splitlines())) <= 118
    found = json.loads(json.dumps(llama.to_json()))
    assert found["verdict"] == "isolated"
    assert found["cells"][0]["isolation"]["movements"]["largest_difference"] == 0
    assert len(found["calls"]) == len(llama.calls) == 8 * 5 * 2


def test_a_cell_that_was_not_tried_is_named_in_the_error(llama: vl.VerifyReport) -> None:
    with pytest.raises(
        KeyError, match="flash_attention_3 rows wasn't tried; there are eager rows, eager flat"
    ):
        llama.cell("flash_attention_3")


def test_kernels_are_named_by_a_run() -> None:
    q = torch.ones(1, 2, 4, 8)

    assert kernels_of(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))[1] == ((FUSED, 1),)
    assert kernels_of(lambda: (q @ q.mT).softmax(-1) @ q)[1] == (("softmax", 1),)
    assert kernels_of(lambda: q + q)[1] == ()
