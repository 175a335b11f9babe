"""model_inputs: exactly the keyword arguments that keep a transformers model's documents apart."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias
from weakref import WeakSet

import numpy as np
import torch

from varlen.adapters.hf import attention
from varlen.adapters.hf.mixing import (
    check_family,
    check_kinds,
    check_trunk,
    drops_block_masks,
    drops_boundaries,
    is_bidirectional,
    segment_arguments,
    takes_mapping,
)
from varlen.adapters.hf.model import (
    accepts,
    check_size,
    family,
    first_position,
    has_experts,
    implementation,
    logits_size,
    model_type,
    named_kinds,
    only_kind,
    shifts_labels,
    text_config,
    text_decoder,
    unwrap,
    uses_registry,
)
from varlen.adapters.hf.trees import check_trees, tree_arguments
from varlen.attention.rules import MASKLESS_KINDS, SELECTING, rotary_limits
from varlen.batch.packed import IGNORE_INDEX, PackedBatch, as_tensor, on_host
from varlen.batch.tree_batch import TreeBatch
from varlen.errors import DocumentsError, ModelError, described
from varlen.types import IntArray

OPTIONAL = ("labels", "use_cache")  # arguments that keep no documents apart
Media: TypeAlias = Mapping[int, Mapping[str, Any] | None] | Sequence[Mapping[str, Any] | None]
"""For each document of the data set, by its number, what the model's processor made of its images and videos."""
MASK_FORMS = {"eager": "additive", "sdpa": "bool", "flex_attention": "block"}


def model_inputs(batch: PackedBatch | TreeBatch, model: Any, media: Media | None = None) -> dict[str, Any]:
    """Return the keyword arguments with which this model treats every document as if it were alone.

    Which they are depends on the attention the model is set to (`config._attn_implementation`):

    - "eager", "sdpa", "flex_attention": a finished 4-D `attention_mask`, one for each kind of layer where
      the model has several (sliding windows). Nothing is left to be inferred from positions.
    - "varlen" and FlashAttention: `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k`, and no
      mask, which would turn boundaries off.

    Masks are causal, or open to both sides, as the model's attention is.

    In all cases `position_ids` restart at every document (a model that knows distances alone takes none), and
    `use_cache=False`. Labels aren't shifted: the model shifts them, and every document's first label is -100, so no
    loss crosses a boundary. The loss that the model returns is the mean over this batch's targets, and 0/0 without
    any; across micro-batches and ranks, pass `num_items_in_batch=1` as well, which makes it their sum, and multiply
    that by `batch.loss_scale()`. Where targets weigh as their rows say (`batch.target_weights`), no labels are
    among the arguments, as a model's own loss knows no weights: compute it of the logits, by `batch.loss_weights()`.

    In a TreeBatch each token sees the tokens before it in its rows, as "eager", "sdpa", "flex_attention" and "varlen"
    compute it. No labels are among the arguments: `vl.log_probs(logits, batch)` gives those of all occurrences.

    Vision-language models with M-RoPE (Qwen2-VL and later, GLM-4V, ERNIE 4.5 VL and others) get positions in time,
    height and width for each document as if it were alone, behind the text positions, from which transformers reads
    boundaries.

    Args:
        batch: of documents or trees, in either layout, numpy arrays or torch tensors; moved to the model's device.
        model: a transformers model, decoder or encoder, bare or in DDP, FSDP, PEFT or `torch.compile`, whose outputs
            are one a token; for heads that pool see `document_outputs`.
        media: for such models, what the processor made of the images and videos of each document of the data set,
            by its number: `{"pixel_values": ..., "image_grid_thw": ...}`; None or nothing for documents of text.

    Returns:
        `input_ids`, `position_ids` and `labels` int64 `[rows, width]`, `use_cache`, the arguments above, and
        `shift_labels` where the batch has them; `labels` and `use_cache` where the model takes them. With M-RoPE
        `position_ids` are `[4, rows, width]`, and the arrays of all images come along, in the order of the documents
        in the batch. For heads whose loss isn't that of the next token (token classification, masked tokens, answers)
        the labels are `batch.token_labels`; without these there are none among the arguments. A column
        `token_type_ids` comes along where the model takes it.

    Raises:
        DocumentsError: not a PackedBatch, token labels that are no classes of this head, or images that don't belong
            to the batch's tokens.
        ModelError: no arguments would keep this model's documents apart (recurrent, hybrid
            and encoder-decoder models, masks of a model's own, unknown attention functions), or it has too few
            positions or too small a vocabulary, or would scale documents by what shares their row.
    """
    check_family(model)
    if isinstance(batch, TreeBatch):
        return _of_trees(batch, model, media)
    if not isinstance(batch, PackedBatch):
        raise DocumentsError(
            f"model_inputs takes a PackedBatch, as vl.collate returns it, and was given {type(batch).__name__}"
        )
    inputs = checked_inputs(batch, model, media)
    if is_bidirectional(model) or not shifts_labels(model):  # tokens that see the next one don't predict it
        inputs = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
    return inputs if shifts_labels(model) else inputs | _token_labels(batch, model)


