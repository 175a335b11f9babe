"""The scales of a change of the house: files on the way through a call, and benchmarks of two checkouts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import pairs

ROOT = Path(__file__).resolve().parents[2]


def trips(*arguments: object) -> str:
    command = [sys.executable, str(ROOT / "scripts/trips.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_trip_holds_the_files_whose_functions_run_and_no_other(tmp_path):
    output = trips("pack", "--json", tmp_path / "found.json")
    files = json.loads((tmp_path / "found.json").read_text())["pack"]

    assert "pack/api.py" in files
    assert "types.py" in files
    assert not any(file.startswith(("feed/", "batch/", "plan/")) for file in files)
    assert f"{len(files)} files" in output
    assert " 1.00 of " in trips("pack", "--against", tmp_path / "found.json")


def test_a_checkout_is_compared_with_itself_in_pairs(tmp_path):
    row = pairs.compare("first_import", pairs.HERE, tmp_path, pairs=2)

    assert len(row["here"]) == len(row["other"]) == 2
    assert min(row["here"] + row["other"]) > 0
    assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1]


def test_there_are_fifteen_benchmarks_and_unknown_ones_are_refused():
    assert len(pairs.BENCHMARKS) == 15
    command = [sys.executable, "-m", "benchmarks.pairs", str(ROOT), "lode_store"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "unknown: lode_store" in done.stderr


@pytest.mark.parametrize("name", ["pack_without_jit", "collate_lists", "simulate"])
def test_a_benchmark_reports_its_least_time(name, tmp_path):
    assert 0 < pairs.run_one(name, tmp_path) < 60
