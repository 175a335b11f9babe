"""`varlen plan` on the command line: what it prints and writes, and one sentence and exit code 2 for bad input."""

import functools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from tests.support.command_line import refusal
from tests.support.offline_packs import write_texts

from varlen.arguments import as_tokens
from varlen.cli.calibrate import unsteady
from varlen.cli.plan_job import counted, mesh_of
from varlen.cost.hardware import Hardware
from varlen.cost.shape import ModelShape
from varlen.errors import SettingError
from varlen.report.plan import stretched


@pytest.fixture
def plan(verb, tmp_path):
    return planning(verb, tmp_path)


def test_a_run_prints_every_method_and_what_to_do_next(plan):
    code, out, said = plan("lengths.npz", *JOB)

    assert (code, said) == (0, "")
    for title in ("MicroPacks", "equal slices", "balanced packs", "tuned packs", "packs as they come"):
        assert title in out
    assert "llama-2-7b on 32 GPUs of h100 (dp 2 × pp 2 × tp 8): step 0, 24 documents" in out
    assert "truncated" in out
    assert out.endswith("-o report.html shows the timelines to zoom into; --sweep looks for a faster mesh.\n")


def test_json_is_one_object_and_the_same_whenever_it_runs(plan):
    runs = [json.loads(plan("lengths.npz", *JOB, "--json")[1]) for _ in range(2)]

    for run in runs:
        for row in [*run["methods"], *run["alternatives"]]:
            del row["planning_s"]
            row.pop("planning_ratio", None)
    assert runs[0] == runs[1]
    assert len(runs[0]["methods"]) == 6
    assert runs[0]["mesh"] == {
        "dp": 2, "pp": 2, "cp": 1, "tp": 8, "virtual_stages": 1, "sharding": "optimizer",
    }  # fmt: skip


def test_the_report_the_trace_and_the_plan_are_written(plan, tmp_path):
    from varlen.plan.serialize import load_plan

    code, out, _ = plan(
        "lengths.npz", *JOB, "--method", "micropack",
        "-o", "report.html", "--trace", "trace.json", "--save", "best.plan",
    )  # fmt: skip

    assert code == 0
    assert "report.html shows the timelines." in out
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert load_plan(tmp_path / "best.plan").num_documents == 24


def test_lengths_come_from_any_of_three_files_or_from_documents(plan, tmp_path):
    np.save(tmp_path / "lengths.npy", LENGTHS)
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, LENGTHS)) + "\n")
    texts = write_texts(tmp_path / "texts.jsonl")

    found = [
        json.loads(plan(f"lengths.{kind}", *JOB, "--method", "packed", "--json")[1])
        for kind in ("npz", "npy", "txt")
    ]
    code, out, _ = plan("texts.jsonl", *JOB, "--method", "packed")

    assert len({(one["tokens"], one["documents"], one["methods"][0]["step_s"]) for one in found}) == 1
    assert code == 0
    assert "Bytes are counted here" in out
    assert f"{min(24, len(texts))} documents" in out


def test_a_text_of_words_is_a_document_and_one_of_numbers_holds_lengths(tmp_path):
    (tmp_path / "words.txt").write_text("12\nand thirteen\nor more\n")
    (tmp_path / "numbers.txt").write_text("12\n\n13\n")
    (tmp_path / "empty.txt").write_text("")

    assert counted([str(tmp_path / "words.txt")]) is None
    assert counted([str(tmp_path / "empty.txt")]) is None
    assert counted([str(tmp_path / "numbers.txt")]).lengths.tolist() == [12, 13]


def test_steps_and_seeds_choose_documents(plan):
    def tokens(*more):
        return json.loads(plan("lengths.npz", *JOB, "--method", "packed", "--json", *more)[1])["tokens"]

    given = LENGTHS.clip(max=4096)
    assert tokens("--in-order") == given[:24].sum()
    assert tokens("--in-order", "--step", 2) == given[48:].sum()
    assert tokens() == tokens("--seed", 0) != tokens("--seed", 1)