def hidden_inputs(batch: PackedBatch, model: Any) -> dict[str, Any]:
    """Return the arguments with which each hidden state is its document's own, whatever a pooler makes of them."""
    check_trunk(model, unwrap(model))
    inputs = checked_inputs(batch, model)
    return {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}


def checked_inputs(batch: PackedBatch, model: Any, media: Media | None = None) -> dict[str, Any]:
    """Return the arguments of a model whose family and head were checked."""
    check_size(batch, model, batch.max_seqlen)
    check_scaled(batch, model)
    inputs = _arguments(batch, model) | _of_vision(batch, model, media)
    if family(model).widest:
        _check_width(batch, model)
        del inputs["position_ids"]
    return _accepted(inputs, batch, model)


def _of_trees(batch: TreeBatch, model: Any, media: Media | None) -> dict[str, Any]:
    """Return the arguments for trees of rows."""
    if media:
        raise ModelError("documents with images can't be folded into trees yet; pack them as documents")
    check_trees(batch, model)
    inputs = tree_arguments(batch, model, MASK_FORMS)
    if reads_text_positions(model):
        inputs["position_ids"] = inputs["position_ids"].expand(AXES + 1, -1, -1)
    return _accepted(inputs, batch, model)


def _accepted(inputs: dict[str, Any], batch: PackedBatch | TreeBatch, model: Any) -> dict[str, Any]:
    """Return the arguments that the model takes, and refuse a model that doesn't take or pass on all it needs."""
    if {"cu_seq_lens_q", "tree_spans"} & inputs.keys() and not uses_registry(model):
        raise ModelError(
            f"{type(unwrap(model)).__name__} computes attention by itself and reads no boundaries, although "
            f'"{implementation(model)}" is set; use model.set_attn_implementation("eager")'
        )
    _check_code(batch, model, inputs)
    if "attention_mask" not in inputs and SELECTING in named_kinds(text_config(model)):
        raise ModelError(
            f"{type(unwrap(model)).__name__} selects by a mask which tokens are attended to, and "
            f'"{implementation(model)}" takes none; use model.set_attn_implementation("sdpa"), or "eager"'
        )
    inputs = {name: v for name, v in inputs.items() if name not in OPTIONAL or accepts(model, name)}
    refused = [name for name in inputs if not accepts(model, name)]
    if refused:
        raise ModelError(
            f"{type(unwrap(model)).__name__} takes no {', '.join(refused)}, without which documents aren't "
            "kept apart; give it one document a row (padded)"
        )
    return inputs


