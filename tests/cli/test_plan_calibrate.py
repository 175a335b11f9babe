"""`varlen plan --calibrate`: what it prints and keeps, and what it refuses."""

import json
import re

import pytest
from tests.cli.plan_verb import planning
from tests.cli.test_pack import one_sentence

from varlen.errors import SettingError


@pytest.fixture
def plan(verb, tmp_path):
    return planning(verb, tmp_path)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("lengths.npz",), "lengths.npz"),
        (("-o", "report.html"), "-o"),
        (("--sweep",), "--sweep"),
        (("--method", "packed"), "--method"),
    ],
)
def test_what_measuring_does_not_take_is_refused(plan, given, named):
    said = one_sentence(plan("--calibrate", *given))

    assert (
        said
        == f"--calibrate measures and plans nothing; leave out {named}, and plan with --hardware afterwards"
    )


def test_seconds_are_refused_where_nothing_is_measured(plan):
    assert one_sentence(plan("lengths.npz", "--seconds", 3)).startswith(
        "--seconds says how long --calibrate measures"
    )


def test_no_time_to_measure_is_refused_before_torch_is_loaded(plan):
    assert one_sentence(plan("--calibrate", "--seconds", 0)) == "--seconds must be above 0; got 0"


def test_a_machine_is_measured_and_its_rates_plan_a_step(plan, tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    mine = ("--model", "config.json", "--tp", 2)

    code, out, said = plan("--calibrate", *mine, "--seconds", 1e-6, "--save", "mine.json")
    planned = plan("lengths.npz", *mine, "--gpus", 4, "--capacity", "2k", "--hardware", "mine.json")

    assert code == 0
    assert re.fullmatch(
        r"varlen: the least that rates of config.json can be fitted to takes about [\d.]+ m?s here, more than "
        r"--seconds 1e-06; a larger --tp than 2 measures a smaller share of its layers\n",
        said,
    )
    assert "Held-out shapes are predicted within" in out
    assert "Measured up to 256 rows and 512 keys of attention, and 128 rows of a layer; beyond" in " ".join(
        out.split()
    )
    assert "mine.json holds the rates, for --hardware mine.json." in out
    assert planned[0] == 0
    assert "on 4 GPUs of" in planned[1]
    errors = json.loads((tmp_path / "mine.json").read_text())["held_out_errors"]
    attention, rest = (f"{100 * error:.1f} %" for error in errors)
    said = " ".join(planned[1].split())
    assert (
        f"predict shapes that they weren't fitted to within {attention} (attention) and {rest} (the rest"
        in said
    )


def test_the_share_of_one_tensor_parallel_gpu_has_its_heads_and_columns():
    from varlen.cli.calibrate import share_of
    from varlen.cost.shape import ModelShape

    whole = ModelShape.named("llama-3-8b")

    part = share_of(whole, 4)

    assert (part.heads, part.kv_heads, part.ffn) == (8, 2, whole.ffn // 4)
    assert (part.hidden, part.head_dim) == (whole.hidden, whole.head_dim)
    assert share_of(whole, 16).kv_heads == 1
    assert share_of(whole, 1) is whole
    with pytest.raises(SettingError, match="tp=3 doesn't divide 32 query heads"):
        share_of(whole, 3)
