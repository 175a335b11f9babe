"""`varlen verify`, of models and of Megatron's configurations: what it prints, and one sentence for what is wrong."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.command_line import asked, one_sentence, varlen
from tests.support.megatron_configs import packed

from varlen.adapters.megatron import check_config
from varlen.cli.verify import print_report
from varlen.errors import SettingError

QUICK = ("--backend", "eager", "--layout", "rows")


def test_verdicts_are_printed_and_nothing_written(tmp_path):
    run = asked("verify", "llama", *QUICK, cwd=tmp_path)

    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("isolated: LlamaForCausalLM (llama), 24,800 weights, float32 on cpu")
    assert "… use_cache=True" in run.stdout
    assert "-o report.html shows this in pictures." in run.stdout
    assert run.stderr.splitlines() == ["  0 %  eager, rows", " 50 %  eager, rows: other ways of calling"]
    assert list(tmp_path.iterdir()) == []


def test_everything_is_printed_as_json():
    run = asked("verify", "llama", *QUICK, "--no-calls", "--no-gradients", "--dtype", "float64", "--json")

    found = json.loads(run.stdout)
    assert run.returncode == 0
    assert (found["verdict"], found["dtype"], found["calls"]) == ("isolated", "float64", [])
    assert found["cells"][0]["gradients"] is None


def test_a_page_is_written_with_the_attention_drawn(tmp_path):
    run = asked("verify", "opt", *QUICK, "-o", tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert run.returncode == 0, run.stderr
    assert "report.html shows this in pictures." in run.stdout
    assert "OPTForCausalLM" in page
    assert page.count('class="weight') > 300
    assert "never looks at position_ids" in page
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("lama", "did you mean llama"),
        ("no/folder", "there is no folder 'no/folder'"),
        ("llama --backend paged", "backends must be one or more of eager, sdpa"),
        ("llama --dtype int8", "--dtype must be one of float64, float32, bfloat16, float16"),
    ],
)
def test_what_there_is_not_is_one_sentence(arguments, said):
    assert said in one_sentence(asked("verify", *arguments.split()))


def test_a_page_in_a_folder_that_there_is_not_is_refused_before_anything_runs(tmp_path):
    run = asked("verify", "llama", "-o", tmp_path / "none" / "report.html")

    assert run.returncode == 2
    assert "doesn't exist" in one_sentence(run)


YAML = """\
model: {seq_length: 510, context_parallel_size: 2, calculate_per_token_loss: true}
train: {micro_batch_size: 1, global_batch_size: 8}
dataset:
  seq_length: 510
  enable_offline_packing: true
  offline_packing_specs: {packed_sequence_size: 1024, pad_seq_to_mult: 4, num_tokenizer_workers: 4}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "cfg.yaml").write_text(YAML, encoding="utf-8")
    return tmp_path / "cfg.yaml"


def test_an_error_is_printed_with_the_value_that_works_and_ends_with_2(config):
    run = varlen("verify", "--megatron", config, "--dialect", "0.7")

    assert run.returncode == 2
    assert run.stderr == ""
    assert run.stdout.splitlines() == [
        f"1 error, 0 warnings found in {config}; Megatron-Bridge 0.7, offline packing to 1,024",
        "error seq_length (stops): a row can't be cut into equal chunks, two for each rank; Megatron stops with an "
        "AssertionError",
        "  seen:  model.seq_length = 510",
        "  must:  a multiple of 2 · context_parallel_size = 4",
        "  fix:   508 or 512; model.seq_length = 512, dataset.seq_length = 512",
        "all errors that settings can mend are gone with:",
        "  model.seq_length=512",
        "  dataset.seq_length=512",
    ]


def test_a_sound_configuration_ends_with_0(config):
    config.write_text(YAML.replace("510", "512"), encoding="utf-8")
    run = asked("verify", "--megatron", config, "--dialect", "0.7", "--world-size", "16")

    assert run.returncode == 0
    assert run.stdout == f"nothing found in {config}; Megatron-Bridge 0.7, offline packing to 1,024\n"


def test_processes_are_taken_into_account(config):
    config.write_text(YAML.replace("510", "512"), encoding="utf-8")
    run = asked("verify", "--megatron", config, "--world-size", "24")

    assert run.returncode == 2
    assert "train.global_batch_size · " not in run.stdout
    assert "must:  a multiple of train.micro_batch_size · data-parallel size = 1·12 = 12" in run.stdout


def test_everything_about_a_configuration_is_printed_as_json(config):
    run = asked("verify", "--megatron", config, "--json")

    found = json.loads(run.stdout)
    assert run.returncode == 2
    assert (found["ok"], found["dialect"]) == (False, "0.6")
    assert found["changes"] == {"model.seq_length": 512, "dataset.seq_length": 512}
    assert found["findings"][0]["kind"] == "seq_length"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("verify", "llama", "--megatron", "CFG"), "leave out MODEL with --megatron, which runs no model"),
        (
            ("verify", "--megatron", "CFG", "--backend", "eager", "--no-calls"),
            "leave out --backend and --no-calls with --megatron",
        ),
        (("verify", "llama", "--dialect", "0.6"), "leave out --dialect without --megatron"),
        (("verify",), "name a MODEL, such as llama, or a configuration with --megatron CONFIG"),
        (("verify", "--megatron", "none.yaml"), "none.yaml: there is no such file"),
        (("verify", "--megatron", "CFG", "--dialect", "1"), "'1' names no dialect of Megatron-Bridge"),
        (("verify", "--megatron", "CFG", "--world-size", "0"), "world_size must be a whole number from 1"),
    ],
)
def test_what_can_not_be_checked_is_one_sentence(arguments, words, config):
    run = asked(*(str(config) if argument == "CFG" else argument for argument in arguments))

    assert words in one_sentence(run)


def test_a_terminal_gets_lines_of_its_width_with_every_word_of_the_report(config):
    report = check_config(config)
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=60, highlight=False))

    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    shown = " ".join(stream.getvalue().split())
    for finding in report:
        for words in (finding.what, finding.seen, finding.limit, finding.fix, finding.kind):
            assert " ".join(words.split()) in shown
    assert lines[-2:] == ["  model.seq_length=512", "  dataset.seq_length=512"]


def test_a_report_raises_its_errors_and_nothing_else():
    check_config(packed()).raise_for_errors()
    with pytest.raises(
        SettingError, match=r"^1 error, 0 warnings found in the configuration; Megatron-Bridge 0\.6"
    ):
        check_config(packed(train__micro_batch_size=4)).raise_for_errors()


def test_a_report_goes_through_json_whatever_it_changes():
    cfg = packed(
        dataset__offline_packing_specs=None,
        model__hierarchical_context_parallel_sizes=[3],
        dataset__seq_length=512,
    )
    report = check_config(cfg)

    assert json.loads(json.dumps(report.to_json()))["changes"][
        "model.hierarchical_context_parallel_sizes"
    ] == [1, 1]
    assert "dataset.offline_packing_specs={packed_sequence_size: 512, pad_seq_to_mult: 1}" in report.overrides