def _token_labels(batch: PackedBatch, model: Any) -> dict[str, Any]:
    """Return the classes of tokens as the labels of a head that takes them."""
    labels = batch.token_labels
    if labels is None or not accepts(model, "labels"):
        return {}
    kind, config = getattr(unwrap(model), "loss_type", None), unwrap(model).config
    classes = config.num_labels if kind == "ForTokenClassification" else logits_size(model)
    if not torch.is_tensor(labels) or not labels.is_cuda:  # on a GPU, looking would wait for it
        wrong = (labels != IGNORE_INDEX) & ((labels < 0) | (labels >= classes))
        if bool(wrong.any()):
            raise DocumentsError(
                f"token_labels hold class {int(labels[wrong][0]):,} ({int(wrong.sum()):,} of the batch are out "
                f"of range), and {type(unwrap(model)).__name__} has classes 0 to {classes - 1:,}; -100 is for tokens "
                "without one, and config.num_labels sets how many there are"
            )
    return {"labels": as_tensor(labels, _input_device(model), widen=True)}


def _check_width(batch: PackedBatch, model: Any) -> None:
    limit, width = getattr(text_config(model), family(model).widest), batch.input_ids.shape[1]
    if width > limit:
        raise ModelError(
            f"{type(unwrap(model)).__name__} weighs distances of up to {limit:,} tokens, and the batch's rows have "
            f'{width:,}; pack with capacity at most {limit:,} and collate with layout="rows"'
        )


def _check_code(batch: PackedBatch | TreeBatch, model: Any, inputs: dict[str, Any]) -> None:
    """Refuse a model whose own code drops boundaries on their way to attention."""
    name, kind = type(unwrap(model)).__name__, implementation(model)
    if kind == "flex_attention" and drops_block_masks(model):
        raise ModelError(
            f"{name} makes its masks over and drops those of FlexAttention; use "
            'model.set_attn_implementation("sdpa"), or "eager"'
        )
    if (
        "attention_mask" in inputs
        and has_experts(model)
        and getattr(text_config(model), "output_router_logits", False)
    ):
        raise ModelError(
            f"{name} adds its router's loss (config.output_router_logits), for which it reads the attention_mask as "
            "one of padding; use varlen.adapters.hf.use_varlen_attention(model) or FlashAttention, which take no mask"
        )
    layer = drops_boundaries(model) if "attention_mask" not in inputs else None
    # FlashAttention then looks at the positions, which do reach it, of a batch of one row.
    if layer and (kind == attention.NAME or len(batch.input_ids) > 1):
        flat = "" if kind == attention.NAME else ', or collate with layout="flat"'
        raise ModelError(
            f"{name} doesn't pass boundaries to attention ({layer} drops its keyword arguments); use "
            f'model.set_attn_implementation("sdpa"){flat}'
        )


def _of_vision(batch: PackedBatch, model: Any, media: Media | None) -> dict[str, Any]:
    """Return the positions of a model with M-RoPE, and the images."""
    base, device = unwrap(model), _input_device(model)
    if not reads_text_positions(model):
        if media:
            raise ModelError(
                f"{type(base).__name__} doesn't number tokens in time, height and width (M-RoPE), and only with "
                "such models can documents with images be packed; give it one document a row"
            )
        return {}
    inputs: dict[str, Any] = {"position_ids": mrope_positions(batch, model, media)}
    if media is not None:
        inputs |= media_arguments(batch, model, media)
    vision = getattr(getattr(base.config, "vision_config", None), "_attn_implementation", None) or "eager"
    if len(inputs) > 1 and vision not in MASK_FORMS and _takes_boundaries(implementation(model)):
        raise ModelError(
            f'the vision part of {type(base).__name__} is set to "{vision}" as well, and would receive the text\'s '
            f'boundaries; use model.set_attn_implementation({{"text_config": "{implementation(model)}", '
            '"vision_config": "sdpa"})'
        )
    return {name: value if device is None else value.to(device) for name, value in inputs.items()}


