"""The page on feeding: every test that it names is there, and its four commands do what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pages
import pytest
from tests.support.offline_packs import write_texts

PAGE = pages.ROOT / "docs" / "feeding.md"


def test_every_test_that_the_page_names_is_there() -> None:
    named = set(
        re.findall(r"`(?:tests/)?([\w/]*test_\w+\.py)(?:::(\w+))?`", PAGE.read_text(encoding="utf-8"))
    )

    assert len(named) > 12
    for file, test in named:
        text = (pages.ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in text, (file, test)


def four_commands() -> list[list[str]]:
    blocks = [b.code for b in pages.blocks(PAGE.read_text(encoding="utf-8")) if b.language == "bash"]
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
def test_four_commands_lead_from_files_to_a_run_that_is_killed_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
