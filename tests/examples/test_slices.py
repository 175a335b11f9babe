"""The examples of a long document and of a pipeline run, with the gradients of the uncut model."""

import re

import pytest
from tests.support.one_by_one import EXAMPLES
from tests.support.ranks import as_ranks


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import long_document

    return long_document


def test_it_says_what_slices_take_and_trains(example, capsys):
    example.main(2048, 128)

    said = capsys.readouterr().out
    sliced_mb, uncut_mb = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) MB", said))
    apart = float(re.search(r"than (\S+) of it", said)[1])
    first, *_, last = (float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", said))
    assert "2,048 tokens in 16 slices of 128" in said
    assert sliced_mb < uncut_mb / 5
    assert 0 < apart < 1e-5
    assert last < first


def test_longer_documents_run_in_slices_alone(example, capsys, monkeypatch):
    monkeypatch.setattr(example, "UNCUT", 500)

    example.main(600, 200)

    said = capsys.readouterr().out
    assert "600 tokens in 3 slices of 200" in said
    assert "uncut" not in said


LIBRARIES = "torch,transformers.models.llama.modeling_llama,varlen.runtime.engine,varlen.simulate.api"


@pytest.mark.soak
def test_four_processes_train_and_say_what_their_tasks_took():
    printed = as_ranks(EXAMPLES / "pipeline.py", "3", ranks=4, libraries=LIBRARIES)

    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    for stage in (0, 1):
        for pipeline in (0, 1):
            assert re.search(
                rf"stage {stage} of pipeline {pipeline}: forward 0 [\d.]+ ms.*, backward \d+ [\d.]+ ms",
                printed,
            )
