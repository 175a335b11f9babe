"""torchtitan 0.3.0 from PyPI, beside this environment: its own trainer and model take what the loader gives."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.one_by_one import EXAMPLES, seen_in
from tests.support.ranks import as_ranks

pytestmark = pytest.mark.soak
PACKAGES = (
    "torchtitan==0.3.0",
    # What it imports and this environment lacks; torch, datasets and the rest are those that are here.
    "torchdata==0.11.0",
    "torch_checkpointing==0.1.1",
    "spmd_types==0.2.3",
    "tyro==1.0.17",
    "typeguard",
    "docstring-parser",
    "einops",
    "triton",
    "tensorboard",
    "absl-py",
    "protobuf",
)
PROGRAM = EXAMPLES / "torchtitan_trainer.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with torchtitan."""
    folder = tmp_path_factory.mktemp("torchtitan")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES]
    subprocess.run(command, check=True, timeout=900)
    return folder


@pytest.fixture(autouse=True)
def found_by_programs(installed, monkeypatch):
    """Programs that are started find it."""
    monkeypatch.setenv("PYTHONPATH", str(installed))


def test_torchtitans_trainer_trains_every_document_once_on_one_rank_and_then_on_two(tmp_path):
    begun = as_ranks(PROGRAM, tmp_path / "run", 4, ranks=1)
    ended = as_ranks(PROGRAM, tmp_path / "run", ranks=2, libraries="torch")

    assert "torchtitan's own trainer took 4 of 12 steps" in begun
    assert "torchtitan's own trainer took 12 of 12 steps" in ended
    seen = seen_in(tmp_path / "run")
    assert all(seen)
    assert sorted(seen[0] + seen[1]) == list(range(120))


def test_torchtitans_llama_gives_a_packed_batch_the_loss_and_gradients_of_its_documents_alone():
    printed = as_ranks(Path(__file__).with_name("torchtitan_job.py"), ranks=1)
    found = {
        name: (float(loss), float(gradient)) for name, loss, gradient in map(str.split, printed.splitlines())
    }

    assert found["packed"][0] < 1e-6
    assert found["packed"][1] < 1e-4
    assert found["joined"][1] > 1e-2  # documents that see each other, which a blind comparison would let pass
