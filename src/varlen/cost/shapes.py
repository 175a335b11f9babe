"""The shapes that go by a name, each as its published configuration gives it, and the positions of its checkpoint.

A shape by itself limits no positions: long-context training begins with extending a checkpoint's, and the shape is
the same. `POSITIONS` stand apart: they limit nothing, and say what a plan of longer documents takes for granted.
"""

from __future__ import annotations

from typing import Any, Final


def _dense(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    """A SwiGLU decoder with heads of 128."""
    return {
        "hidden": hidden,
        "ffn": ffn,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 128,
        "vocab": vocab,
    }


def _gpt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """GPT-3's layer (two matrices of 4h; Brown et al. 2020, arXiv 2005.14165) at Llama's widths."""
    return _dense(hidden, 4 * hidden, layers, heads, heads, 50304) | {"gated": False, "tied": True}


def _experts(count: int, each: int, ffn: int) -> dict[str, Any]:
    """Routed experts, of which a token visits `each`."""
    return {"experts": count, "experts_per_token": each, "expert_ffn": ffn}


SHAPES: Final[dict[str, dict[str, Any]]] = {
    # Touvron et al. 2023, "LLaMA", arXiv 2302.13971, table 2; 30B is the one called 33B there.
    "llama-7b": _dense(4096, 11008, 32, 32, 32, 32000),
    "llama-13b": _dense(5120, 13824, 40, 40, 40, 32000),
    "llama-30b": _dense(6656, 17920, 60, 52, 52, 32000),
    "llama-65b": _dense(8192, 22016, 80, 64, 64, 32000),
    # Touvron et al. 2023, "Llama 2", arXiv 2307.09288.
    "llama-2-7b": _dense(4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": _dense(5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": _dense(8192, 28672, 80, 64, 8, 32000),
    # Grattafiori et al. 2024, "The Llama 3 Herd of Models", arXiv 2407.21783, table 3.
    "llama-3-8b": _dense(4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": _dense(8192, 28672, 80, 64, 8, 128256),
    "llama-3-405b": _dense(16384, 53248, 126, 128, 8, 128256),
    # The same paper's later checkpoints: the same shapes with more positions.
    "llama-3.1-8b": _dense(4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": _dense(8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": _dense(16384, 53248, 126, 128, 8, 128256),
    # Qwen team 2024, "Qwen2.5 Technical Report", arXiv 2412.15115.
    "qwen2.5-7b": _dense(3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _dense(5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _dense(5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _dense(8192, 29568, 80, 64, 8, 152064),
    # Qwen team 2025, "Qwen3 Technical Report", arXiv 2505.09388.
    "qwen3-8b": _dense(4096, 12288, 36, 32, 8, 151936),
    "qwen3-14b": _dense(5120, 17408, 40, 40, 8, 151936),
    "qwen3-32b": _dense(5120, 25600, 64, 64, 8, 151936),
    "qwen3-30b-a3b": _dense(2048, 0, 48, 32, 4, 151936) | _experts(128, 8, 768),
    "qwen3-235b-a22b": _dense(4096, 0, 94, 64, 4, 151936) | _experts(128, 8, 1536),
    # Jiang et al. 2023, "Mistral 7B", arXiv 2310.06825; the window went with version 0.2.
    "mistral-7b": _dense(4096, 14336, 32, 32, 8, 32768),
    "mistral-7b-v0.1": _dense(4096, 14336, 32, 32, 8, 32000) | {"window": 4096, "windowed_layers": 32},
    # Jiang et al. 2024, "Mixtral of Experts", arXiv 2401.04088.
    "mixtral-8x7b": _dense(4096, 0, 32, 32, 8, 32000) | _experts(8, 2, 14336),
    "mixtral-8x22b": _dense(6144, 0, 56, 48, 8, 32768) | _experts(8, 2, 16384),
    # DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, §4.2.
    "deepseek-v3": _dense(7168, 18432, 61, 128, 128, 129280)
    | _experts(256, 8, 2048)
    | {"head_dim": 192, "value_head_dim": 128, "latent_rank": 512, "latent_rope_dim": 64, "query_rank": 1536}
    | {"shared_ffn": 2048, "dense_layers": 3},
    # What papers on slices and balance train: FlexSP (arXiv 2412.01523) and others.
    "gpt-7b": _gpt(4096, 32, 32),
    "gpt-13b": _gpt(5120, 40, 40),
    "gpt-30b": _gpt(6656, 60, 52),
}

POSITIONS: Final[dict[str, int]] = {
    # Of "LLaMA", which came without a config.json: max_seq_len of ModelArgs in the code that came with it.
    **dict.fromkeys(("llama-7b", "llama-13b", "llama-30b", "llama-65b"), 2048),
    # All others: max_position_embeddings of meta-llama/Llama-2-7b-hf, -13b-hf and -70b-hf,
    **dict.fromkeys(("llama-2-7b", "llama-2-13b", "llama-2-70b"), 4096),
    # meta-llama/Meta-Llama-3-8B and -70B,
    **dict.fromkeys(("llama-3-8b", "llama-3-70b"), 8192),
    # meta-llama/Llama-3.1-8B, -70B and -405B (of 405B there is no earlier one),
    **dict.fromkeys(("llama-3-405b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"), 131_072),
    # Qwen/Qwen2.5-7B, -14B, -32B and -72B,
    **dict.fromkeys(("qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b"), 131_072),
    # Qwen/Qwen3-8B, -14B, -32B, -30B-A3B and -235B-A22B,
    **dict.fromkeys(("qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b"), 40_960),
    # mistralai/Mistral-7B-v0.3 and -v0.1, Mixtral-8x7B-v0.1, Mixtral-8x22B-v0.1,
    **dict.fromkeys(("mistral-7b", "mistral-7b-v0.1", "mixtral-8x7b"), 32_768),
    "mixtral-8x22b": 65_536,
    # and deepseek-ai/DeepSeek-V3.
    "deepseek-v3": 163_840,
}
"""Of the published checkpoints, by name. The shapes that papers train at several lengths (gpt-…) have none."""
