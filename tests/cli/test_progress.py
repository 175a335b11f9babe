"""What is drawn while something runs, at the widths of terminals: what matters most is never cut."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import Progress

from varlen.cli import progress as module
from varlen.cli import train
from varlen.cli.progress import FittedLine, Part, fitted

WIDTHS = (40, 60, 80, 100, 120, 200)
PLAN = SimpleNamespace(
    model="llama", num_parameters=8_030_261_248, precision="bf16", world_size=16, parallel="fsdp", device="cuda",
    attention="varlen_attention", plans=None, steps=100_000, resumed_from=12_000,
)  # fmt: skip
METRICS = SimpleNamespace(
    step=98_765, loss=10.1234, tokens_per_s=12_345_678.0, fill=0.9987, step_s=1.2, data_wait_s=0.012
)


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

    with train.watching(10) as watcher:
        watcher.begin(PLAN)
        watcher.step(METRICS)
        watcher.say(
            "saving the checkpoint of step 98,765 to run/checkpoints/step-00098765 takes a while on this disk"
        )

    lines = lines_of(written)
    assert max(map(len, lines)) <= width
    last = next(line for line in reversed(lines) if "step 98,765" in line and "left" in line)
    assert re.search(r"step 98,765/100,000  left [-\d:]+", last), last
    for least, words in (
        (60, "loss 10.1234"),
        (80, "12,345,678 tokens/s"),
        (120, "1.0 % waiting"),
        (120, "99.9 % full"),
    ):
        assert width < least or words in last
    assert "\u2026" not in "".join(lines)  # nothing is cut
    assert "takes a while on this disk" in " ".join(" ".join(lines).split())


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
