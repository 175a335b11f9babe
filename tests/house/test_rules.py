"""The rules of the house hold in this checkout, and each is able to fail: a planted violation is found."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.planted import BROKEN, SOUND

RULES = list(dict.fromkeys(rule for rule, _, _ in BROKEN))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_holds_in_this_checkout(rule, root):
    found = rule(root)

    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_lets_sound_code_pass(rule, tmp_path):
    write(tmp_path, SOUND)

    assert rule(tmp_path) == []


@pytest.mark.parametrize(("rule", "files", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_the_rule_finds_a_planted_violation(rule, files, words, tmp_path):
    write(tmp_path, SOUND | files)

    found = rule(tmp_path)

    assert len(found) == 1, found
    assert words in found[0]


PUBLIC_NAMES = [
    "CostModel",
    "Forest",
    "Hardware",
    "Ledger",
    "Mesh",
    "Mixture",
    "ModelShape",
    "PackedBatch",
    "PackedLoader",
    "Packing",
    "PaddedSampler",
    "Planner",
    "Score",
    "Search",
    "SliceEngine",
    "StepPlan",
    "StepStats",
    "Timeline",
    "TreeBatch",
    "VarlenError",
    "VerifyReport",
    "Waiting",
    "WindowPacker",
    "check_batch",
    "collate",
    "delay_outliers",
    "delay_step",
    "fold",
    "load_plan",
    "log_probs",
    "losses",
    "lower_bound",
    "merge_states",
    "pack",
    "pack_forest",
    "plan_step",
    "save_plan",
    "score",
    "simulate",
    "verify",
]


def test_the_public_names_are_pinned():
    import varlen

    assert sorted(varlen.__all__) == PUBLIC_NAMES
    assert dir(varlen) == sorted([*PUBLIC_NAMES, "__version__"])


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_can_be_imported(name):
    import varlen

    assert getattr(varlen, name).__name__.rpartition(".")[2] == name  # one is a module


def test_a_verb_is_never_hidden_by_its_room():
    script = (
        "import varlen.pack.api, varlen as vl; from varlen.pack import api; assert callable(vl.pack), vl.pack"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    importlib.import_module("varlen.verify.batches.finding")  # in a process of its own it would import torch
    assert callable(importlib.import_module("varlen").verify)


def test_importing_varlen_loads_no_library():
    script = "import sys; before = set(sys.modules); import varlen; print(*sorted(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)

    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    foreign = loaded - set(sys.stdlib_module_names) - {"varlen", "__future__"}
    assert "varlen" in loaded
    assert foreign == set()


LIGHT = ["train.affordable", "train.demo.experiment", "feed.worker.main", "feed.spec", "feed.indexed.stream"]


@pytest.mark.parametrize("module", LIGHT)
def test_processes_that_begin_without_torch_and_the_compiler_load_neither(module):
    script = f"import sys; import varlen.{module}; sys.exit(bool({{'torch', 'numba'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_contributing_leads_to_files_that_exist(root):
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:src|tests|docs|scripts|benchmarks)/[\w/.*]+)`", text))

    assert len(paths) > 30
    assert sorted(path for path in paths if not list(root.glob(path))) == []


def test_windows_is_refused_in_a_sentence():
    script = "import sys; sys.platform = 'win32'; import varlen"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert run.returncode == 1
    assert "PlatformError: varlen runs on Linux and macOS, not on Windows itself" in run.stderr


def test_the_tree_of_errors_is_drawn_whole():
    from varlen import errors

    named = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert named
    assert [name for name in named if name not in (errors.__doc__ or "")] == []
