"""A program that hides libraries, and says what importing every public name and every module of adapters raises.

`python tests/ground/hidden.py torch,transformers` prints a JSON object: by name the error's class and words.
"""

import importlib
import importlib.abc
import json
import sys
from pathlib import Path
from typing import Any


class Hidden(importlib.abc.MetaPathFinder):
    """Finds nothing of some libraries."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main(hidden: set[str]) -> dict[str, list[str]]:
    """Import everything; return what was raised, by name."""
    sys.meta_path.insert(0, Hidden(hidden))
    import varlen
    import varlen.adapters

    root = Path(varlen.adapters.__path__[0])
    modules = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules.append(".".join(["varlen.adapters", *(part for part in parts if part != "__init__")]))
    found: dict[str, list[str]] = {}
    for name in varlen.__all__:
        _try(found, f"varlen.{name}", lambda name=name: getattr(varlen, name))
    for module in modules:
        _try(found, module, lambda module=module: importlib.import_module(module))
        for name in getattr(sys.modules.get(module), "__all__", ()):
            _try(
                found, f"{module}.{name}", lambda module=module, name=name: getattr(sys.modules[module], name)
            )
    return found


def _try(found: dict[str, list[str]], name: str, look: Any) -> None:
    try:
        look()
    except BaseException as error:
        found[name] = [type(error).__name__, str(error)]


if __name__ == "__main__":
    print(json.dumps(main(set(sys.argv[1].split(",")))))
