"""The axolotl example trains every document once over two ranks, with the gradients of one by one, and goes on."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.support.one_by_one import EXAMPLES, assert_same_gradients, python
from tests.support.ranks import as_ranks

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]  # of the libraries about each other
EXAMPLE = EXAMPLES / "axolotl_plugin"
JOB = Path(__file__).with_name("axolotl_job.py")
QUIET = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
STARTED = {"libraries": "tests.examples.axolotl_libraries", **QUIET}
CHECKPOINT = 2


def run(folder, out, *changes):
    """Run axolotl on two ranks; returns what each trained: the step and the documents of every batch."""
    (folder / out).mkdir()
    as_ranks(JOB, "config.yml", out, "max_grad_norm=0", *changes, folder=folder, **STARTED)
    files = [folder / out / f"seen-{rank}.jsonl" for rank in (0, 1)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def documents_of(notes):
    return [number for rank in notes for note in rank for number in note["documents"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The example's folder, what a whole run trained, and what one trained that went on in the middle."""
    folder = tmp_path_factory.mktemp("axolotl")
    shutil.copy(EXAMPLE / "config.yml", folder)
    python(EXAMPLE / "prepare.py", cwd=folder, **STARTED)
    whole = run(folder, "whole")
    shutil.copy(folder / "run" / f"checkpoint-{CHECKPOINT}" / "trainer_state.json", folder)
    rest = run(folder, "rest", f'resume_from_checkpoint="run/checkpoint-{CHECKPOINT}"')
    return folder, whole, rest


def test_every_document_is_trained_once_over_two_ranks(runs):
    _, whole, _ = runs

    assert all(whole)
    assert sorted(documents_of(whole)) == list(range(300))


def test_a_run_that_goes_on_trains_what_is_left_and_each_document_once(runs):
    _, whole, rest = runs
    before = [[note for note in rank if note["step"] < CHECKPOINT] for rank in whole]

    assert rest == [[note for note in rank if note["step"] >= CHECKPOINT] for rank in whole]
    assert sorted(documents_of(before) + documents_of(rest)) == list(range(300))
    assert documents_of(rest)


def test_axolotl_knows_the_exact_number_of_steps(runs):
    folder, whole, _ = runs

    state = json.loads((folder / "trainer_state.json").read_text())

    assert state["max_steps"] == whole[0][-1]["step"] + 1 == whole[1][-1]["step"] + 1


def test_the_gradients_of_a_step_over_two_ranks_are_those_of_its_documents_one_by_one(runs):
    import datasets
    from transformers import LlamaForCausalLM

    folder, whole, _ = runs
    (saved,) = (folder / "prepared").glob("varlen-*")
    rows = datasets.load_from_disk(str(saved))
    step = [[note for note in rank if note["step"] == 0] for rank in whole]
    documents = [rows[number] for number in documents_of(step)]
    model = LlamaForCausalLM.from_pretrained(folder / "model")

    total = sum(label != -100 for row in documents for label in row["labels"][1:])
    loss = sum(
        torch.nn.functional.cross_entropy(
            model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1],
            torch.tensor(row["labels"][1:]),
            reduction="sum",
        )
        for row in documents
    )
    (loss / total).backward()

    state = json.loads((folder / "trainer_state.json").read_text())
    assert min(len(documents_of([rank])) for rank in step) > 10
    assert state["log_history"][0]["loss"] == pytest.approx(float(loss / total), rel=1e-5)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for rank in (0, 1):
        found = torch.load(folder / "whole" / f"gradients-{rank}.pt")
        by_shape = sorted(found, key=lambda grad: (tuple(grad.shape), float(grad.abs().sum())))
        wanted = sorted(expected.values(), key=lambda grad: (tuple(grad.shape), float(grad.abs().sum())))
        assert_same_gradients(dict(enumerate(by_shape)), dict(enumerate(wanted)))
