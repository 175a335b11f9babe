"""Rules about the shape of code: sizes, names, what a file opens with, kernels and their references."""

import ast
import fnmatch
import re
from pathlib import Path

from tests.house.tree import CODE_FOLDERS, functions, python_files

LINES_TO_JUSTIFY = 800
PARALLEL = ("feed", "adapters", "verify", "train")
"""Rooms with folders that answer each other: modes, frameworks, what is proven, the trainer and its demo."""
MOST_LINES_OF_A_FUNCTION = 60
NAMELESS = ("utils", "util", "helpers", "helper", "common", "manager", "managers", "misc", "base_*")
LISTS = ("list", "List", "Sequence", "Iterable")
ROOMS_WITH_KERNELS = ("pack", "batch", "store", "cost", "simulate", "plan", "feed")


def long_files_justify_themselves(root: Path) -> list[str]:
    """A Python file of more than 800 lines says in its first paragraph why it is one file."""
    return [
        f"{source.path}: {count} lines; split it by noun, or say in its first paragraph why it is one file"
        for source in python_files(root)
        if (count := len(source.text.splitlines())) > LINES_TO_JUSTIFY
        and "one file" not in (ast.get_docstring(source.tree) or "").split("\n\n")[0]
    ]


def kernels_are_called_by_name(root: Path) -> list[str]:
    """No kernel is reached by a string, which editors, mypy and grep can't follow."""
    return [
        f"{source.path}:{call.lineno}: {ast.unparse(argument)} names a file of kernels; import the kernel"
        for source in python_files(root, "src")
        for call in ast.walk(source.tree)
        if isinstance(call, ast.Call)
        for argument in call.args
        if isinstance(argument, ast.Constant)
        and isinstance(argument.value, str)
        and re.fullmatch(r"([\w.]+\.)?kernels(_\w+)?", argument.value)
    ]


def neighbours_have_names_of_their_own(root: Path) -> list[str]:
    """No two files of a room share a name, but in the folders of parallel modes and frameworks."""
    found = []
    seen: dict[tuple[str, str], str] = {}
    for source in python_files(root, "src/varlen"):
        name, room = source.module[-1], source.room
        if source.path.endswith("__init__.py") or room in PARALLEL or len(source.module) < 3:
            continue
        other = seen.setdefault((room, name), source.path)
        if other != source.path:
            found.append(f"{source.path}: {name} is also {other}; name each by what it alone holds")
    return found


def functions_are_short(root: Path) -> list[str]:
    """The body of a function has at most 60 lines, its docstring not counted."""
    found = []
    for source in python_files(root):
        for function in functions(source.tree):
            body = function.body[ast.get_docstring(function) is not None :]
            count = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            if count > MOST_LINES_OF_A_FUNCTION:
                where = f"{source.path}:{function.lineno}"
                found.append(
                    f"{where}: {function.name} has {count} lines, at most {MOST_LINES_OF_A_FUNCTION}"
                )
    return found


def names_name_a_noun(root: Path) -> list[str]:
    """No file or folder is called utils, helpers, common, manager or base_*."""
    found = []
    for folder in CODE_FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in ("", ".py") and any(fnmatch.fnmatch(path.stem, name) for name in NAMELESS):
                found.append(f"{path.relative_to(root).as_posix()}: the name says nothing; name the noun")
    return found


def files_open_with_a_sentence(root: Path) -> list[str]:
    """A Python file opens with a sentence that says what it holds."""
    found = []
    for source in python_files(root):
        paragraph = (ast.get_docstring(source.tree) or "").split("\n\n")[0].rstrip()
        if source.text.strip() and (len(paragraph.split()) < 3 or paragraph[-1:] not in (".", ":")):
            found.append(f"{source.path}: opens without a sentence that says what it holds")
    return found


def kernels_have_references(root: Path) -> list[str]:
    """Every kernel has a function of the same name and arguments among the oracles or in its room."""
    found = []
    for room in ROOMS_WITH_KERNELS:
        in_room = [s for s in python_files(root, f"src/varlen/{room}") if s.path.count("/") == 3]
        oracles = [s for s in python_files(root, "tests/oracles") if s.path.split("/")[2].startswith(room)]
        references = {
            function.name: _arguments(function)
            for source in [*oracles, *(s for s in in_room if s.module[-1] == "in_python")]
            for function in _public_functions(source.tree)
        }
        for source in in_room:
            if not source.module[-1].startswith("kernels"):
                continue
            kernels = _public_functions(source.tree)
            if not kernels:
                found.append(f"{source.path}: holds no kernel with a public name")
            for kernel in kernels:
                where = f"{source.path}:{kernel.lineno}"
                if kernel.name not in references:
                    found.append(f"{where}: {kernel.name} has no oracle in tests/oracles/{room}.py")
                elif references[kernel.name] != _arguments(kernel):
                    found.append(f"{where}: {kernel.name} and its oracle take different arguments")
    return found


def _public_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [n for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]


def _arguments(function: ast.FunctionDef) -> str:
    bare = ast.parse(ast.unparse(function.args).join(("def f(", "): ..."))).body[0]
    assert isinstance(bare, ast.FunctionDef)
    for argument in ast.walk(bare.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(bare.args)


def collections_are_flat(root: Path) -> list[str]:
    """No public function takes or returns lists of lists of anything but words; `to_lists` is for reading."""
    found = []
    for source in python_files(root, "src"):
        for function in functions(source.tree):
            if function.name.startswith("_") or function.name == "to_lists":
                continue
            arguments = function.args
            everyone = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            for annotation in [*(a.annotation for a in everyone), function.returns]:
                if annotation is not None and _is_nested(annotation):
                    where = f"{source.path}:{function.lineno}"
                    found.append(
                        f"{where}: {function.name} passes {ast.unparse(annotation)}; use flat arrays"
                    )
    return found


def _is_nested(annotation: ast.expr) -> bool:
    """Return whether a list stands within a list, unless the inner one holds words."""
    return any(
        ast.unparse(inner.slice) != "str"
        for outer in _lists_in(annotation)
        for inner in _lists_in(outer.slice)
    )


def _lists_in(annotation: ast.expr) -> list[ast.Subscript]:
    return [
        node
        for node in ast.walk(annotation)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] in LISTS
    ]
