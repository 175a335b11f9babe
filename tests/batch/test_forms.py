"""Documents in every form that a caller may hold them in give the same batch, without more work than they need."""

import enum
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.batch.batches import cases, same_batch, tokens_like
from tests.support.rarely import mostly

import varlen as vl
from varlen import ragged
from varlen.batch import kernels
from varlen.batch.flatten import flatten, holds_ones_only
from varlen.errors import DocumentsError
from varlen.ragged import as_ragged, as_whole, join, read_int_lists

Form = Callable[[list[list[Any]]], Any]
LENGTHS = [5, 2, 0, 6, 3, 8, 1]
DOCUMENTS = tokens_like(LENGTHS)


def none_wanted() -> np.ndarray:
    raise AssertionError("flat documents are read where they lie, whichever are wanted")


def offsets_of(documents: list[list[Any]], dtype: Any = np.int64) -> np.ndarray:
    return np.cumsum([0, *map(len, documents)]).astype(dtype)


def flat(dtype: Any, offsets: Any = np.int64) -> Form:
    return lambda documents: (
        np.array([value for part in documents for value in part], dtype),
        offsets_of(documents, offsets),
    )


def read_only(documents: list[list[Any]]) -> Any:
    values, offsets = flat(np.int32)(documents)
    values.flags.writeable = offsets.flags.writeable = False
    return values, offsets


def strided(documents: list[list[Any]]) -> Any:
    values, offsets = flat(np.int32)(documents)
    return np.repeat(values, 2)[::2], np.repeat(offsets, 3)[::3]


def with_junk_around(documents: list[list[Any]]) -> Any:
    values, offsets = flat(np.int32)(documents)
    return np.concatenate([[-9, -9, -9], values, [-9]]), offsets + 3


def sliced_arrow(documents: list[list[Any]]) -> Any:
    return pa.array([[-9, -9], *documents, [-9]], type=pa.list_(pa.int32())).slice(1, len(documents))


def sliced_beside_nulls(documents: list[list[Any]]) -> Any:
    return pa.array([[None, -9], *documents], type=pa.list_(pa.int32())).slice(1)


def chunked_arrow(documents: list[list[Any]]) -> Any:
    parts = [documents[:2], [], documents[2:3], documents[3:]]
    return pa.chunked_array([pa.array(part, type=pa.list_(pa.int64())) for part in parts])


FORMS: dict[str, Form] = {
    "lists": lambda documents: documents,
    "arrays": lambda documents: [np.array(part, np.int64) for part in documents],
    "tensors": lambda documents: [torch.tensor(part, dtype=torch.int64) for part in documents],
    "tuples": lambda documents: [tuple(part) for part in documents],
    "ranges": lambda documents: [range(part[0], part[-1] + 1) if part else range(0) for part in documents],
    "mixed": lambda documents: [
        [list, tuple, np.array, torch.tensor][place % 4](part) for place, part in enumerate(documents)
    ],
    "array of objects": lambda documents: np.array([*map(np.array, documents), None], object)[:-1],
    **{
        f"flat {dtype}": flat(dtype)
        for dtype in ("int32", "int64", "uint16", "uint32", "int16", "uint64", ">i4")
    },
    "flat with 32-bit offsets": flat(np.int32, np.int32),
    "flat with offsets of uint64": flat(np.int32, np.uint64),
    "flat list": lambda documents: (
        [value for part in documents for value in part],
        offsets_of(documents).tolist(),
    ),
    "flat tensors": lambda documents: tuple(map(torch.from_numpy, flat(np.int64)(documents))),
    "flat Arrow": lambda documents: (pa.array(flat(np.int32)(documents)[0]), offsets_of(documents)),
    "read-only": read_only,
    "strided": strided,
    "junk around": with_junk_around,
    "Arrow list": lambda documents: pa.array(documents, type=pa.list_(pa.int64())),
    "Arrow list of uint16": lambda documents: pa.array(documents, type=pa.list_(pa.uint16())),
    "Arrow large list": lambda documents: pa.array(documents, type=pa.large_list(pa.int32())),
    "Arrow list view": lambda documents: pa.array(documents, type=pa.list_view(pa.int32())),
    "Arrow sliced": sliced_arrow,
    "Arrow sliced beside nulls": sliced_beside_nulls,
    "Arrow chunked": chunked_arrow,
    "Arrow one chunk": lambda documents: pa.chunked_array([pa.array(documents, type=pa.list_(pa.int32()))]),
    "Arrow column of a table": lambda documents: pa.table({"ids": documents})["ids"],
}
COMPILED_ANEW = {
    *("flat uint32", "flat int16", "flat uint64", "flat uint16", "flat with offsets of uint64"),
    *("Arrow list of uint16", "read-only"),
}
"""Forms for which kernels are compiled anew, which takes longer than to fill all batches."""


