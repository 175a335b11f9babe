"""The pages are true: code and commands do what they say, links lead somewhere, pictures are current."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import draw
import pages
import pytest
from tests.support.offline_packs import write_texts

PAGES = {page.relative_to(pages.ROOT).as_posix(): page for page in pages.pages()}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
COMMANDS = ("make", "varlen", "pip", "git", "cd", "cp", "echo", "python", "torchrun", "axolotl", ".ci/run")


def anchors(text: str) -> set[str]:
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    found = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"https?://[\w.-]+\.\w+(/\S*)?$", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name) if name else page
        if not path.exists():
            found.append(f"{page.name}: {target} leads nowhere")
        elif anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
            found.append(f"{page.name}: {target} names no heading")
    return found


@cache
def has_help(verb: str) -> bool:
    """Whether `varlen` knows a verb; pages name a few of them, many times."""
    return (
        subprocess.run([sys.executable, "-m", "varlen", verb, "--help"], capture_output=True).returncode == 0
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.soak if name in pages.LONG else ())
        for name in PAGES
        if name != "README.md"
    ],
)
def test_every_block_of_the_page_prints_what_the_page_says(name):
    assert pages.differences(PAGES[name]) == []


@pytest.mark.parametrize("name", PAGES)
def test_every_link_of_the_page_leads_somewhere(name):
    assert dead_links(PAGES[name]) == []


@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_the_page_is_one_that_exists(name, root):
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for block in pages.blocks(PAGES[name].read_text(encoding="utf-8")):
        for line in block.code.splitlines() if block.language == "bash" else ():
            words = [word for word in shlex.split(line, comments=True) if "=" not in word]
            assert not words or words[0] in COMMANDS, line
            for word in words:  # a page may say in which folder of examples its commands are
                is_there = (root / word).is_file() or any((root / "examples").rglob(word))
                assert not word.endswith(".py") or is_there, line
            if words[:1] == ["make"]:
                assert set(words[1:]) <= targets, line
            if words[:1] == ["varlen"]:
                assert has_help(words[1]), line


@pytest.mark.parametrize("name", PAGES)
def test_every_test_that_the_page_names_is_there(name, root):
    text = PAGES[name].read_text(encoding="utf-8")
    for file, test in re.findall(r"`(?:tests/)?([\w/]*test_\w+\.py)(?:::(\w+))?`", text):
        code = (root / "tests" / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in code, (file, test)


def test_every_page_is_reached_from_readme():
    reached, waiting = set(), [pages.ROOT / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if not target.startswith(("http", "#")):
                waiting.append(page.parent / target.partition("#")[0])

    assert {page.resolve() for page in PAGES.values()} - reached == set()


@pytest.mark.parametrize("name", draw.PICTURES)
def test_the_picture_is_drawn_from_what_varlen_computes_now(name):
    drawn = (draw.IMAGES / f"{name}.svg").read_text(encoding="utf-8")

    assert drawn == draw.PICTURES[name]().svg(), "run `make pages`"


def test_every_picture_is_drawn_by_a_program_and_shown_on_a_page():
    shown = {
        (page.parent / target).resolve()
        for page in PAGES.values()
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if target.endswith(".svg")
    }

    assert shown == {path.resolve() for path in draw.IMAGES.iterdir() if path.suffix == ".svg"}
    assert {path.stem for path in draw.IMAGES.iterdir()} >= set(draw.PICTURES)


PAGE = """
# A page

```python
a = 1
print(a)
```

```text
1
```

```python
print(a + 1)
```

Words between, so this is no output.

```text
3
```
"""


def test_a_page_that_prints_something_else_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)

    (difference,) = pages.differences(page)

    assert difference == "page.md:14: printed\n2\nbut the page says\n"


def test_a_page_is_written_anew_with_what_it_prints(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("```text\n1", "```text\n7"))

    page.write_text(pages.rewritten(page))

    assert pages.differences(page) == []
    assert page.read_text() == PAGE.replace("print(a + 1)\n```\n", "print(a + 1)\n```\n\n```text\n2\n```\n")


def test_a_block_that_raises_is_found_and_ends_its_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("a = 1", "a = 1 / 0"))

    (difference,) = pages.differences(page)

    assert "ZeroDivisionError" in difference
    assert 'File "page.md", line 5' in difference
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        pages.rewritten(page)


@pytest.mark.parametrize("link", ["[a](missing.md)", "[a](#missing)", "[a](page.md#missing)", "![a](a.svg)"])
def test_a_link_that_leads_nowhere_is_found(link, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n\n[a](#here) [b](page.md#here) {link}\n")

    assert len(dead_links(page)) == 1


TRAINING = pages.ROOT / "docs" / "training.md"


def four_commands() -> list[list[str]]:
    blocks = [b.code for b in pages.blocks(TRAINING.read_text(encoding="utf-8")) if b.language == "bash"]
    found = [shlex.split(line) for line in blocks[0].splitlines()]
    programs = {"varlen": ["-m", "varlen"], "torchrun": ["-m", "torch.distributed.run"]}
    return [[sys.executable, "-W", "ignore", *programs[words[0]], *words[1:]] for words in found]


def ranks_of(parent: int) -> list[int]:
    """The processes that torchrun has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("run/checkpoints/step-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="kills a group of processes")
def test_four_commands_lead_from_files_to_a_run_that_is_killed_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.delenv("VARLEN_JIT", raising=False)  # as readers have it: little work waits for no compiler
    (tmp_path / "data").mkdir()
    write_texts(tmp_path / "data" / "a.jsonl", count=400)
    index, init, shard, alone = four_commands()
    for command in (index, init):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    config = tmp_path / "config.toml"
    text = config.read_text()
    for name, value in (("steps", 400), ("checkpoint_every", 4), ("capacity", 256)):
        text = re.sub(rf"^{name} = \d+", f"{name} = {value}", text, flags=re.MULTILINE)
    config.write_text(text)

    job = subprocess.Popen(
        shard, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    begun = time.monotonic()
    while len(checkpoints(tmp_path)) < 2:
        assert job.poll() is None
        assert time.monotonic() - begun < 300, "no checkpoint"
        time.sleep(0.05)
    for pid in (*ranks_of(job.pid), job.pid):  # ranks have sessions of their own, and may outlive torchrun
        os.kill(pid, signal.SIGKILL)
    job.wait()
    last = int(checkpoints(tmp_path)[-1].removeprefix("step-")) + 6
    config.write_text(config.read_text().replace("steps = 400", f"steps = {last}"))
    said = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    assert said.returncode == 0, said.stderr
    assert re.search(r"on 1 process .*going on after step \d+", said.stdout + said.stderr)
    assert checkpoints(tmp_path)[-1] == f"step-{last:08d}"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, last + 1))
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_every_block_of_readme_prints_what_readme_says(root):
    assert pages.differences(root / "README.md") == []


def test_the_first_python_of_readme_shows_its_output_on_the_first_screen(root):
    text = (root / "README.md").read_text(encoding="utf-8")
    first = next(block for block in pages.blocks(text) if block.language == "python")
    output = pages.blocks(text)[pages.blocks(text).index(first) + 1]

    assert output.language == "text"
    assert output.line + output.code.count("\n") <= 40
