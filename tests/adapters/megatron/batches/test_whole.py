"""From packed rows to what attention and each context-parallel rank get: every real input once, with its target."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from varlen.adapters.megatron import (
    RowCollator,
    cp_slice,
    get_packed_seq_params,
    get_packed_seq_q_cu_seqlens,
    split_microbatches,
)
from varlen.adapters.megatron.dataset import rows_of_items

EOS = 2


@st.composite
def packs(draw: st.DrawFn, multiple: int) -> list[list[list[int]]]:
    """Stored documents, by row: real tokens of a number that no other has, then EOS up to the slot and its target."""
    sizes = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=3)
    numbers = itertools.count(10)
    return [
        [
            [next(numbers) for _ in range(size)] + [EOS] * (-(-size // multiple) * multiple - size + 1)
            for size in row
        ]
        for row in draw(sizes)
    ]


def items_of(rows: list[list[list[int]]], with_lengths: bool) -> list[dict[str, Any]]:
    """Rows as a data set gives them; every real input is trained."""
    items = []
    for row in rows:
        real = [sum(token != EOS for token in document) for document in row]
        items.append(
            {
                "input_ids": [*itertools.chain(*row)],
                "seq_boundaries": np.cumsum([0, *map(len, row)]).tolist(),
                "loss_mask": [int(token != EOS) for document in row for token in document],
            }
            | ({"seq_lengths": real} if with_lengths else {})
        )
    return items


@given(
    st.data(),
    st.sampled_from([1, 4, 6]),
    st.sampled_from(["0.4", "0.5", "0.6"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_attention_gets_every_document_whole_and_apart(
    data: st.DataObject, multiple: int, dialect: Any, with_lengths: bool, is_static: bool, always: bool
) -> None:
    rows = data.draw(packs(multiple))
    settings: dict[str, Any] = {"pad_seq_to_mult": multiple, "always_padded": always, "padding_mask": True}
    if is_static:
        pack_size = 12 * -(-max(sum(map(len, row)) for row in rows) // 12) + data.draw(
            st.sampled_from([0, 12, 600])
        )
        entry = {"max_samples_per_bin": 6, "dataset_max_seqlen": 48, "min_packed_seqlen": 0}
        settings |= {"max_seq_length": pack_size, "pad_to_max_length": True}
        settings |= {"pad_cu_seqlens": True, "pack_metadata": [entry]}
    collator = RowCollator(eos_id=EOS, dialect=dialect, **settings)

    batch = collator(rows_of_items(items_of(rows, with_lengths)))

    for row, micro in zip(rows, split_microbatches(batch), strict=True):
        params = get_packed_seq_params(micro)
        logical, physical = (bounds.tolist() for bounds in get_packed_seq_q_cu_seqlens(params))
        tokens, labels = micro["tokens"][0].tolist(), micro["labels"][0].tolist()
        trained = micro["loss_mask"][0].bool()
        assert len(logical) == len(physical)
        assert physical[0] == logical[0] == 0
        assert physical[-1] == len(tokens)
        for document, begin, real in zip(row, physical, np.diff(logical)):
            kept = [token for token in document if token != EOS]
            assert tokens[begin : begin + real] == kept
            assert labels[begin : begin + real] == [*kept[1:], EOS]
        assert sorted(micro["tokens"][0][trained].tolist()) == sorted(
            token for document in row for token in document if token != EOS
        )
        assert not (trained & micro["padding_mask"][0]).any()
        assert int((~micro["padding_mask"]).sum()) == int(trained.sum())
        is_padded = params.cu_seqlens_q_padded is not None
        assert is_padded == (micro.get("pad_between_seqs", is_padded))
        tail = np.diff(physical)[len(row) :]
        assert all(size % multiple == 0 for size in np.diff(physical)) or multiple == 1
        assert is_static or tail.max(initial=0) <= 128
        assert params.max_seqlen_q is not None
        assert params.max_seqlen_q >= max(np.diff(physical))
        if is_padded:
            assert logical[len(row) :] == logical[-1:] * (len(logical) - len(row))


@given(st.data(), st.sampled_from([1, 2]), st.sampled_from(["0.4", "0.6"]), st.booleans())
def test_ranks_hold_every_place_of_a_collated_row_once(
    data: st.DataObject, ranks: int, dialect: Any, with_lengths: bool
) -> None:
    rows = data.draw(packs(2 * ranks))
    collator = RowCollator(eos_id=EOS, dialect=dialect, pad_seq_to_mult=2 * ranks)

    batch = collator(rows_of_items(items_of(rows, with_lengths)))

    for micro in split_microbatches(batch):
        shares = [cp_slice(micro, rank, ranks) for rank in range(ranks)]
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            held = itertools.chain(*(share[name][0].tolist() for share in shares))
            assert sorted(held) == sorted(micro[name][0].tolist())
        assert len({share["tokens"].shape for share in shares}) == 1
