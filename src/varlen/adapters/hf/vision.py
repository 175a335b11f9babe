"""Images and videos of packed documents: their arrays in the batch's order, and M-RoPE positions that restart.

Vision-language models number tokens in time, height and width. Each family has rules of its own for that, and they
change between versions, so a family's own `get_rope_index` is asked, for one document at a time. In front stand the
text positions, from which transformers reads boundaries.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias
from weakref import WeakSet

import numpy as np
import torch

from varlen.adapters.hf.model import text_decoder, unwrap
from varlen.batch.packed import PackedBatch, on_host
from varlen.errors import DocumentsError, ModelError
from varlen.types import IntArray

Media: TypeAlias = Mapping[int, Mapping[str, Any] | None] | Sequence[Mapping[str, Any] | None]
"""For each document of the data set, by its number, what the model's processor made of its images and videos."""

_log = logging.getLogger(__name__)
_WARNED: WeakSet[Any] = WeakSet()
"""Models of whose tokens without images it was said."""

AXES = 3
"""Time, height and width."""
_OF_TOKENS = frozenset(("input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids"))
"""What a processor returns beside, which a batch has anyway."""
_IMAGE, _VIDEO = 1, 2
"""Kinds of tokens, as `mm_token_type_ids` calls them; 0 is text."""


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
        _say_once(base, int(np.count_nonzero(kinds)))
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
    """Document, its token that comes first, place in the flattened batch, and length, of every segment."""
    slots = on_host(batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded)[:-1]
    places = slots[on_host(batch.segment_ids).reshape(-1)[slots] >= 0]
    of_segments = (batch.document_ids, batch.document_starts, places, batch.document_lengths)
    return list(zip(*(on_host(values).tolist() for values in of_segments)))


def _say_once(base: Any, tokens: int) -> None:
    """Warn, once a model, of tokens that stand for images which nobody gave."""
    if tokens and base not in _WARNED:
        _WARNED.add(base)
        _log.warning(
            "the batch holds %s tokens of images or videos and no images, so that %s takes them for text; pass "
            "model_inputs(batch, model, media), with what the processor made of each document",
            f"{tokens:,}",
            type(base).__name__,
        )


def _given(media: Media, document: int) -> Mapping[str, Any] | None:
    """What there is of a document's images, None where there is none."""
    try:
        given = media[document]
    except (KeyError, IndexError):
        return None
    names = [] if given is None else [name for name, values in given.items() if values is not None]
    return given if set(names) - _OF_TOKENS else None


def _kinds(ids: IntArray, config: Any) -> IntArray:
    """Kind of every token, by the ids that the config has for images and videos."""
    kinds = np.zeros(ids.shape, np.int64)
    for kind, name in ((_IMAGE, "image_token_id"), (_VIDEO, "video_token_id")):
        token = getattr(config, name, None)
        if token is not None:
            kinds[ids == token] = kind
    return kinds


def _kinds_of(given: Mapping[str, Any], by_ids: IntArray, document: int) -> IntArray:
    """Kinds of a document's tokens, as its processor says, or by their ids."""
    told = given.get("mm_token_type_ids")
    if told is None:
        return by_ids
    kinds: IntArray = np.asarray(told, np.int64).reshape(-1)
    if kinds.size != by_ids.size:
        raise DocumentsError(
            f"document {document:,}: mm_token_type_ids has {kinds.size:,} entries, and {by_ids.size:,} of its tokens "
            "are in the batch; documents with images must not be cut"
        )
    return kinds


def _check_whole(given: Mapping[str, Any] | None, kinds: IntArray, document: int, start: int) -> None:
    """Require that images and their tokens come together."""
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
    """Require that the model can tell images from videos."""
    if np.intersect1d(ids[kinds == _IMAGE], ids[kinds == _VIDEO]).size:
        raise DocumentsError(
            f"{type(base).__name__} marks images and videos with the same token, and can't take both in one call; "
            "put documents with videos into batches of their own"
        )


def _of_document(
    base: Any, ids: IntArray, kinds: IntArray, given: Mapping[str, Any], document: int
) -> IntArray:
    """Positions of one document, int64 `[3, tokens]`."""
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
            f"these images: {type(error).__name__}: {error}"
        ) from None
    positions: IntArray = found[:, 0].numpy()
    return positions