@pytest.mark.parametrize("name", mostly(set(FORMS) - COMPILED_ANEW, FORMS))
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_documents_of_every_form_give_the_same_batch(name, layout):
    form, packing = FORMS[name], vl.pack(LENGTHS, 8)
    for pack_ids in (None, [2, 0], [1, 1], []):
        given_ = {"pack_ids": pack_ids, "layout": layout}
        same_batch(vl.collate(form(DOCUMENTS), packing, **given_), vl.collate(DOCUMENTS, packing, **given_))


@pytest.mark.parametrize("name", mostly(set(FORMS) - COMPILED_ANEW, FORMS))
def test_labels_of_every_form_give_the_same_batch_beside_any_documents(name):
    form, packing = FORMS[name], vl.pack(LENGTHS, 8)
    labels = tokens_like(LENGTHS, 30)
    wanted = vl.collate(DOCUMENTS, packing, labels=labels)
    for rows in (DOCUMENTS, flat(np.int32)(DOCUMENTS), FORMS["Arrow list"](DOCUMENTS)):
        same_batch(vl.collate(rows, packing, labels=form(labels)), wanted)


MASKS: dict[str, Form] = {
    "ints": lambda mask: mask,
    "booleans": lambda mask: [[bool(value) for value in part] for part in mask],
    "booleans and ints": lambda mask: [[bool(part[0]), *part[1:]] if part else [] for part in mask],
    "floats": lambda mask: [[float(value) for value in part] for part in mask],
    "arrays of booleans": lambda mask: [np.array(part, np.bool_) for part in mask],
    "flat booleans": flat(np.bool_),
    "flat floats": flat(np.float32),
    "flat floats of 16 bits": flat(np.float16),
    "flat bytes": flat(np.uint8),
    "Arrow booleans": lambda mask: pa.array(
        [[bool(value) for value in part] for part in mask], pa.list_(pa.bool_())
    ),
    "tensors": lambda mask: [torch.tensor(part, dtype=torch.bool) for part in mask],
}


@pytest.mark.parametrize("form", MASKS.values(), ids=MASKS)
def test_masks_of_every_form_give_the_same_batch(form):
    packing = vl.pack(LENGTHS, 8)
    mask = [[token % 3 % 2 for token in part] for part in DOCUMENTS]
    wanted = vl.collate(DOCUMENTS, packing, loss_mask=mask)
    assert 0 < wanted.num_targets < sum(LENGTHS) - wanted.num_segments
    for rows in (DOCUMENTS, flat(np.int32)(DOCUMENTS)):
        same_batch(vl.collate(rows, packing, loss_mask=form(mask)), wanted)


