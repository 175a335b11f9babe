"""The Lightning example trains every document once, with the gradients of one by one, on any number of processes."""

import pytest
import torch
from tests.support.one_by_one import (
    EXAMPLES,
    GRADIENTS_JOB,
    assert_same_gradients,
    ids_of,
    loss_and_gradients,
    python,
    seen_in,
)

import varlen as vl

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries about each other
PROGRAM = EXAMPLES / "lightning_module.py"
LIBRARIES = "torch,lightning,transformers.models.llama.modeling_llama,varlen.adapters.lightning"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two processes stopped after 4 of 7 steps, and gone on with."""
    folder = tmp_path_factory.mktemp("runs")
    begun = python(GRADIENTS_JOB, PROGRAM, folder / "gradients.pt", folder / "two", 2, 4, libraries=LIBRARIES)
    before = seen_in(folder / "two")
    return folder, begun, before, python(PROGRAM, folder / "two", 2, libraries=LIBRARIES)


def test_every_document_is_trained_once_over_two_processes_before_and_after_going_on(runs):
    folder, begun, before, ended = runs
    after = seen_in(folder / "two")

    assert "190 documents so far, 190 different ones, of 300" in begun
    assert all(before)
    assert len({*before[0], *before[1]}) == len(before[0]) + len(before[1]) == 190
    assert "300 documents so far, 300 different ones, of 300" in ended
    assert sorted(after[0] + after[1]) == list(range(300))
    assert all(new[: len(old)] == old and len(new) > len(old) for old, new in zip(before, after))


def test_the_gradients_of_a_step_over_two_processes_are_those_of_its_documents_one_by_one(runs, monkeypatch):
    folder, begun, (first, second), _ = runs
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import lightning_module

    model = lightning_module.LanguageModel(folder).model
    settings = lightning_module.make_data(folder / "two")._settings
    with vl.PackedLoader(folder / "two" / "texts.jsonl", "bytes", **settings) as loader:
        step = set(loader.documents(0).document_ids.tolist())
    taken = [[n for n in numbers if n in step] for numbers in (first, second)]

    loss, expected = loss_and_gradients(model, ids_of(folder / "two" / "texts.jsonl", taken[0] + taken[1]))

    assert min(map(len, taken)) > 10
    assert f"step 1  loss {loss:.3f}" in begun
    found = torch.load(folder / "gradients.pt")
    assert_same_gradients(dict(zip((name for name, _ in model.named_parameters()), found)), expected)
