"""The command line as tests call it: in a process of its own, or where it was imported already."""

import contextlib
import os
import subprocess
import sys

from typer.testing import CliRunner

from varlen.cli import app as app_module

VARLEN = [sys.executable, "-c", "from varlen.cli import main; main()"]


def varlen(*arguments, **settings):
    # As users have it: little work waits for no compiler.
    usual = {name: value for name, value in os.environ.items() if name != "VARLEN_JIT"}
    return subprocess.run(
        [*VARLEN, *map(str, arguments)], capture_output=True, text=True, timeout=300, env=usual, **settings
    )


def started(*arguments, cwd):
    """The command in a group of processes of its own, to be interrupted."""
    pipe = subprocess.PIPE
    command = [*VARLEN, *arguments]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=cwd, start_new_session=True)


def asked(*arguments, cwd="."):
    """What the command line says where it was imported already; of its start, the others tell enough."""
    with contextlib.chdir(cwd):
        run = CliRunner().invoke(app_module.app, [*map(str, arguments)])
    return subprocess.CompletedProcess(arguments, run.exit_code, run.stdout, run.stderr)


def one_sentence(run, code=2):
    assert run.returncode == code, run.stderr
    assert run.stdout == ""
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("varlen: ")
    return lines[0]


def refusal(result, code=2):
    """The sentence with which a verb refuses, of what the fixture `verb` returned."""
    assert result[0] == code, result
    assert result[1] == ""
    (line,) = result[2].strip().splitlines()
    assert line.startswith("varlen: ")
    return line.removeprefix("varlen: ")
