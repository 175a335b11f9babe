"""The torchtitan example trains every document once on changing ranks, with the gradients of one by one."""

import pytest
import torch
from tests.support.one_by_one import EXAMPLES, GRADIENTS_JOB, assert_same_gradients, ids_of, python, seen_in
from tests.support.ranks import as_ranks
from torch.nn.functional import cross_entropy

pytestmark = pytest.mark.soak
PROGRAM = EXAMPLES / "torchtitan_trainer.py"
DOCUMENTS = 120


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two processes stopped after 4 of 12 steps, and gone on with alone."""
    folder = tmp_path_factory.mktemp("runs")
    words = (GRADIENTS_JOB, PROGRAM, folder / "gradients.pt", folder / "run", 4)
    begun = as_ranks(*words, ranks=2, libraries="torch")
    before = seen_in(folder / "run")
    return folder, begun, before, python(PROGRAM, folder / "run", libraries="torch")


def test_every_document_is_trained_once_on_two_ranks_and_then_on_one(runs):
    folder, begun, before, ended = runs
    after = seen_in(folder / "run")

    assert "took 4 of 12 steps" in begun
    assert "took 12 of 12 steps" in ended
    assert all(before)
    assert sorted(after[0] + after[1]) == list(range(DOCUMENTS))
    assert after[0][: len(before[0])] == before[0]
    assert after[1] == before[1]
    assert len(after[0]) > len(before[0])


def test_the_gradients_of_a_step_over_two_ranks_are_those_of_its_documents_one_by_one(runs, monkeypatch):
    folder, begun, before, _ = runs
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import torchtitan_stand_in
    import torchtitan_trainer

    with (
        torchtitan_trainer.data_of(folder / "run")
        .build(dp_world_size=1, dp_rank=0, seq_len=256, local_batch_size=4)
        .loader as loader
    ):
        step = sorted(loader.documents(0).document_ids.tolist())
    torch.manual_seed(0)
    model = torchtitan_stand_in.Decoder()
    documents = [torch.tensor(ids) for ids in ids_of(folder / "run" / "texts.jsonl", step)]
    targets = sum(len(ids) - 1 for ids in documents)
    total = 0.0
    for ids in documents:
        logits = model(ids[None], torch.arange(len(ids))[None])[0, :-1]
        loss = cross_entropy(logits, ids[1:], reduction="sum") / targets
        loss.backward()
        total += loss.item()

    assert set(step) <= set(before[0] + before[1])
    assert len(step) > 4
    assert f"step 1  loss {total:.4f}" in begun
    found = torch.load(folder / "gradients.pt")
    names = [name for name, _ in model.named_parameters()]
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same_gradients(dict(zip(names, found)), expected)
