"""A tokenizer that leaves a trace of every text that it is given, whatever process it runs in."""

import os


def encode(text):
    """Return the bytes of a text, and write one into the file that COUNTED names, if it names one."""
    path = os.environ.get("COUNTED")
    if path:
        with open(path, "ab") as file:  # noqa: PTH123 - tests of paths run elsewhere
            file.write(b".")
    return list(text.encode())
