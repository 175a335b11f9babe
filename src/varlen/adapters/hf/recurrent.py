"""Families with recurrent or convolving layers whose kernels are told boundaries, and how.

Found by running each with stand-ins for its kernels (`varlen.verify.models.backends`), as the tests do again. Where
the kernels' packages aren't installed, transformers itself refuses boundaries, with a sentence that names them.
"""

from __future__ import annotations

from typing import Any

import torch

from varlen.errors import ModelError

BY_NUMBERS = frozenset(("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "zamba2"))
"""Their kernels take `seq_idx`, in which every token has the number of its segment."""
BY_ENDS_TOO = frozenset(("olmo_hybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"))
"""Convolutions take `seq_idx`, and the recurrence `cu_seqlens`, of one row only."""
TOLD = BY_NUMBERS | BY_ENDS_TOO
SINGLE_TOKENS = ("moe", "mlp")
"""Kinds of layers that mix no tokens."""
MASKLESS_KINDS = ("linear_attention", "conv", *SINGLE_TOKENS)
"""Layers in which no mask has a meaning: they take boundaries, or look at single tokens."""


def segment_arguments(family: str, ends: torch.Tensor, rows: int, width: int) -> dict[str, Any]:
    """Return what recurrent layers are told of segments, beside what attention is.

    Args:
        ends: int32 `[segments + 1]`, over the flattened `rows * width` tokens.

    Returns:
        `seq_idx` int32 `[rows, width]`: the number of each token's segment in its row, those of padding included.
    """
    if family not in TOLD:
        return {}
    if rows != 1 and family in BY_ENDS_TOO:
        raise ModelError(
            f"the recurrent layers of {family} take the segments of one row, and the batch has {rows:,} rows; "
            'collate with layout="flat"'
        )
    starts = torch.zeros(rows * width + 1, dtype=torch.int32, device=ends.device)
    starts[ends.long()] = 1  # one more, as segments may end where the last row does
    numbers = starts[:-1].cumsum(0, dtype=torch.int32).view(rows, width)
    return {"seq_idx": numbers - numbers[:, :1]}