@pytest.mark.parametrize(
    "values",
    [
        np.arange(25, dtype=np.int64),
        list(range(25)),
        torch.arange(25),
        pa.array(range(25)),
        np.arange(25, dtype=np.uint8),
    ],
    ids=["array", "list", "tensor", "Arrow", "bytes"],
)
@pytest.mark.parametrize("form", [list, torch.tensor, pa.array], ids=["lists", "tensors", "Arrow"])
def test_flat_values_share_the_offsets_of_flat_documents(values, form):
    packing = vl.pack(LENGTHS, 8)
    documents = flat(np.int32)(DOCUMENTS)
    wanted = vl.collate(documents, packing, labels=(np.arange(25), documents[1]))

    same_batch(vl.collate(documents, packing, labels=values), wanted)
    others = tuple(map(form, documents))
    same_batch(vl.collate(others, packing, labels=values), wanted)
    with pytest.raises(DocumentsError, match="labels: 24 values for 25 tokens; one a token is needed"):
        vl.collate(others, packing, labels=values[:24])


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint8", "int16", "uint16", "float16", "int32", "float32", "int64", "uint64", "float64"],
)
def test_a_column_keeps_its_dtype_and_its_values(dtype):
    packing = vl.pack(LENGTHS, 8)
    values = [np.array([token % 7 + 0.5 for token in part]).astype(dtype) for part in DOCUMENTS]
    pad = np.ones(1, dtype)[0]
    batch = vl.collate(DOCUMENTS, packing, columns={"x": values}, column_pads={"x": pad})
    place = batch.segment_ids >= 0
    of_token = {token: value for part, row in zip(DOCUMENTS, values) for token, value in zip(part, row)}

    assert batch.columns["x"].dtype == np.dtype(dtype)
    assert batch.columns["x"][place].tolist() == [of_token[token].item() for token in batch.input_ids[place]]
    assert set(batch.columns["x"][~place].tolist()) == {pad.item()}


def test_a_batch_of_nothing_has_columns_of_the_dtype_of_the_documents():
    packing = vl.pack([0, 2], 4)
    chunks = pa.chunked_array([pa.array([[]], pa.list_(pa.float64())), pa.array([[0.5, 1.5]])])
    for values in ([[], [0.5, 1.5]], [np.empty(0, np.float64), np.array([0.5, 1.5])], chunks):
        batch = vl.collate([[], [1, 2]], packing, pack_ids=[], columns={"x": values}, column_pads={"x": -0.5})
        assert batch.columns["x"].dtype == np.float64
    whole = vl.collate([[], [1, 2]], packing, pack_ids=[], columns={"x": chunks})
    assert whole.columns["x"].dtype == np.float64


def test_special_floats_pass_through_a_column_bit_by_bit():
    values = np.array([np.nan, np.inf, -0.0], np.float32)
    batch = vl.collate(
        [[1, 2, 3]], vl.pack([3], 4), columns={"x": [values]}, column_pads={"x": float("-inf")}
    )

    assert batch.columns["x"].tobytes() == np.array([*values, -np.inf], np.float32).tobytes()


def test_memory_mapped_tokens_are_read_where_they_lie(tmp_path):
    np.array([token for part in DOCUMENTS for token in part], np.uint16).tofile(tmp_path / "tokens")
    mapped = np.memmap(tmp_path / "tokens", np.uint16, mode="r")
    packing = vl.pack(LENGTHS, 8)

    same_batch(vl.collate((mapped, offsets_of(DOCUMENTS)), packing), vl.collate(DOCUMENTS, packing))
    ragged, _ = as_ragged((mapped, offsets_of(DOCUMENTS)), len(DOCUMENTS), none_wanted, "documents")
    assert np.shares_memory(ragged.values, mapped)


def test_arrow_tokens_are_read_where_they_lie():
    array = pa.array(DOCUMENTS, type=pa.list_(pa.int32()))
    for form in (array, pa.chunked_array([array]), array.slice(2)):
        ragged, _ = as_ragged(form, len(form), none_wanted, "documents")
        assert np.shares_memory(ragged.values, array.values.to_numpy())


