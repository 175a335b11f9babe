"""Compiled layers have the losses of others, and one graph whatever documents come."""

import pytest
import torch
from tests.support.training import LLAMA, Notes, settings
from torch._dynamo.utils import counters

from varlen.errors import SettingError
from varlen.train.trainer import train

# Dynamo looks at inputs that aren't leaves, and tests make its warning an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

STILL = {**LLAMA, "attention_dropout": 0.0}


def losses(store, output, **changes):
    torch._dynamo.reset()
    counters.clear()
    notes = Notes()
    train(settings(store, output, run__steps=8, model__settings=STILL, **changes), notes)
    return [step.loss for step in notes.steps], counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Trace and differentiate ahead of time, and leave code to be made by a C++ compiler out."""
    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: real(module, backend="aot_eager"))


@pytest.mark.parametrize("changes", [{}, {"run__checkpoint_activations": True}, {"run__precision": "bf16"}])
def test_eight_steps_of_other_documents_are_one_graph_with_the_same_losses(store, tmp_path, changes):
    plain, _ = losses(store, tmp_path / "plain", **changes)
    compiled, graphs = losses(store, tmp_path / "compiled", run__compile=True, **changes)

    assert compiled == pytest.approx(plain, rel=1e-5)
    assert graphs == 1


def test_an_evaluation_adds_one_graph(store, tmp_path):
    changes = {"eval__sets": {"same": str(store)}, "eval__every": 2}
    _, graphs = losses(store, tmp_path / "run", run__compile=True, **changes)
    assert graphs == 2


def test_dropout_of_attention_is_refused(store, tmp_path):
    with pytest.raises(SettingError, match=r"set attention_dropout to 0, or run.compile = false"):
        train(settings(store, tmp_path / "run", run__compile=True), Notes())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan__slice_tokens": 64}, r"run.compile is for whole packs"),
        ({"data__layout": "flat"}, r"run.compile needs packs of one shape"),
    ],
)
def test_what_has_many_shapes_isnt_compiled(store, tmp_path, changes, words):
    with pytest.raises(SettingError, match=words):
        settings(store, tmp_path / "run", run__compile=True, **changes)
