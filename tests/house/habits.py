"""Rules about tests: names are sentences, rooms stand alone, fakes and not mocks, and no skip hides a failure."""

import ast
import re
from pathlib import Path

from tests.house.tree import functions, nodes, python_files

FEWEST_WORDS = 3
SHARED = ("support", "oracles")
SKIPS = ("pytest.skip", "pytest.mark.skip", "pytest.mark.skipif")


def test_names_are_sentences(root: Path) -> list[str]:
    """The name of a test has at least three words."""
    return [
        f"{source.path}:{function.lineno}: {function.name} is no sentence"
        for source in python_files(root, "tests")
        if source.path.split("/")[-1].startswith("test_")
        for function in functions(source.tree)
        if function.name.startswith("test_") and len(function.name.split("_")) <= FEWEST_WORDS
    ]


def skips_say_why(root: Path) -> list[str]:
    """A skip gives its reason as words; nothing is expected to fail."""
    found = []
    for source in python_files(root, "tests", "src"):
        for node in nodes(source.tree):
            where = f"{source.path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute) and node.attr in ("xfail", "importorskip"):
                found.append(f"{where}: {node.attr} hides a failure")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in SKIPS:
                words = [a for a in node.args if isinstance(a, ast.Constant | ast.JoinedStr)]
                words += [k.value for k in node.keywords if k.arg == "reason"]
                if not any(len(ast.unparse(word).split()) >= 3 for word in words):
                    found.append(f"{where}: a skip does not say why")
    return found


def tests_use_fakes(root: Path) -> list[str]:
    """No test imports unittest.mock."""
    return [
        f"{source.path}:{node.lineno}: imports a mock; write a fake"
        for source in python_files(root, "tests")
        for node in nodes(source.tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and re.search(r"\bmock\b", ast.unparse(node))
    ]


def rooms_of_tests_stand_alone(root: Path) -> list[str]:
    """Tests import from their own room and from what all share, and never from another file of tests."""
    found = []
    for source in python_files(root, "tests"):
        for node in nodes(source.tree):
            parts = node.module.split(".") if isinstance(node, ast.ImportFrom) and node.module else []
            if parts[:1] == ["tests"] and (
                parts[-1].startswith("test_") or parts[1] not in (*SHARED, source.path.split("/")[1])
            ):
                found.append(f"{source.path}:{node.lineno}: imports {node.module}; put it into tests/support")
    return found
