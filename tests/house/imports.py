"""Rules about imports: strictly down the floors, heavy libraries only where they belong."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.house.tree import Source, is_type_checking, nodes, python_files

# A floor may know the floors before it in this list, and nothing of its own. Ground floor: single files.
FLOORS = (
    {"errors", "kernel_cache"},
    {
        "types",
        "jit",
        "arguments",
        "counts",
        "launch",
        "regular",
        "missing",
        "signals",
        "model_families",
        "parsed",
    },
    {"step_plan", "workers", "forest", "ragged"},
    {"files", "pack", "batch", "cost"},
    {"text"},
    {"documents"},
    {"store"},
    # The planner asks the simulator about every candidate, so the simulator stands below it.
    {"simulate", "offline"},
    {"plan"},
    # A loader gives each rank the documents that a plan deals to it.
    {"feed"},
    # Runtime, adapters and proofs call the same kernels; of the rooms below, it knows the cost model's block of keys.
    {"attention", "losses"},
    {"runtime", "adapters", "report"},
    {"verify"},
    {"train"},
    {"cli"},
    {"__main__"},
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
TORCH_FLOOR = FLOOR_OF["attention"]

TORCH = {"torch", "transformers"}
TORCH_IN_FUNCTIONS = {
    "src/varlen/batch/packed.py",
    "src/varlen/feed/worker/device.py",
    "src/varlen/feed/exchange.py",
    "src/varlen/text/load_tokenizer.py",
}
SMALL_LINES = 120
BY_THEMSELVES = (
    "*/kernels*.py",
    "*/files/formats/*.py",
    "*/cli/*.py",
    "*/*worker.py",
    "*/main.py",
    "*/train/affordable.py",
    "*/preload.py",
    "*/adapters/*",
    "*/__init__.py",
)
"""Files that stay small: kernels, format readers, verbs, entry points of processes, adapters, `__init__.py` of rooms;
what a process imports that must load no torch; what a fork server imports."""
READING_ROOMS = ("files", "text", "documents", "store")
READERS = {"pyarrow", "fsspec", "tokenizers", "jinja2", "yaml"}
PARSERS = {"src/varlen/parsed.py": {"yaml"}}
"""Files that other rooms parse by, and what they import for it."""


@dataclass(frozen=True)
class Import:
    """One name that a file imports, and where it stands in the file."""

    name: tuple[str, ...]
    line: int
    in_function: bool
    for_types: bool


@cache
def imports(source: Source) -> list[Import]:
    """Return all imports of a file, those inside functions and under `if TYPE_CHECKING` included."""
    return list(_imports(source, source.tree, in_function=False, for_types=False))


def _imports(source: Source, node: ast.AST, *, in_function: bool, for_types: bool) -> Iterator[Import]:
    for name in _names(source, node):
        yield Import(tuple(name.split(".")), getattr(node, "lineno", 0), in_function, for_types)
    inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    guarded = list(node.body) if is_type_checking(node) else []
    for child in ast.iter_child_nodes(node):
        yield from _imports(source, child, in_function=inside, for_types=for_types or child in guarded)


def _names(source: Source, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = source.module if source.path.endswith("__init__.py") else source.module[:-1]
            up = package[: len(package) - node.level + 1]
            base = ".".join([*up, *([base] if base else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = ast.unparse(node.func)
        if called in ("import_module", "importlib.import_module", "__import__"):
            return [str(node.args[0].value)]
    return []


def imports_point_down(root: Path) -> list[str]:
    """Imports between rooms point to a lower floor; knowledge for types alone counts as knowledge."""
    found = []
    for source in python_files(root, "src"):
        room = source.room
        if not room:
            continue  # the public face knows the rooms; nobody knows the face
        if room not in FLOOR_OF:
            found.append(f"{source.path}: {room} stands on no floor; give it one in FLOORS")
            continue
        for imported in imports(source):
            if imported.name[0] != "varlen" or imported.name == ("varlen", "__version__"):
                continue
            other = imported.name[1] if len(imported.name) > 1 else ""
            where = f"{source.path}:{imported.line}"
            if other not in FLOOR_OF:
                found.append(f"{where}: imports the public face ({'.'.join(imported.name)}), not a room")
            elif other != room and FLOOR_OF[other] >= FLOOR_OF[room]:
                found.append(f"{where}: {room} must not know {other}, which is not below it")
    return found


def files_go_in_no_circle(root: Path) -> list[str]:
    """No two files import each other, nor over others; the public face, and imports for types alone, don't count."""
    sources = {".".join(source.module): source for source in python_files(root, "src") if source.room}
    try:
        TopologicalSorter({name: _imported(source, sources) for name, source in sources.items()}).prepare()
    except CycleError as error:
        return [f"{' is imported by '.join(error.args[1])}: a circle"]
    return []


