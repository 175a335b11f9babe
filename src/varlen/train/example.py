"""The configuration that `varlen train --init` writes: small, commented, and ready to run."""

from __future__ import annotations

import os
from pathlib import Path

from varlen.errors import SettingError

EXAMPLE = """\
# Trains a small Llama on packed documents:  varlen train CONFIG.toml
# On two processes:                          torchrun --standalone --nproc-per-node 2 -m varlen train CONFIG.toml
# Stopped, killed or finished: the same command goes on from the newest checkpoint, on as many processes as you like.
# Any setting can be put over:               varlen train CONFIG.toml --set run.steps=1000

[data]                       # the arguments of vl.PackedLoader
source = "store"             # of: varlen index 'data/*.jsonl' -o store
capacity = 1024              # tokens of a pack; documents are packed into it and kept apart
global_batch_size = 8        # packs of an optimizer step, over all processes
micro_batch_size = 2         # packs that a process computes at once; more are accumulated
overlong = "split"           # documents longer than a pack: "error", "split", "truncate" or "drop"

[model]
type = "llama"               # transformers' name; or: path = "a saved model's folder, or org/name"

[model.settings]             # transformers' settings of that type; vocab_size is the data's unless it stands here
hidden_size = 128
intermediate_size = 384
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 1024
tie_word_embeddings = true

[optimizer]                  # AdamW
learning_rate = 2e-3
weight_decay = 0.1           # of matrices; norms and biases don't decay
schedule = "cosine"          # or "linear", "constant"
warmup_steps = 10
min_learning_rate = 2e-4     # what the schedule falls to
max_grad_norm = 1.0          # 0 switches clipping off

[run]
output = "run"               # checkpoints, metrics.jsonl and the trained model
steps = 200                  # or: epochs = 1
checkpoint_every = 50        # steps; the last one and Ctrl-C save too
keep = 2                     # newest checkpoints that are kept
seed = 0
precision = "fp32"           # or "bf16"
parallel = "fsdp"            # how processes share the work: "ddp", "fsdp" or "none"

# [plan]                     # run steps in slices by plans made ahead; these are the defaults:
# slice_tokens = 8192        # of one process: rows that run at once; documents may be far longer
# pp = 1                     # of several: pipeline stages; the rest are data-parallel ranks
# method = "micropack"       # how steps are planned for them; see varlen plan
# recompute = "auto"         # "none", "selective" or "full"; "auto": as much as memory asks for
# hardware = "auto"          # "h100", ..., or a file of varlen plan --calibrate; "auto": what the GPU is or measures

[log]
every = 10                   # steps between two lines where there is no terminal to draw on

[measure]
exposed_data = false         # after the last step, train the last 20 again from memory: what did data cost?
"""


def write_example(path: str | Path) -> None:
    """Write the example; it replaces nothing.

    Raises:
        SettingError: the file is there already, or can't be written.
    """
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(EXAMPLE.replace("CONFIG.toml", os.fspath(path)))
    except FileExistsError:
        raise SettingError(f"{path} is there already; name another file") from None
    except OSError as error:
        raise SettingError(f"{path} can't be written: {error.strerror}") from None
