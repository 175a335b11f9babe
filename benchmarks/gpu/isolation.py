"""Small models of every kind keep their documents apart, with every attention that the device has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

import varlen as vl
from varlen.errors import VarlenError

FAMILIES = (
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "mixtral",
    "qwen3_moe",
    "bamba",
    "lfm2",
    "nemotron_h",
    "qwen3_next",
)
"""Plain ones, sliding windows, soft caps, sinks, experts, and recurrent layers of every kind."""


def isolation(
    device: str = "cuda",
    families: Sequence[str] = FAMILIES,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> Iterator[dict[str, Any]]:
    """Verify tiny models of some families, with every attention and layout, in the dtypes that the kernels take."""
    for family in families:
        for dtype in dtypes:
            row = {"family": family, "dtype": str(dtype).removeprefix("torch.")}
            try:
                report = vl.verify(family, device=device, dtype=dtype, calls=False)
            except (VarlenError, RuntimeError) as error:
                reason = str(error).splitlines()[0][:200]
                yield {**row, "attention": "all", "verdict": "not run", "reason": reason}
                continue
            yield from ({**row, **_cell(cell)} for cell in report.cells)


def _cell(cell: Any) -> dict[str, Any]:
    gradients = None if cell.gradients is None else cell.gradients.difference
    return {
        "attention": cell.backend,
        "layout": cell.layout,
        "verdict": cell.verdict,
        "reason": cell.reason,
        "stand_in": list(cell.stand_in),
        "kernels": dict(cell.kernels),
        "gradients": gradients,
    }
