"""Benchmarks: varlen and its peers side by side, on the same inputs, in one process tree.

`make bench` runs all of them; `python -m benchmarks --help` runs some. They need the environment that
`benchmarks/setup_peers.sh` makes; `benchmarks.table`, which writes the tables of the docs, needs only Python.
"""
