"""Processes beside this one: fresh interpreters that speak through pipes, and are replaced when they die.

::

    supervise ──► Child ──► pipe ──► main() of a module: the loader's worker, the planner's
    Workers   ──► Child ──► pipe ──► task_worker.py, which runs one task after the other

In: the name of a module that has a `main`, and messages. Out: its messages, or how it ended.
Begin in `child.py`.
"""
