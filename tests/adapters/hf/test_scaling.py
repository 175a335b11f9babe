"""What models scale by the row or by the longest document: refused where a document wouldn't be what it is alone."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.hf_models import GROUPED, VOCABULARY, make
from transformers import Llama4TextConfig, Ministral3Config, Phi3Config

import varlen as vl
from varlen.adapters import hf
from varlen.errors import ModelError

ORIGINAL = 8
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 8.0,
}


def longrope() -> Any:
    plain = {name: value for name, value in GROUPED.items() if name != "head_dim"}
    config = Phi3Config(**plain, rope_parameters=dict(LONGROPE), original_max_position_embeddings=ORIGINAL)
    return make(config, "sdpa")


def llama4(floor_scale: int = 8) -> Any:
    config = Llama4TextConfig(
        **GROUPED,
        num_local_experts=2,
        interleave_moe_layer_step=1,
        intermediate_size_mlp=64,
        no_rope_layers=[0, 0],
        attention_chunk_size=64,
        attn_temperature_tuning=True,
        floor_scale=floor_scale,
        attn_scale=5.0,
    )
    model = make(config, "sdpa")
    model.set_experts_implementation("eager")
    return model


def batch_of(*lengths: int, layout: Any = "flat") -> tuple[list[Any], Any]:
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, VOCABULARY, length).astype(np.int32) for length in lengths]
    return documents, vl.collate(documents, vl.pack(lengths, 64, "next_fit"), layout=layout)


def furthest(model: Any, documents: list[Any], arguments: dict[str, Any]) -> float:
    """How far the logits of documents laid end to end are from those of each alone."""
    model.eval()
    with torch.no_grad():
        packed = model(**{name: v for name, v in arguments.items() if name != "labels"}).logits[0]
        start, worst = 0, 0.0
        for document in documents:
            alone = model(**hf.plain_inputs(torch.as_tensor(document).long()[None], model)).logits[0]
            worst = max(worst, float((packed[start : start + len(document)] - alone).abs().max()))
            start += len(document)
    return worst


def arguments_unchecked(batch: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments as they were before batches were checked for it."""
    with monkeypatch.context() as patched:
        patched.setattr("varlen.adapters.hf.inputs.check_scaled", lambda *_: None)
        return hf.model_inputs(batch, model)


def test_longrope_takes_the_frequencies_of_the_longest_document_and_is_refused_where_they_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = longrope()
    documents, batch = batch_of(5, 20)

    assert furthest(model, documents, arguments_unchecked(batch, model, monkeypatch)) > 1e-3
    with pytest.raises(ModelError, match=r"longrope.* 1 documents of up to 8 tokens.* and 1 longer ones"):
        hf.model_inputs(batch, model)


@pytest.mark.parametrize("lengths", [(5, 8), (9, 20)])
def test_longrope_takes_documents_of_one_side(lengths: tuple[int, ...]) -> None:
    model = longrope()
    documents, batch = batch_of(*lengths)

    assert furthest(model, documents, hf.model_inputs(batch, model)) < 1e-6


def test_the_way_out_of_longrope_gives_all_documents_what_they_have_alone() -> None:
    model = longrope()
    documents, batch = batch_of(5, 20, 1)

    model.config.rope_parameters["original_max_position_embeddings"] = 1

    assert furthest(model, documents, hf.model_inputs(batch, model)) < 1e-6


def test_llama_4_scales_by_the_place_in_the_row_and_is_refused_where_that_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = llama4()
    documents, batch = batch_of(5, 6)

    assert furthest(model, documents, arguments_unchecked(batch, model, monkeypatch)) > 1e-3
    with pytest.raises(
        ModelError, match=r"place in its row \(attn_temperature_tuning, by steps of 8\), and 4 tokens"
    ):
        hf.model_inputs(batch, model)
    assert hf.model_inputs(batch_of(20)[1], model)  # alone in its row
    documents, batch = batch_of(3, 4)
    assert furthest(model, documents, hf.model_inputs(batch, model)) < 1e-5
    documents, batch = batch_of(5, 6)
    wide = llama4(floor_scale=8192)
    assert furthest(wide, documents, hf.model_inputs(batch, wide)) < 1e-5


def test_scales_that_go_by_positions_stay_right() -> None:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 4,
    }
    config = Ministral3Config(**GROUPED, rope_parameters=rope)
    model = make(config, "sdpa")
    documents, batch = batch_of(5, 20, 3)

    assert furthest(model, documents, hf.model_inputs(batch, model)) < 1e-6
