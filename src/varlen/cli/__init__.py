"""The command line: one file per verb, each of which parses, calls and prints.

    arguments ──► app ──► verb (pack, index, inspect, plan, train, ...) ──► the rooms below ──► tables, JSON

In: arguments. Out: text or JSON, and an exit code: 0, or with one sentence 1 (failed), 2 (bad input) or that of a
signal (`app.main`). `options` has those of several verbs.
Begin in `app.py`.
"""

from varlen.cli.app import main

__all__ = ["main"]
