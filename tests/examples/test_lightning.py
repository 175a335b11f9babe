"""The Lightning example trains every document once, with the gradients of one by one, on any number of processes."""

import pytest
from tests.support.one_by_one import (
    EXAMPLES,
    GRADIENTS_JOB,
    assert_each_once,
    assert_gradients_of_first_step,
    python,
    seen_in,
)

import varlen as vl

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]  # of the libraries about each other
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

    assert_each_once(begun, before, seen_in(folder / "two"))
    assert "300 documents so far, 300 different ones, of 300" in ended


def test_the_gradients_of_a_step_over_two_processes_are_those_of_its_documents_one_by_one(runs, monkeypatch):
    folder, begun, before, _ = runs
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import lightning_module

    model = lightning_module.LanguageModel(folder).model
    settings = lightning_module.make_data(folder / "two")._settings
    loader = vl.PackedLoader(folder / "two" / "texts.jsonl", "bytes", **settings)

    assert_gradients_of_first_step(folder, begun, before, model, loader)
