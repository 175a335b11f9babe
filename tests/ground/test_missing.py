"""Libraries that aren't installed: one sentence with the command, at every public name and every adapter."""

import importlib
import json
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from tests.support.rarely import mostly

from varlen.errors import MissingExtraError
from varlen.missing import library_in, of_missing

PROGRAM = Path(__file__).with_name("hidden.py")
NEEDED = {
    "torch": [
        "varlen.SliceEngine",
        "varlen.StepStats",
        "varlen.verify",
        "varlen.adapters.hf",
        "varlen.adapters.trl.dpo",
    ],
    "transformers": ["varlen.verify", "varlen.adapters.hf", "varlen.adapters.hf.trainer"],
    "trl": ["varlen.adapters.trl.trainer", "varlen.adapters.trl.dpo"],
    "axolotl": ["varlen.adapters.axolotl.VarlenPlugin"],
    "lightning": ["varlen.adapters.lightning"],
    "datasets": ["varlen.adapters.trl.streaming", "varlen.adapters.hf.trainer"],
    "accelerate": ["varlen.adapters.hf.trainer"],
    "peft": ["varlen.adapters.hf.trainer"],
    "numba": [],
    "pyarrow": [],
    "highspy": [],
}
"""Libraries, and what must miss each."""
COMMANDS = {"torch": 'pip install "varlen[train]"', "transformers": 'pip install "varlen[train]"'}


@cache
def raised(hidden: str) -> dict[str, list[str]]:
    """What importing everything raises with some libraries hidden."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), hidden], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("library", mostly(["torch"], NEEDED))
def test_what_needs_a_hidden_library_says_so_with_the_command_everywhere(library):
    found = raised(library)

    assert set(NEEDED[library]) <= set(found)
    for name, (kind, words) in found.items():
        assert kind == "MissingExtraError", f"{name}: {kind}: {words}"
        assert f"{library} is not installed" in words, name
        assert COMMANDS.get(library, "pip install") in words, name


def test_a_module_that_is_missing_in_varlen_itself_is_no_missing_library():
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module("varlen.nowhere")

    assert library_in(raised.value) == ""


def test_the_library_is_found_behind_what_others_say_of_it():
    outer = ModuleNotFoundError("Could not import module 'Trainer'")
    outer.__cause__ = ModuleNotFoundError("No module named 'peft.tuners'", name="peft.tuners")

    assert library_in(outer) == "peft"
    error = of_missing("yaml", "varlen.adapters.megatron.check_config")
    assert (
        "yaml is not installed, and varlen.adapters.megatron.check_config needs it; `pip install pyyaml`"
        in str(error)
    )
    assert isinstance(pickle.loads(pickle.dumps(error)), MissingExtraError)
