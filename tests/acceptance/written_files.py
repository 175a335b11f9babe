"""Damage to files that we wrote: bits, lengths, other kinds of files, and JSON with other values."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

from varlen.files.written import sealed

VALUES: list[Any] = [
    None,
    -1,
    0,
    1,
    2**31,
    2**62,
    2**80,
    1.5,
    float("inf"),
    "",
    "x",
    "../x",
    [],
    {},
    [1],
    True,
]


def damage(path: Path, random: Random, others: list[Path]) -> str:
    """Damage a file; returns how."""
    is_json = path.suffix == ".json"
    ways = ["flip", "cut", "grow", "fifo", "folder", "gone", "swap", "garbage"] + ["json"] * (
        8 if is_json else 0
    )
    way = random.choice(ways)
    content = path.read_bytes()
    if way == "json":
        return f"{path.name}: {_edit(path, random)}"
    path.unlink()
    if way == "fifo":
        os.mkfifo(path)
    elif way == "folder":
        path.mkdir()
    elif way == "flip" and content:
        changed = bytearray(content)
        for _ in range(random.randint(1, 3)):
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        path.write_bytes(changed)
    elif way == "cut":
        path.write_bytes(content[: random.randrange(len(content) + 1)])
    elif way == "grow":
        path.write_bytes(content + random.randbytes(random.randint(1, 40)))
    elif way == "swap" and others:
        shutil.copy(random.choice(others), path)
    elif way != "gone":
        path.write_bytes(
            random.choice([b"", b"[" * 50_000, b"\x93NUMPY\1\0", b"\xff\0", random.randbytes(300)])
        )
    return f"{path.name}: {way}"


def _edit(path: Path, random: Random) -> str:
    """Change, or take out, one value of a JSON file, at any depth; seals are made anew, left or taken out."""
    told = json.loads(path.read_bytes())
    at, names = told, []
    while isinstance(at, dict | list) and at:
        name = random.choice(list(at) if isinstance(at, dict) else range(len(at)))
        names.append(str(name))
        if not isinstance(at[name], dict | list) or not at[name] or random.random() < 0.3:
            how = random.choice(["drop", "value", "value"])
            if how == "drop":
                del at[name]
            else:
                at[name] = random.choice(VALUES)
            break
        at = at[name]
    seal = random.choice(["kept", "anew", "none"])
    if isinstance(told, dict) and "checksum" in told and seal != "kept":
        told.pop("checksum")
        told = sealed(told) if seal == "anew" else told
    path.write_text(json.dumps(told))
    return f"{'.'.join(names)}, seal {seal}"
