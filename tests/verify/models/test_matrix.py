"""The compatibility matrix and the report come from runs; the stand-in for FlashAttention has its form."""

import json
import sys
from typing import Any

import compatibility
import numpy as np
import pytest
import torch
from tests.support.hf_models import verified
from tests.support.rarely import mostly
from transformers import modeling_flash_attention_utils as flash

import varlen as vl
from varlen.verify.models import backends
from varlen.verify.models.api import FAULT, matrix_row
from varlen.verify.models.backends import AttentionPicture, kernels_of
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
def test_the_matrix_has_every_family_of_the_installed_transformers():
    assert compatibility.missing(families(), FOUND) == []
    assert len(FOUND["families"]) >= 60


@pytest.mark.parametrize("name", FOUND["families"])
def test_no_cell_of_a_family_is_silent(name):
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
def test_a_family_that_is_run_again_gives_the_same_verdicts(family):
    assert verdicts(matrix_row(family)) == verdicts(FOUND["families"][family])


@pytest.mark.soak
def test_a_family_that_is_run_again_by_itself_leaves_the_others_their_date(tmp_path, monkeypatch):
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


def test_with_varlens_arguments_no_family_leaks():
    leaking = [
        (name, backend, layout)
        for name, row in FOUND["families"].items()
        for backend, by_layout in row["cells"].items()
        for layout, cell in by_layout.items()
        if cell["verdict"] == "leaks"
    ]
    assert leaking == []


def test_families_leak_that_are_known_to_when_called_with_positions_alone():
    def plain(name: str) -> str:
        return compatibility._plain(FOUND["families"][name])

    for name in ("falcon", "bloom", "mpt", "xglm", "mamba", "rwkv", "jamba", "bamba"):
        assert plain(name) == "**leaks**", name
    for name in ("llama", "qwen3", "mistral", "gemma2", "mixtral", "gpt2", "gpt_neox"):
        assert plain(name) == "isolated", name
    # On FlashAttention, positions reach it.
    for name in ("gpt_oss", "afmoe", "opt", "biogpt"):
        assert plain(name) == "in part", name


def test_the_page_is_what_the_json_says(capsys):
    assert compatibility.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_page_is_found(monkeypatch, tmp_path):
    stale = json.loads(json.dumps(FOUND))
    stale["families"]["llama"]["cells"]["sdpa"]["rows"] = {"verdict": "leaks", "reason": "planted"}
    (tmp_path / "stale.json").write_text(json.dumps(stale), encoding="utf-8")
    monkeypatch.setattr(compatibility, "RESULTS", tmp_path / "stale.json")

    assert compatibility.main(["--check"]) == 1
    assert "planted" in compatibility.render(stale)


def test_a_family_that_crashes_the_check_is_told_and_costs_no_other(monkeypatch):
    def crash(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(sys.modules["varlen.verify.models.api"], "verify", crash)
    row = matrix_row("llama")

    assert row["verdict"] == "not run"
    assert f"{FAULT}: ZeroDivisionError: planted" in row["cells"]["eager"]["rows"]["reason"]


FUSED = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(scope="module")
def llama() -> vl.VerifyReport:
    return verified("llama")


@pytest.mark.soak
def test_the_attention_between_documents_is_drawn(llama):
    picture = llama.attention
    assert picture is not None
    kept, without = picture.between(picture.kept_apart), picture.between(picture.without)  # type: ignore[arg-type]
    outside = ~np.eye(len(kept), dtype=bool)
    assert (kept[outside] == 0).all()
    assert (without[np.tril_indices(len(without), -1)] > 0).all()
    assert (kept.diagonal() > 0).all()
    assert str(picture).splitlines()[1].startswith("█ · · ·")


def test_a_shade_is_a_dot_only_for_exactly_nothing():
    weights = np.array([[1.0, 1e-30], [0.0, 0.5]], np.float32)
    picture = AttentionPicture(owner=np.array([0, 1]), kept_apart=weights, without=None)

    assert [line.split() for line in str(picture).splitlines()[1:]] == [["█", "░"], ["·", "▓"]]


def test_the_report_reads_well_and_is_json(llama):
    text = str(llama)
    assert text.startswith("isolated: LlamaForCausalLM (llama), 24,800 weights, float32 on cpu")
    for words in (
        "isolated with varlen's arguments; 6 of the other ways of calling it leak",
        "flash_attention_2 *",
        "* plain PyTorch stood in for flash_attn_varlen_func",
        "… use_cache=True",
        "tried on 10 documents of 163 tokens, the longest of 52 tokens: rows [4, 52], flat [1, 163]",
        "eager: position_ids=int64 [4, 52], use_cache=False, attention_mask=float32 [4, 1, 52, 52]",
        "varlen, flash_attention_2: position_ids=int64 [4, 52], use_cache=False, cu_seq_lens_q=int32",
        "flex_attention: gradients weren't compared: FlexAttention does not support backward on CPU",
        "leaks/isolated",
        "a/b: a in rows, b in flat",
        'fix: del batch["attention_mask"]',
        "Attention between the documents of a row",
    ):
        assert words in text, text
    assert max(map(len, text.splitlines())) <= 118
    found = json.loads(json.dumps(llama.to_json()))
    assert found["verdict"] == "isolated"
    assert found["cells"][0]["isolation"]["movements"]["largest_difference"] == 0
    assert len(found["calls"]) == len(llama.calls) == 8 * 5 * 2


def test_a_cell_that_was_not_tried_is_named_in_the_error(llama):
    with pytest.raises(
        KeyError, match="flash_attention_3 rows wasn't tried; these were: eager rows, eager flat"
    ):
        llama.cell("flash_attention_3")


def test_kernels_are_named_by_a_run():
    q = torch.ones(1, 2, 4, 8)

    assert kernels_of(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))[1] == ((FUSED, 1),)
    assert kernels_of(lambda: (q @ q.mT).softmax(-1) @ q)[1] == (("softmax", 1),)
    assert kernels_of(lambda: q + q)[1] == ()


def test_a_transformers_that_knows_the_cache_kernel_unpacks_its_arguments_too(monkeypatch):
    monkeypatch.setattr(flash, "_process_with_kvcache_kwargs_fn", None, raising=False)
    with backends.flash_attention():
        (dense, varlen, cached, *padding), (process, process_cached) = flash.lazy_import_flash_attention(
            "any"
        )
    assert callable(dense)
    assert callable(varlen)
    assert cached is None
    assert len(padding) == 2
    assert callable(process)
    assert process_cached() == {}


def test_an_earlier_transformers_unpacks_one_function(monkeypatch):
    monkeypatch.delattr(flash, "_process_with_kvcache_kwargs_fn", raising=False)
    with backends.flash_attention():
        (dense, varlen, cached, *padding), process = flash.lazy_import_flash_attention("any")
    assert callable(dense)
    assert callable(varlen)
    assert cached is None
    assert len(padding) == 2
    assert callable(process)


def test_what_transformers_finds_is_put_back():
    found = flash.lazy_import_flash_attention
    with backends.flash_attention():
        assert flash.lazy_import_flash_attention is not found
    assert flash.lazy_import_flash_attention is found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels that compute it run on CUDA")
def test_on_cuda_it_says_segments_where_the_tokens_are():
    report = vl.verify(
        "llama", backends=["flash_attention_2"], device="cuda", dtype=torch.bfloat16, calls=False
    )

    assert {cell.verdict for cell in report.cells} == {"isolated"}
