"""Benchmarks: varlen and its peers side by side, on the same inputs, in one process tree.

`make bench` runs all of them; `python -m benchmarks --help` runs some. They need the environment that
`benchmarks/setup_peers.sh` makes; `benchmarks.table`, which writes the tables of the docs, needs only Python.
"""

import os

# Read by the libraries when they are first imported: one thread each, and no call home while timing.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    NUMBA_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
)
