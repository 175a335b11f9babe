"""The command line: help, exit codes, one sentence for what is wrong, and what is drawn while something runs."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console
from rich.progress import Progress
from tests.support.command_line import asked, one_sentence, started, varlen

from varlen.cli import app as app_module
from varlen.cli import progress as extras_module
from varlen.cli import progress as module
from varlen.cli import train
from varlen.cli.progress import FittedLine, Part, fitted
from varlen.train.evaluate import Evaluation, LengthLoss, SetLoss


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("--help", ["demo", "inspect"]),
        ("-h", ["demo", "inspect"]),
        ("demo --help", ["Example:", "demo"]),
        ("inspect --help", ["Example:", "inspect"]),
        ("train --help", ["Example:", "train"]),
        ("index --help", ["varlen index 'chats/*.jsonl' -o store"]),
        ("verify --help", ["varlen verify qwen3 -o report.html", "varlen verify --megatron run_config.yaml"]),
        (
            "pack --help",
            [
                "Example:  varlen pack 'chats/*.jsonl' -o packed --capacity 8192",
                *("--tokens", "--on-error", "--ray", "--overwrite", "--in-order"),
            ],
        ),
        (
            "plan --help",
            [
                "Example:  varlen plan lengths.npz --model llama-3-8b --gpus 128 --pp 4 --capacity 256k",
                *("--sweep", "--calibrate", "--trace", "--save", "--recompute", "--hardware", "--in-order"),
            ],
        ),
    ],
)
def test_help_is_printed_with_an_example_and_loads_no_library(arguments, shown):
    libraries = {"torch", "transformers", "numba", "pyarrow", "tokenizers", "numpy", "ray"}
    script = (
        "import sys\n"
        "from varlen.cli import main\n"
        "try:\n    main()\n"
        f"finally:\n    loaded = {libraries} & set(sys.modules)\n    assert not loaded, loaded\n"
    )
    command = [sys.executable, "-c", script, *arguments.split()]
    wide = {**os.environ, "COLUMNS": "200"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=wide)

    assert run.returncode == 0, run.stderr
    assert [words for words in shown if words not in run.stdout] == []
    assert ("Example:" in run.stdout) == (not arguments.startswith("-"))


OF_EACH_VERB = {"output", "capacity", "seed", "as_json", "help"}


def test_an_option_of_several_verbs_is_explained_alike():
    verbs = typer.main.get_command(app_module.app).commands
    described = [
        {
            option.name: (option.opts, option.default, option.metavar, option.help, option.rich_help_panel)
            for option in verbs[verb].params
            if option.name not in OF_EACH_VERB
        }
        for verb in ("pack", "inspect")
    ]

    shared = described[0].keys() & described[1].keys()

    assert shared >= {"data", "tokenizer", "column", "chat_template", "eos", "no_eos", "text_cut", "on_error"}
    assert {name: described[0][name] for name in shared} == {name: described[1][name] for name in shared}


def test_the_version_is_printed_alone():
    import varlen as package

    assert varlen("--version").stdout == f"varlen {package.__version__}\n"


def test_an_unknown_option_is_bad_input():
    run = varlen("demo", "--nonsense")

    assert run.returncode == 2
    assert "--nonsense" in run.stderr


@pytest.mark.parametrize(
    ("ask", "content", "said"),
    [
        (asked, None, "does not exist"),
        (asked, "", "is empty"),
        (asked, '{"body": 1}\n', "found `body`"),
        (varlen, '{"text": "a few words"}\n', "holds 1 document of two tokens or more, but the demo needs"),
    ],
)
def test_bad_data_ends_in_one_sentence_and_leaves_nothing(tmp_path, ask, content, said):
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)

    run = ask("demo", "--data", tmp_path / "a.jsonl", "-o", tmp_path / "out.html")

    assert said in one_sentence_after_progress(run)
    assert not (tmp_path / "out.html").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name != "a.jsonl"] == []


def one_sentence_after_progress(run):
    """Progress may have begun before the fault was found."""
    run.stderr = run.stderr.replace("  0 %  reading documents\n", "")
    return one_sentence(run)


def test_settings_out_of_range_are_refused_before_any_work(tmp_path):
    assert "steps must be at least 1, got 0" in one_sentence(asked("demo", "--steps", 0, cwd=tmp_path))
    assert "threads must be at least 1" in one_sentence(asked("demo", "--threads", 0, cwd=tmp_path))
    assert "seed must be at least 0" in one_sentence(asked("demo", "--seed", -1, cwd=tmp_path))
    assert "seed must be at most" in one_sentence(asked("demo", "--seed", 10**23, cwd=tmp_path))
    assert "threads must be at most" in one_sentence(asked("demo", "--threads", 10**6, cwd=tmp_path))
    assert "doesn't exist" in one_sentence(asked("demo", "-o", tmp_path / "no" / "report.html"))
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch, capsys):
    monkeypatch.setattr(extras_module, "find_spec", lambda name: None)

    with pytest.raises(SystemExit) as ended:
        app_module.app(["demo"])

    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert 'needs torch and transformers, not installed here; run: pip install "varlen[train]"' in said


def test_the_demo_prints_one_json_object_and_writes_its_report(tmp_path):
    rows = "".join(json.dumps({"text": f"line {n}. " * (1 + n % 17)}) + "\n" for n in range(40))
    (tmp_path / "a.jsonl").write_text(rows)

    run = asked("demo", "--quick", "--json", "--data", "a.jsonl", "-o", "out.html", cwd=tmp_path)

    assert run.returncode == 0, run.stderr
    tree = json.loads(run.stdout)
    assert {method["name"] for method in tree["methods"]} >= {"padded", "flattened", "packed"}
    assert tree["isolation"]["is_proved"]
    assert "100 %" in run.stderr
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out.html"]


@pytest.mark.soak
def test_an_interrupt_ends_in_one_line_and_leaves_nothing(tmp_path):
    process = started("demo", "-o", "out.html", cwd=tmp_path)
    assert process.stderr is not None
    assert "reading" in process.stderr.readline()
    time.sleep(1.5)  # torch is being imported in the background

    os.killpg(process.pid, signal.SIGINT)
    out, said = process.communicate(timeout=60)

    assert process.returncode == 130
    assert out == ""
    assert said.strip().splitlines()[-1:] == ["varlen: interrupted; nothing was written"]
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


WIDTHS = (40, 60, 80, 100, 120, 200)
PLAN = SimpleNamespace(
    model="llama", num_parameters=8_030_261_248, precision="bf16", world_size=16, parallel="fsdp", device="cuda",
    attention="varlen_attention", plans=None, steps=100_000, resumed_from=12_000, num_trained=8_030_261_248,
    cross_entropy="liger",
)  # fmt: skip
METRICS = SimpleNamespace(
    step=98_765, loss=10.1234, tokens_per_s=12_345_678.0, fill=0.9987, step_s=1.2, data_wait_s=0.012,
    learning_rate=2.9e-4, mfu=0.4123, peak_bytes=71_234_567_890,
)  # fmt: skip
PART = {"loss": 2.1234, "documents": 1_234, "targets": 123_456.0}
EVALUATION = Evaluation(
    step=98_765, loss=2.1234, is_best=True, seconds=123.4,
    sets={
        name: SetLoss(
            loss=2.1234, documents=6_170, tokens=1_234_567, targets=617_280.0,
            by_length=tuple(
                LengthLoss(above=above, up_to=up_to, **PART)
                for above, up_to in pairwise((0, 512, 2048, 8192, 32768, None))
            ),
        )
        for name in ("chats", "books")
    },
)  # fmt: skip


def on_terminal(monkeypatch, where, width):
    """A console of a width, which a module takes for the terminal; and what is written to it."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=width, highlight=False, color_system=None)
    monkeypatch.setattr(where, "Console", lambda **_: console)
    return written


