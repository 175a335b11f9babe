"""`varlen plan` run in the process of a test, on lengths that it has written."""

import functools

import numpy as np

LENGTHS = np.random.default_rng(0).lognormal(7.0, 1.2, 50).clip(16, 20_000).astype(np.int32)
JOB = ("--model", "llama-2-7b", "--gpus", 32, "--pp", 2, "--tp", 8, "--documents", 24, "--capacity", "4k")


def planning(verb, folder):
    """Write lengths, and return what runs `varlen plan` and returns exit code, output and errors."""
    np.savez(folder / "lengths.npz", lengths=LENGTHS)
    return functools.partial(verb, "plan")
