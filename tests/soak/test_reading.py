"""Broken files of every format: an error that names the file or a right answer each time, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.soak.mutants import KINDS, mutant

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("mutants.py")
SLICE = 300
QUARTER = 25_000


def read_mutants(first: int, count: int, folder: Path, seconds: float) -> dict[str, int]:
    """Read mutants in another process, which a crash in a library may end, or a hang; returns its counts."""
    command = [sys.executable, "-W", "error", *map(str, (PROGRAM, first, count, folder))]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    run = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=variables, check=False)
    at = (folder / "at.txt").read_text() if (folder / "at.txt").exists() else "none"
    assert run.returncode == 0, f"exit code {run.returncode} at file {at}:\n{run.stderr[-4000:]}"
    assert run.stderr == "", f"something was left open: {run.stderr[:2000]}"
    return dict(json.loads(run.stdout))


def test_each_of_a_few_hundred_broken_files_gives_an_error_or_a_right_answer(tmp_path):
    counts = read_mutants(0, SLICE, tmp_path, 60)

    assert counts["files"] == SLICE
    assert counts["raise: error"] == counts["skip: faults"] > SLICE / 2
    assert counts["raise: read"] > SLICE / 10


@pytest.mark.soak
@pytest.mark.parametrize("quarter", [1, 2, 3, 4])
def test_each_of_a_hundred_thousand_broken_files_gives_an_error_or_a_right_answer(tmp_path, quarter):
    counts = read_mutants(quarter * 1_000_000, QUARTER, tmp_path, 900)

    assert counts["files"] == QUARTER


def test_a_mutant_is_made_from_its_number_alone_and_every_format_has_its_turn():
    names = {mutant(number)[0] for number in range(40 * len(KINDS))}

    assert mutant(7) == mutant(7)
    assert names == {kind + packing for kind in KINDS for packing in ("", ".gz", ".zst")}
