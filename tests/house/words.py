"""Rules about words in code: docstrings that name arguments and errors, and the drawn tree of errors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.tree import functions, python_files

Function = ast.FunctionDef | ast.AsyncFunctionDef
NOT_OURS = ("Exception", "BaseException", "RuntimeError", "ValueError", "TypeError", "OSError", "ImportError")


def _public(tree: ast.Module) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Yield the public functions, classes and methods of a file with their names."""
    for node in tree.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, Function) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member


def _argument_names(function: Function) -> list[str]:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def _sections(docstring: str) -> dict[str, str]:
    parts = re.split(r"^(Args|Returns|Yields|Raises|Cost):$", docstring, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def public_things_are_documented(root: Path) -> list[str]:
    """Every public class and function has a docstring."""
    return [
        f"{source.path}:{node.lineno}: {name} has no docstring"
        for source in python_files(root, "src")
        for name, node in _public(source.tree)
        if ast.get_docstring(node) is None and "overload" not in map(ast.unparse, node.decorator_list)
    ]


def what_users_call_explains_its_arguments(root: Path) -> list[str]:
    """Public functions, and methods of public classes, explain each argument under `Args:`."""
    face = _public_names(root)
    found = []
    for source in python_files(root, "src"):
        for name, node in _public(source.tree):
            is_public = (name.split(".")[0], ".".join(source.module)) in face
            if isinstance(node, ast.ClassDef) or not is_public or _is_overload(node):
                continue
            explained = _sections(ast.get_docstring(node) or "").get("Args", "")
            missing = [a for a in _argument_names(node) if not re.search(rf"\b{a}\b", explained)]
            if missing:
                where = f"{source.path}:{node.lineno}"
                found.append(f"{where}: the docstring of {name} explains no {', '.join(missing)} under Args")
    return found


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function only declares types for one that follows, which explains its arguments."""
    return any(ast.unparse(each) == "overload" for each in node.decorator_list)


def _public_names(root: Path) -> set[tuple[str, str]]:
    """Return the public names of varlen and its adapters, each with the file that it comes from."""
    adapters = root / "src" / "varlen" / "adapters"
    found: set[tuple[str, str]] = set()
    for path in sorted(adapters.rglob("__init__.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("varlen."):
                found |= {(alias.name, str(node.module)) for alias in node.names}
    for path in sorted(adapters.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found |= {(name, f"varlen.adapters.{path.stem}") for name in ast.literal_eval(node.value)}
    tree = ast.parse((root / "src" / "varlen" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            return found | set(ast.literal_eval(node.value).items())
    return found


def raised_errors_are_documented(root: Path) -> list[str]:
    """What users call names each class of error that it raises under `Raises:`."""
    face, found = _public_names(root), []
    for source in python_files(root, "src"):
        for name, node in _public(source.tree):
            is_public = (name.split(".")[0], ".".join(source.module)) in face
            if isinstance(node, ast.ClassDef) or not is_public:
                continue
            documented = _sections(ast.get_docstring(node) or "").get("Raises", "")
            for error in sorted(_raised(node)):
                if not re.search(rf"\b{error}\b", documented):
                    found.append(
                        f"{source.path}:{node.lineno}: {name} raises {error}, which Raises leaves out"
                    )
    return found


def _raised(node: ast.AST) -> set[str]:
    names = set()
    for statement in ast.walk(node):
        if isinstance(statement, ast.Raise) and isinstance(statement.exc, ast.Call):
            name = ast.unparse(statement.exc.func).split(".")[-1]
            if name[0].isupper():
                names.add(name)
    return names


def errors_come_from_the_tree(root: Path) -> list[str]:
    """What varlen raises comes from its own tree of errors, never as a bare built-in."""
    found = []
    for source in python_files(root, "src"):
        for function in functions(source.tree):
            found += [
                f"{source.path}:{function.lineno}: {function.name} raises a bare {name}; use varlen.errors"
                for name in sorted(_raised(function) & set(NOT_OURS))
            ]
    return found


def errors_are_drawn(root: Path) -> list[str]:
    """The docstring of errors.py draws every class below its parent, and draws no other."""
    path = root / "src" / "varlen" / "errors.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    written = {
        node.name: ast.unparse(node.bases[0]) if node.bases else ""
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    drawn: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (ast.get_docstring(tree, clean=False) or "").splitlines():
        match = re.match(r"^([\s│├└─]*)([A-Z]\w+Error)\b", line)
        if match:
            column, name = len(match[1]), match[2]
            above = [(c, n) for c, n in above if c < column]
            drawn[name] = above[-1][1] if above else "Exception"
            above.append((column, name))
    found = [f"errors.py: {name} is not drawn" for name in written if name not in drawn]
    found += [f"errors.py: {name} is drawn but not written" for name in drawn if name not in written]
    found += [
        f"errors.py: {name} is drawn below {drawn[name]} but is a {parent}"
        for name, parent in written.items()
        if name in drawn and drawn[name] != parent
    ]
    return found
