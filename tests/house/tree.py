"""What a rule looks at: the files of a checkout, and Python files parsed once."""

import ast
import fnmatch
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CODE_FOLDERS = ("src", "tests", "benchmarks", "examples", "docs", "scripts")


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: str
    """Relative to the checkout, with forward slashes."""
    text: str
    tree: ast.Module

    @property
    def module(self) -> tuple[str, ...]:
        """Dotted name below `src`, as parts: `("varlen", "pack", "api")`; a room's own file is the room."""
        parts = self.path.removesuffix(".py").split("/")[1:]
        return tuple(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """The room, or the file on the ground floor, that this file belongs to; "" for the public face."""
        return self.module[1] if len(self.module) > 1 else ""


@cache
def _parsed(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text, path))


def python_files(root: Path, *folders: str) -> Iterator[Source]:
    """Yield the Python files of some folders (all folders with code, unless said), by name."""
    for folder in folders or CODE_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if "__pycache__" not in path.parts:
                yield _parsed(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))


def ignored_names(root: Path) -> list[str]:
    """Return the names that `.gitignore` leaves out, as patterns of one path part each."""
    file = root / ".gitignore"
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    return [line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#")]


def text_files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield `(relative path, text)` of every file that git would take, pictures and other bytes left out."""
    ignored = [".git", *ignored_names(root)]
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not any(fnmatch.fnmatch(f, i) for i in ignored))
        for name in sorted(files):
            if any(fnmatch.fnmatch(name, i) for i in ignored):
                continue
            path = Path(folder, name)
            try:
                yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return every node of a tree, found once for all rules."""
    return tuple(ast.walk(tree))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method, inner ones included."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_type_checking(node: ast.AST) -> bool:
    """Return whether a statement is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
