"""What models scale by the row or by the longest document of a batch, so that a document isn't what it is alone.

Rotary frequencies of LongRoPE (Phi-3 and later) are chosen once a batch, by its longest document. Llama 4 sharpens
the attention of some layers by the place of a token in its row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from varlen.adapters.hf.model import text_config, unwrap
from varlen.batch.packed import PackedBatch
from varlen.errors import ModelError


def check_scaled(batch: PackedBatch, model: Any) -> None:
    """Refuse a batch in which a model would scale documents by what shares their row or batch.

    Args:
        batch: in either layout.
        model: a transformers model, bare or wrapped.

    Raises:
        ModelError: names what is scaled by what, how many documents it changes, and the way out.
    """
    config = text_config(model)
    name = type(unwrap(model)).__name__
    for kind, limit in _limits(config):
        lengths = _numpy(batch.document_lengths)
        short = int(
            ((lengths <= limit) & (lengths > 1)).sum()
        )  # one token stands at 0, whatever the frequency
        longer = int((lengths > limit).sum())
        if short and longer:
            raise ModelError(
                f"{name} chooses its rotary frequencies once a batch, by the longest document ({kind}): the batch "
                f"has {short:,} documents of up to {limit:,} tokens, which alone have those of short ones, and "
                f"{longer:,} longer ones. Give them batches of their own, or give all documents the "
                'frequencies of long ones: model.config.rope_parameters["original_max_position_embeddings"] = 1'
            )
    if getattr(config, "attn_temperature_tuning", False) and hasattr(config, "floor_scale"):
        _check_places(batch, config, name)


def _limits(config: Any) -> list[tuple[str, int]]:
    """Return the kinds of rotary frequencies that go by a batch's longest document, and where they change."""
    told = getattr(config, "rope_parameters", None) or {}
    each = [told, *(part for part in told.values() if isinstance(part, dict))]
    found = []
    for part in each:
        kind = str(part.get("rope_type", ""))
        if kind == "longrope":
            found.append((kind, part.get("original_max_position_embeddings")))
        elif "dynamic" in kind:
            found.append((kind, getattr(config, "max_position_embeddings", None)))
    return [(kind, int(limit)) for kind, limit in found if limit]


def _check_places(batch: PackedBatch, config: Any, name: str) -> None:
    """Refuse tokens whose place in the row has another temperature than their place in the document.

    Raises:
        ModelError: there are such tokens.
    """
    step, width = config.floor_scale, batch.input_ids.shape[1]
    rows = getattr(config, "no_rope_layers", None)
    if width < step or (rows is not None and all(rows)):
        return
    segments, places = _numpy(batch.segment_ids), _numpy(batch.position_ids)
    by_row = (np.arange(width) + 1) // step
    wrong = (segments >= 0) & (by_row != (places + 1) // step)
    if wrong.any():
        raise ModelError(
            f"{name} scales attention by a token's place in its row (attn_temperature_tuning, by steps of {step:,}), "
            f"and {int(wrong.sum()):,} tokens of this batch stand behind other documents, beyond the first step; "
            f"collate rows of fewer than {step:,} tokens, one document a row, or set "
            "config.attn_temperature_tuning=False before the model is made"
        )


def _numpy(values: Any) -> Any:
    return values.cpu().numpy() if torch.is_tensor(values) else np.asarray(values)
