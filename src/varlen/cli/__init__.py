"""The command line: one file a verb, each of which parses, calls and prints."""

from varlen.cli.app import main

__all__ = ["main"]
