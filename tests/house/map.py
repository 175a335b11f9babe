"""The map of the house in CONTRIBUTING: floors as imports are held to them, lines as rooms open.

`python -m tests.house.map` writes it.
"""

import ast
import re
from pathlib import Path

from tests.house.imports import FLOORS

BEGIN, END = "<!-- map: made by tests/house/map.py -->", "<!-- end of map -->"


def table(root: Path) -> str:
    """Return the map: a row a floor, the highest first; rooms of one floor don't know each other."""
    rows = ["| floor | room | holds |", "|---|---|---|"]
    for number, rooms in reversed(list(enumerate(FLOORS))):
        for place, room in enumerate(sorted(rooms - {"__main__"})):
            name, line = _line(root, room)
            rows.append(f"| {number or 'ground' if not place else ''} | {name} | {line} |")
    return "\n".join(rows)


def _line(root: Path, room: str) -> tuple[str, str]:
    """Return a room's name and the first sentence that it opens with."""
    folder = root / "src/varlen" / room
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    opening = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    return f"[`{room}`]({path.relative_to(root).as_posix()})", " ".join(opening.split())


def contributing_has_the_map(root: Path) -> list[str]:
    """CONTRIBUTING's map is the one that the rules and the rooms give."""
    path = root / "CONTRIBUTING.md"
    text = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{table(root)}\n{END}"
    found = re.search(f"{BEGIN}\n(.*)\n{END}", text, re.DOTALL)
    if found and found[1] == table(root):
        return []
    return ["CONTRIBUTING.md: the map is another; write it by `python -m tests.house.map`"]


def rooms_open_with_where_to_begin(root: Path) -> list[str]:
    """A room's docstring has a picture, says what goes in and comes out, and names the file to begin in."""
    found = []
    for room in (room for rooms in FLOORS for room in rooms):
        path = root / "src/varlen" / room / "__init__.py"
        if not path.exists():
            continue
        opening = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        begin = re.search(r"Begin in [^.`]*`([\w/]+\.py)`", opening)
        where = path.relative_to(root).as_posix()
        if "──►" not in opening or not re.search(r"^In( and out)?: ", opening, re.MULTILINE):
            found.append(f"{where}: opens without a picture, or without what goes in and comes out")
        elif begin is None or not (path.parent / begin[1]).exists():
            found.append(f"{where}: doesn't say which file to begin in")
    return found


def rooms_name_what_they_have(root: Path) -> list[str]:
    """What a room's docstring names is there: files, what `file.name` says that a file holds, words in backticks."""
    rooms = {room for some in FLOORS for room in some}
    found = []
    for init in sorted((root / "src/varlen").glob("*/__init__.py")):
        texts = {path.stem: "" for path in init.parent.rglob("*")}
        for path in init.parent.rglob("*.py"):
            texts[path.stem] += path.read_text(encoding="utf-8")
        opening = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        dotted = re.findall(r"\b(\w+)\.(\w+)", opening)
        gone = [f"{file}.py" for file, name in dotted if name == "py" and file not in texts]
        gone += [
            f"{file}.{name}"
            for file, name in dotted
            if name != "py" and not re.search(rf"\b(def|class) {name}\b", texts.get(file, f"class {name}"))
        ]
        gone += [
            word
            for word in re.findall(r"`(\w+)`", opening)
            if word not in {*texts, *rooms}
            and not re.search(rf"^(def|class|from .* import .*) ?\b{word}\b", "\n".join(texts.values()), re.M)
        ]
        found += [f"{init.relative_to(root).as_posix()}: names {name}, which isn't there" for name in gone]
    return found


def write(root: Path) -> None:
    """Write the map into CONTRIBUTING."""
    path = root / "CONTRIBUTING.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(
        re.sub(f"{BEGIN}\n.*\n{END}", lambda _: f"{BEGIN}\n{table(root)}\n{END}", text, flags=re.DOTALL)
    )


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2])
