"""Every model class of the installed transformers that reads text, made tiny, and the oracle: each document alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto import modeling_auto

import varlen as vl
from varlen.adapters import hf
from varlen.batch.packed import Layout, PackedBatch
from varlen.errors import ModelError
from varlen.verify.models.loading import VOCABULARY, tiny_config

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "answer": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "next_sentence": "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES",
    "pretraining": "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}
"""Heads by transformers' own tables."""
LENGTHS = (5, 9, 3, 1, 7)
TOLERANCE = 1e-5
"""Parts of some families compute in float32 whatever the weights are."""


def classes() -> Iterator[tuple[str, str, str]]:
    """Give each kind of head, family and name of a class, of families that have a text model for some head."""
    text = {
        family
        for kind, table in KINDS.items()
        if kind not in ("base", "pretraining")
        for family in getattr(modeling_auto, table)
    }
    for kind, table in KINDS.items():
        for family, names in getattr(modeling_auto, table).items():
            if family in text:
                for name in (names,) if isinstance(names, str) else names:
                    yield kind, family, name


def tiny_class(family: str, name: str, *, is_decoder: bool) -> Any:
    """Return a tiny model of a class, in float64.

    Raises:
        ModelError: none can be made.
    """
    config = tiny_config(family)
    config.is_decoder = is_decoder
    config.num_labels = 2
    try:
        kind = getattr(transformers, name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = kind._from_config(config, attn_implementation="eager", experts_implementation="eager")
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.ndim > 1 and weight.is_floating_point():
                        weight.normal_(0, 0.2)
    except Exception as error:
        raise ModelError(f"no tiny {name}: {type(error).__name__}: {error}") from error
    return model.to(torch.float64).eval()


def batch_of(layout: Layout) -> tuple[list[Any], PackedBatch]:
    """Return documents and their batch."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, VOCABULARY, length).astype(np.int32) for length in LENGTHS]
    return documents, vl.collate(documents, vl.pack(LENGTHS, capacity=14, method="next_fit"), layout=layout)


def outputs_of(model: Any, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the numbers that a call gives for each token, row or batch."""
    with torch.no_grad():
        found = model(**arguments)
    named = (
        found.items()
        if hasattr(found, "items")
        else enumerate(found if isinstance(found, tuple) else (found,))
    )
    return {
        str(name): value
        for name, value in named
        if torch.is_tensor(value) and value.is_floating_point() and name != "loss"
    }


def furthest_from_alone(model: Any, layout: Layout = "rows") -> float:
    """Return how far a model's packed outputs are from those of each document alone; infinite where one is missing.

    Raises:
        ModelError: `model_inputs` refuses the model.
    """
    documents, batch = batch_of(layout)
    arguments = {name: v for name, v in hf.model_inputs(batch, model).items() if name != "labels"}
    packed = outputs_of(model, arguments)
    segments = np.asarray(batch.segment_ids)
    worst, number = 0.0, 0
    for row, told in enumerate(segments):
        for segment in range(told.max() + 1):
            place = np.flatnonzero(told == segment)
            tokens = torch.as_tensor(documents[int(batch.document_ids[number])]).long()[None]
            number += 1
            for name, theirs in outputs_of(model, hf.plain_inputs(tokens, model)).items():
                ours = packed.get(name)
                if ours is None or ours.ndim < 2 or theirs.ndim < 2 or ours.shape[:2] != segments.shape:
                    return float("inf")
                if theirs.shape[1] != len(place):
                    return float("inf")
                worst = max(worst, float((ours[row, place] - theirs[0]).abs().max()))
    return worst


def runs_alone(model: Any) -> bool:
    """Return whether a model takes a document by itself at all."""
    try:
        outputs_of(model, hf.plain_inputs(torch.arange(3, 8)[None], model))
    except Exception:
        return False
    return True
