"""A file larger than memory may hold: 20 GB of JSON lines are packed in 1 GB of memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

FILE_BYTES = 20 * 10**9
MEMORY_BYTES = 10**9
DISK_BYTES = 3.3 * FILE_BYTES
"""The file, its tokens at two bytes each, and rows that compress well."""
CHUNK_ROWS = 20_000


def chunk() -> bytes:
    """Return about 40 MB of rows, long and short."""
    words = " ".join(f"{number} bottles of water on the wall" for number in range(400))
    lengths = [200 + 37 * number % 3_800 for number in range(CHUNK_ROWS)]
    return b"".join(
        json.dumps({"text": words[number % 900 :][:length]}).encode() + b"\n"
        for number, length in enumerate(lengths)
    )


def resident_bytes(process: int) -> int:
    """Return what a process and those it started hold, pages that they share counted once."""
    try:
        status = Path(f"/proc/{process}/smaps_rollup").read_text()
        children = [
            int(child)
            for thread in Path(f"/proc/{process}/task").iterdir()
            for child in (thread / "children").read_text().split()
        ]
    except OSError:  # it has just ended
        return 0
    (line,) = [line for line in status.splitlines() if line.startswith("Pss:")]
    return int(line.split()[1]) * 1024 + sum(map(resident_bytes, children))


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is counted by Linux alone")
def test_a_file_of_20_gb_is_packed_in_1_gb_of_memory(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < DISK_BYTES:
        pytest.skip(f"takes {DISK_BYTES / 1e9:.0f} GB of disk, the file's and its tokens', which aren't free")
    rows = chunk()
    copies = -(-FILE_BYTES // len(rows))
    data, output = tmp_path / "data.jsonl", tmp_path / "packed"
    with data.open("wb") as file:
        for _ in range(copies):
            file.write(rows)
    command = [sys.executable, "-m", "varlen", "pack", str(data), "-o", str(output), "--capacity", "8192"]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(0.2)

    assert process.returncode == 0, (tmp_path / "said").read_text()
    assert os.path.getsize(data) >= FILE_BYTES  # noqa: PTH202
    manifest = json.loads((output / ".manifest.json").read_bytes())
    texts = [json.loads(line)["text"] for line in rows.splitlines()]
    assert manifest["ledger"]["documents_in"] == copies * CHUNK_ROWS
    assert manifest["num_tokens"] == copies * sum(len(text) + 1 for text in texts)
    assert manifest["fill_ratio"] > 0.995
    assert peak <= MEMORY_BYTES, f"{peak / 1e9:.2f} GB at most"
    print(f"{peak / 1e9:.2f} GB at most")
    shutil.rmtree(tmp_path)
