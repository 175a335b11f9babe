"""`varlen plan` and the positions of a model: a configuration's are kept to, a published checkpoint's are said."""

import json
from dataclasses import replace

import pytest
from tests.cli.plan_verb import LENGTHS, planning

from varlen.cost.shape import ModelShape
from varlen.report.plan import stretched

_NOTE = "was published with"


@pytest.fixture
def plan(verb, tmp_path):
    return planning(verb, tmp_path)


@pytest.fixture
def configured(plan, tmp_path):
    """A call that plans a small model whose configuration has 2,048 positions."""
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "vocab_size": 1000, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ("lengths.npz", "--model", "config.json", "--gpus", 2)
    return lambda *more: plan(*given, *more)


def test_documents_longer_than_a_configuration_has_positions_are_refused_or_stretched(configured):
    short = configured("--method", "packed", "--capacity", "2k")
    long = configured("--method", "packed", "--capacity", "32k")
    extended = configured("--method", "packed", "--capacity", "32k", "--stretch")

    assert (short[0], short[2]) == (0, "")
    assert long[0] == 2
    over = int((LENGTHS > 2048).sum())
    assert (
        f"{over} of {LENGTHS.size} documents are longer than the 2,048 positions of llama, the longest "
        f"{LENGTHS.max():,} tokens; plan as if its positions were stretched with --stretch, or truncate documents "
        "with --capacity 2048"
    ) in long[2]
    assert (extended[0], extended[2]) == (0, "")
    assert _NOTE not in extended[1]


def test_a_sweep_counts_documents_over_the_positions_once(configured):
    code, _, said = configured("--capacity", "8k", "--capacity", "16k", "--sweep")

    assert code == 2
    assert f"{int((LENGTHS > 2048).sum())} of {LENGTHS.size} documents are longer" in said
    assert f"the longest {LENGTHS.clip(max=16_384).max():,} tokens" in said


def test_a_name_is_planned_at_any_length_and_one_line_says_what_it_was_published_with(plan, tmp_path):
    job = ("lengths.npz", "--tp", 8, "--method", "packed")

    code, out, said = plan(
        *job, "--capacity", "256k", "--model", "llama-3-8b", "-o", tmp_path / "report.html"
    )

    longest = LENGTHS.max()
    note = (
        f"llama-3-8b {_NOTE} 8,192 positions; documents of up to {longest:,} tokens are planned as if its "
        "positions were stretched."
    )
    assert (code, said) == (0, "")
    assert out.count(_NOTE) == 1
    assert note in " ".join(out.split())
    assert note in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("model", "capacity"), [("llama-3-8b", "8k"), ("llama-3.1-8b", "256k"), ("gpt-7b", "256k")]
)
def test_nothing_is_said_where_no_document_is_longer_or_no_positions_are_known(
    plan, tmp_path, model, capacity
):
    report = tmp_path / "report.html"

    shown = plan(
        "lengths.npz", "--model", model, "--capacity", capacity, "--tp", 8, "--method", "packed", "-o", report
    )

    assert (shown[0], shown[2]) == (0, "")
    assert _NOTE not in shown[1] + report.read_text(encoding="utf-8")


def test_a_sweep_says_it_too_of_its_longest_documents(plan):
    job = ("lengths.npz", "--model", "llama-2-7b", "--gpus", 8, "--sweep")

    short = plan(*job, "--capacity", "4k")
    both = plan(*job, "--capacity", "4k", "--capacity", "8k")

    assert (short[0], both[0]) == (0, 0)
    assert _NOTE not in short[1]
    assert f"llama-2-7b {_NOTE} 4,096 positions; documents of up to 8,192 tokens" in " ".join(both[1].split())


def test_the_last_document_that_fits_is_not_said_to_be_stretched():
    named = ModelShape.named("llama-3-8b")

    assert stretched(named, 8192) == ""
    assert "up to 8,193 tokens" in stretched(named, 8193)
    assert stretched(replace(named, max_positions=16_384), 8193) == ""
    assert stretched(replace(named, name=""), 10**6) == ""