def test_of_a_list_and_of_chunks_only_the_documents_of_the_batch_are_converted():
    class Unreadable:
        def __len__(self) -> int:
            raise AssertionError("a document that no pack of this batch holds was read")

    packing = vl.pack([3, 8, 2], 8, "next_fit")
    documents: list[Any] = [[1, 2, 3], Unreadable(), [4, 5]]
    assert vl.collate(documents, packing, pack_ids=[2, 0]).num_tokens == 5

    chunks = pa.chunked_array([pa.array([[1, 2, 3]]), pa.array([[1] * 8]), pa.array([[4, 5]])])
    ragged, places = as_ragged(chunks, len(chunks), lambda: np.array([2, 0]), "documents")
    assert ragged.values.tolist() == [1, 2, 3, 4, 5]
    assert places.tolist() == [1, 0]


@settings(max_examples=2 * settings.default.max_examples)
@given(cases(), st.sampled_from(["arrays", "flat int64", "Arrow list", "Arrow chunked", "junk around"]))
def test_any_batch_is_the_same_from_lists_and_from_other_forms(case, form):
    convert = FORMS[form]
    assume(case.documents or "Arrow" not in form)
    labels = None if case.labels is None else convert(case.labels)

    same_batch(case.collate(documents=convert(case.documents), labels=labels), case.collate())


class Word(enum.IntEnum):
    HELLO = 7


@pytest.mark.parametrize(
    ("documents", "tokens"),
    [
        ([[1, 2], [3]], [1, 2, 3]),
        ([[1, 2**31 - 1], [0]], [1, 2**31 - 1, 0]),
        ([[np.int64(1), 2], [np.uint16(3)]], [1, 2, 3]),
        ([[Word.HELLO, 2], [3]], [7, 2, 3]),
        ([[True, 2], [3]], [1, 2, 3]),
        ([[1, 2], np.array([3])], [1, 2, 3]),
    ],
    ids=[
        "ints",
        "limits of 32 bits",
        "numpy ints",
        "subclasses of int",
        "booleans among ints",
        "an array among lists",
    ],
)
def test_lists_of_anything_that_is_a_whole_number_are_read(documents, tokens):
    batch = vl.collate(documents, vl.pack([2, 1], 3))

    assert batch.input_ids.tolist() == [tokens]
    assert batch.input_ids.dtype == np.int32


class Tokens(list):  # type: ignore[type-arg]
    """A list by another name."""


def test_subclasses_of_list_and_empty_lists_are_read():
    packing = vl.pack([2, 0, 1], 3)

    assert vl.collate([Tokens([1, 2]), [], Tokens([3])], packing).input_ids.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        (
            [[1, 2**31], [3]],
            "token ids run from 1 to 2,147,483,648, outside of int32; these are no token ids",
        ),
        ([[1, -(2**31) - 1], [3]], "token ids run from -2,147,483,649 to 3, outside of int32"),
        ([[1, 2**63], [3]], "token ids must be whole numbers|outside of int32"),
        ([[1, 2**70], [3]], "token ids must be whole numbers, got dtype object"),
        ([[1.0, 2.0], [3.0]], "token ids must be whole numbers, got dtype float64"),
        ([[1, 2.5], [3]], "token ids must be whole numbers, got dtype float64"),
        ([[True, False], [True]], "token ids must be whole numbers, got dtype bool"),
        ([["a", "b"], ["c"]], "token ids must be whole numbers, got dtype <U1"),
        ([[1, None], [3]], "token ids must be whole numbers, got dtype object"),
        ([[1, [2]], [3]], "documents: entry 0 can't be read as an array"),
        ([[[1, 2]], [3]], r"documents: entry 0 must have one dimension, got shape \(1, 2\)"),
        ([[1, 2], 3], r"documents: entry 1 must have one dimension, got shape \(\)"),
        ([{"input_ids": [1, 2]}, [3]], "documents: entry 0 must have one dimension"),
    ],
)
def test_lists_of_anything_else_are_refused(documents, words):
    with pytest.raises(DocumentsError, match=words):
        vl.collate(documents, vl.pack([2, 1], 3))


