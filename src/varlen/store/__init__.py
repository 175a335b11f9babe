"""Tokens on disk with random access.

    token store ─┐
    .bin/.idx   ─┼─► open.open_tokens ──► tokens.TokenDocuments ──► lengths, targets, pieces
    Arrow, saved ┘

In: folders and files of token ids. Out: one protocol, `tokens.TokenDocuments`, that the loader and `pack` read.
`shard` writes a store atomically; `growing` reads one that is still being written.
Begin in `tokens.py`.
"""
