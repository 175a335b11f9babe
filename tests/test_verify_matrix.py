"""The compatibility matrix is complete, comes from runs, and the page says what the runs found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import compatibility
import pytest
from rarely import mostly

from varlen.verify.models.api import FAULT, matrix_row
from varlen.verify.models.loading import families

FOUND = json.loads(compatibility.RESULTS.read_text(encoding="utf-8"))
VERDICTS = {"isolated", "coupled", "leaks", "refuses", "not run"}
BACKENDS = ["eager", "sdpa", "flex_attention", "varlen", "flash_attention_2"]
# A plain one, one whose attention is chosen when it is made, one that drops boundaries, one that is refused, one with
# windows, one with experts, two with recurrent layers, one that can't be made.
SAMPLE = ["llama", "falcon", "stablelm", "bloom", "gemma2", "mixtral", "lfm2", "qwen3_next", "musicgen"]


@pytest.fixture
def same_transformers() -> None:
    import transformers

    if transformers.__version__ != FOUND["versions"]["transformers"]:
        pytest.skip(
            f"the matrix is of transformers {FOUND['versions']['transformers']}; `make matrix` renews it"
        )


@pytest.mark.usefixtures("same_transformers")
def test_the_matrix_has_every_family_of_the_installed_transformers() -> None:
    assert compatibility.missing(families(), FOUND) == []
    assert len(FOUND["families"]) >= 60


@pytest.mark.parametrize("name", FOUND["families"])
def test_no_cell_of_a_family_is_silent(name: str) -> None:
    row = FOUND["families"][name]
    assert list(row["cells"]) == BACKENDS
    for by_layout in row["cells"].values():
        assert list(by_layout) == ["rows", "flat"]
        for cell in by_layout.values():
            assert cell["verdict"] in VERDICTS
            assert cell["verdict"] == "isolated" or cell["reason"]
            assert FAULT not in cell.get("reason", "")
            assert cell["verdict"] != "isolated" or (
                cell["control"] > 0 and cell["kernels"] and "moved" in cell
            )


@pytest.mark.usefixtures("same_transformers")
@pytest.mark.parametrize("family", mostly(["stablelm", "musicgen"], SAMPLE))
def test_a_family_that_is_run_again_gives_the_same_verdicts(family: str) -> None:
    assert verdicts(matrix_row(family)) == verdicts(FOUND["families"][family])


def test_a_family_that_is_run_again_by_itself_leaves_the_others_their_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = FOUND["families"]
    written = tmp_path / "found.json"
    written.write_text(
        json.dumps(FOUND | {"date": "2001-02-03", "families": {"llama": known["llama"], "musicgen": {}}})
    )
    monkeypatch.setattr(compatibility, "RESULTS", written)
    monkeypatch.setattr(compatibility, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(f"{compatibility.START}\n{compatibility.END}")
    compatibility.main(["--families", "musicgen", "--processes", "1"])

    found = json.loads(written.read_text())
    assert found["families"]["musicgen"] == known["musicgen"]
    assert found["families"]["llama"] == known["llama"]
    assert "on 2001-02-03" in (tmp_path / "page.md").read_text()
    assert "Run again since then: musicgen." in (tmp_path / "page.md").read_text()


def verdicts(row: dict[str, Any]) -> Any:
    cells = [
        (backend, layout, cell["verdict"], cell.get("reason"), cell.get("stand_in"))
        for backend, by_layout in row["cells"].items()
        for layout, cell in by_layout.items()
    ]
    return row["verdict"], cells, row["calls"]


def test_with_varlens_arguments_no_family_leaks() -> None:
    leaking = [
        (name, backend, layout)
        for name, row in FOUND["families"].items()
        for backend, by_layout in row["cells"].items()
        for layout, cell in by_layout.items()
        if cell["verdict"] == "leaks"
    ]
    assert leaking == []


def test_families_leak_that_are_known_to_when_called_with_positions_alone() -> None:
    def plain(name: str) -> str:
        return compatibility._plain(FOUND["families"][name])

    for name in ("falcon", "bloom", "mpt", "xglm", "mamba", "rwkv", "jamba", "bamba"):
        assert plain(name) == "**leaks**", name
    for name in ("llama", "qwen3", "mistral", "gemma2", "mixtral", "gpt2", "gpt_neox"):
        assert plain(name) == "isolated", name
    # On FlashAttention, positions reach it.
    for name in ("gpt_oss", "afmoe", "opt", "biogpt"):
        assert plain(name) == "in part", name


def test_the_page_is_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert compatibility.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_page_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    stale = json.loads(json.dumps(FOUND))
    stale["families"]["llama"]["cells"]["sdpa"]["rows"] = {"verdict": "leaks", "reason": "planted"}
    (tmp_path / "stale.json").write_text(json.dumps(stale), encoding="utf-8")
    monkeypatch.setattr(compatibility, "RESULTS", tmp_path / "stale.json")

    assert compatibility.main(["--check"]) == 1
    assert "planted" in compatibility.render(stale)


def test_a_family_that_crashes_the_check_is_told_and_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(sys.modules["varlen.verify.models.api"], "verify", crash)
    row = matrix_row("llama")

    assert row["verdict"] == "not run"
    assert f"{FAULT}: ZeroDivisionError: planted" in row["cells"]["eager"]["rows"]["reason"]
