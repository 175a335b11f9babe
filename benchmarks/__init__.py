"""Benchmarks: varlen and its peers side by side, on the same inputs, in one process tree.

`make bench` runs all sections and writes the tables of docs/benchmarks.md; `python -m benchmarks --help` runs some.
They need the environment that `benchmarks/setup_peers.sh` makes. By subject, a file or a folder each:

    packing, collating, adapters, reading, offline, startup    sections of `python -m benchmarks`
    feeding/, megatron/                                        sections with several files
    plan/           every method of planning, simulated        python -m benchmarks plan
    strategies/     padding and packing, by loss and speed     python -m benchmarks strategies
    running/        planned steps of real models on a CPU      python -m benchmarks.running
    gpu/            what needs a CUDA device                   python -m benchmarks.gpu FILE
    pairs           two checkouts of varlen by turns           python -m benchmarks.pairs ../before
    peers/          how each peer is called
"""
