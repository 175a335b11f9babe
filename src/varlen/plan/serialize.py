"""Plans as bytes: written atomically, verified by a fingerprint, and small enough to send to every rank.

::

    magic | version, 2 bytes | fingerprint, 32 | unpacked size, 8 | zlib( size of head, 4 | head | arrays )

The head is JSON: the plan's settings, and the size of each array. Arrays are stored as differences to predicted
values, nearly all 0, in byte planes: the lowest bytes of all entries, then the next ones.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib
import json
import operator
import struct
import zlib
from dataclasses import fields
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, Final, Protocol, get_args

import numpy as np
import numpy.typing as npt

from varlen.arguments import in_words
from varlen.errors import PlanError, SettingError, SourceError, StalledError, described
from varlen.files.ours import atomic_file, disk_faults
from varlen.regular import read_regular
from varlen.simulate.api import check_form
from varlen.step_plan import Mesh, MicroPacks, Offload, PlanMethod, Recompute, StepPlan
from varlen.types import Int32Array, IntArray, stored_fields

VERSION: Final = 1
_MAGIC: Final = b"\x89varlen plan\n"
_FRONT: Final = struct.Struct("<H32sQ")
_PASSES: Final = ("forward", "backward")
_ARRAYS: Final = (
    "lengths",
    "first_ranks",
    "num_ranks",
    "tasks",
    "task_offsets",
    *(f"{of}.{field.name}" for of in _PASSES for field in fields(MicroPacks)),
)
_SETTINGS: Final = ("splits_backward", "method", "recompute", "recompute_share", "offload", "answered_by")
_MOST_PACKED: Final = 1100  # zlib compresses at most 1,032 bytes into one
_MOST_STORED: Final = 64  # plans left in a store: more steps than ranks can be apart
_LEVEL: Final = 6  # of zlib; 9 takes ten times as long and saves 1 %
_OTHER: Final = "these bytes are no plan of varlen, or were damaged: "


class Store(Protocol):
    """A key-value store, as in torch.distributed."""

    def set(self, key: str, value: bytes) -> Any:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""


@lru_cache(maxsize=4)  # the planner, the loader and the engine ask for it in the same step
def plan_fingerprint(plan: StepPlan) -> str:
    """Return SHA-256 over settings (except `answered_by`) and arrays, in hexadecimal; the same on every machine."""
    return _digest(plan).hex()


def plan_to_bytes(plan: StepPlan) -> bytes:
    """Serialize a plan; equal plans give equal bytes with the same release of zlib.

    Cost: some 10 ms for 1,024 documents on 64 x 16 stages with 48 MicroPacks a rank, which take 40 KB.
    """
    check_form(plan)
    arrays = [_packed(plan, name) for name in _ARRAYS]
    settings = {name: getattr(plan, name) for name in _SETTINGS}
    mesh = {
        field.name: value if isinstance(value := getattr(plan.mesh, field.name), str) else int(value)
        for field in fields(Mesh)
    }
    sizes = [array.size for array in arrays]
    head = json.dumps({"mesh": mesh, "settings": settings, "sizes": sizes}, sort_keys=True).encode()
    content = b"".join([len(head).to_bytes(4, "little"), head, *map(_by_planes, arrays)])
    front = _FRONT.pack(VERSION, _digest(plan), len(content))
    return _MAGIC + front + zlib.compress(content, _LEVEL)


def plan_from_bytes(content: bytes) -> StepPlan:
    """Return and validate the plan that `plan_to_bytes` was given."""
    content = bytes(content)
    start = len(_MAGIC)
    if content[:start] != _MAGIC or len(content) < start + _FRONT.size:
        raise PlanError(f"{_OTHER}{len(content):,} bytes that begin with {content[:start]!r}")
    version, digest, size = _FRONT.unpack_from(content, start)
    if version != VERSION:
        raise PlanError(
            f"the plan has format {version}, and this varlen reads format {VERSION}; plan the step again, or read it "
            "with the varlen that wrote it"
        )
    head, arrays = _unpacked(content[start + _FRONT.size :], size)
    try:
        mesh = Mesh(**head["mesh"])
        by_name = dict(zip(_ARRAYS, arrays))
        _restore(by_name)
        parts: dict[str, Any] = {name: array for name, array in by_name.items() if "." not in name}
        for of in _PASSES:
            parts[of] = MicroPacks(
                **{field.name: by_name[f"{of}.{field.name}"] for field in fields(MicroPacks)}
            )
        plan = StepPlan(**parts, mesh=mesh, **{name: head["settings"][name] for name in _SETTINGS})
        check_form(plan)
        _check_settings(head["settings"])
        is_same = _digest(plan) == digest
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"{_OTHER}{described(error, kind=True)}") from None
    if not is_same:
        raise PlanError(f"{_OTHER}their fingerprint is another; save or send the plan again")
    return plan


def _check_settings(settings: dict[str, Any]) -> None:
    """Require valid settings."""
    allowed = {"method": PlanMethod, "recompute": Recompute, "offload": Offload}
    for name, values in allowed.items():
        if settings[name] not in get_args(values):
            raise PlanError(f"{name} {settings[name]!r}; it must be {in_words(get_args(values))}")
    share = settings["recompute_share"]
    if not isinstance(share, float) or not 0 < share <= 1 or (share < 1 and settings["recompute"] != "full"):
        raise PlanError(
            f"recompute_share {share!r}; it must be above 0, at most 1, and 1 unless all recomputes"
        )
    if not isinstance(settings["splits_backward"], bool) or not isinstance(settings["answered_by"], str):
        raise PlanError(
            f"splits_backward {settings['splits_backward']!r}, answered by {settings['answered_by']!r}"
        )


def save_plan(plan: StepPlan, path: str | Path) -> None:
    """Write a plan to a file atomically.

    Args:
        plan: the plan.
        path: of the file; an existing one is replaced, missing folders are made.

    Raises:
        SettingError: the file can't be written, or the arguments are no plan or no path.
    """
    if not isinstance(plan, StepPlan):
        raise SettingError(
            f"vl.save_plan(plan, path) takes what vl.plan_step returned, and a {type(plan).__name__} was given"
        )
    path = _as_path(path)
    with disk_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as part:
            part.write_bytes(plan_to_bytes(plan))


def load_plan(path: str | Path) -> StepPlan:
    """Return the plan in a file.

    Args:
        path: of a file that `save_plan` wrote.

    Raises:
        SourceError: no such file, or one that can't be read.
        PlanError: the file holds no valid plan.
        SettingError: `path` is no path.
    """
    try:
        content = read_regular(_as_path(path))
    except OSError as error:
        raise SourceError(f"the plan {path} can't be read: {error.strerror or error}") from None
    try:
        return plan_from_bytes(content)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def _as_path(path: object) -> Path:
    """Require a path."""
    if isinstance(path, str | PathLike):
        return Path(path)
    raise SettingError(
        f"path must be the path of a file that holds a plan, and a {type(path).__name__} was given"
    )


def broadcast_plan(plan: StepPlan | None, store: Store, step: int, *, name: str = "varlen/plan") -> StepPlan:
    """Send the plan of a step from the rank that has it to all others, through the job's store."""
    key = f"{name}/{step}"
    if plan is not None:
        store.set(key, plan_to_bytes(plan))
        forget = getattr(store, "delete_key", None)
        if forget is not None and step >= _MOST_STORED:
            forget(f"{name}/{step - _MOST_STORED}")
        return plan
    try:
        content = store.get(key)
    except (RuntimeError, TimeoutError, KeyError) as error:
        raise StalledError(
            f"no plan of step {step:,} came through the job's store ({error}); the rank that plans is gone, or calls "
            f"broadcast_plan with another step or name than {name!r}"
        ) from error
    return plan_from_bytes(content)


