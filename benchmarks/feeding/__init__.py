"""Feeding a trainer: loaders beside each other, what a trainer waits for, skewed ranks, and a huge store.

Begin in `loaders`, whose section runs `waiting` and `skewed` too; `scale` is a section of its own. Contestants and
the server that stalls are programs: `delivery`, `stalling_server`.
"""