def _imported(source: Source, sources: dict[str, Source]) -> set[str]:
    """Return the files that a file imports when it is imported or run."""
    names = (one.name for one in imports(source) if not one.for_types)
    files = {_file_of(name, sources) for name in names if name[0] == "varlen"}
    return {name for name in files if name is not None and name != ".".join(source.module)}


def _file_of(name: tuple[str, ...], sources: dict[str, Source]) -> str | None:
    """Return the file of an imported name: itself, or the one that it is taken from."""
    return next((one for one in (".".join(name), ".".join(name[:-1])) if one in sources), None)


def small_files_join_their_importer(root: Path) -> list[str]:
    """A file under 120 lines that one file of its room alone imports is part of that one."""
    sources = {".".join(source.module): source for source in python_files(root, "src")}
    importers: dict[str, set[str]] = {name: set() for name in sources}
    for source in sources.values():
        named = {node.value for node in nodes(source.tree) if isinstance(node, ast.Constant)} & set(sources)
        for name in _imported(source, sources) | named:
            importers[name].add(".".join(source.module))
    found = []
    for name, source in sources.items():
        room, lines = source.room, source.text.count("\n")
        if lines >= SMALL_LINES or len(importers[name]) != 1 or _stands_by_itself(source.path):
            continue
        (single,) = importers[name]
        if sources[single].room == room and single != f"varlen.{room}":
            found.append(f"{source.path}: {lines} lines, and {single} alone imports it; make it part of that")
    return found


def _stands_by_itself(path: str) -> bool:
    """Whether a file is one by its kind: a kernel, a format, a verb, a process, an adapter or an `__init__.py`."""
    return any(fnmatch(path, pattern) for pattern in BY_THEMSELVES)


def torch_stays_upstairs(root: Path) -> list[str]:
    """Below the floor of adapters only named files import torch or transformers, inside functions."""
    found = []
    for source in python_files(root, "src"):
        if FLOOR_OF.get(source.room, 0) >= TORCH_FLOOR:
            continue
        for imported in imports(source):
            if imported.name[0] in TORCH and not imported.for_types:
                if source.path not in TORCH_IN_FUNCTIONS:
                    found.append(f"{source.path}:{imported.line}: imports {imported.name[0]} below its floor")
                elif not imported.in_function:
                    found.append(
                        f"{source.path}:{imported.line}: imports {imported.name[0]} outside a function"
                    )
    return found


def readers_stay_in_their_rooms(root: Path) -> list[str]:
    """Below the floor of adapters only rooms that read, and `parsed` for all, import what reads files and text."""
    found = []
    for source in python_files(root, "src"):
        if FLOOR_OF.get(source.room, 0) >= TORCH_FLOOR or source.room in READING_ROOMS:
            continue
        found += [
            f"{source.path}:{imported.line}: imports {imported.name[0]}, which is for rooms that read"
            for imported in imports(source)
            if imported.name[0] in READERS - PARSERS.get(source.path, set()) and not imported.for_types
        ]
    return found


def numba_waits_for_a_kernel(root: Path) -> list[str]:
    """numba is imported inside functions, or by files of kernels, which load on the first call."""
    found = []
    for source in python_files(root, "src"):
        if source.module[-1].startswith("kernels"):
            continue
        found += [
            f"{source.path}:{imported.line}: imports numba when loaded"
            for imported in imports(source)
            if imported.name[0] in ("numba", "llvmlite") and not (imported.in_function or imported.for_types)
        ]
    return found


def kernels_call_their_own_file(root: Path) -> list[str]:
    """No file of kernels imports another: numba's cache would not see that the other has changed."""
    return [
        f"{source.path}:{imported.line}: imports {'.'.join(imported.name)}; numba's cache sees one file"
        for source in python_files(root, "src")
        if source.module[-1].startswith("kernels")
        for imported in imports(source)
        if imported.name[0] == "varlen" and any(part.startswith("kernels") for part in imported.name)
    ]
