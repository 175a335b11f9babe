"""Print constraints.txt: every package of this environment at its version, without local build names."""

from __future__ import annotations

import importlib.metadata
import re

HEADER = """\
# Every package that the tests, the checks and the demo run with, pinned; written by `make pins`.
# A plain torch version takes a CPU build (2.13.0+cpu) where the package index offers one."""


def pins() -> list[str]:
    """Return one `name==version` a package, sorted, without varlen itself and pip."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        found[name] = distribution.version.partition("+")[0]
    return [f"{name}=={version}" for name, version in sorted(found.items()) if name not in ("varlen", "pip")]


if __name__ == "__main__":
    print(HEADER, *pins(), sep="\n")