def test_a_plan_far_from_its_bound_is_said_to_be_so(plan):
    wide = ("lengths.npz", *JOB, "--method", "packed")
    narrow = (*wide, "--tp", 4)

    for arguments, end in ((wide, "may come nearer."), (narrow, "may come nearer, say with more --tp.")):
        ratio = json.loads(plan(*arguments, "--json")[1])["methods"][0]["lower_bound_ratio"]
        assert ratio > 1.2
        said = f"takes {ratio:.2f} times the lower bound of this mesh; others of 32 GPUs {end}"
        assert said in " ".join(plan(*arguments)[1].split())


def test_a_plan_near_its_bound_or_on_one_gpu_has_no_other_mesh_named(plan):
    model = ("lengths.npz", "--model", "llama-2-7b", "--capacity", "4k", "--method", "packed")
    near = (*model, "--gpus", 8, "--tp", 8)
    alone = (*model, "--gpus", 1, "--hardware", "b200", "--documents", 1)

    for arguments, is_far in ((near, False), (alone, True)):
        ratio = json.loads(plan(*arguments, "--json")[1])["methods"][0]["lower_bound_ratio"]
        assert (ratio > 1.2) == is_far
        assert "may come nearer" not in plan(*arguments)[1]


def test_gpu_hours_are_always_there_and_money_where_an_hour_has_a_price(plan):
    free, priced = (plan("lengths.npz", *JOB, *more)[1] for more in ((), ("--price", 2.5)))
    row = json.loads(plan("lengths.npz", *JOB, "--price", 2.5, "--json")[1])["methods"][0]

    assert "GPU-hours" in free
    assert "at 2.5 a GPU-hour" not in free
    assert "per 10⁹ tokens, at 2.5 a GPU-hour" in " ".join(priced.split())
    assert row["cost_per_billion_tokens"] == pytest.approx(2.5 * row["gpu_hours_per_billion_tokens"])


def test_other_choices_are_planned_unless_methods_are_named(plan):
    usual, named = (plan("lengths.npz", *JOB, *more) for more in ((), ("--method", "micropack")))

    assert "What other choices would give" in usual[1]
    assert "What other choices would give" not in named[1]


def test_a_sweep_prints_meshes_and_the_command_for_the_best(plan):
    arguments = (
        "lengths.npz",
        "--model",
        "llama-2-7b",
        "--gpus",
        2,
        "--documents",
        12,
        "--capacity",
        "2k",
        "--sweep",
    )

    code, out, said = plan(*arguments, "--capacity", "4k")
    found = json.loads(plan(*arguments, "--json")[1])

    assert (code, said) == (0, "")
    assert "is the fastest:" in out
    assert "To look at the fastest: this command with " in out
    assert "-o report.html in place of --sweep." in " ".join(out.split())
    rates = [row["tokens_per_s"] for row in found["best"]]
    assert rates == sorted(rates, reverse=True)
    assert all(row["dp"] * row["pp"] * row["cp"] * row["tp"] == 2 for row in found["best"])


