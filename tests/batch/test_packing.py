"""Packings that `vl.collate` refuses: without packs, or made by hand of what can't be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.batch.batches import tokens_like

import varlen as vl
from varlen.errors import SettingError
from varlen.types import Packing


def test_a_packing_without_packs_says_so() -> None:
    with pytest.raises(SettingError, match="pack id 0 is out of range: this packing has no packs"):
        vl.collate([], vl.pack([], 8), pack_ids=[0])


def test_a_packing_made_by_hand_over_its_capacity_is_refused() -> None:
    right = vl.pack([5, 3], 8)
    wrong = Packing(
        document_ids=right.document_ids,
        starts=right.starts,
        stops=right.stops,
        offsets=right.offsets,
        capacity=7,
        ledger=right.ledger,
    )
    with pytest.raises(SettingError, match="pack 0 takes up 8 tokens, over the packing's capacity of 7"):
        vl.collate(tokens_like([5, 3]), wrong)


@pytest.mark.parametrize("documents", [tokens_like([3, 2]), (np.arange(5), np.array([0, 3, 5]))])
@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"document_ids": [0, 2]},
            "pack 1 holds tokens 0 to 2 of document 2, and the packing has 2 documents",
        ),
        ({"document_ids": [-1, 1]}, "pack 0 holds tokens 0 to 3 of document -1"),
        ({"starts": [0, 2]}, "pack 1 holds tokens 2 to 2 of document 1"),
        ({"starts": [-1, 0]}, "pack 0 holds tokens -1 to 3 of document 0"),
        ({"stops": [3, -(2**31)]}, "pack 1 holds tokens 0 to -2,147,483,648 of document 1"),
        ({"offsets": [0, 1, 3]}, "pack 1 holds pieces 1 to 3 of 2; make packings with vl.pack"),
        ({"offsets": [-1, 1, 2]}, "pack 0 holds pieces -1 to 1 of 2"),
        ({"offsets": [0, 3, 2]}, "pack 0 holds pieces 0 to 3 of 2"),
    ],
)
def test_a_packing_made_by_hand_of_pieces_that_cannot_be_is_refused(
    fields: dict[str, list[int]],
    words: str,
    documents: Any,
    in_python: bool,
    plain_python: Callable[[bool], None],
) -> None:
    plain_python(in_python)
    right = vl.pack([3, 2], 4)
    values = {name: getattr(right, name) for name in ("document_ids", "starts", "stops", "offsets")}
    wrong = {name: np.array(fields.get(name, array), array.dtype) for name, array in values.items()}
    names = ("input_ids", "labels", "position_ids", "segment_ids")
    out = {name: np.full((2, 4), -7, np.int32) for name in names}

    with pytest.raises(SettingError, match=words):
        vl.collate(documents, Packing(**wrong, capacity=4, ledger=right.ledger), out=out)
    assert all((array == -7).all() for array in out.values())
