"""Recurrent and convolving layers, and positions that don't begin at 0: what they are told keeps documents apart."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import SMALL, VOCABULARY, furthest, gradients, make
from rarely import mostly
from torch.nn.functional import cross_entropy
from transformers import RobertaConfig

import varlen as vl
from varlen.adapters import hf
from varlen.adapters.hf.mixing import segment_arguments
from varlen.batch.packed import PackedBatch
from varlen.errors import ModelError
from varlen.model_families import FAMILIES
from varlen.verify.models.backends import recurrence
from varlen.verify.models.isolation import check_isolation
from varlen.verify.models.loading import tiny_model

LENGTHS = (9, 21, 1, 13, 30, 6, 17, 2)
BY_NUMBERS = {name for name, family in FAMILIES.items() if family.boundaries == "numbers"}
BY_ENDS_TOO = {name for name, family in FAMILIES.items() if family.boundaries == "ends"}
IN_ROWS, IN_ONE_ROW = sorted(BY_NUMBERS), sorted(BY_NUMBERS | BY_ENDS_TOO)


def documents() -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in LENGTHS]


def packed(layout: Any) -> PackedBatch:
    capacity = 52 if layout == "rows" else sum(LENGTHS)
    return vl.collate(documents(), vl.pack(LENGTHS, capacity=capacity, method="next_fit"), layout=layout)


LAYOUTS = [(f, "flat") for f in IN_ONE_ROW] + [(f, "rows") for f in IN_ROWS]
CELLS = [(*one, attention) for one in LAYOUTS for attention in ("sdpa", "varlen")]
BY_VARLEN = ("qwen4_exp_text", "bamba", "qwen3_next")


@pytest.mark.parametrize(
    ("family", "layout", "attention"),
    mostly([one for one in CELLS if one[2] == "sdpa" or one[0] in BY_VARLEN], CELLS),
)
def test_told_boundaries_keep_documents_apart(family: str, layout: Any, attention: str) -> None:
    model = tiny_model(family)
    hf.register()
    model.set_attn_implementation(attention)
    with recurrence(model) as names:
        report = check_isolation(model, packed(layout))

    assert names
    if (family, attention) == ("qwen4_exp_text", "varlen"):
        assert report.verdict == "refuses"
        assert "selects by a mask which tokens are attended to" in report.reason
    else:
        assert report.verdict == "isolated", str(report)


@pytest.mark.parametrize("family", IN_ONE_ROW)
def test_loss_and_gradients_are_those_of_documents_one_by_one(family: str) -> None:
    model, batch = tiny_model(family, attention="sdpa"), packed("flat")
    with recurrence(model):
        arguments = hf.model_inputs(batch, model)
        labels = arguments.pop("labels")
        logits = model(**arguments).logits
        ours = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        ours_by_weight = gradients(model, ours)
    alone = torch.zeros(())
    for document in documents():
        tokens = torch.as_tensor(document).long()
        logits = model(**hf.plain_inputs(tokens[None], model)).logits[0]
        alone = alone + cross_entropy(logits[:-1], tokens[1:], reduction="sum")
    theirs = gradients(model, alone)

    assert ours.item() == pytest.approx(alone.item(), rel=1e-5)
    ours_by_weight = {name: ours_by_weight[name] for name in theirs}
    assert furthest(ours_by_weight, theirs) < 2e-3


@pytest.mark.parametrize(
    ("family", "missing"),
    [*((family, "seq_idx") for family in IN_ONE_ROW), *((f, "cu_seq_lens_q") for f in sorted(BY_ENDS_TOO))],
)
def test_each_argument_is_needed(family: str, missing: str) -> None:
    def without(batch: PackedBatch, model: Any) -> dict[str, Any]:
        return {name: value for name, value in hf.model_inputs(batch, model).items() if name != missing}

    model = tiny_model(family)
    with recurrence(model):
        report = check_isolation(model, packed("flat"), inputs=without)

    assert report.verdict == "leaks", str(report)


def test_without_the_kernels_transformers_refuses_in_a_sentence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = check_isolation(tiny_model("bamba"), packed("flat"))

    if report.verdict != "isolated":  # where the kernels are installed, they run
        assert report.verdict == "refuses"
        assert "can't keep packed sequences apart without `causal_conv1d`" in report.reason


@pytest.mark.parametrize("family", ["jamba", "kimi_linear", "mamba", "mamba2", "zamba", "minimax", "rwkv"])
def test_recurrent_families_that_take_no_boundaries_are_refused(family: str) -> None:
    with pytest.raises(ModelError, match=r"layers of kind|recurrent state"):
        hf.model_inputs(packed("flat"), tiny_model(family))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["axk2", "deepseek_v32", "glm_moe_dsa"])
def test_tokens_are_selected_within_their_document(family: str, attention: str) -> None:
    report = check_isolation(tiny_model(family, attention=attention), packed("rows"))

    assert report.verdict == "isolated", str(report)


def test_segments_are_numbered_in_each_row_padding_included() -> None:
    ends = torch.tensor([0, 2, 3, 5, 9, 10], dtype=torch.int32)

    found = segment_arguments("bamba", ends, 2, 5)["seq_idx"]

    assert found.dtype == torch.int32
    assert found.tolist() == [[0, 0, 1, 2, 2], [0, 0, 0, 0, 1]]
    assert segment_arguments("llama", ends, 2, 5) == {}


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_positions_begin_behind_that_of_padding_where_it_has_one(attention: str, layout: Any) -> None:
    config = RobertaConfig(**SMALL | {"pad_token_id": 1}, is_decoder=True)
    model, batch = make(config, attention, torch.float32), packed(layout)

    report = check_isolation(model, batch)

    assert report.verdict == "isolated", str(report)
    assert int(hf.model_inputs(batch, model)["position_ids"].min()) == 2


def test_positions_that_padding_takes_up_are_not_there_for_documents() -> None:
    config = RobertaConfig(**SMALL | {"pad_token_id": 1, "max_position_embeddings": 31}, is_decoder=True)

    with pytest.raises(ModelError, match=r"longest document has 30 tokens, but .* has 29 positions"):
        hf.model_inputs(packed("flat"), make(config, "sdpa"))
