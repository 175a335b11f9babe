"""Rates of slice attention, both passes apart, over query rows, key length and heads of a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from varlen.cost.shape import BACKWARD_RATIO, ModelShape
from varlen.runtime.probes import attention_probe, quiet, run_once

ROWS = (256, 512, 1024, 2048, 4096, 8192)
KEYS = (8192, 32_768, 131_072)
HEADS = ((8, 1), (32, 8))
"""Query and key heads: what tensor parallelism of 4 leaves of an 8B model, and all of it."""
HEAD_DIM = 128
ROUNDS = 4


def rates(
    device: torch.device,
    *,
    rows: tuple[int, ...] = ROWS,
    keys: tuple[int, ...] = KEYS,
    heads: tuple[tuple[int, int], ...] = HEADS,
    dtype: torch.dtype = torch.bfloat16,
) -> list[dict[str, Any]]:
    """Time the attention of the last rows of documents, and say what rate that is.

    A backward pass is counted at 2.5 times the FLOPs of the forward pass, as papers do.
    """
    found = []
    for query_heads, key_heads in heads:
        shape = replace(
            ModelShape.named("llama-3-8b"),
            heads=query_heads,
            kv_heads=key_heads,
            head_dim=HEAD_DIM,
            value_head_dim=HEAD_DIM,
        )
        points = [(few, many) for few, many in product(rows, keys) if few <= many]
        for few, many in points:
            probe = attention_probe(shape, few, many, device, dtype)
            run_once(probe, device)
            rounds = np.stack([run_once(probe, device) for _ in range(ROUNDS)])
            forward_s, backward_s = quiet(rounds).tolist()
            found.append(
                {
                    "query_heads": query_heads,
                    "key_heads": key_heads,
                    "rows": probe.rows,
                    "keys": many,
                    "forward_s": forward_s,
                    "backward_s": backward_s,
                    "forward_tflops": probe.flops / forward_s / 1e12,
                    "backward_tflops": BACKWARD_RATIO * probe.flops / backward_s / 1e12,
                }
            )
    return found
