"""Token ids below 0 are refused in every form, layout and width, and -100 stays a label."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import varlen as vl
from varlen.batch.flatten import flatten
from varlen.errors import DocumentsError

DOCUMENTS = [[1, 2, 3], [4, 5, -7], [8]]
PACKING = vl.pack([3, 3, 1], 8)
FORMS: dict[str, Callable[[list[list[int]]], Any]] = {
    "lists": list,
    **{
        f"arrays of {kind}": lambda given, kind=kind: [np.array(one, kind) for one in given]
        for kind in ("int8", "int16", "int32", "int64")
    },
    **{
        f"flat {kind}": lambda given, kind=kind: (
            np.array([token for one in given for token in one], kind),
            np.array([0, 3, 6, 7]),
        )
        for kind in ("int8", "int32", "int64")
    },
    "tensors": lambda given: [torch.tensor(one) for one in given],
    "Arrow": pa.array,
    "large Arrow": lambda given: pa.array(given, pa.large_list(pa.int32())),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("beside", ["nothing", "labels", "loss_mask"])
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_an_id_below_0_is_refused(form: str, beside: str, layout: Any) -> None:
    more = {
        "nothing": {},
        "labels": {"labels": DOCUMENTS},
        "loss_mask": {"loss_mask": [[1] * 3, [1] * 3, [1]]},
    }

    with pytest.raises(
        DocumentsError, match=r"document 1 has the token id -7; .* \(1 of 7 tokens are below 0\)"
    ):
        vl.collate(FORMS[form](DOCUMENTS), PACKING, layout=layout, **more[beside])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("positions", [True, False])
def test_a_flat_row_refuses_an_id_below_0(form: str, positions: bool) -> None:
    with pytest.raises(DocumentsError, match="document 1 has the token id -7"):
        flatten(FORMS[form](DOCUMENTS), positions=positions)


@pytest.mark.parametrize("token", [-1, -100, -(2**31)])
def test_every_id_below_0_is_one(token: int) -> None:
    with pytest.raises(DocumentsError, match=f"token id {token};"):
        vl.collate([[token]], vl.pack([1], 4))


@pytest.mark.parametrize("form", FORMS)
def test_labels_and_padding_may_be_below_0(form: str) -> None:
    labels = [[-100, 2, 3], [-100, 5, -100], [8]]

    batch = vl.collate(FORMS[form]([[1, 2, 3], [4, 5, 7], [8]]), PACKING, labels=labels, pad_id=-1)

    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 7, 8, -1]]
    assert batch.labels.tolist() == [[-100, 2, 3, -100, 5, -100, -100, -100]]
    assert batch.max_token_id == 8


def test_documents_of_other_packs_are_not_asked() -> None:
    packing = vl.pack([3, 3, 1], 3, "next_fit")

    assert vl.collate(DOCUMENTS, packing, pack_ids=[0]).input_ids.tolist() == [[1, 2, 3]]
