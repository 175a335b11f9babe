"""One run at a time in an output folder: a second one is refused, and a run that failed early leaves nothing."""

import os
import signal
import subprocess
import sys

import pytest

from varlen.errors import SettingError
from varlen.train.claim import claimed

HOLDER = """
import sys, time
from pathlib import Path
from varlen.train.claim import claimed
with claimed(Path(sys.argv[1])):
    (Path(sys.argv[1]) / "metrics.jsonl").write_text("")
    print("claimed", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path):
    folder = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE, text=True)
    with holder, holder.stdout:
        assert holder.stdout.readline() == "claimed\n"
        with (
            pytest.raises(SettingError, match=f"process {holder.pid} trains into .*run; wait for it"),
            claimed(folder),
        ):
            pass
        holder.send_signal(signal.SIGKILL)
    with claimed(folder):
        assert (folder / ".running").read_text() == f"process {os.getpid()}\n"
    assert (folder / "metrics.jsonl").exists()


def test_a_run_that_fails_before_it_writes_leaves_no_folder(tmp_path):
    with pytest.raises(SettingError, match="bad"), claimed(tmp_path / "run"):
        raise SettingError("bad")
    assert not (tmp_path / "run").exists()