@pytest.mark.parametrize(
    ("form", "is_plain"),
    [
        ("flat int64", True),
        ("flat uint16", True),
        ("Arrow list", True),
        ("flat uint64", False),
        ("lists", False),
    ],
)
def test_a_batch_that_needs_nothing_special_takes_one_kernel_call(replace_kernel, form, is_plain):
    calls, whole = [], kernels.plain_batch

    def watched(*arguments: Any) -> Any:
        calls.append("plain")
        return whole(*arguments)

    replace_kernel(kernels, "plain_batch", watched)
    packing = vl.pack(LENGTHS, 8)
    documents = FORMS[form](DOCUMENTS)

    same_batch(vl.collate(documents, packing, [1, 0]), vl.collate(DOCUMENTS, packing, [1, 0]))
    assert calls == ["plain"] * is_plain
    for more in ({"labels": documents}, {"columns": {"x": documents}}, {"loss_mask": documents}):
        vl.collate(documents, packing, **more)
    vl.collate(documents, packing, out=vl.collate(documents, packing, labels=documents))
    assert calls == ["plain"] * is_plain


ANY_DOCUMENTS = st.lists(st.lists(st.integers(0, 50_000), min_size=1, max_size=300), min_size=1, max_size=6)


@given(ANY_DOCUMENTS, st.integers(1, 400), st.booleans(), st.sampled_from([list, np.array]))
def test_a_row_is_the_flat_batch_that_collate_makes_of_one_pack(documents, multiple, labelled, form):
    given_labels = [[token if token % 3 else -100 for token in document] for document in documents]
    labels = [form(values) for values in given_labels] if labelled else None
    lengths = [len(document) for document in documents]
    packing = vl.pack(lengths, capacity=sum(lengths), method="next_fit")
    batch = vl.collate(
        documents, packing, labels=labels, pad_id=7, pad_to_multiple_of=multiple, layout="flat", report=False
    )

    row = flatten([form(document) for document in documents], labels, pad_id=7, pad_to_multiple_of=multiple)

    assert row.position_ids is not None
    assert row.owners is not None
    assert row.input_ids.dtype == row.labels.dtype == row.position_ids.dtype == np.int64
    assert row.input_ids.tolist() == batch.input_ids[0].tolist()
    assert row.labels.tolist() == batch.labels[0].tolist()
    assert row.position_ids.tolist() == batch.position_ids[0].tolist()
    assert row.cu_seqlens.dtype == row.owners.dtype == np.int32
    assert row.cu_seqlens.tolist() == batch.cu_seqlens.tolist()
    owners = batch.segment_ids[0].tolist()
    assert [number if number < len(documents) else -1 for number in row.owners.tolist()] == owners


@given(ANY_DOCUMENTS, st.data())
def test_rows_of_several_documents_are_cut_at_their_lengths(documents, data):
    cut = data.draw(st.integers(0, len(documents)))
    rows = [list(itertools.chain(*part)) for part in (documents[:cut], documents[cut:])]
    lengths = [[len(document) for document in part] for part in (documents[:cut], documents[cut:])]

    whole, rowed = flatten(documents), flatten(rows, lengths=lengths)

    assert rowed.input_ids.tolist() == whole.input_ids.tolist()
    assert rowed.labels.tolist() == whole.labels.tolist()
    assert rowed.cu_seqlens.tolist() == whole.cu_seqlens.tolist()


def test_documents_without_tokens_are_counted():
    assert flatten([[], [1], [], [2]], keep=[[], [1], [], [0]]).empty_documents == 3


def test_token_ids_that_int64_cannot_hold_are_refused():
    with pytest.raises(DocumentsError, match="input_ids"):
        flatten([[2**64]])
    with pytest.raises(DocumentsError, match="input_ids"):
        flatten([np.array([2**63], np.uint64)])


