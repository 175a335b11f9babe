"""What `varlen plan` is told of a job, as objects: token counts, the mesh, the model, the hardware."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from varlen.errors import SettingError
from varlen.parsed import parse_json

if TYPE_CHECKING:
    from varlen.cost.hardware import Hardware
    from varlen.cost.shape import ModelShape
    from varlen.step_plan import Mesh, Sharding
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from varlen.errors import SourceError

if TYPE_CHECKING:
    import numpy.typing as npt

    from varlen.store.lengths import Lengths


def mesh_of(
    *,
    gpus: int | None,
    dp: int | None,
    pp: int,
    cp: int,
    tp: int,
    virtual_stages: int,
    sharding: Sharding,
) -> Mesh:
    """Return the mesh: data-parallel ranks are what the other axes leave of the GPUs."""
    from varlen.step_plan import Mesh

    rest = prod(max(axis, 1) for axis in (pp, cp, tp))
    if gpus is not None and gpus < 1:
        raise SettingError(f"--gpus must be at least 1; got {gpus}")
    total = gpus if gpus is not None else rest * dp if dp is not None else max(8, rest)
    words = f"pp {pp} x cp {cp} x tp {tp} = {rest:,}"
    if dp is not None and dp * rest != total:
        raise SettingError(
            f"dp {dp} x {words.replace(f'= {rest:,}', f'= {dp * rest:,}')} GPUs, but --gpus says {total:,}; "
            "leave out --gpus or --dp"
        )
    if total % rest:
        below, above = total - total % rest, total - total % rest + rest
        near = f"{below:,} or {above:,}" if below else f"{above:,}"
        raise SettingError(
            f"{total:,} GPUs can't be divided into pipelines of {words} GPUs; {near} GPUs can, or axes whose "
            f"product divides {total:,}"
        )
    axes = {"pp": pp, "cp": cp, "tp": tp, "virtual_stages": virtual_stages}
    return Mesh(dp=total // rest, sharding=sharding, **axes)


def model_of(words: str) -> ModelShape:
    """Return the shape of a model: by its name, or from its configuration."""
    from varlen.cost.shape import ModelShape

    path = Path(words)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        if path.suffix == ".json" or "/" in words:
            raise SettingError(f"--model {words}: there is no configuration at {path}")
        return ModelShape.named(words)
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"--model {words}: {path} can't be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise SettingError(f"--model {words}: {path} is no configuration, which is an object of settings")
    return ModelShape.from_config(config)


def hardware_of(words: str) -> Hardware:
    """Return hardware: by its name, or as `varlen plan --calibrate` measured it."""
    from varlen.cost.hardware import Hardware

    if Path(words).is_file():
        from varlen.cost.hardware import load_hardware

        return load_hardware(words)
    if Path(words).suffix == ".json":
        raise SettingError(
            f"--hardware {words}: there is no such file; varlen plan --calibrate --save makes one"
        )
    return Hardware.named(words)


# Lengths that were counted before: an `.npy` or `.npz` file, or a text of one whole number a line.

_MOST_DIGITS = 18
"""Of a number that int64 holds."""


def counted(data: Sequence[str]) -> Lengths | None:
    """Return the lengths that one file holds, or None where arguments name something else."""
    if len(data) != 1 or not Path(data[0]).is_file():
        return None
    path = Path(data[0])
    if path.suffix == ".npz":
        return _stored(path)
    return _array(path) if path.suffix == ".npy" else _lines(path) if path.suffix == ".txt" else None


def _array(path: Path) -> Lengths:
    """Read an array of numpy's."""
    import numpy as np

    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SourceError(f"{path} is not a readable .npy file: {error}") from error
    return _checked(path, found)


def _stored(path: Path) -> Lengths | None:
    """Read arrays of numpy's by name; None where they are documents."""
    import zipfile
    import zlib

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as arrays:
            if "lengths" in arrays.files:
                return _checked(path, arrays["lengths"])
            names = arrays.files
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise SourceError(f"{path} is not a readable .npz file: {error}") from error
    if {"input_ids", "ids", "tokens"} & set(names):
        return None
    raise SourceError(
        f"{path} must hold lengths as `lengths`, or documents as `input_ids` and `offsets`; it holds "
        f"{', '.join(f'`{name}`' for name in names[:5]) or 'nothing'}"
    )


def _checked(path: Path, found: npt.NDArray[Any]) -> Lengths:
    """Take an array as lengths."""
    import numpy as np

    from varlen.store.lengths import Lengths

    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise SourceError(
            f"{path} must hold lengths, a row of whole numbers from 0; it holds {found.dtype} of shape {found.shape}"
        )
    below = np.flatnonzero(found < 0)
    if below.size:
        raise SourceError(
            f"{path} must hold lengths from 0; number {below[0]:,} is {found[below[0]]:,} ({below.size:,} of "
            f"{found.size:,} are below 0)"
        )
    return Lengths(lengths=found.astype(np.int64), targets=None, excerpts={}, skipped=(), are_counted=True)


def _lines(path: Path) -> Lengths | None:
    """Read a text of numbers; None where most lines are something else, and the text a document."""
    import numpy as np

    from varlen.store.lengths import Lengths

    try:
        with path.open(encoding="ascii") as file:
            lines = [(number, line.strip()) for number, line in enumerate(file, 1) if line.strip()]
    except UnicodeDecodeError:
        return None
    wrong = [(number, words) for number, words in lines if not words.isdigit() or len(words) > _MOST_DIGITS]
    if not lines or 2 * len(wrong) > len(lines):
        return None
    if wrong:
        number, words = wrong[0]
        raise SourceError(
            f"{path} holds a length a line, but line {number:,} is {words[:40]!r}, no whole number from 0 "
            f"({len(wrong):,} of {len(lines):,} lines are none); mend or remove them, or give a document as .jsonl"
        )
    found = np.array([int(words) for _, words in lines], np.int64)
    return Lengths(lengths=found, targets=None, excerpts={}, skipped=(), are_counted=True)