def test_a_configuration_of_transformers_is_a_model(plan, tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    code, out, _ = plan(
        "lengths.npz", "--model", "model", "--gpus", 2, "--method", "packed", "--capacity", "4k"
    )

    assert code == 0
    assert "on 2 GPUs of h100" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name a file of lengths, or documents; or measure this machine with --calibrate"),
        (("lengths.npz", "--model", "llama-3-8bb"), "no model is called 'llama-3-8bb'; nearest: llama-3-8b"),
        (("lengths.npz", "--hardware", "h1000"), "no hardware is called 'h1000'; nearest: h100"),
        (("lengths.npz", "--hardware", "mine.json"), "--hardware mine.json: there is no such file; varlen plan"),
        (("lengths.npz", "--model", "gone/config.json"), "there is no configuration at gone/config.json"),
        (("lengths.npz", "--gpus", "100", "--pp", "8"), "100 GPUs can't be divided into pipelines of pp 8 x cp 1"),
        (("lengths.npz", "--tp", "3", "--gpus", "6"), "tp=3 doesn't divide 32 query heads"),
        (("lengths.npz", "--gpus", "64", "--pp", "64"), "64"),
        (("lengths.npz", "--method", "micropak"), "no method is called 'micropak'; did you mean micropack?"),
        (("lengths.npz", "--recompute", "some"), "--recompute must be one of auto, none, selective, full; got"),
        (("lengths.npz", "--price", "0"), "--price is what a GPU-hour costs, a number above 0; got 0"),
        (("lengths.npz", "--rates", "best"), "--rates must be one of calibrated, flops; got 'best'"),
        (("lengths.npz", "--sharding", "all"), "mesh sharding='all'; it must be \"none\", \"optimizer\""),
        (("lengths.npz", "--capacity", "4kb"), "--capacity must be a whole number of tokens"),
        (("lengths.npz", "--capacity", "4k", "--capacity", "8k"), "which only --sweep compares"),
        (("lengths.npz", "--step", "9"), "--step 9 isn't there: 50 documents, 512 a step, make 1 step"),
        (("lengths.npz", "--documents", "0"), "--documents must be at least 1"),
        (("lengths.npz", "--seed", "-1"), "--seed must be at least 0; got -1"),
        (("lengths.npz", "--dp", "1000000000"), "a mesh of 1,000,000,000 GPUs"),
        (("lengths.npz", "-o", "gone/report.html"), "the folder gone doesn't exist"),
        (("lengths.npz", "--trace", "gone/t.json"), "the folder gone doesn't exist"),
        (("lengths.npz", "--sweep", "-o", "r.html"), "--sweep prints meshes and writes no r.html; leave out -o"),
        (("lengths.npz", "--sweep", "--method", "packed", "--method", "sliced"), "--sweep plans by one --method"),
        (("lengths.npz", "--calibrate"), "--calibrate only measures, and doesn't plan; leave out lengths.npz"),
        (("lengths.npz", "--tokens", "-1"), "--tokens is how many are trained in all, a number above 0; got -1"),
        (("lengths.npz", "--steps", "0"), "--steps must be at least 1; got 0"),
        (("lengths.npz", "--step", "2", "--documents", "20", "--steps", "2"), "--step 3 isn't there"),
        (("lengths.npz", "--sweep", "--steps", "2"), "--sweep plans one step on many meshes, and was given"),
        (("lengths.npz", "--sweep", "--tokens", "9"), "was given --tokens 9; leave out --tokens"),
        (("lengths.npz", "--memory-fraction", "2"), "memory_fraction=2.0; it must be above 0 and at most 1"),
        (("gone.npz",), "gone.npz does not exist; lengths are read from an .npz with `lengths`, an .npy, or a .txt"),
        (("lengths.csv",), "lengths.csv has a column of lengths, and lengths are read from an .npz with `lengths`"),
        (("zeros.npy",), "every document is empty"),
        (("floats.npy",), "floats.npy must hold lengths, a row of whole numbers from 0; it holds float64"),
        (("broken.npy",), "broken.npy is not a readable .npy file"),
    ],
)  # fmt: skip
def test_bad_input_ends_in_one_sentence(plan, tmp_path, arguments, said):
    np.save(tmp_path / "zeros.npy", np.zeros(3, int))
    (tmp_path / "lengths.csv").write_text("name,lengths\na,12\n")
    np.save(tmp_path / "floats.npy", np.ones(3))
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY broken")

    assert said in refusal(plan(*arguments))

    assert not list(tmp_path.glob("*.html"))


def test_a_step_that_no_method_holds_prints_the_reasons_and_ends_with_code_2(plan, tmp_path):
    code, out, said = plan(
        "lengths.npz", "--model", "llama-2-70b", "--gpus", 2, "--capacity", "2k", "-o", "r.html"
    )

    assert code == 2
    assert "parameters, gradients and optimizer states take" in out
    assert said == "varlen: no method has a plan for this step on this mesh; the reasons stand above\n"
    assert (
        "No mesh of 2 GPUs holds the model's states: more GPUs may hold it, or --sharding parameters." in out
    )
    assert (tmp_path / "r.html").exists()


def test_a_sweep_is_named_only_where_another_mesh_may_hold_the_step(plan):
    model = ("lengths.npz", "--method", "packed", "--documents", 4, "--capacity", "1k")

    alone = plan(*model, "--model", "llama-2-13b", "--gpus", 1)[1]
    divided = plan(*model, "--model", "llama-2-13b", "--gpus", 8)[1]

    assert alone.endswith("More GPUs, a smaller --capacity or fewer --documents may hold it.\n")
    assert divided.endswith("--sweep looks for a mesh of 8 GPUs that holds the step.\n")