ANY_VALUES = st.lists(st.lists(st.integers(-100, 50_000), max_size=5), min_size=1, max_size=6)
JOINED_FORMS: dict[str, Any] = {
    "lists": lambda documents: documents,
    "arrays": lambda documents: [np.array(document, np.int64) for document in documents],
    "arrays of 32 bits": lambda documents: [np.array(document, np.int32) for document in documents],
    "arrays from big-endian files": lambda documents: [np.array(document, ">i4") for document in documents],
    "strided arrays": lambda documents: [
        np.repeat(np.array(document, np.int64), 2)[::2] for document in documents
    ],
    "tensors": lambda documents: [torch.tensor(document, dtype=torch.int64) for document in documents],
    "tensors of 16 bits and 64": lambda documents: [
        torch.tensor(document, dtype=torch.int64 if number % 2 else torch.int32)
        for number, document in enumerate(documents)
    ],
    "empty tensors of floats": lambda documents: [torch.tensor(document) for document in documents],
    "a mixture": lambda documents: [
        document if number % 2 else torch.tensor(document, dtype=torch.int64)
        for number, document in enumerate(documents)
    ],
    "Arrow": lambda documents: pa.array(documents, pa.list_(pa.int32())),
    "Arrow of 64 bits, sliced": lambda documents: pa.array([[7], *documents, [8]], pa.large_list(pa.int64()))[
        1:-1
    ],
    "Arrow in chunks": lambda documents: pa.chunked_array(
        [pa.array([document], pa.list_(pa.int32())) for document in documents]
    ),
    "values and offsets": lambda documents: (
        np.array([5, *[token for document in documents for token in document], 6]),
        np.cumsum([1, *map(len, documents)]),
    ),
}


@pytest.mark.parametrize("form", JOINED_FORMS)
@given(documents=ANY_VALUES)
def test_every_form_gives_the_same_values_and_sizes(form, documents):
    joined = join(JOINED_FORMS[form](documents), "input_ids")

    values, sizes, is_fresh = as_whole(joined, "input_ids")
    assert joined.values.dtype.isnative
    assert values.tolist() == [token for document in documents for token in document]
    assert (sizes.dtype, sizes.tolist()) == (np.int64, [len(document) for document in documents])
    assert values.dtype in (np.int32, np.int64)
    assert values.flags.writeable or not is_fresh


@pytest.mark.parametrize("form", JOINED_FORMS)
def test_what_is_given_stays_as_it_is(form):
    documents = [[11, 12, 13], [21], [31, 32]]
    given_documents, given_labels = JOINED_FORMS[form](documents), JOINED_FORMS[form](documents)

    row = flatten(given_documents, given_labels)
    row.input_ids[:] = row.labels[:] = -1

    for kept in (given_documents, given_labels):
        assert join(kept, "input_ids").values.tolist() == [11, 12, 13, 21, 31, 32]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([np.ones((1, 4), np.int64)] * 2, "entry 0 must have one dimension, got shape"),
        ([torch.ones((1, 4), dtype=torch.int64)] * 2, "entry 0 must have one dimension, got shape"),
        ([np.ones(2, np.int64), np.ones((2, 2), np.int64)], "entry 1 must have one dimension"),
        ([np.int64(3), np.int64(4)], "entry 0 must have one dimension"),
        ([np.array(["a", "b"])], "must hold numbers or booleans"),
        (["ab", "cd"], "entry 0 must have one dimension"),
        ((np.arange(4), np.array([0, 3, 2])), "must rise, and lie within 4 values"),
        ((np.arange(4), np.array([0, 5])), "must rise, and lie within 4 values"),
        (pa.array([[1], None]), "1 nulls in place of documents"),
        (pa.array([1, 2]), "must be of a list type"),
    ],
)
def test_what_holds_no_documents_is_refused(documents, message):
    with pytest.raises(DocumentsError, match=message):
        join(documents, "input_ids")


