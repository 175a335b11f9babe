"""`Hardware`: a GPU's compute rates by rows, its memory, and its links to other GPUs."""

from __future__ import annotations

import difflib
import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from varlen.errors import SettingError
from varlen.regular import read_regular
from varlen.types import FloatArray, rebuilt

_NAMED_HOLES = 4  # most holes that an error lists


def is_number(value: object) -> bool:
    """Return whether a value is a number, and not a bool."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _frozen(owner: object, name: str, dimensions: int) -> FloatArray:
    """Replace a field of `owner` by a read-only float64 array, and return it."""
    array = np.array(getattr(owner, name), np.float64)
    if array.ndim != dimensions:
        raise SettingError(
            f"{name} of a rate table must have {dimensions} dimensions; got shape {array.shape}"
        )
    array.flags.writeable = False
    object.__setattr__(owner, name, array)
    return array


def _check_rising(name: str, grid: FloatArray) -> None:
    """Refuse a grid that isn't above 0 and strictly increasing."""
    if not grid.size or not np.isfinite(grid).all() or grid[0] <= 0 or (np.diff(grid) <= 0).any():
        raise SettingError(
            f"{name} of a rate table must be above 0 and strictly increasing; got {grid.tolist()}"
        )


def _check_whole(cells: FloatArray, named: list[str]) -> None:
    """Refuse holes: rates that are NaN, infinite or not above 0."""
    holes = np.flatnonzero(~(np.isfinite(cells) & (cells > 0)).ravel())
    if holes.size:
        some = ", ".join(f"{named[hole]} ({cells.ravel()[hole]:g})" for hole in holes[:_NAMED_HOLES])
        raise SettingError(
            f"the rate table has {holes.size} holes in {cells.size} cells: {some}"
            f"{', …' if holes.size > _NAMED_HOLES else ''}; measure them, or leave their rows out"
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RateTable:
    """Attention's rate in one pass by query rows and key length; read-only."""

    query_rows: FloatArray
    """`[Q]`, rising."""
    key_lengths: FloatArray
    """`[K]`, rising."""
    tflops: FloatArray
    """`[Q, K]`: TFLOP/s of one GPU; the backward pass counts 2.5 times the forward's FLOPs."""

    def __post_init__(self) -> None:
        rows, keys = _frozen(self, "query_rows", 1), _frozen(self, "key_lengths", 1)
        cells = _frozen(self, "tflops", 2)
        _check_rising("query_rows", rows)
        _check_rising("key_lengths", keys)
        if cells.shape != (rows.size, keys.size):
            raise SettingError(
                f"a rate table of {rows.size} rows and {keys.size} key lengths has tflops of shape {cells.shape}; it "
                f"must be ({rows.size}, {keys.size})"
            )
        _check_whole(cells, [f"{row:g} rows x {key:g} keys" for row in rows for key in keys])

    __reduce__ = rebuilt  # arrays are read-only in another process too


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RateCurve:
    """The rate of matrix products by rows; read-only."""

    rows: FloatArray
    """`[G]`, rising."""
    tflops: FloatArray
    """`[G]`: TFLOP/s of one GPU."""

    def __post_init__(self) -> None:
        rows, cells = _frozen(self, "rows", 1), _frozen(self, "tflops", 1)
        _check_rising("rows", rows)
        if cells.shape != rows.shape:
            raise SettingError(
                f"a rate curve of {rows.size} rows has tflops of shape {cells.shape}; it must be ({rows.size},)"
            )
        _check_whole(cells, [f"{row:g} rows" for row in rows])

    __reduce__ = rebuilt  # arrays are read-only in another process too


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A link between GPUs: a message of n bytes takes `latency_s + n / bytes_per_s` (the alpha-beta model)."""

    latency_s: float
    bytes_per_s: float
    """Bandwidth of one GPU in one direction that collectives reach."""

    def __post_init__(self) -> None:
        are_numbers = is_number(self.latency_s) and is_number(self.bytes_per_s)
        if not are_numbers or not (0 <= self.latency_s < math.inf and 0 < self.bytes_per_s < math.inf):
            raise SettingError(
                f"a link of {self.bytes_per_s!r} bytes per second and {self.latency_s!r} s latency; "
                "bytes_per_s must be a number above 0 and latency_s one of at least 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Hardware:
    """A kind of GPU, in nodes of several, with the numbers that the cost model needs."""

    name: str = ""
    source: str
    """The source of the numbers, for display."""
    memory_bytes: float
    memory_bytes_per_s: float
    """Memory bandwidth of element-wise kernels."""
    gpus_per_node: int
    peak_tflops: float
    """The manufacturer's figure for dense bf16, to which MFU refers."""
    attention: tuple[RateTable, RateTable]
    """Forward and backward."""
    gemm: RateCurve
    """Matrix products of the forward pass, and the kernels between them if they were measured together."""
    gemm_backward: RateCurve | None = None
    """The same for the backward pass; None: as `gemm`."""
    launch_s: float
    """Fixed seconds of a layer in one pass, short collectives included."""
    intra: Link
    """Between GPUs of a node."""
    inter: Link
    """Between nodes."""
    host: Link
    """Between a GPU and its host's memory."""
    measured_heads: int = 64
    """Query heads with which attention was measured."""
    heads_exponent: float = 0.0
    """Attention is looked up at rows x (heads on a GPU / measured_heads)**heads_exponent: 0 for a kernel whose rate
    doesn't depend on heads, 1 for one that needs eight times the rows with an eighth of the heads. Other exponents
    use the C library's `pow`, whose last bit may differ between machines; nothing else in a price does."""
    held_out_errors: tuple[float, float] | None = None
    """Mean absolute error of the rates on shapes that they weren't fitted to, as a share: of attention, and of the
    rest of a layer. None if it wasn't measured."""

    @property
    def held_out(self) -> str:
        """A sentence on the error of the rates on shapes that they weren't fitted to; "" if it wasn't measured."""
        if self.held_out_errors is None:
            return ""
        attention, rest = self.held_out_errors
        return (
            f"The rates of {self.name} predict shapes that they weren't fitted to within {100 * attention:.1f} % "
            f"(attention) and {100 * rest:.1f} % (the rest of a layer)."
        )

    @property
    def published_kernel(self) -> str:
        """The attention kernel of published rates, and the TFLOP/s that it reaches at best; "" for measured rates."""
        known = MACHINES.get(self.name)
        if known is None or known.source != self.source:
            return ""
        forward, backward = known.forward[0], known.backward[0]
        return f"{known.kernel}, at best {forward:,.0f} TFLOP/s forward, {backward:,.0f} backward"

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            if not isinstance(getattr(self, name), str):
                raise SettingError(f"hardware {name}={getattr(self, name)!r}; it must be a string")
        for name in ("memory_bytes", "memory_bytes_per_s", "gpus_per_node", "peak_tflops", "measured_heads"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value < math.inf:
                raise SettingError(f"hardware {name}={value!r}; it must be a number above 0")
        if self.gpus_per_node != int(self.gpus_per_node):
            raise SettingError(f"hardware gpus_per_node={self.gpus_per_node!r}; it must be a whole number")
        errors = self.held_out_errors
        if errors is not None:
            if (
                not isinstance(errors, list | tuple)
                or len(errors) != 2
                or not all(is_number(error) and 0 <= error < math.inf for error in errors)
            ):
                raise SettingError(
                    f"hardware held_out_errors={errors!r}; it must be two numbers of at least 0, or none"
                )
            object.__setattr__(self, "held_out_errors", tuple(errors))
        for name in ("launch_s", "heads_exponent"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < math.inf:
                raise SettingError(f"hardware {name}={value!r}; it must be a number of at least 0")

    @classmethod
    def named(cls, name: str) -> Hardware:
        """Return known hardware.

        Args:
            name: "h100", "h200", "a100" or "b200".

        Raises:
            SettingError: an unknown name; the nearest ones are named.

        >>> Hardware.named("h100").gpus_per_node
        8
        """
        key = str(name).lower()
        if key not in MACHINES:
            near = difflib.get_close_matches(key, MACHINES, n=3, cutoff=0.5) or sorted(MACHINES)
            raise SettingError(f"no hardware is called {name!r}; nearest: {', '.join(near)}")
        known = MACHINES[key]
        return cls(
            name=key,
            source=known.source,
            memory_bytes=known.memory_bytes,
            memory_bytes_per_s=known.memory_bytes_per_s,
            gpus_per_node=known.gpus_per_node,
            peak_tflops=known.peak_tflops,
            attention=(_table(known.forward), _table(known.backward)),
            gemm=_curve(known.gemm),
            launch_s=known.launch_s,
            intra=Link(latency_s=known.intra[0], bytes_per_s=known.intra[1]),
            inter=Link(latency_s=known.inter[0], bytes_per_s=known.inter[1]),
            host=Link(latency_s=known.host[0], bytes_per_s=known.host[1]),
        )


def _table(fit: tuple[float, float, float]) -> RateTable:
    """Return the table of a saturating rate, given its peak, and the rows and keys that halve it."""
    peak, half_rows, half_keys = fit
    rows, keys = QUERY_ROWS, KEY_LENGTHS
    filled = rows[:, None] / (rows[:, None] + half_rows) * keys / (keys + half_keys)
    return RateTable(query_rows=rows, key_lengths=keys, tflops=peak * filled)


def _curve(fit: tuple[float, float]) -> RateCurve:
    """Return the curve of a saturating rate, given its peak and the rows that halve it."""
    peak, half_rows = fit
    rows = QUERY_ROWS
    return RateCurve(rows=rows, tflops=peak * rows / (rows + half_rows))


# Known hardware: published figures, and saturating rates fitted to published measurements.

QUERY_ROWS: Final[FloatArray] = np.ldexp(1.0, np.arange(7, 19))
"""128 to 256K. Rates are interpolated in 1 / rows, which is exact for saturating rates."""
KEY_LENGTHS: Final[FloatArray] = np.ldexp(1.0, np.arange(7, 21))
"""128 to 1M."""


class Machine(NamedTuple):
    """Numbers of one kind of GPU, from which `Hardware.named` makes tables."""

    source: str
    kernel: str
    """Whose rates those of attention are."""
    memory_bytes: float
    memory_bytes_per_s: float
    gpus_per_node: int
    peak_tflops: float
    forward: tuple[float, float, float]
    """Attention: peak TFLOP/s, query rows and key lengths that halve the rate."""
    backward: tuple[float, float, float]
    gemm: tuple[float, float]
    """Matrix products: peak TFLOP/s, rows that halve the rate."""
    launch_s: float
    intra: tuple[float, float]
    """Latency in seconds, bytes per second in one direction."""
    inter: tuple[float, float]
    host: tuple[float, float]


_LINKS: Final = (
    "Links are planning defaults: 80 % of the maker's peak for one direction within a node, {network} GB/s a GPU and "
    "20 us between nodes, PCIe at 85 %; launch time 30 us a layer and pass. "
)
_SHAPE: Final = (
    "How rates saturate: N/(N+650) in query rows and b/(b+500) in keys forward, N/(N+1300) and b/(b+1000) backward, "
    "within 11 % of what DistCA (arXiv 2510.18121) publishes of FlashAttention 2 on slices, H100, 64 query heads. "
)
_H100: Final = Machine(
    source="Attention: 720 and 640 TFLOP/s at best, forward and backward: FlashAttention 3, causal, heads of 128 "
    "(Shah et al. 2024, arXiv 2407.08608, and MagiAttention's H100 charts). "
    + _SHAPE
    + "Against those charts the forward pass is up to 25 % low on one document of 2K rows or more, and 10 to 26 % "
    "high on packs of 2K to 32K rows whose documents are a quarter as long. PyTorch's own variable-length kernel, "
    "measured on one H100, reaches 375 and 294: for it calibrate there (docs/gpu-results.md). Matrix products: "
    "600·n/(n+512) TFLOP/s, a planning default; measured layers of transformers reach 98 to 104 % of that from 2K "
    "rows on forward, 84 to 90 % backward. 80 GB, 3.35 TB/s, 989 TFLOP/s dense bf16: NVIDIA's data sheet. "
    + _LINKS.format(network=50),
    kernel="FlashAttention 3",
    memory_bytes=80e9,
    memory_bytes_per_s=3.35e12,
    gpus_per_node=8,
    peak_tflops=989.0,
    forward=(720.0, 650.0, 500.0),
    backward=(640.0, 1300.0, 1000.0),
    gemm=(600.0, 512.0),
    launch_s=30e-6,
    intra=(10e-6, 360e9),
    inter=(20e-6, 50e9),
    host=(10e-6, 54e9),
)
_H200: Final = _H100._replace(
    source="The H100's rates, since the processor is the same, with 141 GB at 4.8 TB/s. " + _H100.source,
    memory_bytes=141e9,
    memory_bytes_per_s=4.8e12,
)
_A100: Final = Machine(
    source="Attention: FlashAttention 2, causal, heads of 128: forward and backward together 99 to 189 TFLOP/s at "
    "512 to 16K keys (Dao 2023, arXiv 2307.08691), met within 6 %; the two passes apart, and rows scaled from the "
    "H100's by multiprocessors (108 of 132), are assumptions. Matrix products: 230·n/(n+420) TFLOP/s, a planning "
    "default. 80 GB, 2.04 TB/s, 312 TFLOP/s: NVIDIA's data sheet. " + _LINKS.format(network=25),
    kernel="FlashAttention 2",
    memory_bytes=80e9,
    memory_bytes_per_s=2.04e12,
    gpus_per_node=8,
    peak_tflops=312.0,
    forward=(232.0, 530.0, 450.0),
    backward=(191.0, 1060.0, 450.0),
    gemm=(230.0, 420.0),
    launch_s=30e-6,
    intra=(10e-6, 240e9),
    inter=(20e-6, 25e9),
    host=(10e-6, 27e9),
)
_TIMES_H100: Final = 2250.0 / 989.0
_B200: Final = Machine(
    source="NOT MEASURED: the H100's rates times 2.28, the ratio of dense bf16 peaks (2,250 and 989 TFLOP/s), with "
    "the same half-saturation. 180 GB, 8 TB/s: NVIDIA's data sheet. " + _LINKS.format(network=50),
    kernel="FlashAttention 3 on an H100, scaled and not measured",
    memory_bytes=180e9,
    memory_bytes_per_s=8e12,
    gpus_per_node=8,
    peak_tflops=2250.0,
    forward=(720.0 * _TIMES_H100, 650.0, 500.0),
    backward=(640.0 * _TIMES_H100, 1300.0, 1000.0),
    gemm=(600.0 * _TIMES_H100, 512.0),
    launch_s=30e-6,
    intra=(10e-6, 720e9),
    inter=(20e-6, 50e9),
    host=(10e-6, 54e9),
)

MACHINES: Final[dict[str, Machine]] = {"h100": _H100, "h200": _H200, "a100": _A100, "b200": _B200}


FORMAT: Final = "varlen hardware 1"
_SAVED_LINKS: Final = ("intra", "inter", "host")
_ERRORS: Final = "held_out_errors"
_PLAIN: Final = tuple(
    field.name
    for field in fields(Hardware)
    if field.name not in (*_SAVED_LINKS, "attention", "gemm", "gemm_backward")
)


def save_hardware(hardware: Hardware, path: str | Path) -> None:
    """Write hardware to a JSON file, without loss of precision."""
    forward, backward = hardware.attention
    record: dict[str, Any] = {"format": FORMAT}
    record |= {name: getattr(hardware, name) for name in _PLAIN}
    for name in _SAVED_LINKS:
        link: Link = getattr(hardware, name)
        record[name] = {"latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
    record["attention"] = {"forward": _arrays(forward), "backward": _arrays(backward)}
    record["gemm"] = _arrays(hardware.gemm)
    record["gemm_backward"] = None if hardware.gemm_backward is None else _arrays(hardware.gemm_backward)
    path, text = Path(path), json.dumps(record, indent=1) + "\n"
    if path.exists() and not path.is_file():  # a pipe or a device
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_hardware(path: str | Path) -> Hardware:
    """Read what `save_hardware` wrote."""
    try:
        record = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(
            f"{path} can't be read as hardware: {error}; measure it by varlen plan --calibrate"
        ) from None
    if not isinstance(record, Mapping) or record.get("format") != FORMAT:
        seen = record.get("format") if isinstance(record, Mapping) else type(record).__name__
        raise SettingError(
            f"{path} is of format {seen!r}, not {FORMAT!r}; measure it by varlen plan --calibrate"
        )
    record = {_ERRORS: None, **record}  # missing in files of 0.1.0
    expected = {"format", *_PLAIN, *_SAVED_LINKS, "attention", "gemm", "gemm_backward"}
    if set(record) != expected:
        raise SettingError(
            f"{path} lacks {sorted(expected - set(record))} and has unknown {sorted(set(record) - expected)}; "
            "measure it by varlen plan --calibrate"
        )
    try:
        return _hardware(record)
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from None


def _hardware(record: Mapping[str, Any]) -> Hardware:
    attention, back = _object(record, "attention", ("forward", "backward")), record["gemm_backward"]
    given: dict[str, Any] = {name: record[name] for name in _PLAIN}
    given |= {name: Link(**_object(record, name, _names(Link))) for name in _SAVED_LINKS}
    return Hardware(
        **given,
        attention=(_saved_table(attention, "forward"), _saved_table(attention, "backward")),
        gemm=_saved_curve(record, "gemm"),
        gemm_backward=None if back is None else _saved_curve(record, "gemm_backward"),
    )


def _saved_table(within: Mapping[str, Any], name: str) -> RateTable:
    """Read a table, in which null is a hole."""
    arrays = _object(within, name, _names(RateTable))
    return RateTable(**{column: _floats(values) for column, values in arrays.items()})


def _saved_curve(within: Mapping[str, Any], name: str) -> RateCurve:
    """Read a curve, in which null is a hole."""
    arrays = _object(within, name, _names(RateCurve))
    return RateCurve(**{column: _floats(values) for column, values in arrays.items()})


def _names(kind: type[Link | RateTable | RateCurve]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _object(within: Mapping[str, Any], name: str, names: tuple[str, ...]) -> Mapping[str, Any]:
    """Return an object of the file that must have exactly these names."""
    value = within[name]
    if not isinstance(value, Mapping) or set(value) != set(names):
        seen = f"holds {sorted(value)}" if isinstance(value, Mapping) else f"is {json.dumps(value)[:40]}"
        raise SettingError(
            f"{name} {seen}; it must be an object of {', '.join(names)}. Measure it by varlen plan --calibrate"
        )
    return value


def _floats(values: Any) -> FloatArray:
    """Return the numbers of a JSON list, null as NaN."""
    try:
        return np.array(values, np.float64)
    except (ValueError, TypeError, OverflowError) as error:  # rows of different lengths, objects
        raise SettingError(
            f"a rate table has rows of different lengths, or entries that are no numbers: {error}"
        ) from None


def _arrays(rates: RateTable | RateCurve) -> dict[str, Any]:
    return {field.name: getattr(rates, field.name).tolist() for field in fields(rates)}