def lines_of(written):
    """What stood on the terminal, frame by frame, without control codes."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.getvalue()).replace("\r", "\n")
    return [line.rstrip() for line in text.split("\n") if line.strip()]


@pytest.mark.parametrize("width", WIDTHS)
def test_step_and_time_left_are_whole_at_every_width(monkeypatch, width):
    written = on_terminal(monkeypatch, train, width)

    with train.run_display(10) as display:
        display.on_begin(PLAN)
        display.on_step(METRICS)
        display.on_note(
            "saving the checkpoint of step 98,765 to run/checkpoints/step-00098765 takes a while on this disk"
        )

    lines = lines_of(written)
    assert max(map(len, lines)) <= width
    row = next(row for row in reversed(range(len(lines))) if "step 98,765/" in lines[row])
    first, second = lines[row : row + 2]
    assert re.search(r"step 98,765/100,000  left [-\d:]+", first), first
    for least, words in (
        (40, "loss 10.1234"),
        (60, "12,345,678 tokens/s"),
        (80, "MFU 41.2 %"),
        (80, "lr 0.00029"),
        (80, "71.2 GB"),
        (100, "1.0 % waiting"),
        (120, "99.9 % full"),
    ):
        assert width < least or words in second
    assert "\u2026" not in "".join(lines)  # nothing is cut
    assert "takes a while on this disk" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", [80, 120])
def test_what_a_run_says_is_read_whole_at_usual_widths(monkeypatch, width):
    written = on_terminal(monkeypatch, train, width)

    with train.run_display(10) as display:
        display.on_begin(PLAN)
        display.on_step(METRICS)
        display.on_evaluate(EVALUATION)

    lines = lines_of(written)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "\u2026" not in text
    for start, stop in pairwise((0, 512, 2048, 8192, 32768)):  # a length and its loss stand in one line
        assert f"{start + 1:,} to {stop:,}: 2.1234" in text or f"up to {stop:,}: 2.1234" in text
    assert "over 32,768: 2.1234" in text
    assert 'attention "varlen_attention", cross-entropy "liger"' in " ".join(text.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_what_goes_on_is_cut_before_the_share_and_the_time_left(monkeypatch, width):
    written = on_terminal(monkeypatch, module, width)

    with module.progress() as on_progress:
        on_progress(7, 100, "step 3 of 5 \u00b7 padded to the longest document, with a mask")

    lines = lines_of(written)
    assert max(map(len, lines)) <= width
    assert any(re.search(r"  7 %  left [-\d:]+", line) for line in lines), lines


def test_the_bar_stands_only_where_all_words_fit():
    for width, has_bar in ((60, False), (80, True)):
        written = io.StringIO()
        console = Console(file=written, force_terminal=True, width=width, color_system=None)
        line = FittedLine(console, lambda _: [Part(words="x" * 40, rank=0)])
        with Progress(line, console=console) as bar:
            bar.add_task("", total=10, completed=5)
        assert ("\u2501" in written.getvalue()) == has_bar


def test_parts_of_the_lowest_ranks_stay():
    parts = [Part(words=10 * letter, rank=rank) for letter, rank in zip("abcd", (0, 3, 1, 2))]

    assert [part.words[0] for part in fitted(parts, 48)] == list("abcd")
    assert [part.words[0] for part in fitted(parts, 40)] == list("acd")
    assert [part.words[0] for part in fitted(parts, 5)] == ["a"]
