"""Child processes: fresh interpreters that communicate over pipes, and are restarted when they die.

::

    child.supervise ──► child.Child ──► pipe ──► main() of a module: the loader's worker, the planner's
    pool.Workers    ──► child.Child ──► pipe ──► task_worker.py, which runs tasks one by one

In: the name of a module with a `main`, and messages. Out: its messages, or how it ended.
Begin in `child.py`: `supervise` notices a death, and restarts the child a few times.
"""
