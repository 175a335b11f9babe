"""A checkpoint's own description: what it says of step, data and files, and whether that is what was written."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varlen.errors import StateError
from varlen.regular import read_regular, require_regular

FORMAT = 3
WITHOUT_CHECKSUMS = 2
"""Of version 0.1.0: its files are told by their sizes alone."""
MANIFEST = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint on the disk."""

    folder: Path
    step: int
    manifest: Mapping[str, Any]

    @property
    def words(self) -> str | None:
        """What a user is to know of it: that nothing tells whether its bytes are what was written; else None."""
        if self.manifest["format"] != WITHOUT_CHECKSUMS:
            return None
        return (
            f"{self.folder} has no checksums (it is of varlen {self.manifest.get('varlen')}), so only the sizes of "
            "its files were compared"
        )


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the newest last."""
    try:
        names = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StateError(
            f"{folder} can't be listed ({error.strerror or error}), so nobody knows whether it holds checkpoints"
        ) from None
    return sorted(names, key=_step_of)


def opened(folder: Path) -> Checkpoint:
    """Return a checkpoint whose files are all there, by their sizes."""
    try:
        manifest = json.loads(read_regular(folder / MANIFEST))
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(f"{folder / MANIFEST} can't be read ({error})") from None
    if not isinstance(manifest, dict):
        raise StateError(f"{folder / MANIFEST} is damaged: it holds no object")
    if manifest.get("format") not in (FORMAT, WITHOUT_CHECKSUMS):
        raise StateError(
            f"{folder} has format {str(manifest.get('format'))[:20]}, and this version reads {WITHOUT_CHECKSUMS} and "
            f"{FORMAT}"
        )
    is_checked = manifest["format"] == FORMAT
    if is_checked and manifest.get("checksum") != checksum_of(manifest):
        raise StateError(f"{folder / MANIFEST} isn't what was written: its own checksum is another")
    wrong = _wrong_in(manifest, folder, is_checked=is_checked)
    if wrong is not None:
        raise StateError(f"{folder / MANIFEST} is damaged: {wrong}")
    for name, size in manifest["files"].items():
        _check_size(folder / name, size)
    others = {path.name for path in folder.glob("*.safetensors")} - set(manifest["files"])
    if others:
        raise StateError(
            f"{folder} holds {len(others):,} files that aren't of it, such as {min(others)}; they would be read too"
        )
    return Checkpoint(folder=folder, step=manifest["step"], manifest=manifest)


def _wrong_in(manifest: Mapping[str, Any], folder: Path, *, is_checked: bool) -> str | None:
    """Say what a checkpoint doesn't say of itself, or says wrongly; None where all is there."""
    kinds = {"step": int, "files": dict, "loader": dict, "model": dict, "total_tokens": int, "seed": int}
    for name, kind in (kinds | ({"sha256": dict} if is_checked else {})).items():
        if not isinstance(manifest.get(name), kind) or isinstance(manifest[name], bool):
            return f"`{name}` is absent" if name not in manifest else f"`{name}` is {manifest[name]!r:.40}"
    files = manifest["files"]
    if not files or not all(
        _is_name(name) and type(size) is int and size >= 0 for name, size in files.items()
    ):
        return "`files` doesn't list names with sizes"
    if is_checked and sorted(manifest["sha256"]) != sorted(files):
        return "`sha256` and `files` list other files"
    if is_checked and not all(isinstance(one, str) for one in manifest["sha256"].values()):
        return "`sha256` doesn't list checksums"
    if _step_of(folder) != manifest["step"]:
        return f"it is of step {manifest['step']}, and lies in {folder.name}"
    return None


def _is_name(name: str) -> bool:
    """Whether a name is one of a file in the folder itself."""
    return name.endswith(".safetensors") and Path(name).name == name


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _check_size(path: Path, size: int) -> None:
    """Require a file of a size."""
    try:
        now = path.stat()
        require_regular(now.st_mode)
    except OSError as error:
        raise StateError(f"{path} can't be read ({error.strerror or error})") from None
    if now.st_size != size:
        raise StateError(f"{path} has {now.st_size:,} bytes, and {size:,} were written")


def checksum_of(notes: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what a checkpoint says of itself, but for this very checksum."""
    plain = {name: value for name, value in notes.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