def inputs_without_boundaries(batch: PackedBatch, model: Any) -> dict[str, Any]:
    """Return the same call with boundaries erased: every row is one segment, so documents see each other.

    For controls and comparisons only. Positions stay as they are, so a row may be longer than the model's
    positions.

    Args:
        batch: in either layout.
        model: any transformers model; recurrent ones, which `model_inputs` refuses, are called plainly.
    """
    tensors = batch.to_torch(_input_device(model))
    device = tensors.input_ids.device
    rows, width = tensors.input_ids.shape
    erased = tensors.replace(
        segment_ids=torch.zeros((rows, width), dtype=torch.int32, device=device),
        position_ids=torch.arange(width, device=device).expand(rows, width),
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32) * width,
        cu_seqlens_padded=None,
    )
    try:
        check_family(model)
    except ModelError:
        return plain_inputs(tensors.input_ids, model)
    inputs = _arguments(erased, model)
    if not drops_boundaries(model):  # where boundaries are read from positions, those must run on as well
        inputs["position_ids"] = tensors.position_ids + first_position(model)
    return {name: value for name, value in inputs.items() if accepts(model, name)}


def plain_inputs(input_ids: torch.Tensor, model: Any) -> dict[str, Any]:
    """Return the arguments of an ordinary call in which every row is one document.

    What packing must equal when a row holds one document, and what leaks when it holds several.

    Args:
        input_ids: int64 `[rows, width]`, on the model's device.
        model: a transformers model.
    """
    inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    # Positions that the model finds from the tokens would skip tokens that mean padding elsewhere.
    if (first := first_position(model)) > 0:
        width = input_ids.shape[1]
        inputs["position_ids"] = torch.arange(first, first + width, device=input_ids.device)[None]
    if implementation(model) == attention.NAME:
        rows, width = input_ids.shape
        ends = torch.arange(rows + 1, dtype=torch.int32, device=input_ids.device) * width
        inputs |= _boundary_arguments(ends, width)
    if _only_config_is_bidirectional(model):
        inputs["is_causal"] = False
    return {name: v for name, v in inputs.items() if name not in OPTIONAL or accepts(model, name)}


def _input_device(model: Any) -> torch.device | None:
    """Return the device of the model's inputs; None if its weights are loaded on demand."""
    device: torch.device = unwrap(model).device
    return None if device.type == "meta" else device


def _takes_boundaries(name: str) -> bool:
    """Return whether an attention takes boundaries instead of a mask."""
    if name == attention.NAME or ("flash" in name and not name.startswith("paged|")):
        return True
    if name in MASK_FORMS:
        return False
    known = ", ".join([*MASK_FORMS, "flash_attention_2", "flash_attention_3", attention.NAME])
    raise ModelError(
        f'the model\'s attention is "{name}", and varlen knows {known}; choose one with '
        "model.set_attn_implementation(...)"
    )


def _slots(batch: PackedBatch) -> Any:
    """Return where slots begin in the flattened batch; a slot may be longer than its document."""
    return batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded


def boundaries(batch: PackedBatch, device: torch.device) -> dict[str, Any]:
    """Return the boundaries over the flattened array, padding included, and the longest segment."""
    ends = torch.as_tensor(_slots(batch), dtype=torch.int32)
    # Padding segments and rounded-up slots may be longer than the longest document, and a kernel must not
    # be given less than the longest of its segments.
    longest = int(ends.diff().max()) if len(ends) > 1 else 0
    return _boundary_arguments(ends.to(device), longest)


