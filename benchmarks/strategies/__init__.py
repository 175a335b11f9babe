"""Padding and the ways of packing, by loss, throughput and memory; begin in `run`.

`sets` are the documents, `feeds` the strategies (how documents become steps), `models` what is trained, `train` one
run. `compare` has the runs for the loss, `race` those that are timed, `ranks` those on several ranks. `figures` reads
the records, and `page` writes them into docs/strategies.md.
"""