def test_memory_that_plans_may_use_is_an_option_and_stands_in_the_table_to_train_so(plan):
    found = json.loads(
        plan(
            "lengths.npz",
            *JOB,
            "--method",
            "packed",
            "--memory-fraction",
            "0.5",
            "--recompute",
            "full",
            "--json",
        )[1]
    )

    assert found["limit_bytes"] == 0.5 * found["memory_bytes"] == 40e9
    assert found["train"].splitlines() == [
        "[plan]", 'method = "packed"', "pp = 2", "tp = 8", 'hardware = "h100"', 'recompute = "full"',
        "memory_fraction = 0.5", "[run]", 'parallel = "ddp"', 'precision = "bf16"',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "dp"),
    [
        ({"gpus": 128, "pp": 4}, 32),
        ({"gpus": None, "pp": 2}, 4),
        ({"gpus": None, "dp": 3, "tp": 4}, 3),
        ({}, 8),
    ],
)
def test_data_parallel_ranks_are_what_is_left(axes, dp):
    usual = {"gpus": None, "dp": None, "pp": 1, "cp": 1, "tp": 1, "virtual_stages": 1, "sharding": "none"}

    assert mesh_of(**usual | axes).dp == dp


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"gpus": 100, "pp": 8}, "96 or 104 GPUs can"),
        ({"gpus": 4, "pp": 8}, "; 8 GPUs can"),
        ({"gpus": 0}, "--gpus must be at least 1; got 0"),
        (
            {"gpus": 16, "dp": 3, "pp": 4},
            "dp 3 x pp 4 x cp 1 x tp 1 = 12 GPUs, but --gpus says 16; leave out",
        ),
        ({"gpus": 8, "pp": 0}, "mesh pp=0; it must be a whole number of at least 1"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused_with_what_would(axes, said):
    usual = {"gpus": None, "dp": None, "pp": 1, "cp": 1, "tp": 1, "virtual_stages": 1, "sharding": "none"}

    with pytest.raises(SettingError, match=said):
        mesh_of(**usual | axes)


@pytest.mark.parametrize("words", ["", "k", "0", "-1", "1.5k", "256kb", "9" * 12])
def test_a_number_of_tokens_is_refused_unless_it_is_one(words):
    with pytest.raises(
        SettingError, match="--capacity must be a whole number of tokens from 1 to 2,147,483,647, such as"
    ):
        as_tokens(words, "--capacity")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5\n-3\n7\n", "line 2 is '-3'"),
        ("length\n5\n6\n", "line 1 is 'length'"),
        ("5\n7\n8.5\n", "line 3 is '8.5'"),
        ("12\nabc", "line 2 is 'abc'"),
    ],
)
def test_a_wrong_line_among_lengths_is_named_and_not_planned_as_text(plan, tmp_path, text, said):
    (tmp_path / "odd.txt").write_text(text)

    words = refusal(plan("odd.txt"))

    assert words.startswith("odd.txt holds a length a line, but ")
    assert f"{said}, no whole number from 0 (1 of {len(text.split())} lines are none)" in words


def test_a_length_below_0_is_named(plan, tmp_path):
    np.save(tmp_path / "below.npy", np.array([4, 5, -6, -7]))

    assert "number 2 is -6 (2 of 4 are below 0)" in refusal(plan("below.npy"))


def test_a_file_is_not_written_over_another(plan, tmp_path):
    before = (tmp_path / "lengths.npz").read_bytes()

    read = refusal(plan("lengths.npz", *JOB, "--save", "./lengths.npz"))
    twice = refusal(plan("lengths.npz", *JOB, "-o", "a", "--trace", "a"))

    assert read == "--save lengths.npz is read already; name another file"
    assert twice == "--trace a is written by -o already; name another file"
    assert (tmp_path / "lengths.npz").read_bytes() == before