def _boundary_arguments(ends: torch.Tensor, longest: int) -> dict[str, Any]:
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _arguments(batch: PackedBatch, model: Any) -> dict[str, Any]:
    """Return the arguments for the model's attention, including those that its forward may not take."""
    base, name = unwrap(model), implementation(model)
    with_boundaries = _takes_boundaries(name)
    tensors = batch.to_torch(_input_device(model))
    inputs: dict[str, Any] = {
        "input_ids": tensors.input_ids,
        "position_ids": tensors.position_ids,
        "labels": tensors.labels,
        "use_cache": False,
    }
    if (first := first_position(model)) > 0:
        inputs["position_ids"] = tensors.position_ids + first
    if with_boundaries or family(model).boundaries:
        args = boundaries(batch, tensors.input_ids.device)
        inputs |= args | segment_arguments(model_type(model), args["cu_seq_lens_q"], *tensors.input_ids.shape)
    if not with_boundaries:
        inputs["attention_mask"] = explicit_masks(tensors, model, MASK_FORMS[name], base.dtype)
    elif _only_config_is_bidirectional(model):
        inputs["is_causal"] = False
    if "token_type_ids" in tensors.columns and accepts(model, "token_type_ids"):
        inputs["token_type_ids"] = tensors.columns["token_type_ids"].long()
    if tensors.shift_labels is not None:
        inputs["shift_labels"] = tensors.shift_labels
    if tensors.target_weights is not None:
        inputs = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
    return inputs


# Attention masks made from a batch's boundaries, in the form that a transformers model takes them.
#
# transformers can infer boundaries from `position_ids`, but only some families ask it to, and any cache or
# 2-D mask silently turns it off. A finished 4-D mask is passed on unread by every family.


def explicit_masks(batch: PackedBatch, model: Any, form: str, dtype: torch.dtype) -> Any:
    """Return what to pass as `attention_mask`: one mask, or one for each kind of layer.

    Returns `[rows, 1, width, width]`.
    """
    config = text_config(model)
    kinds = named_kinds(config)
    if family(model).boundaries:
        masked = [kind for kind in dict.fromkeys(("full_attention", *kinds)) if kind not in MASKLESS_KINDS]
        masks = {kind: _mask(batch, model, kind, form, dtype) for kind in masked}
        return masks | dict.fromkeys(MASKLESS_KINDS)
    check_kinds(model)
    if kinds and takes_mapping(model):
        return {kind: _mask(batch, model, kind, form, dtype) for kind in kinds}
    return _mask(batch, model, kinds[0] if kinds else only_kind(model), form, dtype)


def _counts_itself(config: Any) -> bool:
    """Return whether a window to both sides counts the token itself, as Gemma 3's does."""
    return bool(getattr(config, "use_bidirectional_attention", False)) and getattr(config, "is_causal", True)


def _only_config_is_bidirectional(model: Any) -> bool:
    """Return whether layers that are causal by themselves attend in both directions if the call says so.

    Without a mask transformers' attention goes by the layer, and not by the configuration.
    """
    layers = text_decoder(model).modules()
    return getattr(text_config(model), "is_causal", None) is False and any(
        getattr(layer, "is_causal", False) is True for layer in layers
    )


def _mask(batch: PackedBatch, model: Any, kind: str, form: str, dtype: torch.dtype) -> Any:
    config, causal = text_config(model), not is_bidirectional(model)
    window = config.sliding_window if kind == "sliding_attention" else None
    if window is not None and not causal and not _counts_itself(config):
        window += 1  # on both sides transformers counts the other tokens alone
    if form == "block":
        if kind == "chunked_attention":
            raise ModelError(
                "chunked attention has no FlexAttention block mask in varlen; use "
                'model.set_attn_implementation("sdpa")'
            )
        return batch.block_mask(sliding_window=window, is_causal=causal)
    mask: torch.Tensor = batch.dense_mask(sliding_window=window, is_causal=causal)
    if kind == "chunked_attention":
        chunk = batch.position_ids // config.attention_chunk_size
        mask = mask & (chunk[:, :, None] == chunk[:, None, :])
    mask = mask[:, None]
    if form == "bool":
        return mask
    zero, closed = torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min
    return torch.where(mask, zero, closed)


# What some models scale by the row or the batch, so that a document's result depends on what it is packed with.
#
# Rotary frequencies of LongRoPE (Phi-3 and later) are chosen once per batch, by its longest document. Llama 4 scales
# the attention of some layers by the position of a token in its row.


