"""Packed documents with images and videos: each computes what it computes alone, in every family with M-RoPE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapters.hf.vision_models import (
    FAMILIES,
    MARKED_ALIKE,
    Document,
    alone,
    by_document,
    document,
    model_of,
    packed,
    tiny,
    with_images,
)
from torch.nn.functional import cross_entropy

import varlen as vl
from varlen.adapters import hf
from varlen.adapters.hf.vision import mrope_positions
from varlen.batch.packed import Layout
from varlen.errors import ModelError
from varlen.verify.models import backends
from varlen.verify.models.isolation import check_isolation

LAYOUTS: tuple[Layout, ...] = ("rows", "flat")
GRIDS = st.tuples(st.just(1), st.sampled_from([2, 4, 6]), st.sampled_from([2, 4]))
VIDEOS = st.tuples(st.sampled_from([2, 4]), st.just(4), st.sampled_from([2, 4]))


def rounding(family: str, attention: str) -> float:
    """Largest difference of logits about 1: eager attention takes its softmax in float32, GLM routes in it."""
    return 2e-6 if attention == "eager" or family == "glm4v_moe" else 1e-12


def of_family(family: str) -> list[list[Document]]:
    """The same, in as many batches as the family needs."""
    documents = with_images(family)
    return [documents[:4], [documents[3], *documents[4:]]] if family in MARKED_ALIKE else [documents]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_document_computes_what_it_computes_alone(
    family: str, attention: str, layout: Layout
) -> None:
    model = model_of(family, attention)
    for documents in of_family(family):
        batch = packed(documents, layout, capacity=40)

        inputs = hf.model_inputs(batch, model, [one.media for one in documents])
        with torch.no_grad():
            logits = model(**inputs).logits
            expected = [alone(model, one) for one in documents]

        assert vl.check_batch(inputs, model).ok
        assert batch.num_rows == (1 if layout == "flat" else len(batch.pack_ids))
        for number, found in by_document(batch, logits).items():
            torch.testing.assert_close(found, expected[number], rtol=0, atol=rounding(family, attention))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_changing_one_document_moves_no_other_by_a_bit(family: str, attention: str) -> None:
    model = model_of(family, attention)
    documents = of_family(family)[0]
    changed = list(documents)
    changed[1] = document(family, [3, ("image", (1, 4, 6)), 4], 99)

    logits = []
    for given_documents in (documents, changed):
        batch = packed(given_documents, "flat")
        with torch.no_grad():
            inputs = hf.model_inputs(batch, model, [one.media for one in given_documents])
            logits.append(by_document(batch, model(**inputs).logits))

    for number, found in logits[0].items():
        assert torch.equal(found, logits[1][number]) is (number != 1)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_gradients_are_those_of_one_by_one(family: str) -> None:
    model = model_of(family, "sdpa")
    documents = of_family(family)[0]
    batch = packed(documents, "rows", capacity=40)

    def gradients(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits[:-1], labels[1:], reduction="sum")

    inputs = hf.model_inputs(batch, model, [one.media for one in documents])
    labels = inputs.pop("labels").flatten()
    together = gradients(loss(model(**inputs).logits.flatten(0, 1), labels))
    losses = [loss(alone(model, one), torch.from_numpy(one.ids).long()) for one in documents]
    one_by_one = gradients(torch.stack(losses).sum())

    assert together.keys() == one_by_one.keys()
    for name, expected in one_by_one.items():
        torch.testing.assert_close(
            together[name], expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max() + 1)
        )
    model.zero_grad(set_to_none=True)


PARTS = st.lists(
    st.integers(1, 4) | st.tuples(st.just("image"), GRIDS) | st.tuples(st.just("video"), VIDEOS),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12)
@given(parts=st.lists(PARTS, min_size=1, max_size=4), layout=st.sampled_from(LAYOUTS))
def test_positions_are_those_that_the_family_gives_each_document_alone(
    family: str, parts: list[list[Any]], layout: Layout
) -> None:
    model = model_of(family, "sdpa")
    kinds = ("image",) if family in MARKED_ALIKE else ("image", "video")
    parts = [[part for part in some if isinstance(part, int) or part[0] in kinds] or [1] for some in parts]
    documents = [document(family, some, seed) for seed, some in enumerate(parts)]
    batch = packed(documents, layout, capacity=max(len(one.ids) for one in documents))

    positions = mrope_positions(batch, model, [one.media for one in documents])

    assert positions.dtype == torch.int64
    assert positions.shape == (4, *batch.input_ids.shape)
    assert (positions[:, torch.from_numpy(batch.segment_ids) < 0] == 0).all()
    for number, found in by_document(batch, positions.permute(1, 2, 0)).items():
        one = documents[number]
        assert found[:, 0].tolist() == list(range(len(one.ids)))
        grids = {name: values for name, values in one.media.items() if not name.startswith(("pixel", "mm"))}
        expected, _ = model.model.get_rope_index(
            input_ids=torch.from_numpy(one.ids).long()[None],
            mm_token_type_ids=torch.from_numpy(one.kinds)[None],
            **grids,
        )
        assert found[:, 1:].T.tolist() == expected[:, 0].tolist()


def test_without_the_text_positions_in_front_documents_leak() -> None:
    model = model_of("qwen2_5_vl", "sdpa")
    batch = packed([document("qwen2_5_vl", [5], seed) for seed in range(3)], "flat")
    inputs = {"input_ids": torch.from_numpy(batch.input_ids).long(), "use_cache": False}
    moved = inputs | {"input_ids": inputs["input_ids"].clone()}
    moved["input_ids"][0, 0] = 7
    positions = mrope_positions(batch, model)

    with torch.no_grad():
        for rows, leaks in ((positions[1:], True), (positions[0], True), (positions, False)):
            before, after = (model(**call, position_ids=rows).logits for call in (inputs, moved))
            assert torch.equal(before[0, 5:], after[0, 5:]) is not leaks


@pytest.mark.parametrize("family", FAMILIES)
def test_text_alone_needs_no_images_and_passes_the_check(family: str) -> None:
    model = model_of(family, "sdpa")
    documents = [document(family, [length], length) for length in (5, 9, 1, 12)]
    batch = packed(documents, "rows", capacity=16)

    inputs = hf.model_inputs(batch, model)

    assert inputs["position_ids"].shape == (4, *batch.input_ids.shape)
    assert vl.check_batch(inputs, model).ok
    with torch.no_grad():
        for number, found in by_document(batch, model(**inputs).logits).items():
            expected = alone(model, documents[number])
            torch.testing.assert_close(found, expected, rtol=0, atol=rounding(family, "sdpa"))


def test_tokens_of_images_without_any_images_are_text_to_the_model_and_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny("qwen2_vl", "sdpa")
    documents = [document("qwen2_vl", [3, ("image", (1, 4, 4)), 2], seed) for seed in (1, 2)]
    bare = [Document(ids=one.ids, kinds=one.kinds) for one in documents]
    batch = packed(documents, "flat")

    with torch.no_grad():
        for _ in range(2):
            logits = model(**hf.model_inputs(batch, model)).logits
        for number, found in by_document(batch, logits).items():
            torch.testing.assert_close(found, alone(model, bare[number]), rtol=0, atol=1e-12)
    assert [record.getMessage().split(",")[0] for record in caplog.records if "varlen" in record.name] == [
        "the batch holds 8 tokens of images or videos and no images"
    ]


def test_a_vision_language_model_is_proved_on_text() -> None:
    report = check_isolation(tiny("qwen3_vl", "sdpa"))

    assert report.verdict == "isolated", str(report)


def test_our_attention_takes_the_text_and_sdpa_the_images() -> None:
    documents = of_family("qwen2_vl")[0]
    media = [one.media for one in documents]
    batch = packed(documents, "rows", capacity=40)
    model = tiny("qwen2_vl", "varlen")

    with pytest.raises(ModelError, match=r'vision part .* is set to "varlen" as well'):
        hf.model_inputs(batch, model, media)
    model.set_attn_implementation({"text_config": "varlen", "vision_config": "sdpa"})
    with torch.no_grad():
        logits = model(**hf.model_inputs(batch, model, media)).logits
        sdpa = model_of("qwen2_vl", "sdpa")
        for number, found in by_document(batch, logits).items():
            torch.testing.assert_close(found, alone(sdpa, documents[number]), rtol=0, atol=1e-9)


def test_boundaries_reach_flash_attention_in_the_text_and_not_the_images() -> None:
    documents = of_family("qwen2_vl")[0]
    media = [one.media for one in documents]
    sdpa, model = model_of("qwen2_vl", "sdpa"), tiny("qwen2_vl", "sdpa")
    # transformers refuses the name where the package isn't there.
    model.config.text_config._attn_implementation_internal = "flash_attention_2"

    for layout in LAYOUTS:
        batch = packed(documents, layout, capacity=40)
        with backends.flash_attention(), torch.no_grad():
            inputs = hf.model_inputs(batch, model, media)
            logits = model(**inputs).logits
        assert "cu_seq_lens_q" in inputs
        assert "attention_mask" not in inputs
        with torch.no_grad():
            for number, found in by_document(batch, logits).items():
                torch.testing.assert_close(found, alone(sdpa, documents[number]), rtol=0, atol=1e-9)


def test_recurrent_layers_take_images_where_their_kernels_are_told_boundaries() -> None:
    documents = of_family("qwen3_5")[0]
    model = tiny("qwen3_5", "sdpa")
    batch = packed(documents, "flat")

    with backends.recurrence(model), torch.no_grad():
        logits = model(**hf.model_inputs(batch, model, [one.media for one in documents])).logits
    with torch.no_grad():
        for number, found in by_document(batch, logits).items():
            # Their recurrence is computed in float32.
            torch.testing.assert_close(found, alone(model, documents[number]), rtol=0, atol=2e-6)