@pytest.mark.parametrize(
    ("option", "value"), [("--pp", 4), ("--dp", 2), ("--tp", 2), ("--cp", 2), ("--virtual-stages", 2)]
)
def test_a_sweep_is_given_no_axis(plan, option, value):
    said = refusal(plan("lengths.npz", "--gpus", 8, "--sweep", option, value))

    assert said == f"--sweep looks for the mesh and was given {option} {value}; leave out --sweep or {option}"


def test_a_sweep_of_no_gpu_is_refused(plan):
    assert refusal(plan("lengths.npz", "--gpus", 0, "--sweep")) == "--gpus must be at least 1; got 0"


def test_arrays_that_are_no_lengths_are_named(plan, tmp_path):
    np.savez(tmp_path / "other.npz", weights=LENGTHS, biases=LENGTHS)

    said = refusal(plan("other.npz"))

    assert said == (
        "other.npz must hold lengths as `lengths`, or documents as `input_ids` and `offsets`; it holds "
        "`weights`, `biases`"
    )


def test_a_file_of_no_lengths_is_refused(plan, tmp_path):
    np.save(tmp_path / "none.npy", np.zeros(0, np.int64))

    assert refusal(plan("none.npy")).startswith("there is no document, and nothing to plan")


def test_a_reason_that_every_method_has_is_printed_once_without_an_empty_table(plan):
    code, out, _ = plan("lengths.npz", "--model", "llama-2-70b", "--gpus", 2, "--documents", 8)

    assert code == 2
    assert out.count("optimizer states take") == 1
    assert "every method: " in out
    assert "over bound" not in out
    assert "-o report.html shows" not in out


def test_a_file_that_cannot_be_written_after_all_is_said(plan):
    said = refusal(plan("lengths.npz", *JOB, "--method", "packed", "--trace", "/proc/trace.json"))

    assert said.startswith("a file can't be written: ")


LENGTHS = np.random.default_rng(0).lognormal(7.0, 1.2, 50).clip(16, 20_000).astype(np.int32)
JOB = ("--model", "llama-2-7b", "--gpus", 32, "--pp", 2, "--tp", 8, "--documents", 24, "--capacity", "4k")


def planning(verb, folder):
    """Write lengths, and return what runs `varlen plan` and returns exit code, output and errors."""
    np.savez(folder / "lengths.npz", lengths=LENGTHS)
    return functools.partial(verb, "plan")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("lengths.npz",), "lengths.npz"),
        (("-o", "report.html"), "-o"),
        (("--sweep",), "--sweep"),
        (("--method", "packed"), "--method"),
        (("--price", "2"), "--price"),
        (("--tokens", "2"), "--tokens"),
    ],
)
def test_what_measuring_does_not_take_is_refused(plan, given, named):
    said = refusal(plan("--calibrate", *given))

    assert (
        said
        == f"--calibrate only measures, and doesn't plan; leave out {named}, and plan with --hardware afterwards"
    )


def test_seconds_are_refused_where_nothing_is_measured(plan):
    assert refusal(plan("lengths.npz", "--seconds", 3)).startswith(
        "--seconds says how long --calibrate measures"
    )


def test_no_time_to_measure_is_refused_before_torch_is_loaded(plan):
    assert refusal(plan("--calibrate", "--seconds", 0)) == "--seconds must be above 0 and finite; got 0"


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
        r"varlen: the smallest set of shapes to which rates of config.json can be fitted takes about "
        r"[\d.]+ m?s here, more than --seconds 1e-06; a larger --tp than 2 measures a smaller share of its layers\n",
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


def test_rates_of_a_machine_that_varied_are_not_to_be_planned_with():
    from varlen.runtime.calibrate import Calibration

    steady, varied = (
        Calibration(hardware=Hardware.named("h100"), held_out=(), rounds=2, repeat_mape=apart)
        for apart in (0.05, 1.496)
    )

    assert unsteady(steady) == ""
    said = unsteady(varied).replace("\N{NO-BREAK SPACE}", " ")
    assert said.startswith(
        "Don't plan with these rates: the two halves of the rounds differ by 149.6 %. Measure"
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


_NOTE = "was published with"


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
    job = ("lengths.npz", "--model", "llama-2-7b", "--gpus", 2, "--sweep")

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
