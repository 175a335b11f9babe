"""Run a program with its arguments, and save the gradients of its first optimizer step: `PROGRAM OUT ARGUMENTS`."""

import os
import runpy
import sys
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def main():
    """Wait for the first step, whoever's optimizer makes it; some compute gradients within it, so look after it."""
    program, out, *arguments = sys.argv[1:]

    def keep(optimizer, _given, _named):
        if not Path(out).exists():
            torch.save([p.grad.clone() for group in optimizer.param_groups for p in group["params"]], out)

    if os.environ.get("RANK", "0") == "0":
        register_optimizer_step_post_hook(keep)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
