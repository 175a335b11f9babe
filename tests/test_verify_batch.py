"""check_batch against real runs: over the whole truth table, it finds an error exactly where a model leaks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import VOCABULARY, make, tiny
from test_verify_isolation import stand_in_for_flash_attention
from transformers import AutoConfig
from transformers import modeling_flash_attention_utils as kernels

import varlen as vl
from varlen.adapters import hf

LENGTHS = (4, 5, 3)
PADDING = 3
POSITIONS = ("restart", "absent", "continue", "run on", "mid-document", "padded")
MASKS = ("none", "ones", "padding", "segments", "padded segments", "finished", "finished and open")
CACHES = (False, True, None)
BOUNDARIES = ("none", "all four", "incomplete")
ISOLATION = {
    "attention_mask",
    "use_cache",
    "packed_rows",
    "positions_missing",
    "positions_run_on",
    "positions_continue",
    "row_starts_mid_document",
    "incomplete_boundaries",
    "boundaries_missing",
    "mrope_positions",
    "open_mask",
    "model_family",
    "boundaries_disagree",
}
FLASH = "flash_attention_2"


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_flash_attention(monkeypatch)
    (dense, varlen, *_), process = kernels.lazy_import_flash_attention(None)
    padding = (kernels._pad_input, kernels._unpad_input)  # transformers' own, for masks with holes
    monkeypatch.setattr(
        kernels, "lazy_import_flash_attention", lambda *_, **__: ((dense, varlen, None, *padding), process)
    )


def model_with(attention: str, config: Any = None) -> Any:
    """Return a tiny Llama, or a model of a config, with this attention."""
    plain = "eager" if attention == FLASH else attention
    model = tiny("llama", plain) if config is None else make(config, plain)
    if attention == FLASH:
        model.config._attn_implementation_internal = FLASH
    return model.eval()


def positions_of(kind: str) -> list[int] | None:
    starts = {"continue": (0, 7, 0), "run on": (0, 4, 9), "mid-document": (7, 0, 0)}.get(kind, (0, 0, 0))
    if kind == "absent":
        return None
    return [start + i for start, length in zip(starts, LENGTHS, strict=True) for i in range(length)]


def owners(mask: str, positions: str) -> np.ndarray[Any, Any]:
    """Return the document of every token of a row, -1 at padding."""
    tail = [-1] * PADDING if positions == "padded" or mask in ("padding", "padded segments") else []
    return np.array([i for i, length in enumerate(LENGTHS) for _ in range(length)] + tail)


def batch_of(mask: str, use_cache: bool | None, rows: int, positions: str, ends: str) -> dict[str, Any]:
    """Return a batch of one case of the table; every row is cut alike."""
    owner = owners(mask, positions)
    width, padding = len(owner), int((owner < 0).sum())
    batch: dict[str, Any] = {"input_ids": torch.randint(1, VOCABULARY, (rows, width))}
    if (row := positions_of(positions)) is not None:
        batch["position_ids"] = torch.tensor([row + [0] * padding] * rows)
    lengths = [*LENGTHS, *([1] * padding)] * rows
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    if ends != "none":
        batch |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    if ends == "all four":
        batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    if use_cache is not None:
        batch["use_cache"] = use_cache
    numbers = torch.as_tensor(owner + 1).expand(rows, width)
    same = (numbers[:, None, :, None] == numbers[:, None, None, :]) & torch.ones(width, width).tril().bool()
    masks = {
        "ones": torch.ones(rows, width, dtype=torch.long),
        "padding": (numbers > 0).long(),
        "segments": numbers,
        "padded segments": numbers,
        "finished": same,
        "finished and open": torch.ones(width, width).tril().bool().expand(rows, 1, width, width),
    }
    if mask in masks:
        batch["attention_mask"] = masks[mask]
    return batch


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)


def leaks(model: Any, batch: dict[str, Any], owner: np.ndarray[Any, Any]) -> bool:
    """Return whether any document's logits move when another, or padding, changes; or whether the call fails."""
    documents = range(-1 if (owner < 0).any() else 0, int(owner.max()) + 1)
    try:
        with torch.no_grad():
            before = model(**batch).logits
            for row, document in itertools.product(range(len(batch["input_ids"])), documents):
                chosen = np.zeros(batch["input_ids"].shape, dtype=bool)
                chosen[row] = owner == document
                ids = batch["input_ids"].clone()
                ids[torch.as_tensor(chosen)] = (ids[torch.as_tensor(chosen)] + 7) % VOCABULARY
                moved = (model(**batch | {"input_ids": ids}).logits != before).any(-1).numpy()
                if (moved & ~chosen & (owner >= 0)).any():
                    return True
    except (AssertionError, RuntimeError, IndexError, ValueError):
        return True
    return False


def is_told(mask: str, positions: str, ends: str) -> bool:
    """Return whether the batch says anywhere that its rows hold several documents."""
    return ends != "none" or "segments" in mask or positions not in ("absent", "run on")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("attention", ["eager", "sdpa", FLASH])
def test_an_error_is_found_exactly_where_the_model_leaks(attention: str, mask: str, flash: None) -> None:
    model = model_with(attention)
    model.config.use_cache = True
    wrong, seen = [], set()
    for use_cache, rows, positions, ends in itertools.product(CACHES, (1, 2), POSITIONS, BOUNDARIES):
        if positions == "padded" and mask in ("finished", "finished and open"):
            continue
        case, owner = batch_of(mask, use_cache, rows, positions, ends), owners(mask, positions)
        if attention == "eager" and mask.startswith("finished"):
            case["attention_mask"] = additive(case["attention_mask"])
        report = vl.check_batch(case, model)
        found = {finding.kind for finding in report.errors} & ISOLATION
        expected = is_told(mask, positions, ends) and leaks(model, case, owner)
        if mask.startswith("finished") and attention == FLASH:
            expected = True  # FlashAttention takes no such mask, whether or not documents are told
        seen.add(expected)
        if bool(found) is not expected:
            wrong.append((use_cache, rows, positions, ends, expected, report.kinds))

    assert wrong == []
    assert True in seen or mask == "finished"
