"""`varlen verify`: what it prints and writes, and one sentence for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.test_app import asked, one_sentence, varlen

QUICK = ("--backend", "eager", "--layout", "rows")


def test_verdicts_are_printed_and_nothing_written(tmp_path: Path) -> None:
    run = asked("verify", "llama", *QUICK, cwd=tmp_path)

    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("isolated: LlamaForCausalLM (llama), 24,800 weights, float32 on cpu")
    assert "… use_cache=True" in run.stdout
    assert "-o report.html shows this in pictures." in run.stdout
    assert run.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_everything_is_printed_as_json() -> None:
    run = asked(
        "verify",
        "llama",
        *QUICK,
        "--no-calls",
        "--no-gradients",
        "--dtype",
        "float64",
        "--json",
    )

    found = json.loads(run.stdout)
    assert run.returncode == 0
    assert (found["verdict"], found["dtype"], found["calls"]) == ("isolated", "float64", [])
    assert found["cells"][0]["gradients"] is None


def test_a_page_is_written_with_the_attention_drawn(tmp_path: Path) -> None:
    run = asked("verify", "falcon", *QUICK, "-o", tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert run.returncode == 0, run.stderr
    assert "report.html shows this in pictures." in run.stdout
    assert "FalconForCausalLM" in page
    assert page.count('class="weight') > 300
    assert "never looks at position_ids" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_family_that_nobody_has_is_one_sentence() -> None:
    run = asked("verify", "lama")

    assert run.returncode == 2
    assert "did you mean llama" in one_sentence(run)


def test_a_backend_that_there_is_not_is_one_sentence() -> None:
    run = asked("verify", "llama", "--backend", "paged")

    assert run.returncode == 2
    assert "backends must be one or more of eager, sdpa" in one_sentence(run)


def test_a_dtype_that_there_is_not_is_one_sentence() -> None:
    run = asked("verify", "llama", "--dtype", "int8")

    assert run.returncode == 2
    assert "--dtype must be one of float64, float32, bfloat16, float16" in one_sentence(run)


def test_a_page_in_a_folder_that_there_is_not_is_refused_before_anything_runs(tmp_path: Path) -> None:
    run = asked("verify", "llama", "-o", tmp_path / "none" / "report.html")

    assert run.returncode == 2
    assert "doesn't exist" in one_sentence(run)


def test_the_help_has_an_example() -> None:
    run = varlen("verify", "--help")

    assert run.returncode == 0
    assert "varlen verify qwen3 -o report.html" in run.stdout
