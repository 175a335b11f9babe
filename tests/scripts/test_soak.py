"""The page of the long tests: a test that failed stays named until it passes."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", ROOT / "scripts" / "soak.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "soak", module)  # dataclasses look it up
        spec.loader.exec_module(module)
        yield module


@pytest.mark.parametrize(
    ("runs", "left"),
    [
        ([], ["a", "b"]),
        ([(2, ["b"])], ["b"]),
        ([(2, ["b"]), (1, [])], []),
        ([(0, [])], ["a", "b"]),  # out of time: nothing is known
    ],
)
def test_what_failed_stays_until_it_passes(soak, runs, left):
    def part(title, tests, failed):
        rest = {"date": "2026-11-28", "commit": "1234567", "skipped": 0, "seconds": 60.0, "exit_code": 1}
        return soak.Part(title=title, tests=tests, failed=failed, slowest=[], meshes=[], **rest)

    parts = [part("properties", 9, ["a"]), part("soak", 9, ["b"]), *(part(soak.AGAIN, *run) for run in runs)]

    assert soak.still_failed(parts) == left
    page = soak.summary(parts)
    assert [name for name in "ab" if f"- {name} failed\n" in page] == left
    assert all(f"- {name} failed, and passed when run again" in page for name in "ab" if name not in left)