def _array(plan: StepPlan, name: str) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = operator.attrgetter(name)(plan)
    return array


def _digest(plan: StepPlan) -> bytes:
    mesh = [str(getattr(plan.mesh, field.name)) for field in fields(Mesh)]
    settings = [str(getattr(plan, name)) for name in _SETTINGS if name != "answered_by"]
    digest = hashlib.sha256(json.dumps([*mesh, *settings]).encode())
    for name in _ARRAYS:
        array = _array(plan, name)
        digest.update(array.size.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array, _dtype(name)).tobytes())
    return digest.digest()


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype("u1" if name == "tasks" else "<i4")


def _packed(plan: StepPlan, name: str) -> npt.NDArray[Any]:
    """Return an array as differences to predicted values, modulo 2^32."""
    array = _array(plan, name)
    if name == "tasks":
        return array
    if name.endswith("offsets"):
        return np.diff(array, prepend=np.int32(0))
    outer, _, inner = name.rpartition(".")
    if inner in ("starts", "stops"):
        packs: MicroPacks = getattr(plan, outer)
        return array - _predicted(outer, inner, plan.lengths, packs.document_ids, packs.starts, packs.stops)
    return array


def _restore(arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Replace the differences that `_packed` returned by the arrays."""
    for name in _ARRAYS:
        if name.endswith("offsets"):
            arrays[name] = np.cumsum(arrays[name], dtype=np.int32)
    for of in _PASSES:
        ids = arrays[f"{of}.document_ids"]
        for inner in ("stops", "starts") if of == "forward" else ("starts", "stops"):
            starts, stops = arrays[f"{of}.starts"], arrays[f"{of}.stops"]
            arrays[f"{of}.{inner}"] += _predicted(of, inner, arrays["lengths"], ids, starts, stops)


def _predicted(
    of: str, inner: str, lengths: Int32Array, ids: Int32Array, starts: Int32Array, stops: Int32Array
) -> Int32Array:
    """Predict starts or stops: a slice begins where the document's previous one ended, and ends the document."""
    if (of, inner) == ("backward", "starts"):
        return np.zeros(ids.size, np.int32)
    if (of, inner) == ("forward", "stops"):
        return lengths[ids]
    before = _before(ids)
    if of == "forward":
        return np.where(before >= 0, stops[before], np.int32(0))
    return np.where(before >= 0, starts[before], lengths[ids])


def _before(ids: Int32Array) -> IntArray:
    """Return the previous slice of the same document for each slice, -1 for none."""
    order = np.argsort(ids, kind="stable")
    before = np.full(ids.size, -1, np.int64)
    same = ids[order][1:] == ids[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    return before


def _by_planes(array: npt.NDArray[Any]) -> bytes:
    """Return the lowest bytes of all entries, then the next ones."""
    if array.itemsize == 1:
        return array.tobytes()
    folded = (array << 1) ^ (array >> 31)  # zigzag: high bytes are 0 for small numbers of either sign
    return folded.astype("<i4").view(np.uint8).reshape(-1, 4).T.tobytes()


def _from_planes(content: bytes) -> Int32Array:
    folded = np.frombuffer(content, np.uint8).reshape(4, -1).T.copy().view("<u4").reshape(-1)
    return ((folded >> 1) ^ (np.uint32(0) - (folded & 1))).astype(np.uint32).view(np.int32)


def _unpacked(content: bytes, size: int) -> tuple[dict[str, Any], list[npt.NDArray[Any]]]:
    """Decompress and split into the head, and the arrays as they were packed."""
    if size > _MOST_PACKED * len(content):
        raise PlanError(f"{_OTHER}{len(content):,} bytes can't hold the {size:,} that they claim")
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(content, max(size, 1))
        if not unpacker.eof:
            plain += unpacker.decompress(unpacker.unconsumed_tail, 1)
        if len(plain) != size or not unpacker.eof or unpacker.unused_data:
            raise PlanError(f"{_OTHER}they hold other than the {size:,} bytes that they claim")
        ends = 4 + int.from_bytes(plain[:4], "little")
        head = json.loads(plain[4:ends])
        sizes = [int(size) for size in head["sizes"]]
    except (zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PlanError(f"{_OTHER}{error}") from None
    if len(sizes) != len(_ARRAYS) or min(sizes) < 0:
        raise PlanError(f"{_OTHER}{len(sizes)} arrays, {len(_ARRAYS)} belong to a plan")
    arrays: list[npt.NDArray[Any]] = []
    for name, count in zip(_ARRAYS, sizes):
        begin, ends = ends, ends + count * _dtype(name).itemsize
        if ends > len(plain):
            raise PlanError(f"{_OTHER}the array {name} of {count:,} entries ends outside")
        part = plain[begin:ends]
        arrays.append(np.frombuffer(part, np.uint8).copy() if name == "tasks" else _from_planes(part))
    if ends != len(plain):
        raise PlanError(f"{_OTHER}{len(plain) - ends:,} bytes are too many")
    return head, arrays


# Settings for the planner's process as JSON: of classes, only varlen's own dataclasses and named tuples.

_OURS = "varlen."


def to_json(value: Any) -> str:
    """Serialize nested numbers, strings, arrays, tuples, lists, dicts and dataclasses of varlen."""
    return json.dumps(_encoded(value), sort_keys=True)


def from_json(text: str) -> Any:
    """Return what `to_json` was given."""
    return _decoded(json.loads(text))


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": [value.dtype.str, list(value.shape), content]}
    kind = type(value)
    named = f"{kind.__module__}:{kind.__qualname__}"
    if dataclasses.is_dataclass(value) and named.startswith(_OURS):
        names = [field.name for field in stored_fields(value) if field.init]
        return {"made": named, "fields": {name: _encoded(getattr(value, name)) for name in names}}
    if isinstance(value, tuple) and hasattr(value, "_fields") and named.startswith(_OURS):
        return {"made": named, "fields": {name: _encoded(getattr(value, name)) for name in value._fields}}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_encoded(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(item)] for key, item in value.items()]}
    raise SettingError(
        f"a {kind.__module__}.{kind.__qualname__} can't be sent to the process that plans; settings are numbers, "
        "words, arrays and dataclasses of varlen"
    )


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "array" in value:
        dtype, shape, content = value["array"]
        return np.frombuffer(base64.b64decode(content), np.dtype(dtype)).reshape(shape).copy()
    if "tuple" in value:
        return tuple(map(_decoded, value["tuple"]))
    if "list" in value:
        return list(map(_decoded, value["list"]))
    if "dict" in value:
        return {_decoded(key): _decoded(item) for key, item in value["dict"]}
    return named(value["made"])(**{name: _decoded(item) for name, item in value["fields"].items()})


def named(name: str) -> Any:
    """Import the object called "module:name"."""
    module, _, inner = name.partition(":")
    try:
        return operator.attrgetter(inner)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(f"{name!r} can't be found ({error}); write it as 'module:function'") from None
