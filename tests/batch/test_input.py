"""What `vl.collate` refuses: one clear sentence each, and nothing written into the caller's buffers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.batch.batches import tokens_like

import varlen as vl
from varlen.batch.flatten import flatten
from varlen.errors import DocumentsError, InputError, OutputBufferError, SettingError
from varlen.types import Packing

LENGTHS = [3, 2, 4]
DOCUMENTS = tokens_like(LENGTHS)
PACKING = vl.pack(LENGTHS, 8)
FLAT = np.arange(1, 10, dtype=np.int32)
NAMES = ("input_ids", "labels", "position_ids", "segment_ids")


def buffers(shape: tuple[int, int] = (2, 8), **columns: Any) -> dict[str, np.ndarray]:
    made = {name: np.full(shape, -7, np.int32) for name in NAMES}
    return {**made, **{name: np.full(shape, -7, dtype) for name, dtype in columns.items()}}


BAD_DOCUMENTS: list[tuple[Any, str]] = [
    (DOCUMENTS[:2], "documents: 2 documents given, but 3 lengths were packed"),
    ([*DOCUMENTS, [1]], "documents: 4 documents given, but 3 lengths were packed"),
    (
        [[1, 2], [4, 5], [6, 7, 8, 9]],
        r"document 0 doesn't match the packing: it has 2 values here but was packed up to token 3 \(1 of 3 segments",
    ),
    ([[1, 2, 3, 4], [4, 5], [6, 7, 8, 9]], "it has 4 values here but was packed up to"),
    ("abc", "documents must be a list of arrays, .* or an Arrow list array; got str"),
    (5, "documents must be a list of arrays, .*; got int"),
    ({"input_ids": DOCUMENTS}, "documents must be a list of arrays, .*; got dict"),
    (iter(DOCUMENTS), "documents must be a list of arrays, .*; got list_iterator"),
    ((FLAT,), r"documents as a tuple must be \(values, offsets\)"),
    ((FLAT, 3), r"documents as a tuple must be \(values, offsets\)"),
    ((FLAT, []), r"documents as a tuple must be \(values, offsets\)"),
    ((FLAT, [0, 3, 5]), "documents: 2 documents given, but 3 lengths were packed"),
    (
        (FLAT, [0, 3, 2, 9]),
        r"offsets must rise, but document 1 begins at 3 and ends at 2 \(1 of 3 documents\)",
    ),
    ((FLAT, [0, 3, 5, 10]), "offsets 5 to 10 lie outside of the 9 values"),
    ((FLAT, [-1, 2, 4, 8]), "offsets -1 to 2 lie outside of the 9 values"),
    ((FLAT, [0.0, 3.0, 5.0, 9.0]), "whole-number offsets; got .* offsets float64"),
    ((FLAT.reshape(3, 3), [0, 3, 5, 9]), r"one-dimensional values .* shape \(3, 3\)"),
    ((FLAT / 2, [0, 3, 5, 9]), "token ids must be whole numbers, got dtype float64"),
    ((FLAT > 2, [0, 3, 5, 9]), "token ids must be whole numbers, got dtype bool"),
    (
        (FLAT.astype(np.int64) << 30, [0, 3, 5, 9]),
        "token ids run from 1,073,741,824 to 9,663,676,416, outside of int32",
    ),
    (
        (FLAT.astype(np.uint64) - 2, [0, 3, 5, 9]),
        "token ids run from .* to 18,446,744,073,709,551,615, outside of int32",
    ),
    (([[1], [2, 3]], [0, 3, 5, 9]), "can't be read as arrays of values and offsets"),
    (pa.array([1, 2, 3]), "must be of a list type, got int64"),
    (pa.array([{"a": [1]}] * 3), "must be of a list type, got struct<a: list"),
    (pa.array([[1, 2, 3], None, [1, 2, 3, 4]]), "1 nulls in place of documents"),
    (pa.array([[1, 2, 3], [1, None], [1, 2, 3, 4]]), "1 nulls in place of values"),
]
BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"pack_ids": [0, 2]}, r"pack id 2 is out of range: this packing has packs 0 to 1 \(1 of 2 pack ids"),
    ({"pack_ids": [-1]}, "pack id -1 is out of range"),
    ({"pack_ids": [2**64 - 1]}, "pack id 9223372036854775807 is out of range"),
    ({"columns": {"labels": DOCUMENTS}}, "a column can't be called 'labels'"),
    ({"columns": {"x": DOCUMENTS}, "column_pads": {"x": 0.5}}, "is 0.5, which .* int32 can't hold"),
    ({"columns": {"x": DOCUMENTS}, "column_pads": {"x": "a"}}, "is 'a', which .* int32 can't hold"),
    ({"columns": {"x": DOCUMENTS}, "column_pads": {"x": 2**31}}, "which .* int32 can't hold"),
    ({"columns": {"x": DOCUMENTS}, "column_pads": {"y": 1}}, "names 'y', but the columns are 'x'"),
    ({"layout": "row"}, "layout must be one of rows, flat; got 'row'"),
    ({"pad_id": None}, "pad_id must be a whole number from .* got None"),
    ({"pad_id": 0.5}, "pad_id must be a whole number from .* got 0.5"),
    ({"pad_id": 2**31}, "pad_id must be a whole number from .* got 2147483648"),
    ({"pad_id": True}, "pad_id must be a whole number from .* got True"),
    ({"pad_to_multiple_of": 0}, "pad_to_multiple_of must be a whole number from 1 .* got 0"),
    ({"pad_to_multiple_of": 2.0}, "pad_to_multiple_of must be a whole number from 1 .* got 2.0"),
    ({"pad_to_multiple_of": 3}, "capacity 8 is not a multiple of .* 3; the nearest: 6 or 9"),
    ({"pad_to_multiple_of": 16}, "capacity 8 is not a multiple of .* 16; the nearest: 16"),
    ({"dp_world_size": 0}, "dp_world_size must be a whole number from 1"),
    ({"step_num_targets": -1}, "step_num_targets must be a whole number from 0"),
    ({"step_num_targets": 2.5}, "step_num_targets must be a whole number from 0"),
]
BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    *(({"documents": documents}, words) for documents, words in BAD_DOCUMENTS),
    ({"pack_ids": [[0]]}, "pack_ids must be whole numbers in one dimension"),
    ({"pack_ids": [0.0]}, "pack_ids must be whole numbers in one dimension, got float64"),
    ({"pack_ids": [True, False]}, "pack_ids must be whole numbers in one dimension, got bool"),
    ({"pack_ids": [[0], [0, 1]]}, "pack_ids can't be read as whole numbers"),
    ({"labels": [[1, 2, 3], [4], [6, 7, 8, 9]]}, "labels: document 1 has 1 values for 2 tokens"),
    ({"labels": [[1, 2, 3]]}, "labels: 1 documents given, but 3 lengths were packed"),
    ({"labels": [[0.5] * 3, [1] * 2, [1] * 4]}, "labels must be whole numbers, got dtype float64"),
    ({"labels": [[2**40] * 3, [1] * 2, [1] * 4]}, "labels run from 1 to 1,099,511,627,776"),
    ({"loss_mask": [[1] * 3, [1] * 3, [1] * 4]}, "loss_mask: document 1 has 3 values for 2 tokens"),
    ({"loss_mask": [["a"] * 3, ["b"] * 2, ["c"] * 4]}, "loss_mask must be numbers or booleans"),
    (
        {"documents": (FLAT, [0, 3, 5, 9]), "loss_mask": np.ones(8)},
        "loss_mask: 8 values for 9 tokens; one a token is needed",
    ),
    (
        {"documents": (FLAT, [0, 3, 5, 9]), "loss_mask": pa.array([1] * 8 + [None])},
        "loss_mask hold 1 nulls in place of values",
    ),
    ({"columns": {"x": [[1] * 3, [1], [1] * 4]}}, "column 'x': document 1 has 1 values for 2 tokens"),
    ({"columns": {"x": [["a"] * 3, ["b"] * 2, ["c"] * 4]}}, "column 'x' must hold numbers or boo"),
    ({"columns": {"x": [[1j] * 3, [1j] * 2, [1j] * 4]}}, "column 'x' must hold numbers or booleans"),
]
BAD_BUFFERS: list[tuple[dict[str, Any], str]] = [
    ({"out": {}}, "out lacks input_ids, labels, position_ids, segment_ids; it needs input_ids"),
    ({"out": buffers((2, 7))}, r"must be a numpy array int32 \(2, 8\), got int32 \(2, 7\)"),
    ({"out": buffers((1, 8))}, r"must be a numpy array int32 \(2, 8\), got int32 \(1, 8\)"),
    ({"out": {**buffers(), "labels": np.zeros((2, 8))}}, r"out\['labels'\] must be .* got float64"),
    ({"out": {**buffers(), "labels": [[0] * 8] * 2}}, r"out\['labels'\] must be .* got list"),
    (
        {"out": {**buffers(), "segment_ids": np.zeros((8, 2), np.int32).T}},
        r"out\['segment_ids'\] must be C-contiguous and writable",
    ),
    ({"columns": {"x": DOCUMENTS}, "out": buffers()}, "out lacks x"),
    ({"columns": {"x": DOCUMENTS}, "out": buffers(x=np.int64)}, r"out\['x'\] must be .* int32"),
]
REFUSED: list[tuple[dict[str, Any], type[InputError], str]] = [
    *((given, DocumentsError, words) for given, words in BAD_VALUES),
    *((given, SettingError, words) for given, words in BAD_SETTINGS),
    *((given, OutputBufferError, words) for given, words in BAD_BUFFERS),
]


@pytest.mark.parametrize(
    ("given", "error", "words"), REFUSED, ids=[f"{n} {w[:50]}" for n, (_, _, w) in enumerate(REFUSED)]
)
def test_input_that_can_not_be_is_refused_and_nothing_is_written(given, error, words):
    out = given.get("out", buffers(**dict.fromkeys(given.get("columns", ()), np.int32)))
    before = {name: np.array(array) for name, array in out.items()}

    with pytest.raises(error, match=words) as caught:
        vl.collate(**{"documents": DOCUMENTS, "packing": PACKING, "out": out, **given})
    assert isinstance(caught.value, ValueError)
    assert all(np.array_equal(before[name], out[name]) for name in before)


@pytest.mark.parametrize("overlong", ["error", "drop", "truncate", "split"])
@pytest.mark.parametrize("method", ["best_fit", "wrapped"])
def test_labels_longer_than_their_documents_are_refused_under_every_policy(method, overlong):
    packing = vl.pack([3, 9, 4], 9, method, overlong)
    documents = tokens_like([3, 9, 4])
    for place in range(3):
        labels = [part + [5] * (number == place) for number, part in enumerate(documents)]
        with pytest.raises(
            DocumentsError, match=f"labels: document {place} has {len(labels[place])} values for"
        ):
            vl.collate(documents, packing, labels=labels)


def test_documents_that_were_truncated_may_be_longer_and_none_shorter():
    packing = vl.pack([9, 3], 6, overlong="truncate")

    assert vl.collate(tokens_like([9, 3]), packing).num_tokens == 9
    with pytest.raises(
        DocumentsError, match=r"document 1 doesn't match .* it has 2 values here but was packed up to"
    ):
        vl.collate(tokens_like([9, 2]), packing)


def test_documents_that_were_packed_whole_may_not_be_longer():
    packing = vl.pack([5, 3], 6)

    with pytest.raises(
        DocumentsError, match=r"document 1 doesn't match .* it has 4 values here but was packed up to"
    ):
        vl.collate(tokens_like([5, 4]), packing)


def test_a_buffer_that_can_not_be_written_is_refused():
    out = buffers()
    out["labels"].flags.writeable = False
    with pytest.raises(OutputBufferError, match=r"out\['labels'\] must be C-contiguous and writable"):
        vl.collate(DOCUMENTS, PACKING, out=out)


def test_buffers_that_share_memory_are_refused():
    out = buffers()
    out["labels"] = out["input_ids"]
    with pytest.raises(OutputBufferError, match=r"out\['input_ids'\] and out\['labels'\] share memory"):
        vl.collate(DOCUMENTS, PACKING, out=out)


def test_buffers_that_fit_are_filled_and_handed_back():
    columns = {"x": [[0.5] * 3, [1.5] * 2, [2.5] * 4]}
    fresh = vl.collate(DOCUMENTS, PACKING, columns=columns)
    out = {**buffers(x=np.float64), "another": np.zeros(3)}
    batch = vl.collate(DOCUMENTS, PACKING, columns=columns, out=out)
    again = vl.collate(DOCUMENTS, PACKING, columns=columns, pad_id=3, out=batch)

    for name in NAMES:
        assert getattr(batch, name) is out[name] is getattr(again, name)
        assert name == "input_ids" or np.array_equal(out[name], getattr(fresh, name))
    assert batch.columns["x"] is out["x"] is again.columns["x"]
    assert (out["input_ids"][fresh.segment_ids < 0] == 3).all()
    assert out["another"].tolist() == [0, 0, 0]
    with pytest.raises(OutputBufferError, match=r"\(1, 8\), got int32 \(2, 8\)"):
        vl.collate(DOCUMENTS, PACKING, pack_ids=[0], columns=columns, out=batch)


@pytest.mark.parametrize("what", ["documents", "labels", "loss_mask", "columns"])
def test_buffers_that_hold_what_is_read_are_refused(what):
    offsets = np.array([0, 3, 5, 9])
    held = np.zeros(16, np.int32)
    held[:9] = FLAT
    before = held.copy()
    out = {**buffers(w=np.int32), "position_ids": held.reshape(2, 8)}
    given = (held[:9], offsets)
    arguments = {"documents": (FLAT, offsets), **{what: {"w": given} if what == "columns" else given}}
    with pytest.raises(OutputBufferError, match=r"out\['position_ids'\] shares memory with the documents"):
        vl.collate(packing=PACKING, out=out, **arguments)
    assert (held == before).all()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"out": 5}, OutputBufferError, "out must be a mapping or an earlier batch, got int"),
        ({"columns": [[1] * 3]}, SettingError, "columns must be a mapping from names to values, got list"),
        ({"column_pads": 0}, SettingError, "column_pads must be a mapping from names to values, got int"),
    ],
)
def test_what_must_be_named_is_refused_without_names(given, error, words):
    with pytest.raises(error, match=words):
        vl.collate(DOCUMENTS, PACKING, **given)


def test_flat_buffers_have_one_row():
    out = buffers((1, 12))
    batch = vl.collate(DOCUMENTS, PACKING, layout="flat", pad_to_multiple_of=4, out=out)

    assert batch.input_ids is out["input_ids"]
    assert batch.input_ids.tolist() == [[1, 2, 3, 6, 7, 8, 9, 4, 5, 0, 0, 0]]


def test_more_positions_than_boundaries_can_count_are_refused_before_anything_is_made():
    packing = vl.pack([1, 1], 2**30, "next_fit", max_documents=1)
    with pytest.raises(
        SettingError, match="2,147,483,648 positions in one batch are more than int32 boundaries"
    ):
        vl.collate([[1], [2]], packing)


WITH_NEGATIVE = [[1, 2, 3], [4, 5, -7], [8]]
PACKED_NEGATIVE = vl.pack([3, 3, 1], 8)
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
def test_an_id_below_0_is_refused(form, beside, layout):
    more = {
        "nothing": {},
        "labels": {"labels": WITH_NEGATIVE},
        "loss_mask": {"loss_mask": [[1] * 3, [1] * 3, [1]]},
    }

    with pytest.raises(
        DocumentsError, match=r"document 1 has the token id -7; .* \(1 of 7 tokens are below 0\)"
    ):
        vl.collate(FORMS[form](WITH_NEGATIVE), PACKED_NEGATIVE, layout=layout, **more[beside])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("positions", [True, False])
def test_a_flat_row_refuses_an_id_below_0(form, positions):
    with pytest.raises(DocumentsError, match="document 1 has the token id -7"):
        flatten(FORMS[form](WITH_NEGATIVE), positions=positions)


@pytest.mark.parametrize("token", [-1, -100, -(2**31)])
def test_every_id_below_0_is_one(token):
    with pytest.raises(DocumentsError, match=f"token id {token};"):
        vl.collate([[token]], vl.pack([1], 4))


@pytest.mark.parametrize("form", FORMS)
def test_labels_and_padding_may_be_below_0(form):
    labels = [[-100, 2, 3], [-100, 5, -100], [8]]

    batch = vl.collate(FORMS[form]([[1, 2, 3], [4, 5, 7], [8]]), PACKED_NEGATIVE, labels=labels, pad_id=-1)

    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 7, 8, -1]]
    assert batch.labels.tolist() == [[-100, 2, 3, -100, 5, -100, -100, -100]]
    assert batch.max_token_id == 8


def test_documents_of_other_packs_are_not_asked():
    packing = vl.pack([3, 3, 1], 3, "next_fit")

    assert vl.collate(WITH_NEGATIVE, packing, pack_ids=[0]).input_ids.tolist() == [[1, 2, 3]]


def test_a_packing_without_packs_says_so():
    with pytest.raises(SettingError, match="pack id 0 is out of range: this packing has no packs"):
        vl.collate([], vl.pack([], 8), pack_ids=[0])


def test_a_packing_made_by_hand_over_its_capacity_is_refused():
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
    fields, words, documents, in_python, plain_python
):
    plain_python(in_python)
    right = vl.pack([3, 2], 4)
    values = {name: getattr(right, name) for name in ("document_ids", "starts", "stops", "offsets")}
    wrong = {name: np.array(fields.get(name, array), array.dtype) for name, array in values.items()}
    names = ("input_ids", "labels", "position_ids", "segment_ids")
    out = {name: np.full((2, 4), -7, np.int32) for name in names}

    with pytest.raises(SettingError, match=words):
        vl.collate(documents, Packing(**wrong, capacity=4, ledger=right.ledger), out=out)
    assert all((array == -7).all() for array in out.values())
