"""`varlen plan` run in the process of a test: what it returns, prints and says."""

import numpy as np

from varlen.cli import app as app_module

LENGTHS = np.random.default_rng(0).lognormal(7.0, 1.2, 50).clip(16, 20_000).astype(np.int32)
JOB = ("--model", "llama-2-7b", "--gpus", 32, "--pp", 2, "--tp", 8, "--documents", 24, "--capacity", "4k")


def verb(folder, monkeypatch, capfd):
    """Go to a folder with lengths, and return what runs the verb and returns exit code, output and errors."""
    monkeypatch.chdir(folder)
    np.savez(folder / "lengths.npz", lengths=LENGTHS)

    def call(*arguments):
        try:
            app_module.app(["plan", *map(str, arguments)])
        except SystemExit as ended:
            code = ended.code
        out, said = capfd.readouterr()
        return code, out, "".join(line for line in said.splitlines(keepends=True) if " %  " not in line)

    return call


def one_sentence(result, code=2):
    assert result[0] == code, result
    assert result[1] == ""
    (line,) = result[2].strip().splitlines()
    assert line.startswith("varlen: ")
    return line.removeprefix("varlen: ")
