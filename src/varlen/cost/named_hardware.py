"""The hardware that goes by a name: published figures, and saturating rates fitted to published measurements."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from varlen.types import FloatArray

QUERY_ROWS: Final[FloatArray] = np.ldexp(1.0, np.arange(7, 19))
"""128 to 256K. Rates are interpolated in 1 / rows, which meets a saturating rate exactly between these too."""
KEY_LENGTHS: Final[FloatArray] = np.ldexp(1.0, np.arange(7, 21))
"""128 to 1M."""


class Machine(NamedTuple):
    """Plain figures of one kind of GPU; `Hardware.named` makes tables of them."""

    source: str
    memory_bytes: float
    memory_bytes_per_s: float
    gpus_per_node: int
    peak_tflops: float
    forward: tuple[float, float, float]
    """Attention: TFLOP/s at its best, query rows and key lengths at which the rate is half."""
    backward: tuple[float, float, float]
    gemm: tuple[float, float]
    """Matrix products: TFLOP/s at their best, rows at which the rate is half."""
    launch_s: float
    intra: tuple[float, float]
    """Latency in seconds, bytes a second in one direction."""
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
    "high on packs of 2K to 32K rows whose documents are a quarter as long. Matrix products: 600·n/(n+512) TFLOP/s, "
    "a planning default. 80 GB, 3.35 TB/s, 989 TFLOP/s dense bf16: NVIDIA's data sheet. "
    + _LINKS.format(network=50),
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
