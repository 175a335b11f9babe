"""facts_of: ask a model what decides whether a batch keeps its documents apart in it.

Whether a family looks at positions when it builds its mask is read off its own code, as transformers has it
installed, and not off a list of names, which would age.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from varlen.adapters.hf import attention
from varlen.adapters.hf.code import drops_boundaries
from varlen.adapters.hf.mixing import check_family
from varlen.adapters.hf.model import (
    implementation,
    model_type,
    text_config,
    text_decoder,
    unwrap,
    uses_registry,
    vocabulary_size,
)
from varlen.adapters.hf.recurrent import BY_ENDS_TOO, TOLD
from varlen.errors import ModelError
from varlen.parsed import parse_python
from varlen.verify.batches.finding import Detector, ModelFacts, MRope

INFERRED_FROM_POSITIONS = ("eager", "sdpa", "flex_attention")


def facts_of(model: Any) -> ModelFacts:
    """Ask a model all that matters to a batch."""
    config, decoder, name = text_config(model), text_decoder(model), implementation(model)
    limit = getattr(config, "max_position_embeddings", None)
    kind: Any = type(decoder)
    code = _code(kind)
    return ModelFacts(
        name=type(unwrap(model)).__name__,
        attention=name,
        detector=_detector(model, name),
        uses_cache=bool(getattr(config, "use_cache", False)),
        drops_cache=bool(getattr(decoder, "gradient_checkpointing", False)) and decoder.training,
        reads_positions=code.reads_positions,
        mrope=code.mrope,
        reads_boundaries=code.reads_boundaries,
        drops_boundaries=drops_boundaries(model) is not None,
        recurrent_read=_recurrent_read(model_type(model)),
        recurrent_in_one_row=model_type(model) in BY_ENDS_TOO,
        learned_positions=_has_table_of_positions(decoder, limit),
        vocabulary=vocabulary_size(model),
        positions=limit if isinstance(limit, int) and limit > 0 else None,
        refusal=_refusal(model),
    )


def _detector(model: Any, name: str) -> Detector:
    # A model with an attention of its own takes any registered name, and builds its mask all the same.
    if name in INFERRED_FROM_POSITIONS or not uses_registry(model):
        return "mask"
    if name == attention.NAME:
        return "varlen"
    return "flash" if "flash" in name and not name.startswith("paged|") else "unknown"


def _recurrent_read(family: str) -> tuple[str, ...]:
    if family not in TOLD:
        return ()
    return ("seq_idx", "cu_seq_lens_q") if family in BY_ENDS_TOO else ("seq_idx",)


def _refusal(model: Any) -> str | None:
    try:
        check_family(model)
    except ModelError as error:
        return str(error)
    return None


def _has_table_of_positions(decoder: Any, limit: Any) -> bool:
    """Return whether an embedding beside the tokens' has a row for every position (and a few more)."""
    if not isinstance(limit, int):
        return False
    tokens = decoder.get_input_embeddings() if hasattr(decoder, "get_input_embeddings") else None
    return any(
        isinstance(module, torch.nn.Embedding)
        and module is not tokens
        and limit <= module.num_embeddings <= limit + 8
        for module in decoder.modules()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Code:
    """What a decoder's source says."""

    reads_positions: bool = True
    mrope: MRope = "none"
    reads_boundaries: bool = False


@lru_cache(maxsize=256)
def _code(decoder: Any) -> _Code:
    """Read a decoder's source; where there is none, believe that it looks at positions."""
    try:
        forward = inspect.getsource(inspect.unwrap(decoder.forward))
        module = inspect.getsource(inspect.getmodule(decoder) or decoder)
    except (OSError, TypeError, AttributeError):
        return _Code()
    mrope: MRope = "none"
    if "text_position_ids" in forward:
        mrope = "text_row_or_plain" if "expand(4, position_ids" in forward else "text_row"
    return _Code(
        reads_positions=_hands_positions_on(parse_python(textwrap.dedent(forward))),
        mrope=mrope,
        reads_boundaries="seq_idx" in module or "cu_seq_lens_q" in module,
    )


def _hands_positions_on(forward: ast.AST) -> bool:
    """Return whether every mask of causal attention is built with `position_ids`; True where none is built."""
    tables = {
        target.id
        for node in ast.walk(forward)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
        and any(isinstance(key, ast.Constant) and key.value == "position_ids" for key in node.value.keys)
    }
    calls = [
        node
        for node in ast.walk(forward)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id.startswith("create_")
        and node.func.id.endswith("causal_mask")
    ]

    def hands_on(call: ast.Call) -> bool:
        named = any(word.arg == "position_ids" for word in call.keywords)
        unfolded = [
            word.value.id for word in call.keywords if word.arg is None and isinstance(word.value, ast.Name)
        ]
        return named or any(name in tables for name in unfolded)

    return all(map(hands_on, calls))
