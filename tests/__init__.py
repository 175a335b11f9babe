"""Tests, a folder for each room of `src/varlen`, whose tests run alone: `make test ARGS=tests/feed`.

Beside the rooms: what holds at every entry point (`acceptance`), jobs of several torch processes (`distributed`),
long runs (`soak`), what surrounds the code (`benchmarks`, `docs`, `examples`, `scripts`), and the rules of the house
(`house`). What several rooms share is in `support`; the readable reference of each kernel is in `oracles`.
"""
