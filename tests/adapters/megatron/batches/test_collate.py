"""Batches of packed rows: the releases' values where asked for, right ones where theirs are wrong."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import megatron_batches as reference

from varlen.adapters.megatron import PackedRows, RowCollator, collate_rows
from varlen.adapters.megatron.batches import kernels
from varlen.adapters.megatron.dataset import rows_of_items
from varlen.errors import DocumentsError, SettingError

EOS = 2
GOLDEN = json.loads((Path(__file__).with_name("golden.json")).read_text(encoding="utf-8"))
NAMES = [f"{n}-{case['release']}-{case['rows']}" for n, case in enumerate(GOLDEN["cases"])]


def rows(*documents: list[list[int]], mask: Any = None, seq_lengths: list[int] | None = None) -> PackedRows:
    """Packed rows of documents given as stored tokens; every input is trained unless said."""
    items = []
    for row in documents:
        bounds = np.cumsum([0, *map(len, row)]).tolist()
        items.append({"input_ids": [*chain(*row)], "loss_mask": [1] * bounds[-1], "seq_boundaries": bounds})
    found = rows_of_items(items)
    changed: dict[str, Any] = {name: getattr(found, name) for name in PackedRows.__slots__}
    changed["loss_mask"] = found.loss_mask if mask is None else np.asarray(mask)
    changed["seq_lengths"] = None if seq_lengths is None else np.array(seq_lengths, np.int32)
    return PackedRows(**changed)


def listed(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [str(value.dtype).removeprefix("torch."), value.tolist()]
        if isinstance(value, torch.Tensor)
        else value
        for name, value in batch.items()
    }


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=NAMES)
def test_compatible_batches_are_those_that_the_release_made(case):
    batch = collate_rows(
        rows_of_items(GOLDEN["rows"][case["rows"]]),
        dialect=case["dialect"],
        eos_id=EOS,
        pad_seq_to_mult=case["pad_seq_to_mult"],
        pack_metadata=GOLDEN["metadata"],
        compatible=True,
        **case["settings"],
    )

    assert listed(batch) == case["batch"]


def test_labels_never_cross_from_one_document_to_the_next():
    batch = collate_rows(rows([[5, 6, 7], [8, 9]]), eos_id=EOS, pad_seq_length_to_mult=1)

    assert batch["tokens"].tolist() == [[5, 6, 8]]
    assert batch["labels"].tolist() == [[6, 7, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 0]]
    assert batch["token_count"] == [3]


def test_an_eos_in_the_middle_is_trained_as_the_mask_says_unless_it_shall_not():
    stored = rows([[5, EOS, 6, EOS]])

    ours = collate_rows(stored, eos_id=EOS, pad_seq_length_to_mult=1)
    without = collate_rows(stored, eos_id=EOS, pad_seq_length_to_mult=1, eos_in_loss=False)

    assert ours["loss_mask"].tolist() == [[1, 1, 1]]
    assert without["loss_mask"].tolist() == [[1, 0, 1]]


def test_eos_behind_the_last_trained_input_is_padding_and_a_trained_one_never_is():
    stored = rows([[5, 6, 7, EOS, EOS], [8, 9, EOS, EOS, EOS]], mask=[1, 1, 1, 0, 0, 1, 1, 1, 0, 0])

    batch = collate_rows(stored, eos_id=EOS, pad_seq_to_mult=4, pad_seq_length_to_mult=8)

    assert batch["cu_seqlens_q"].tolist() == [[0, 3, 6]]
    assert batch["cu_seqlens_q_padded"].tolist() == [[0, 4, 8]]
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0, 1, 1, 1, 0]]


def test_stored_lengths_say_what_is_padding_whatever_the_tokens_are():
    stored = rows([[5, 6, EOS, EOS, EOS], [8, 9, 10, 11, 12]], seq_lengths=[3, 2])

    batch = collate_rows(stored, eos_id=EOS, pad_seq_to_mult=4, pad_seq_length_to_mult=8)

    assert batch["cu_seqlens_q"].tolist() == [[0, 3, 5]]
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0, 1, 1, 0, 0]]


def test_padded_boundaries_are_given_only_where_they_differ_or_always_on_request():
    stored = rows([[5, 6, 7, 8, EOS]])

    ours = collate_rows(stored, eos_id=EOS, pad_seq_to_mult=4, pad_seq_length_to_mult=4)
    always = collate_rows(stored, eos_id=EOS, pad_seq_to_mult=4, pad_seq_length_to_mult=4, always_padded=True)

    assert "cu_seqlens_q_padded" not in ours
    assert always["cu_seqlens_q_padded"].tolist() == [[0, 4]]


@pytest.mark.parametrize("multiple", [1, 6])
def test_the_padding_of_a_row_is_never_one_long_sequence(multiple):
    stored = rows([[5] * 13])

    batch = collate_rows(
        stored, eos_id=EOS, max_seq_length=600, pad_to_max_length=True, pad_seq_to_mult=multiple
    )

    ends = batch["cu_seqlens_q"][0]
    sizes = (ends[1:] - ends[:-1]).tolist()
    assert int(ends[-1]) == 600
    assert sizes[0] == 12
    assert max(sizes[1:]) <= 128
    assert all(size % multiple == 0 for size in sizes)
    assert batch["max_seqlen_q"].tolist() == [[max(sizes)]]


def test_padding_behind_rounded_documents_holds_no_real_token():
    stored = rows([[5, 6, EOS, EOS, EOS]], seq_lengths=[2])

    batch = collate_rows(stored, eos_id=EOS, max_seq_length=400, pad_to_max_length=True, pad_seq_to_mult=4)

    assert batch["cu_seqlens_q"].tolist() == [[0, 2, 2, 2, 2, 2]]
    assert batch["cu_seqlens_q_padded"].tolist() == [[0, 4, 104, 204, 304, 400]]
    assert batch["max_seqlen_q"].tolist() == [[100]]


@pytest.mark.parametrize("dialect", ["0.4", "0.5"])
def test_every_row_of_the_older_dialects_ends_in_minus_one(dialect):
    batch = collate_rows(
        rows([[5, 6], [7, 8]], [[5, 6, 7]]), dialect=dialect, eos_id=EOS, pad_seq_length_to_mult=1
    )

    assert batch["cu_seqlens"].tolist() == [[0, 1, 2, -1], [0, 2, -1, -1]]
    assert batch["cu_seqlens_argmin"].tolist() == torch.argmin(batch["cu_seqlens"], 1, keepdim=True).tolist()


def test_rows_with_fewer_documents_repeat_their_last_boundary_in_the_newest_dialect():
    batch = collate_rows(rows([[5, 6], [7, 8]], [[5, 6, 7]]), eos_id=EOS, pad_seq_length_to_mult=1)

    assert batch["cu_seqlens_q"].tolist() == [[0, 1, 2], [0, 2, 2]]
    assert batch["max_seqlen_kv"].tolist() == [[1], [2]]


@pytest.mark.parametrize("dialect", ["0.4", "0.6"])
@pytest.mark.parametrize("multiple", [1, 4])
def test_graphs_get_one_shape_and_the_same_keys_for_every_batch(dialect, multiple):
    metadata = [{"max_samples_per_bin": 3, "dataset_max_seqlen": 8, "min_packed_seqlen": 4}]
    collator = RowCollator(
        dialect=dialect,  # type: ignore[arg-type]
        eos_id=EOS,
        max_seq_length=400,
        pad_to_max_length=True,
        pad_cu_seqlens=True,
        pack_metadata=metadata,
        pad_seq_to_mult=multiple,
    )

    batches = [collator(rows(*given)) for given in ([[[5] * 9, [6] * 9, [7] * 5]], [[[5] * 9]], [[[8] * 5]])]

    shapes = [
        {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)}
        for batch in batches
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert {int(batch["max_seqlen" if dialect == "0.4" else "max_seqlen_q"]) for batch in batches} == {396}
    if dialect == "0.6":
        assert batches[0]["cu_seqlens_q"].shape == (1, 5)
        assert [max(np.diff(batch["cu_seqlens_q"][0])[-3:]) for batch in batches[1:]] == (
            [131, 132] if multiple == 1 else [0, 0]
        )


def test_a_mask_of_fractions_stays_one_where_the_release_cuts_it_to_nothing():
    stored = rows([[5, 6, 7, EOS]], mask=[0.5, 0.25, 1.0, 0.0])

    ours = collate_rows(stored, eos_id=EOS, pad_seq_length_to_mult=1)["loss_mask"]
    theirs = collate_rows(stored, eos_id=EOS, pad_seq_length_to_mult=1, compatible=True)["loss_mask"]

    assert ours.dtype == torch.float32
    assert ours.tolist() == [[0.5, 0.25, 1.0]]
    assert theirs.tolist() == [[0, 0, 1]]


def test_rows_that_complete_a_batch_train_nothing():
    batch = collate_rows(
        rows([[5, 6]], [[5, 6]]),
        silent=[False, True],
        eos_id=EOS,
        pad_seq_length_to_mult=1,
        answer_only_loss=False,
    )

    assert batch["loss_mask"].tolist() == [[1], [0]]


@pytest.mark.parametrize("dialect", ["0.4", "0.5", "0.6"])
def test_the_padding_mask_is_true_at_padding_within_and_behind_documents(dialect):
    stored = rows([[5, 6, 7, EOS, EOS], [8, 9, EOS, EOS, EOS]], mask=[1, 1, 1, 0, 0, 1, 0, 0, 0, 0])

    batch = collate_rows(
        stored,
        dialect=dialect,
        eos_id=EOS,
        pad_seq_to_mult=4,
        max_seq_length=12,
        pad_to_max_length=True,
        padding_mask=True,
    )

    assert batch["padding_mask"].dtype == torch.bool
    assert "".join("x" if pad else "." for pad in batch["padding_mask"][0].tolist()) == "...x..xxxxxx"
    assert batch.get("pad_between_seqs") is (True if dialect == "0.6" else None)


def test_a_mask_without_boundaries_keeps_documents_apart():
    stored = rows([[5, 6, 7], [8, 9, 10]])

    mask = collate_rows(stored, eos_id=EOS, return_cu_seqlen=False, pad_seq_length_to_mult=5)[
        "attention_mask"
    ]

    sees = ~mask[0, 0]
    assert mask.shape == (1, 1, 5, 5)
    assert sees.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def test_widths_are_multiples_of_what_documents_were_rounded_up_to():
    stored = rows([[5] * 7])

    assert collate_rows(stored, eos_id=EOS, pad_seq_to_mult=6)["tokens"].shape == (1, 48)
    assert collate_rows(stored, eos_id=EOS, ceil_to_power_2=True)["tokens"].shape == (1, 8)


META = {"max_samples_per_bin": 1, "dataset_max_seqlen": 4, "min_packed_seqlen": 8}
STATIC = {"max_seq_length": 8, "pad_to_max_length": True, "pad_cu_seqlens": True}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_seq_length": 2}, r"row 0 holds 8 inputs but max_seq_length is 2 \(1 row of 1\)"),
        ({"pad_to_max_length": True}, "pad_to_max_length=True needs max_seq_length"),
        ({"max_seq_length": 10, "pad_seq_to_mult": 4}, "no multiple of pad_seq_to_mult=4.*pass 8 or 12"),
        ({"pad_seq_to_mult": 0}, "pad_seq_to_mult must be a whole number from 1 to"),
        ({"ceil_to_power_2": True, "pad_seq_to_mult": 6}, "makes rows that pad_seq_to_mult=6 doesn't divide"),
        ({"dialect": "0.2"}, "names no dialect"),
        ({"pad_cu_seqlens": True, "pack_metadata": [META]}, "'pad_to_max_length=True' is required"),
        (STATIC, "needs the metadata of the packs"),
        (STATIC | {"pack_metadata": [{"max_samples_per_bin": 1}]}, "entry 0 .* no whole number 'dataset_max"),
        (STATIC | {"pack_metadata": [META]}, "row 0 holds 2 documents, but .* at most 1"),
        (
            STATIC | {"pack_metadata": [META | {"max_samples_per_bin": 2, "dataset_max_seqlen": 3}]},
            "a segment of 4 inputs, but the pack metadata allows for 3",
        ),
    ],
)
def test_settings_that_contradict_each_other_or_the_rows_are_refused(settings, words):
    with pytest.raises(SettingError, match=words):
        collate_rows(rows([[5] * 5, [6] * 5]), eos_id=EOS, **settings)


def test_padded_documents_without_their_multiple_are_refused_where_keys_must_not_change():
    stored = rows([[5, 6, 7, 8, EOS]], seq_lengths=[2])

    with pytest.raises(SettingError, match=r"hold padding.*pad_seq_to_mult=1"):
        collate_rows(stored, eos_id=EOS, **STATIC, pack_metadata=[META])


def test_rows_whose_boundaries_do_not_match_are_refused_by_number():
    good = rows([[5, 6, 7]], [[5, 6, 7], [8, 9]])
    fields: dict[str, Any] = {name: getattr(good, name) for name in PackedRows.__slots__}

    with pytest.raises(DocumentsError, match="row 1: `seq_start_id` reaches past the row's 5 tokens"):
        collate_rows(PackedRows(**fields | {"seq_start_id": np.array([0, 0, 7])}), eos_id=EOS)
    with pytest.raises(DocumentsError, match="8 `input_ids`, but 7 values of `loss_mask`"):
        collate_rows(PackedRows(**fields | {"loss_mask": np.ones(7, np.int8)}), eos_id=EOS)
    with pytest.raises(DocumentsError, match="row 1: offsets reach past"):
        collate_rows(PackedRows(**fields | {"offsets": np.array([0, 3, 90])}), eos_id=EOS)
    with pytest.raises(DocumentsError, match="at least one packed row"):
        collate_rows(PackedRows(**fields | {"offsets": np.array([0])}), eos_id=EOS)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"seq_lengths": np.array([2], np.int32)},
            r"one value for each of 2 documents, got the shape \(1,\)",
        ),
        ({"input_ids": np.arange(8.0)}, "whole numbers of one dimension, got float64"),
        ({"input_ids": np.arange(8, dtype=np.uint64) + 2**63}, "hold 9223372036854775815, which is no token"),
        ({"loss_mask": np.ones((8, 1))}, r"numbers of one dimension, got float64 of shape \(8, 1\)"),
        ({"loss_mask": np.array([1, np.nan] * 4)}, r"holds nan at stored token 1 \(4 of 8 values"),
        ({"loss_mask": np.full(8, 1j)}, "got complex128"),
    ],
)
def test_values_that_no_batch_can_hold_are_refused(changed, words):
    good = rows([[5, 6, 7], [5, 6, 7, 8, 9]])
    fields: dict[str, Any] = {name: getattr(good, name) for name in PackedRows.__slots__}

    with pytest.raises(DocumentsError, match=words):
        collate_rows(PackedRows(**fields | changed), eos_id=EOS)


@pytest.mark.parametrize(
    ("silent", "words"),
    [
        ([True], r"silent must be 2 booleans, one per row; got bool of the shape \(1,\)"),
        ([0.5, 1], "got float64"),
    ],
)
def test_rows_that_train_nothing_are_said_one_by_one(silent, words):
    with pytest.raises(SettingError, match=words):
        collate_rows(rows([[5, 6, 7]], [[8, 9]]), silent=silent, eos_id=EOS)


@pytest.mark.parametrize("settings", [{"eos_id": 2.5}, {"eos_id": None}, {"eos_id": 2, "pad_id": 2**63}])
def test_tokens_of_padding_are_whole_numbers(settings):
    with pytest.raises(SettingError, match="_id must be the whole number of a token, got"):
        collate_rows(rows([[5, 6, 7]]), **settings)


TAIL = 8


@st.composite
def stored(draw: st.DrawFn) -> dict[str, Any]:
    """Arrays of packed rows; one in four has a boundary that is wrong."""
    sizes = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
    counts, totals = [len(row) for row in sizes], [sum(row) for row in sizes]
    total = sum(totals)
    starts = np.concatenate([np.cumsum([0, *row[:-1]]) for row in sizes]).astype(np.int64)
    mask = np.array(draw(st.lists(st.integers(0, 2), min_size=total, max_size=total)))
    arrays = {
        "input_ids": np.array(draw(st.lists(st.integers(0, 4), min_size=total, max_size=total)), np.int32),
        "loss_mask": draw(st.sampled_from([mask.astype(np.int8), mask, (mask / 2).astype(np.float32)])),
        "offsets": np.cumsum([0, *totals]).astype(np.int64),
        "starts": starts,
        "document_offsets": np.cumsum([0, *counts]).astype(np.int64),
    }
    if draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(["offsets", "starts", "document_offsets"]))
        place = draw(st.integers(0, len(arrays[name]) - 1))
        arrays[name] = arrays[name].copy()
        arrays[name][place] += draw(st.sampled_from([-3, -1, 1, 2, 100]))
    return arrays


def measured(module: Any, arrays: dict[str, Any], lengths: Any, keep: int) -> tuple[Any, ...]:
    found = np.full(len(arrays["starts"]), -7), np.full(len(arrays["offsets"]) - 1, -7)
    wrong, differs = module.measure_rows(*arrays.values(), lengths, keep, EOS, *found)
    return wrong, differs, *found


@given(stored(), st.integers(0, 2), st.data())
def test_measured_rows_are_those_of_the_reference(arrays, keep, data):
    size = len(arrays["starts"])
    given_lengths = data.draw(
        st.just(np.empty(0, np.int64))
        | st.lists(st.integers(-1, 8), min_size=size, max_size=size).map(lambda n: np.array(n, np.int64))
    )

    ours = measured(kernels, arrays, given_lengths, keep)
    theirs = measured(reference, arrays, given_lengths, keep)

    assert ours[0] == theirs[0]
    if ours[0] < 0:
        assert ours[1] == theirs[1]
        assert ours[2].tolist() == theirs[2].tolist()
        assert ours[3].tolist() == theirs[3].tolist()


def sound(arrays: dict[str, Any]) -> tuple[Any, Any] | None:
    """Lengths and widths of rows that are packed rows, or None."""
    wrong, _, lengths, used = measured(reference, arrays, np.empty(0, np.int64), 1)
    return None if wrong >= 0 else (lengths, used)


@given(stored(), st.data(), st.booleans(), st.booleans(), st.booleans())
def test_filled_rows_are_those_of_the_reference(arrays, data, answer_only, eos_in_loss, cut):
    found = sound(arrays)
    if found is None:
        return
    lengths, used = found
    width = int(used.max()) + data.draw(st.integers(0, 5))
    silent = np.array(data.draw(st.sampled_from([[], [True] * len(used), [False] * len(used)])), np.bool_)
    is_float = arrays["loss_mask"].dtype.kind == "f" and not cut
    results = []
    for module in (kernels, reference):
        out = [np.full((len(used), width), 77, np.int64) for _ in range(4)]
        out[2] = out[2].astype(np.float32) if is_float else out[2]
        module.fill_rows(*arrays.values(), lengths, silent, int(answer_only), int(eos_in_loss), EOS, 9, *out)
        results.append([each.tolist() for each in out])

    assert results[0] == results[1]


@given(
    stored(),
    st.integers(0, 40),
    st.sampled_from([0, 4, TAIL]),
    st.sampled_from([1, 4]),
    st.booleans(),
    st.data(),
)
def test_boundaries_are_those_of_the_reference_and_cover_the_row(arrays, gap, tail, multiple, real, data):
    found = sound(arrays)
    if found is None:
        return
    lengths, used = found
    width = int(used.max()) + gap
    documents = int(np.diff(arrays["document_offsets"]).max())
    most = data.draw(st.sampled_from([documents + 2, documents + 4, 2**31]))
    entries = min(most, documents + 1 + width)
    results = []
    for module in (kernels, reference):
        tables = np.full((2, len(used), entries), 77, np.int32)
        numbers = np.full((2, len(used)), 77)
        module.lay_boundaries(
            *(arrays[name] for name in ("offsets", "starts", "document_offsets")),
            lengths,
            width,
            tail,
            multiple,
            int(real),
            most,
            *tables,
            *numbers,
        )
        results.append((tables, numbers))

    (tables, numbers), (wanted_tables, wanted_numbers) = results
    assert tables.tolist() == wanted_tables.tolist()
    assert numbers.tolist() == wanted_numbers.tolist()
    assert (tables[1, :, -1] == width).all()
    assert (np.diff(tables[1]) >= 0).all()
    assert (np.diff(tables[0]) <= np.diff(tables[1])).all()
