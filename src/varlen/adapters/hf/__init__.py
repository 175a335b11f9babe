"""transformers: the arguments that keep documents apart, answers for each document, and attention per document."""

from varlen.adapters.hf.attention import register, use_varlen_attention
from varlen.adapters.hf.collator import DataCollatorWithFlattening
from varlen.adapters.hf.documents import document_outputs, pool
from varlen.adapters.hf.inputs import (
    inputs_without_boundaries,
    model_inputs,
    mrope_positions,
    plain_inputs,
)
from varlen.adapters.hf.model import (
    accepts,
    first_position,
    has_experts,
    implementation,
    logits_size,
    model_type,
    text_config,
    unwrap,
    vocabulary_size,
)

__all__ = [
    "DataCollatorWithFlattening",
    "accepts",
    "document_outputs",
    "first_position",
    "has_experts",
    "implementation",
    "inputs_without_boundaries",
    "logits_size",
    "model_inputs",
    "model_type",
    "mrope_positions",
    "plain_inputs",
    "pool",
    "register",
    "text_config",
    "unwrap",
    "use_varlen_attention",
    "vocabulary_size",
]
