"""check_batch on boundaries under other names, masks of other shapes, and padding with positions of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.hf_models import packed, tiny
from tests.verify.batches.faults import good

import varlen as vl
from varlen.errors import DocumentsError

IDS = [[5, 6, 7, 8, 9, 10, 11, 12, 13]]
LABELS = [[-100, 6, 7, -100, 9, 10, 11, -100, 13]]
NUMBERS = [[0, 0, 0, 1, 1, 1, 1, 2, 2]]
UNREAD = [
    {"cu_seqlens": [0, 3, 7, 9]},
    {"cu_seqlens_q": np.array([0, 3, 7, 9], np.int32)},
    {"cu_seq_lens": torch.tensor([0, 3, 7, 9])},
    {"seq_lengths": [[3, 4, 2]]},
    {"seq_lens": [3, 4, 2]},
    {"segment_ids": NUMBERS},
    {"sequence_ids": NUMBERS},
    {"document_ids": torch.tensor(NUMBERS)},
    {"doc_ids": NUMBERS},
]


def model(attention: str = "sdpa") -> Any:
    found = tiny("llama", attention, torch.float32)
    found.config.use_cache = False
    return found


@pytest.mark.parametrize("unread", UNREAD, ids=lambda unread: next(iter(unread)))
def test_boundaries_under_a_name_that_no_model_reads_are_found(unread: dict[str, Any]) -> None:
    for given in (None, model()):
        report = vl.check_batch({"input_ids": IDS, "labels": LABELS} | unread, given)
        first = report.errors[0]

        assert first.kind == "positions_missing"
        assert (
            f"(models don't look at {next(iter(unread))}), so 2 documents see tokens of others" in first.what
        )
        assert (first.row, first.column) == (0, 3)
        assert report.documents == 3


@pytest.mark.parametrize("unread", UNREAD, ids=lambda unread: next(iter(unread)))
def test_beside_arguments_that_are_read_they_do_no_harm(unread: dict[str, Any]) -> None:
    assert not len(vl.check_batch(good() | unread, model()))
    told = vl.check_batch(
        {"input_ids": IDS, "labels": LABELS, "position_ids": [list(range(9))]} | unread, model()
    )
    assert told.kinds[0] == "positions_run_on"


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_our_own_batch_as_a_mapping_has_no_finding(layout: Any) -> None:
    assert not len(vl.check_batch(dict(vars(packed(layout))), model()))


@pytest.mark.parametrize(
    "other",
    [
        {"cu_seqlens": [0, 3]},
        {"cu_seqlens": "abc"},
        {"seq_lens": [[3], [4, 2]]},
        {"segment_ids": [[0, 1]]},
        {"document_ids": [4, 5, 6]},
        {"seq_lens": [-1, 10]},
    ],
)
def test_what_can_not_be_boundaries_is_passed_over(other: dict[str, Any]) -> None:
    assert not len(vl.check_batch({"input_ids": IDS, "labels": LABELS} | other, model()))


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (3, 1, 9, 9), (1, 1, 9, 8)])
def test_a_finished_mask_of_another_shape_is_found(shape: tuple[int, ...]) -> None:
    batch = good(attention_mask=torch.ones(shape, dtype=torch.bool), cu_seq_lens_q=None)
    report = vl.check_batch(batch, model())

    assert "shapes" in [finding.kind for finding in report.errors]
    assert f"attention_mask has the shape {list(shape)}, and must be [1, 'heads or 1', 9, 9]" in str(report)


def test_a_mask_that_is_missing_for_a_kind_of_layers_is_found() -> None:
    gemma = tiny("gemma2", "eager", torch.float32)
    segments = torch.tensor(NUMBERS)
    mask = (segments[:, :, None] == segments[:, None, :])[:, None] & torch.ones(9, 9, dtype=torch.bool).tril()
    closed = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
    batch = {"input_ids": IDS, "labels": LABELS, "position_ids": good()["position_ids"]}
    whole = batch | {"attention_mask": {"full_attention": closed, "sliding_attention": closed, "conv": None}}
    half = batch | {"attention_mask": {"full_attention": closed, "sliding_attention": None}}

    assert not len(vl.check_batch(whole, gemma))
    report = vl.check_batch(half, gemma)
    assert report.kinds == ("open_mask",)
    assert "holds no mask for layers of kind sliding_attention" in report.findings[0].what


def test_tensors_without_numbers_are_refused_in_a_sentence() -> None:
    with pytest.raises(DocumentsError, match="input_ids, labels: tensors on the meta device hold no numbers"):
        vl.check_batch(
            {name: torch.tensor(v).to("meta") for name, v in (("input_ids", IDS), ("labels", LABELS))}
        )


def test_padding_with_positions_of_its_own_is_no_document() -> None:
    """axolotl's collators let the positions of padding count from 0."""
    batch = {
        "input_ids": [[5, 6, 7, 8, 9, 0, 0, 0, 0]],
        "labels": [[-100, 6, 7, -100, 9, -100, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1, 2, 3]],
    }
    report = vl.check_batch(batch, model())
    assert not len(report)
    assert report.documents == 2

    batch["input_ids"][0][-1] = 4
    assert vl.check_batch(batch, model()).kinds == ("documents_without_targets",)
