"""`varlen plan` and the positions of a model: a checkpoint's are kept to, unless they are to be stretched."""

import json

import pytest
from plan_verb import LENGTHS, planning
from test_cli_pack import one_sentence


@pytest.fixture
def plan(verb, tmp_path):
    return planning(verb, tmp_path)


def test_documents_longer_than_the_positions_are_refused_or_stretched(plan, tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "vocab_size": 1000, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("lengths.npz", "--model", "config.json", "--gpus", 2, "--method", "packed")

    short = plan(*arguments, "--capacity", "2k")
    long = plan(*arguments, "--capacity", "32k")
    stretched = plan(*arguments, "--capacity", "32k", "--stretch")

    assert (short[0], short[2]) == (0, "")
    assert long[0] == 2
    over = int((LENGTHS > 2048).sum())
    assert (
        f"{over} of {LENGTHS.size} documents are longer than the 2,048 positions of llama, the longest "
        f"{LENGTHS.max():,} tokens; plan as if its positions were stretched with --stretch, or truncate documents "
        "with --capacity 2048"
    ) in long[2]
    assert (stretched[0], stretched[2]) == (0, "")


def test_a_name_has_the_positions_that_it_was_published_with(plan):
    def planned(model, *more):
        return plan("lengths.npz", "--model", model, "--tp", 8, "--method", "packed", *more)

    over = int((LENGTHS > 8192).sum())
    assert (
        f"{over} of {LENGTHS.size} documents are longer than the 8,192 positions of llama-3-8b"
        in one_sentence(planned("llama-3-8b", "--capacity", "256k"))
    )
    assert planned("llama-3-8b", "--capacity", "256k", "--stretch")[0] == 0
    assert planned("llama-3-8b", "--capacity", "8k")[0] == 0
    assert planned("llama-3.1-8b", "--capacity", "256k")[0] == 0


def test_a_sweep_counts_documents_over_the_positions_once(plan):
    said = one_sentence(
        plan("lengths.npz", "--model", "llama-2-7b", "--capacity", "8k", "--capacity", "16k", "--sweep")
    )

    over = int((LENGTHS > 4096).sum())
    assert f"{over} of {LENGTHS.size} documents are longer" in said
    assert f"the longest {LENGTHS.clip(max=16_384).max():,} tokens" in said


def test_without_a_capacity_documents_are_truncated_to_the_positions_or_128k(plan):
    def capacity(*more):
        found = plan("lengths.npz", *more, "--gpus", 8, "--tp", 8, "--method", "packed", "--json")
        return json.loads(found[1])["capacity"]

    assert capacity() == 131_072
    assert capacity("--model", "llama-2-7b") == 4096
    assert capacity("--model", "llama-2-7b", "--stretch") == 131_072
    assert capacity("--model", "gpt-7b") == 131_072
    assert capacity("--model", "deepseek-v3", "--gpus", 1024, "--sharding", "parameters") == 131_072
