"""Tiny vision-language models with M-RoPE, and documents with images and videos for them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import varlen as vl
from varlen.adapters import hf
from varlen.batch.packed import Layout, PackedBatch

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
    """Return documents in rows, in input order."""
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
