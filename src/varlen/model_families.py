"""Facts about transformers' model families, by `config.model_type`: one row each, shared by all rooms.

Everything else is read from a model's config, its modules and its code, of which `names_in` gives the names.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One row; the defaults apply to families without one."""

    # Whether some layers pass a state, or the last few tokens, from token to token.
    is_recurrent: bool = False
    has_own_attention: bool = False  # computes its own scores, or ignores its layer's parameters
    # Arguments for recurrent and convolution kernels: `seq_idx`, the segment number of every token ("numbers"), or
    # that for convolutions and `cu_seqlens` for the recurrence, of a single row ("ends"). Determined by running each
    # family with stand-ins for its kernels (`varlen.verify.models.backends`), which the tests repeat; where the
    # kernels' packages aren't installed, transformers itself rejects boundaries.
    boundaries: Literal["", "numbers", "ends"] = ""
    takes_flat_masks: bool = False  # whether its code accepts only padding masks, and fails with a 4-D mask
    mixes_neighbours: bool = False  # whether its embeddings join each token's with those beside it in the row
    # For families whose only positions are distances between tokens (ALiBi), the same wherever a document stands in
    # its row: the setting that bounds a row's width.
    widest: str = ""
    is_gated: bool = True  # whether its feed-forward part has three matrices instead of two
    is_four_times: bool = False  # whether its inner width defaults to four times the hidden size


RECURRENT = Family(is_recurrent=True)
UNGATED = Family(is_gated=False)

FAMILIES: dict[str, Family] = {
    "apertus": UNGATED,
    "arcee": UNGATED,
    "bailing_hybrid": RECURRENT,
    "bamba": Family(is_recurrent=True, boundaries="numbers"),
    "bloom": Family(has_own_attention=True, is_gated=False, is_four_times=True),
    "codegen": Family(has_own_attention=True, is_gated=False, is_four_times=True),
    "esm": Family(takes_flat_masks=True),
    "falcon": Family(has_own_attention=True, is_gated=False, is_four_times=True),
    "falcon_h1": Family(is_recurrent=True, boundaries="numbers"),
    "falcon_mamba": RECURRENT,
    "flaubert": Family(takes_flat_masks=True),
    "gpt2": Family(is_gated=False, is_four_times=True),
    "gpt_bigcode": Family(is_gated=False, is_four_times=True),
    "gpt_neo": Family(has_own_attention=True, is_gated=False, is_four_times=True),
    "gpt_neox": UNGATED,
    "gpt_neox_japanese": Family(has_own_attention=True, is_gated=False),
    "gptj": Family(has_own_attention=True, is_gated=False, is_four_times=True),
    "granitemoehybrid": Family(is_recurrent=True, boundaries="numbers"),
    "jais2": UNGATED,
    "jamba": RECURRENT,
    "kimi_linear": RECURRENT,
    "lfm2": Family(is_recurrent=True, boundaries="numbers"),
    "lfm2_moe": Family(is_recurrent=True, boundaries="numbers"),
    "lfm3": RECURRENT,
    "mamba": RECURRENT,
    "mamba2": RECURRENT,
    "minimax": RECURRENT,
    "mobilebert": Family(mixes_neighbours=True),
    "mpt": Family(has_own_attention=True, widest="max_seq_len", is_gated=False, is_four_times=True),
    "nanochat": UNGATED,
    "nemotron": Family(has_own_attention=True, is_gated=False),
    "nemotron_h": Family(is_recurrent=True, boundaries="numbers"),
    "olmo_hybrid": Family(is_recurrent=True, boundaries="ends"),
    "openai-gpt": Family(takes_flat_masks=True),
    "opt": UNGATED,
    "persimmon": UNGATED,
    "phi": UNGATED,
    "qwen3_5": RECURRENT,
    "qwen3_5_moe": RECURRENT,
    "qwen3_5_moe_text": Family(is_recurrent=True, boundaries="ends"),
    "qwen3_5_text": Family(is_recurrent=True, boundaries="ends"),
    "qwen3_next": Family(is_recurrent=True, boundaries="ends"),
    "qwen4_exp_text": Family(is_recurrent=True, boundaries="ends"),
    "recurrent_gemma": RECURRENT,
    "reformer": Family(takes_flat_masks=True),
    "rwkv": RECURRENT,
    "stablelm": Family(has_own_attention=True),
    "starcoder2": UNGATED,
    "xglm": Family(has_own_attention=True),
    "xlm": Family(takes_flat_masks=True),
    "xlstm": RECURRENT,
    "zamba": RECURRENT,
    "zamba2": Family(is_recurrent=True, boundaries="numbers"),
    "zaya": RECURRENT,
}
UNKNOWN = Family()


def cache_name(module: Any) -> str:
    """Return the argument of a module's `forward` that takes a cache, which transformers 5.24 renamed."""
    compiled = getattr(module, "_orig_mod", module)
    return "cache" if "cache" in inspect.signature(compiled.forward).parameters else "past_key_values"


def names_in(module: Any, method: str | None = None) -> frozenset[str]:
    """Return the globals and attributes to which the code of a module's class and its base classes refers.

    Args:
        method: the only one whose code is read; None for all code.
    """
    kind: Any = type(module)
    return _names_in(kind, method)


@lru_cache(maxsize=1024)
def _names_in(kind: Any, method: str | None) -> frozenset[str]:
    """Read code objects, as sources may be absent, and finding a class in a source parses the whole file."""
    codes: list[CodeType] = []
    for each in kind.__mro__:
        module = each.__module__
        if module not in ("transformers.modeling_utils", "builtins") and not module.startswith("torch."):
            for name, attribute in tuple(vars(each).items()):
                codes += _codes_of(attribute) if method in (None, name) else []
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(names)


def _codes_of(attribute: Any) -> list[CodeType]:
    """Return the code objects of a class's attribute: of an unwrapped method, or of a property's functions."""
    if isinstance(attribute, property):
        accessors = (attribute.fget, attribute.fset, attribute.fdel)
        return [code for each in accessors if each for code in _codes_of(each)]
    function: Any = getattr(attribute, "__func__", attribute)
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return [code] if isinstance(code, CodeType) else []
