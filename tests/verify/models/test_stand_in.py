"""The stand-in for FlashAttention has the form that transformers unpacks, in each version that we support."""

import pytest
import torch
from transformers import modeling_flash_attention_utils as flash

import varlen as vl
from varlen.verify.models import backends


def test_a_transformers_that_knows_the_cache_kernel_unpacks_its_arguments_too(monkeypatch):
    monkeypatch.setattr(flash, "_process_with_kvcache_kwargs_fn", None, raising=False)
    with backends.flash_attention():
        (dense, varlen, cached, *padding), (process, process_cached) = flash.lazy_import_flash_attention(
            "any"
        )
    assert callable(dense)
    assert callable(varlen)
    assert cached is None
    assert len(padding) == 2
    assert callable(process)
    assert process_cached() == {}


def test_an_earlier_transformers_unpacks_one_function(monkeypatch):
    monkeypatch.delattr(flash, "_process_with_kvcache_kwargs_fn", raising=False)
    with backends.flash_attention():
        (dense, varlen, cached, *padding), process = flash.lazy_import_flash_attention("any")
    assert callable(dense)
    assert callable(varlen)
    assert cached is None
    assert len(padding) == 2
    assert callable(process)


def test_what_transformers_finds_is_put_back():
    found = flash.lazy_import_flash_attention
    with backends.flash_attention():
        assert flash.lazy_import_flash_attention is not found
    assert flash.lazy_import_flash_attention is found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels that compute it run on CUDA")
def test_on_cuda_it_says_segments_where_the_tokens_are():
    report = vl.verify(
        "llama", backends=["flash_attention_2"], device="cuda", dtype=torch.bfloat16, calls=False
    )

    assert {cell.verdict for cell in report.cells} == {"isolated"}