def check_scaled(batch: PackedBatch, model: Any) -> None:
    """Refuse a batch in which a model would scale documents by what shares their row or batch."""
    config = text_config(model)
    name = type(unwrap(model)).__name__
    for kind, limit in rotary_limits(config):
        lengths = _numpy(batch.document_lengths)
        # A document of one token is at position 0, whatever the frequency.
        short = int(((lengths <= limit) & (lengths > 1)).sum())
        longer = int((lengths > limit).sum())
        if short and longer:
            raise ModelError(
                f"{name} chooses its rotary frequencies once per batch, by the longest document ({kind}): the batch "
                f"has {short:,} documents of up to {limit:,} tokens, which alone have those of short ones, and "
                f"{longer:,} longer ones. Give them batches of their own, or give all documents the "
                'frequencies of long ones: model.config.rope_parameters["original_max_position_embeddings"] = 1'
            )
    if getattr(config, "attn_temperature_tuning", False) and hasattr(config, "floor_scale"):
        _check_temperatures(batch, config, name)


def _check_temperatures(batch: PackedBatch, config: Any, name: str) -> None:
    """Refuse tokens whose temperature by position in the row differs from that by position in the document."""
    step, width = config.floor_scale, batch.input_ids.shape[1]
    rows = getattr(config, "no_rope_layers", None)
    if width < step or (rows is not None and all(rows)):
        return
    segments, positions = _numpy(batch.segment_ids), _numpy(batch.position_ids)
    by_row = (np.arange(width) + 1) // step
    wrong = (segments >= 0) & (by_row != (positions + 1) // step)
    if wrong.any():
        raise ModelError(
            f"{name} scales attention by a token's place in its row (attn_temperature_tuning, by steps of {step:,}), "
            f"and {int(wrong.sum()):,} tokens of this batch come after other documents, beyond the first step; "
            f"collate rows of fewer than {step:,} tokens, one document a row, or set "
            "config.attn_temperature_tuning=False before the model is made"
        )


def _numpy(values: Any) -> Any:
    return values.cpu().numpy() if torch.is_tensor(values) else np.asarray(values)


# Images and videos of packed documents: their arrays in the batch's order, and M-RoPE positions that restart.
#
# Vision-language models number tokens in time, height and width. Each family has rules of its own for that, and they
# change between versions, so a family's own `get_rope_index` is asked, for one document at a time. In front stand the
# text positions, from which transformers reads boundaries.

_log = logging.getLogger(__name__)
_WARNED: WeakSet[Any] = WeakSet()  # models that were warned about image tokens without images

AXES = 3  # time, height and width
_OF_TOKENS = frozenset(("input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids"))
"""What a processor returns beside, which a batch has anyway."""
_IMAGE, _VIDEO = 1, 2  # kinds of tokens, as `mm_token_type_ids` calls them; 0 is text


def reads_text_positions(model: Any) -> bool:
    """Return whether the decoder takes positions `[4, rows, width]`: text positions, then time, height and width."""
    decoder: Any = type(text_decoder(model))
    return _reads_text_positions(decoder)


@lru_cache(maxsize=256)
def _reads_text_positions(decoder: Any) -> bool:
    try:
        source = inspect.getsource(inspect.unwrap(decoder.forward))
    except (OSError, TypeError, AttributeError):
        return False
    return "text_position_ids" in source and f"position_ids.shape[0] == {AXES + 1}" in source


def mrope_positions(batch: PackedBatch, model: Any, media: Media | None = None) -> torch.Tensor:
    """Return the positions of a packed batch for a model with M-RoPE.

    Those of a document equal what the model's `get_rope_index` gives it alone, wherever it stands. Text counts on by
    one on all axes; padding is 0.

    Args:
        batch: in either layout.
        model: a transformers model, bare or wrapped, that `reads_text_positions`.
        media: by document, mappings with `image_grid_thw`, `video_grid_thw` and what else `get_rope_index` takes; of
            their tokens, `mm_token_type_ids` say which are an image's or a video's, else the model's config does.
            None for text alone: the model then takes tokens of images for text as well, and a warning says so once.

    Returns:
        int64 `[4, rows, width]` in host memory: text positions, time, height, width.

    Raises:
        DocumentsError: tokens of images without images, images without tokens, or as many as don't fit; a document
            with images that was cut.
        ModelError: images for a model without `get_rope_index`.

    Cost: that of `get_rope_index` for each document with images, a fraction of a millisecond.
    """
    text = on_host(batch.position_ids)
    positions = np.repeat(text.reshape(1, -1), AXES + 1, axis=0).astype(np.int64)
    ids = on_host(batch.input_ids).reshape(-1)
    base = unwrap(model)
    kinds = np.where(on_host(batch.segment_ids).reshape(-1) >= 0, _kinds(ids, base.config), 0)
    if media is None:  # then the model itself takes all tokens for text
        _warn_once(base, int(np.count_nonzero(kinds)))
        return torch.from_numpy(positions.reshape(AXES + 1, *text.shape))
    for document, start, at, length in _segments(batch):
        given, piece = _given(media, document), slice(at, at + length)
        if given is None and not kinds[piece].any():
            continue
        of_tokens = kinds[piece] if given is None else _kinds_of(given, kinds[piece], document)
        _check_whole(given, of_tokens, document, start)
        kinds[piece] = of_tokens
        positions[1:, piece] = _of_document(base, ids[piece], of_tokens, given or {}, document)
    _check_marks(ids, kinds, base)
    return torch.from_numpy(positions.reshape(AXES + 1, *text.shape))


def media_arguments(batch: PackedBatch, model: Any, media: Media) -> dict[str, torch.Tensor]:
    """Return the arrays of all images and videos of a batch, in the order in which their documents stand."""
    parts: dict[str, list[torch.Tensor]] = {}
    for document in on_host(batch.document_ids).tolist():
        for name, values in (_given(media, document) or {}).items():
            if name not in _OF_TOKENS and values is not None:
                parts.setdefault(name, []).append(torch.as_tensor(values))
    unknown = sorted(set(parts) - set(inspect.signature(unwrap(model).forward).parameters))
    if unknown:
        raise ModelError(
            f"{type(unwrap(model)).__name__} takes no {', '.join(unknown)}; leave that out of the media"
        )
    return {name: torch.cat(arrays) for name, arrays in parts.items()}


def _segments(batch: PackedBatch) -> list[tuple[int, int, int, int]]:
    """Return document, first token, position in the flattened batch and length of each segment."""
    slots = on_host(_slots(batch))[:-1]
    begins = slots[on_host(batch.segment_ids).reshape(-1)[slots] >= 0]
    of_segments = (batch.document_ids, batch.document_starts, begins, batch.document_lengths)
    return list(zip(*(on_host(values).tolist() for values in of_segments)))


def _warn_once(base: Any, tokens: int) -> None:
    """Warn once per model of image tokens without images."""
    if tokens and base not in _WARNED:
        _WARNED.add(base)
        _log.warning(
            "the batch holds %s tokens of images or videos and no images, so that %s takes them for text; pass "
            "model_inputs(batch, model, media), with what the processor made of each document",
            f"{tokens:,}",
            type(base).__name__,
        )


def _given(media: Media, document: int) -> Mapping[str, Any] | None:
    """Return the media of a document; None if there are none."""
    try:
        given = media[document]
    except (KeyError, IndexError):
        return None
    names = [] if given is None else [name for name, values in given.items() if values is not None]
    return given if set(names) - _OF_TOKENS else None


def _kinds(ids: IntArray, config: Any) -> IntArray:
    """Return the kind of each token by the config's ids of images and videos."""
    kinds = np.zeros(ids.shape, np.int64)
    for kind, name in ((_IMAGE, "image_token_id"), (_VIDEO, "video_token_id")):
        token = getattr(config, name, None)
        if token is not None:
            kinds[ids == token] = kind
    return kinds


def _kinds_of(given: Mapping[str, Any], by_ids: IntArray, document: int) -> IntArray:
    """Return the kinds of a document's tokens, from its processor or by their ids."""
    types = given.get("mm_token_type_ids")
    if types is None:
        return by_ids
    kinds: IntArray = np.asarray(types, np.int64).reshape(-1)
    if kinds.size != by_ids.size:
        raise DocumentsError(
            f"document {document:,}: mm_token_type_ids has {kinds.size:,} entries, and {by_ids.size:,} of its tokens "
            "are in the batch; documents with images must not be cut"
        )
    return kinds


def _check_whole(given: Mapping[str, Any] | None, kinds: IntArray, document: int, start: int) -> None:
    """Refuse images without their tokens, and tokens without their images."""
    images, videos = int((kinds == _IMAGE).sum()), int((kinds == _VIDEO).sum())
    if given is None:
        raise DocumentsError(
            f"document {document:,} has {images:,} tokens of images and {videos:,} of videos, and there are none of "
            "these for it; pass model_inputs(batch, model, media), with what the processor made of each document"
        )
    grids = [
        0 if given.get(name) is None else len(given[name]) for name in ("image_grid_thw", "video_grid_thw")
    ]
    begins = np.diff(kinds, prepend=0)
    runs = int(((begins != 0) & (kinds == _IMAGE)).sum())
    if start or runs != grids[0] or bool(videos) != bool(grids[1]):
        raise DocumentsError(
            f"document {document:,} has {grids[0]:,} images and {grids[1]:,} videos, and of it the batch holds "
            f"{runs:,} runs of image tokens and {videos:,} video tokens, from token {start:,} on; documents with "
            'images must be whole: pack with overlong="error" or "drop", and a capacity that holds the longest'
        )


def _check_marks(ids: IntArray, kinds: IntArray, base: Any) -> None:
    if np.intersect1d(ids[kinds == _IMAGE], ids[kinds == _VIDEO]).size:
        raise DocumentsError(
            f"{type(base).__name__} marks images and videos with the same token, and can't take both in one call; "
            "put documents with videos into batches of their own"
        )


def _of_document(
    base: Any, ids: IntArray, kinds: IntArray, given: Mapping[str, Any], document: int
) -> IntArray:
    """Return the positions of one document, int64 `[3, tokens]`."""
    inner = getattr(base, getattr(base, "base_model_prefix", ""), None)
    home = next((module for module in (base, inner) if hasattr(module, "get_rope_index")), None)
    if home is None:
        raise ModelError(f"{type(base).__name__} has no get_rope_index, which numbers the tokens of images")
    tokens = {
        "input_ids": torch.from_numpy(ids.astype(np.int64))[None],
        "mm_token_type_ids": torch.from_numpy(kinds)[None],
        "attention_mask": torch.ones((1, ids.size), dtype=torch.long),
    }
    grids = {
        name: torch.as_tensor(values).cpu()
        for name, values in given.items()
        if name not in tokens and values is not None
    }
    taken = inspect.signature(home.get_rope_index).parameters
    if "mm_token_type_ids" not in taken:
        raise ModelError(
            f"{type(base).__name__} numbers tokens by more than images and videos, which varlen can't pack; give it "
            "one document a row"
        )
    try:
        found, _ = home.get_rope_index(
            **{name: value for name, value in {**grids, **tokens}.items() if name in taken}
        )
    except (RuntimeError, ValueError, TypeError, IndexError, StopIteration) as error:
        raise DocumentsError(
            f"document {document:,}: {type(home).__name__}.get_rope_index can't number its {ids.size:,} tokens with "
            f"these images: {described(error, kind=True)}"
        ) from None
    positions: IntArray = found[:, 0].numpy()
    return positions