@pytest.mark.parametrize(
    "documents",
    [
        [np.array([1, 2]), np.array([1.0])],
        [np.array([1, 2]), np.array([True])],
        [torch.tensor([1, 2]), torch.tensor([True])],
        [torch.tensor([1, 2]), torch.tensor([1.5])],
        [np.array([1, 2], np.uint64), np.array([-1])],
        [np.array([2**63], np.uint64)],
    ],
)
def test_token_ids_are_whole_numbers_in_every_document(documents):
    with pytest.raises(DocumentsError, match=r"whole numbers|outside of int64"):
        as_whole(join(documents, "input_ids"), "input_ids")


def test_only_lists_of_ones_hold_ones_only():
    assert holds_ones_only([[1, 1], [1]])
    assert not holds_ones_only([[1, 1], [0]])
    assert not holds_ones_only([[1, 1], np.ones(2)])


@pytest.mark.parametrize("form", ["list", "chunked", "fixed size"])
def test_an_arrow_array_is_looked_through_once_and_let_go(form):
    array = pa.array([[1, 2], [3, 4]])
    if form == "chunked":
        array = pa.chunked_array([array])
    if form == "fixed size":
        array = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
    before = len(ragged._FLAT)

    first, again = ragged.as_flat(array, "documents"), ragged.as_flat(array, "documents")
    assert first is not None
    assert again is first
    assert len(ragged._FLAT) == before + 1
    del array
    assert len(ragged._FLAT) == before


def test_another_array_in_the_place_of_a_known_one_is_read_anew(monkeypatch):
    known, other = pa.array([[1, 2]]), pa.array([[7, 8, 9]])
    ragged.as_flat(known, "documents")
    monkeypatch.setitem(ragged._FLAT, id(other), ragged._FLAT[id(known)])

    found = ragged.as_flat(other, "documents")
    assert found is not None
    assert found.values.tolist() == [7, 8, 9]


VALUES = st.one_of(
    st.integers(-(2**31), 2**31 - 1),
    st.sampled_from(
        [0, -1, 2**31 - 1, -(2**31), np.int32(7), np.uint8(9), enum.IntEnum("Id", "SEVEN").SEVEN]
    ),
)
OTHERS = st.sampled_from([None, 1.5, "i", b"iiiii", 2**31, -(2**31) - 1, 2**70, (1,), [1], np.float32(2)])


@given(st.lists(st.lists(VALUES, max_size=6), min_size=1, max_size=5))
def test_lists_of_whole_numbers_are_read_as_they_are(lists):
    offsets = np.zeros(len(lists) + 1, np.int64)
    read = read_int_lists(lists, offsets)

    assert read is not None
    assert read.dtype == np.int32
    assert read.tolist() == [int(value) for part in lists for value in part]
    assert offsets.tolist() == np.cumsum([0, *map(len, lists)]).tolist()


@given(st.lists(st.lists(VALUES, max_size=6), min_size=1, max_size=5), OTHERS, st.data())
def test_lists_with_anything_else_in_them_are_left_to_numpy(lists, other, data):
    part = data.draw(st.sampled_from(lists))
    part.insert(data.draw(st.integers(0, len(part))), other)

    assert read_int_lists(lists, np.zeros(len(lists) + 1, np.int64)) is None


def test_lists_of_booleans_stay_booleans():
    assert read_int_lists([[1], [], [True, False]], np.zeros(4, np.int64)) is None


@pytest.mark.parametrize("lists", [[[2**31]], [[1], [2**32 - 1, 2]], [[-5, 7], [2**31]], [[2**31, -5]]])
def test_numbers_of_all_32_bits_do_not_turn_negative(lists):
    assert read_int_lists(lists, np.zeros(len(lists) + 1, np.int64)) is None


def test_a_list_with_negative_numbers_stands_between_others_as_it_is():
    offsets = np.zeros(4, np.int64)

    read = read_int_lists([[1, 2], [3, -100, -(2**31)], [2**31 - 1]], offsets)

    assert read is not None
    assert read.tolist() == [1, 2, 3, -100, -(2**31), 2**31 - 1]
    assert offsets.tolist() == [0, 2, 5, 6]
