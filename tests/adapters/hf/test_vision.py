"""Packed documents with images and videos: each computes what it does alone, and media come whole and in order."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaConfig

import varlen as vl
from varlen.adapters import hf
from varlen.adapters.hf.inputs import mrope_positions, reads_text_positions
from varlen.batch.packed import Layout, PackedBatch
from varlen.errors import DocumentsError, ModelError
from varlen.verify.models import backends
from varlen.verify.models.isolation import check_isolation

IMAGE, VIDEO, START, END = 90, 91, 92, 93
VOCABULARY = 97

_TEXT = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]},
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
MARKED_ALIKE = ("glm4v", "glm46v", "glm4v_moe", "glm_ocr")
"""Families that mark images and videos with the same token, and take one kind in a call."""
_EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
# Of each family what differs from the tiny sizes above.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"vision_config": {"embed_dim": 16, "hidden_size": 32}},
    "qwen2_5_vl": {"vision_config": {"window_size": 8, "fullatt_block_indexes": [0], "tokens_per_second": 2}},
    "qwen3_vl": {"vision_config": {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}},
    "qwen3_vl_moe": {
        "text_config": _EXPERTS,
        "vision_config": {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    },
    "glm4v": {"vision_config": {"image_size": 16}},
    "glm46v": {"vision_config": {"image_size": 16}},
    # These two turn half of a head only.
    "glm4v_moe": {"text_config": _EXPERTS | {"head_dim": 16}, "vision_config": {"image_size": 16}},
    "glm_ocr": {"vision_config": {"image_size": 16}},
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [16, 16],
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
        },
        "vision_config": {"temporal_merge_size": 2, "hidden_size": 16},
    },
}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": {
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "vision_config": {"num_position_embeddings": 64},
    }
}
"""A family whose recurrent kernels, which need a GPU, are told boundaries."""


def tiny(family: str, attention: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Return a tiny model with weights large enough that every token matters to those that see it."""
    hf.register()
    given = (FAMILIES | RECURRENT)[family]
    config = AutoConfig.for_model(
        family,
        text_config=copy.deepcopy(_TEXT | given.get("text_config", {})),
        vision_config=copy.deepcopy(_VISION | given.get("vision_config", {})),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **{
            f"{kind}_{end}_token_id": token
            for kind in ("image", "video", "vision")
            for end, token in (("start", START), ("end", END))
        },
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    model.set_attn_implementation(attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    if "moe" in family:
        model.set_experts_implementation("eager")  # the grouped product takes no float64
    return model.to(dtype).eval()


@dataclass(frozen=True, kw_only=True)
class Document:
    """Tokens, what kinds they are, and the images that stand among them."""

    ids: np.ndarray
    kinds: np.ndarray
    media: dict[str, torch.Tensor] = field(default_factory=dict)


def document(family: str, parts: list[Any], seed: int = 0) -> Document:
    """Return a document of runs of text, given as lengths, and images and videos, given as (kind, grid)."""
    rng, patch = np.random.default_rng(seed), 3 * 2 * 2 * (1 if family == "ernie4_5_vl_moe" else 2)
    ids: list[int] = []
    kinds: list[int] = []
    media: dict[str, list[Any]] = {}
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(1, IMAGE, part).tolist()
            kinds += [0] * part
            continue
        kind, (t, h, w) = part
        is_video = kind == "video"
        frames = t if is_video else 1
        # Qwen3-VL and its kin set the frames of a video apart; ERNIE joins two of them into one.
        apart = is_video and family not in ("qwen2_vl", "qwen2_5_vl", "ernie4_5_vl_moe")
        merged = t // 2 if is_video and family == "ernie4_5_vl_moe" else frames
        run = h // 2 * (w // 2) * (1 if apart else merged)
        for _ in range(frames if apart else 1):
            token = VIDEO if is_video and family not in MARKED_ALIKE else IMAGE
            ids += [START, *[token] * run, END]
            kinds += [0, *[2 if is_video else 1] * run, 0]
        pixels = torch.from_numpy(rng.standard_normal((t * h * w, patch)))
        media.setdefault("pixel_values_videos" if is_video else "pixel_values", []).append(pixels)
        media.setdefault("video_grid_thw" if is_video else "image_grid_thw", []).append(
            torch.tensor([[t, h, w]])
        )
        if is_video and family == "qwen2_5_vl":
            media.setdefault("second_per_grid_ts", []).append(torch.tensor([1.5]))
    joined = {name: torch.cat(values) for name, values in media.items()}
    if joined:
        joined["mm_token_type_ids"] = torch.tensor([kinds])
    return Document(ids=np.array(ids, np.int32), kinds=np.array(kinds), media=joined)


def packed(documents: list[Document], layout: Layout, capacity: int = 64) -> PackedBatch:
    packing = vl.pack([len(one.ids) for one in documents], capacity=capacity, method="next_fit")
    return vl.collate([one.ids for one in documents], packing, layout=layout)


def alone(model: Any, one: Document) -> torch.Tensor:
    """Return the logits of a document by itself, called as transformers' own guides call the model."""
    ids = torch.from_numpy(one.ids).long()[None]
    kinds = {"mm_token_type_ids": torch.from_numpy(one.kinds)[None]} if one.media else {}
    return model(input_ids=ids, use_cache=False, **{**one.media, **kinds}).logits[0]


@cache
def model_of(family: str, attention: str) -> Any:
    """Return one for several tests, which don't change it."""
    return tiny(family, attention)


def with_images(family: str) -> list[Document]:
    """Text, one image, several, and videos."""
    documents = [
        document(family, [5], 1),
        document(family, [3, ("image", (1, 4, 6)), 4], 2),
        document(family, [("image", (1, 2, 2)), 2, ("image", (1, 4, 4)), 3], 3),
        document(family, [7], 4),
    ]
    videos = [
        document(family, [2, ("video", (2, 4, 4)), 3], 5),
        document(family, [("video", (4, 2, 2)), 1, ("video", (2, 4, 2))], 6),
    ]
    return documents + videos


def by_document(batch: PackedBatch, values: torch.Tensor) -> dict[int, torch.Tensor]:
    """Values `[rows, width, ...]` of each document."""
    flat, kept = values.flatten(0, 1), torch.from_numpy(batch.segment_ids).flatten() >= 0
    parts = flat[kept].split(batch.document_lengths.tolist())
    return dict(zip(batch.document_ids.tolist(), parts))


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
def test_a_packed_document_computes_what_it_computes_alone(family, attention, layout):
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
def test_changing_one_document_moves_no_other_by_a_bit(family, attention):
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
def test_gradients_are_those_of_one_by_one(family):
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
def test_positions_are_those_that_the_family_gives_each_document_alone(family, parts, layout):
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


def test_without_the_text_positions_in_front_documents_leak():
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
def test_text_alone_needs_no_images_and_passes_the_check(family):
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


def test_tokens_of_images_without_any_images_are_text_to_the_model_and_are_said(caplog):
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


def test_a_vision_language_model_is_proved_on_text():
    report = check_isolation(tiny("qwen3_vl", "sdpa"))

    assert report.verdict == "isolated", str(report)


def test_our_attention_takes_the_text_and_sdpa_the_images():
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


def test_boundaries_reach_flash_attention_in_the_text_and_not_the_images():
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


def test_recurrent_layers_take_images_where_their_kernels_are_told_boundaries():
    documents = of_family("qwen3_5")[0]
    model = tiny("qwen3_5", "sdpa")
    batch = packed(documents, "flat")

    with backends.recurrence(model), torch.no_grad():
        logits = model(**hf.model_inputs(batch, model, [one.media for one in documents])).logits
    with torch.no_grad():
        for number, found in by_document(batch, logits).items():
            # Their recurrence is computed in float32.
            torch.testing.assert_close(found, alone(model, documents[number]), rtol=0, atol=2e-6)


def test_images_come_in_the_order_of_the_documents_whatever_their_packs():
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
def test_images_that_do_not_belong_to_the_tokens_are_refused(change, message):
    batch, media = one_image(change)

    with pytest.raises(DocumentsError, match=message):
        hf.model_inputs(batch, model_of("qwen2_vl", "sdpa"), media)


def test_a_document_with_images_must_be_whole():
    one = document("qwen2_vl", [3, ("image", (1, 4, 4)), 8, ("image", (1, 2, 2))], 2)
    packing = vl.pack([len(one.ids)], capacity=10, overlong="split")
    by_ids = {name: values for name, values in one.media.items() if name != "mm_token_type_ids"}
    model = model_of("qwen2_vl", "sdpa")

    for pack in (0, 1):
        with pytest.raises(DocumentsError, match=r"must not be cut|must be whole"):
            hf.model_inputs(vl.collate([one.ids], packing, pack_ids=[pack]), model, [one.media])
        with pytest.raises(DocumentsError, match="must be whole"):
            hf.model_inputs(vl.collate([one.ids], packing, pack_ids=[pack]), model, [by_ids])


def test_an_image_behind_the_cut_would_be_numbered_from_there_and_is_refused():
    one = document("qwen2_vl", [12, ("image", (1, 4, 4))], 2)
    packing = vl.pack([len(one.ids)], capacity=10, overlong="split")
    media = {name: values for name, values in one.media.items() if name != "mm_token_type_ids"}

    with pytest.raises(DocumentsError, match="from token 10 on; documents with images must be whole"):
        hf.model_inputs(vl.collate([one.ids], packing, pack_ids=[1]), model_of("qwen2_vl", "sdpa"), [media])


def test_images_and_videos_of_one_token_are_refused_in_one_batch():
    documents = with_images("glm4v")
    batch = packed(documents, "flat")

    with pytest.raises(DocumentsError, match="marks images and videos with the same token"):
        hf.model_inputs(batch, model_of("glm4v", "sdpa"), [one.media for one in documents])


def test_a_model_without_m_rope_takes_no_images():
    from transformers import AutoModelForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_hidden_layers=1))
    batch, media = one_image(lambda media: media)

    assert not reads_text_positions(model)
    with pytest.raises(ModelError, match="doesn't number tokens in time, height and width"):
        hf.model_inputs(batch, model, media)
    assert hf.model_inputs(batch, model)["position_ids"].ndim == 2


@pytest.mark.filterwarnings("ignore")  # transformers' own, of sizes that it would choose otherwise
def test_a_model_that_numbers_audio_takes_text_alone():
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


def test_what_the_model_does_not_take_is_named():
    batch, media = one_image(lambda media: media | {"pixels_of_depth": torch.zeros(1)})

    with pytest.raises(ModelError, match="takes no pixels_of_depth"):
        hf.model_inputs(batch, model_of("qwen2_vl", "sdpa"), media)


def test_padding_may_have_the_token_of_images():
    one = document("glm4v", [2, ("video", (2, 4, 4)), 3], 1)
    packing = vl.pack([len(one.ids)], capacity=32)
    batch = vl.collate([one.ids], packing, pad_id=IMAGE)

    positions = mrope_positions(batch, model_of("glm4v", "sdpa"), [one.media])

    assert (positions[:, 0, len(one.ids) :] == 0).all()
    assert positions[1:, 0, : len(one.ids)].max() > 0
