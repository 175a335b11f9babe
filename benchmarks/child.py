"""Run a measurement in a fresh interpreter, and read back the JSON it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def measure(program: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    """Run Python source as a process of its own and return what its last line of output says.

    Args:
        program: Python source; it prints JSON as its last line.
        arguments: what `sys.argv[1:]` is there.
        environment: variables set besides those of this process.

    Raises:
        RuntimeError: the process failed; the message holds what it wrote to stderr.
    """
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"a measurement ended with code {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
