"""Public functions that are given what is easily taken for their arguments: a sentence with what to write instead."""

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import varlen as vl

DOCUMENTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
PACKING = vl.pack([3, 2, 4], 8)
BATCH = vl.collate(DOCUMENTS, PACKING)
LENGTHS_NOT_DOCUMENTS = {
    "lists": DOCUMENTS,
    "lists of one length": [[1, 2], [3, 4]],
    "arrays": [np.arange(3), np.arange(2)],
    "tensors": [torch.arange(3), torch.arange(3)],
    "an array of arrays": np.array([np.arange(3), np.arange(2)], dtype=object),
    "an Arrow list array": pa.array(DOCUMENTS),
    "a Dataset": datasets.Dataset.from_dict({"input_ids": DOCUMENTS}),
    "a DatasetDict": datasets.DatasetDict(train=datasets.Dataset.from_dict({"input_ids": DOCUMENTS})),
    "a stream": datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).to_iterable_dataset(),
    "a DataFrame": pd.DataFrame({"input_ids": DOCUMENTS}),
    "a Series": pd.Series(DOCUMENTS),
    "a dict": {"input_ids": DOCUMENTS},
    "rows": [{"input_ids": [1, 2]}],
    "a table": pa.table({"input_ids": DOCUMENTS}),
}
TEXTS = {
    "texts": ["abc", "de"],
    "rows of text": [{"text": "abc"}],
    "a path": "file.jsonl",
    "an array": np.array(["abc"]),
}
ODD = (None, 5, {1, 2}, iter([1]), PACKING, lambda: 1, object(), torch.ones(2, requires_grad=True))
NUMPY = (
    "inhomogeneous",
    "setting an array element",
    "numpy()",
    "object has no attribute",
    "argument must be",
)
TAKE_LENGTHS = {
    "pack": lambda given: vl.pack(given, 8),
    "lower_bound": lambda given: vl.lower_bound(given, 8),
    "WindowPacker.add": vl.WindowPacker(capacity=8).add,
}


def said(call, *given):
    with pytest.raises(vl.VarlenError) as caught:
        call(*given)
    text = str(caught.value)
    assert "\n" not in text
    assert not any(words in text for words in NUMPY), text
    return text


@pytest.mark.parametrize("name", LENGTHS_NOT_DOCUMENTS)
@pytest.mark.parametrize("function", TAKE_LENGTHS)
def test_documents_in_place_of_lengths(function, name):
    text = said(TAKE_LENGTHS[function], LENGTHS_NOT_DOCUMENTS[name])

    assert all(words in text for words in ("[len(d) for d in documents]", "vl.collate", "vl.PackedLoader")), (
        text
    )


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("function", TAKE_LENGTHS)
def test_texts_in_place_of_lengths(function, name):
    text = said(TAKE_LENGTHS[function], TEXTS[name])

    assert "vl.PackedLoader(rows, tokenizer)" in text
    assert name != "a path" or "'file.jsonl' is a text" in text


def test_tokens_and_offsets_in_place_of_lengths():
    assert "np.diff(offsets)" in said(TAKE_LENGTHS["pack"], (np.arange(5), np.array([0, 3, 5])))


@pytest.mark.parametrize("given", ODD, ids=lambda given: type(given).__name__)
@pytest.mark.parametrize("function", TAKE_LENGTHS)
def test_anything_else_in_place_of_lengths(function, given):
    assert "one whole number per document" in said(TAKE_LENGTHS[function], given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((len(d) for d in DOCUMENTS), "pass list(lengths)"),
        (map(len, DOCUMENTS), "pass list(lengths)"),
        (np.ones((3, 4), np.int64), "shape (3, 4); of padded rows, pass attention_mask.sum(1)"),
        (torch.ones(3, 4, dtype=torch.int64), "shape (3, 4); of padded rows, pass attention_mask.sum(1)"),
        (
            torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged),
            "[len(d) for d in lengths.unbind()]",
        ),
    ],
)
def test_lengths_that_come_once_and_tokens_in_one_tensor_say_what_to_pass(given, words):
    assert words in said(TAKE_LENGTHS["pack"], given)


def test_one_slip_among_lengths_is_named_as_that():
    assert said(TAKE_LENGTHS["pack"], [3, 2, None]).startswith(
        "length None of document 2 is not a whole number"
    )


@pytest.mark.parametrize(
    "given", [DOCUMENTS, [3, 2], BATCH, "x", None], ids=lambda given: type(given).__name__
)
@pytest.mark.parametrize(
    "call", [vl.score, lambda given: vl.collate(DOCUMENTS, given)], ids=["score", "collate"]
)
def test_something_else_in_place_of_a_packing(call, given):
    assert "what vl.pack(lengths, capacity) returned" in said(call, given)


@pytest.mark.parametrize("given", [[3, 2, 4], ["abc", "de", "f"]])
def test_lengths_or_texts_in_place_of_tokens(given):
    assert "as token ids" in said(vl.collate, given, PACKING)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: vl.save_plan(PACKING, "x"), "vl.plan_step"),
        (lambda: vl.load_plan(PACKING), "path of a file"),
        (lambda: vl.load_plan(None), "path of a file"),
        (lambda: vl.merge_states(3), "a list of the states"),
        (lambda: vl.merge_states("x"), "a list of the states"),
        (lambda: vl.check_batch(DOCUMENTS), "PackedBatch or a mapping"),
        (lambda: vl.verify(BATCH), "PreTrainedModel"),
        (lambda: vl.simulate(PACKING, None), "vl.plan_step"),
        (lambda: vl.plan_step([3], cost="h100", mesh=8), "vl.CostModel and a vl.Mesh"),
        (lambda: vl.PackedLoader(PACKING, capacity=8, global_batch_size=1), "is no source"),
        (lambda: vl.CostModel(model="llama-3-8b", hardware="h100"), "ModelShape.named"),
    ],
)
def test_other_arguments_are_told_apart_too(call, words):
    assert words in said(call)
