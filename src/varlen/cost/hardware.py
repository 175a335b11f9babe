"""`Hardware`: how fast one GPU computes at how many rows, how much it holds, and how it reaches the others."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from varlen.cost import named_hardware
from varlen.errors import SettingError
from varlen.types import FloatArray

_NAMED_HOLES = 4


def is_number(value: object) -> bool:
    """Return whether something is a number, and not a truth value."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _frozen(owner: object, name: str, dimensions: int) -> FloatArray:
    """Make a field of `owner` a read-only float64 array."""
    array = np.array(getattr(owner, name), np.float64)
    if array.ndim != dimensions:
        raise SettingError(
            f"{name} of a rate table must have {dimensions} dimensions; got shape {array.shape}"
        )
    array.flags.writeable = False
    object.__setattr__(owner, name, array)
    return array


def _check_rising(name: str, grid: FloatArray) -> None:
    """Refuse a grid that doesn't rise from above 0."""
    if not grid.size or not np.isfinite(grid).all() or grid[0] <= 0 or (np.diff(grid) <= 0).any():
        raise SettingError(f"{name} of a rate table must rise from above 0; got {grid.tolist()}")


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
    """`[Q, K]`: TFLOP/s of one GPU; the backward pass counted at 2.5 times the forward's FLOPs."""

    def __post_init__(self) -> None:
        rows, keys = _frozen(self, "query_rows", 1), _frozen(self, "key_lengths", 1)
        cells = _frozen(self, "tflops", 2)
        _check_rising("query_rows", rows)
        _check_rising("key_lengths", keys)
        if cells.shape != (rows.size, keys.size):
            raise SettingError(
                f"a rate table of {rows.size} rows and {keys.size} key lengths has tflops of shape {cells.shape}"
            )
        _check_whole(cells, [f"{row:g} rows x {key:g} keys" for row in rows for key in keys])

    def __reduce__(self) -> tuple[partial[RateTable], tuple[()]]:
        """Pickle through the constructor, so that arrays are read-only in another process too."""
        return partial(RateTable, **{field.name: getattr(self, field.name) for field in fields(self)}), ()


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
            raise SettingError(f"a rate curve of {rows.size} rows has tflops of shape {cells.shape}")
        _check_whole(cells, [f"{row:g} rows" for row in rows])

    def __reduce__(self) -> tuple[partial[RateCurve], tuple[()]]:
        """Pickle through the constructor, so that arrays are read-only in another process too."""
        return partial(RateCurve, **{field.name: getattr(self, field.name) for field in fields(self)}), ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A way between GPUs: a message of n bytes takes `latency_s + n / bytes_per_s` (the alpha-beta model)."""

    latency_s: float
    bytes_per_s: float
    """In one direction, of one GPU, as collectives reach it."""

    def __post_init__(self) -> None:
        are_numbers = is_number(self.latency_s) and is_number(self.bytes_per_s)
        if not are_numbers or not (0 <= self.latency_s < math.inf and 0 < self.bytes_per_s < math.inf):
            raise SettingError(
                f"a link of {self.bytes_per_s!r} bytes a second and {self.latency_s!r} s latency; "
                "bytes_per_s must be a number above 0 and latency_s one of at least 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Hardware:
    """One kind of GPU, in nodes of several, as the cost model sees it."""

    name: str = ""
    source: str
    """Where the figures come from, for people."""
    memory_bytes: float
    memory_bytes_per_s: float
    """What element-wise work reaches."""
    gpus_per_node: int
    peak_tflops: float
    """Dense bf16, as the maker gives it: what MFU is a share of."""
    attention: tuple[RateTable, RateTable]
    """Forward and backward."""
    gemm: RateCurve
    """Matrix products of the forward pass, and what stands between them where they were measured together."""
    gemm_backward: RateCurve | None = None
    """Those of the backward pass; None: as `gemm`."""
    launch_s: float
    """Seconds that a layer takes in one pass however few rows there are, short collectives included."""
    intra: Link
    """Between GPUs of a node."""
    inter: Link
    """Between nodes."""
    host: Link
    """Between a GPU and its host's memory."""
    measured_heads: int = 64
    """Query heads that attention was measured with."""
    heads_exponent: float = 0.0
    """Attention is looked up at rows x (heads on a GPU / measured_heads)**heads_exponent: 0 for a kernel that few
    heads fill as well as many, 1 for one that needs eight times the rows at an eighth of the heads. Powers of other
    exponents are the machine's C library's, whose last bit another's may not share; nothing else of a price is."""
    held_out_errors: tuple[float, float] | None = None
    """Mean absolute error of the rates on shapes that they weren't fitted to, as a share: of attention, and of the
    rest of a layer. None where nobody measured it."""

    @property
    def held_out(self) -> str:
        """How well these rates predict what they weren't fitted to, in a sentence; "" where nobody measured it."""
        if self.held_out_errors is None:
            return ""
        attention, rest = self.held_out_errors
        return (
            f"The rates of {self.name} predict shapes that they weren't fitted to within {100 * attention:.1f} % "
            f"(attention) and {100 * rest:.1f} % (the rest of a layer)."
        )

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            if not isinstance(getattr(self, name), str):
                raise SettingError(f"hardware {name}={getattr(self, name)!r}; it must be words")
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
                or not all(is_number(one) and 0 <= one < math.inf for one in errors)
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
        if key not in named_hardware.MACHINES:
            near = difflib.get_close_matches(key, named_hardware.MACHINES, n=3, cutoff=0.5) or sorted(
                named_hardware.MACHINES
            )
            raise SettingError(f"no hardware is called {name!r}; nearest: {', '.join(near)}")
        known = named_hardware.MACHINES[key]
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
    """The table of a saturating rate: peak, and the rows and keys at which each halves it."""
    peak, half_rows, half_keys = fit
    rows, keys = named_hardware.QUERY_ROWS, named_hardware.KEY_LENGTHS
    filled = rows[:, None] / (rows[:, None] + half_rows) * keys / (keys + half_keys)
    return RateTable(query_rows=rows, key_lengths=keys, tflops=peak * filled)


def _curve(fit: tuple[float, float]) -> RateCurve:
    """The curve of a saturating rate: peak, and the rows that halve it."""
    peak, half_rows = fit
    rows = named_hardware.QUERY_ROWS
    return RateCurve(rows=rows, tflops=peak * rows / (rows + half_rows))
