"""The Python sources of the running interpreter as documents: real, long-tailed text, present everywhere.

Functions and classes at the top level of every module are documents of their own; about 5 % of the
modules, chosen by a hash of their names, stay whole and make the tail long. Tests and third-party
packages are left out by name, so that two machines with the same Python version see the same documents
whether or not the tests are installed.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from varlen.errors import SourceError
from varlen.parsed import parse_python

_LEFT_OUT_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "ensurepip",
    "__pycache__",
}
_WHOLE_MODULES_PERCENT = 5


def interpreter_texts(folder: Path | None = None) -> Iterator[str]:
    """Yield functions, classes and some whole modules of the standard library, in the order of their files.

    Deterministic: the same files give the same documents in the same order. Files that don't parse or
    decode are left out; parsing costs about 3 s for all of the standard library.

    Args:
        folder: where the sources lie; None takes the running interpreter's standard library.

    Raises:
        SourceError: the interpreter carries no sources (frozen or zipped).
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not _is_left_out(path.relative_to(root)))
    found_any = False
    for path in files:
        for text in _module_texts(path, path.relative_to(root).as_posix()):
            found_any = True
            yield text
    if not found_any:
        raise SourceError(f"this interpreter has no Python sources in {root}; pass your own text with --data")


def _is_left_out(relative: Path) -> bool:
    """Return whether a file belongs to tests or to packages that aren't the interpreter's own."""
    return not _LEFT_OUT_FOLDERS.isdisjoint(relative.parts[:-1])


def _module_texts(path: Path, name: str) -> Iterator[str]:
    """Yield a module whole, or its top-level functions and classes with their decorators."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library's own invalid escapes are not the user's business
            tree = parse_python(source)
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return
    if _stays_whole(name):
        if source.strip():
            yield source
        return
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield "".join(lines[first - 1 : node.end_lineno])


def _stays_whole(name: str) -> bool:
    """Choose by a hash of the module's name, so that the choice is the same on every machine."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 100 < _WHOLE_MODULES_PERCENT
