"""Images that come with packed documents: in the order of their documents, whole, or refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.adapters.hf.vision_models import (
    IMAGE,
    VOCABULARY,
    alone,
    by_document,
    document,
    model_of,
    packed,
    tiny,
    with_images,
)
from transformers import LlamaConfig

import varlen as vl
from varlen.adapters import hf
from varlen.adapters.hf.vision import mrope_positions, reads_text_positions
from varlen.batch.packed import PackedBatch
from varlen.errors import DocumentsError, ModelError


def test_images_come_in_the_order_of_the_documents_whatever_their_packs() -> None:
    model = model_of("qwen2_vl", "sdpa")
    documents = with_images("qwen2_vl")
    packing = vl.pack([len(one.ids) for one in documents], capacity=40, max_documents=1)
    batch = vl.collate([one.ids for one in documents], packing, pack_ids=range(packing.num_packs)[::-1])
    by_number = {number: one.media for number, one in enumerate(documents) if one.media}

    with torch.no_grad():
        logits = model(**hf.model_inputs(batch, model, by_number)).logits

        assert batch.document_ids.tolist() == [5, 4, 3, 2, 1, 0]
        for number, found in by_document(batch, logits).items():
            torch.testing.assert_close(found, alone(model, documents[number]), rtol=0, atol=1e-12)


def one_image(change: Callable[[dict[str, Any]], Any]) -> tuple[PackedBatch, list[Any]]:
    """A text, and a document with an image whose arrays are changed."""
    documents = [document("qwen2_vl", [5], 1), document("qwen2_vl", [3, ("image", (1, 4, 4)), 2], 2)]
    return packed(documents, "flat"), [{}, change(dict(documents[1].media))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda media: None, "document 1 has 4 tokens of images and 0 of videos, and there are none"),
        (lambda media: {}, "document 1 has 4 tokens of images and 0 of videos, and there are none"),
        (lambda media: media | {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}, "has 2 images .* 1 runs"),
        (
            lambda media: media | {"image_grid_thw": torch.tensor([[1, 4, 6]])},
            "document 1: Qwen2VLModel.get_rope_index can't number its 11 tokens",
        ),
        (lambda media: media | {"mm_token_type_ids": torch.zeros(7)}, "has 7 entries, and 11"),
        (lambda media: media | {"video_grid_thw": torch.tensor([[1, 4, 4]])}, "1 images and 1 videos"),
    ],
)
def test_images_that_do_not_belong_to_the_tokens_are_refused(change: Any, message: str) -> None:
    batch, media = one_image(change)

    with pytest.raises(DocumentsError, match=message):
        hf.model_inputs(batch, model_of("qwen2_vl", "sdpa"), media)


def test_a_document_with_images_must_be_whole() -> None:
    one = document("qwen2_vl", [3, ("image", (1, 4, 4)), 8, ("image", (1, 2, 2))], 2)
    packing = vl.pack([len(one.ids)], capacity=10, overlong="split")
    by_ids = {name: values for name, values in one.media.items() if name != "mm_token_type_ids"}
    model = model_of("qwen2_vl", "sdpa")

    for pack in (0, 1):
        with pytest.raises(DocumentsError, match=r"must not be cut|must be whole"):
            hf.model_inputs(vl.collate([one.ids], packing, pack_ids=[pack]), model, [one.media])
        with pytest.raises(DocumentsError, match="must be whole"):
            hf.model_inputs(vl.collate([one.ids], packing, pack_ids=[pack]), model, [by_ids])


def test_an_image_behind_the_cut_would_be_numbered_from_there_and_is_refused() -> None:
    one = document("qwen2_vl", [12, ("image", (1, 4, 4))], 2)
    packing = vl.pack([len(one.ids)], capacity=10, overlong="split")
    media = {name: values for name, values in one.media.items() if name != "mm_token_type_ids"}

    with pytest.raises(DocumentsError, match="from token 10 on; documents with images must be whole"):
        hf.model_inputs(vl.collate([one.ids], packing, pack_ids=[1]), model_of("qwen2_vl", "sdpa"), [media])


def test_images_and_videos_of_one_token_are_refused_in_one_batch() -> None:
    documents = with_images("glm4v")
    batch = packed(documents, "flat")

    with pytest.raises(DocumentsError, match="marks images and videos with the same token"):
        hf.model_inputs(batch, model_of("glm4v", "sdpa"), [one.media for one in documents])


def test_a_model_without_m_rope_takes_no_images() -> None:
    from transformers import AutoModelForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_hidden_layers=1))
    batch, media = one_image(lambda media: media)

    assert not reads_text_positions(model)
    with pytest.raises(ModelError, match="doesn't number tokens in time, height and width"):
        hf.model_inputs(batch, model, media)
    assert hf.model_inputs(batch, model)["position_ids"].ndim == 2


@pytest.mark.filterwarnings("ignore")  # transformers' own, of sizes that it would choose otherwise
def test_a_model_that_numbers_audio_takes_text_alone() -> None:
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    given_config = tiny("qwen2_5_vl", "sdpa").config.to_dict()
    audio = {
        "d_model": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "output_dim": 32,
    }
    config = Qwen2_5OmniThinkerConfig(
        text_config=given_config["text_config"] | {"model_type": "qwen2_5_omni_text"},
        vision_config=given_config["vision_config"] | {"model_type": "qwen2_5_omni_vision_encoder"},
        audio_config=audio | {"output_dim": 32},
    )
    model = Qwen2_5OmniThinkerForConditionalGeneration(config).double().eval()
    texts = [document("qwen2_5_vl", [length], length) for length in (5, 9, 3)]
    batch, media = one_image(lambda media: media)

    with torch.no_grad():
        text_batch = packed(texts, "rows", capacity=12)
        for number, found in by_document(
            text_batch, model(**hf.model_inputs(text_batch, model)).logits
        ).items():
            torch.testing.assert_close(found, alone(model, texts[number]), rtol=0, atol=1e-12)
    with pytest.raises(ModelError, match="numbers tokens by more than images and videos"):
        hf.model_inputs(batch, model, media)


def test_what_the_model_does_not_take_is_named() -> None:
    batch, media = one_image(lambda media: media | {"pixels_of_depth": torch.zeros(1)})

    with pytest.raises(ModelError, match="takes no pixels_of_depth"):
        hf.model_inputs(batch, model_of("qwen2_vl", "sdpa"), media)


def test_padding_may_have_the_token_of_images() -> None:
    one = document("glm4v", [2, ("video", (2, 4, 4)), 3], 1)
    packing = vl.pack([len(one.ids)], capacity=32)
    batch = vl.collate([one.ids], packing, pad_id=IMAGE)

    positions = mrope_positions(batch, model_of("glm4v", "sdpa"), [one.media])

    assert (positions[:, 0, len(one.ids) :] == 0).all()
    assert positions[1:, 0, : len(one.ids)].max() > 0
