"""The cells of the planning benchmark: real lengths, models, meshes; and the share of them that is run."""

from __future__ import annotations

import functools
import itertools
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.inputs import REAL_LENGTHS
from benchmarks.plan.figures import ATTENTION_SHARES, MORE_CHUNKS
from benchmarks.records import RESULTS
from varlen.cost.hardware import Hardware, load_hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.step_plan import Mesh, Recompute

SETS = (
    "pub_flexsp_wikipedia",
    "pub_distca_prolong",
    "pub_distca_wlbllm",
    "pub_magiattention_buckets",
    "code_src",
    "mix_pretrain_docs",
)
CAPACITIES = (65_536, 131_072, 262_144)
DOCUMENTS = (512, 2048)
MODELS = ("llama-2-7b", "llama-2-13b", "llama-30b", "llama-2-70b")
MESHES = (
    (2, 4, 4),
    (4, 4, 4),
    (8, 4, 4),
    (8, 8, 4),
    (4, 4, 8),
    (16, 4, 8),
    (8, 8, 8),
    (32, 4, 8),
    (16, 8, 8),
)
"""(dp, pp, tp): 32 to 1,024 GPUs."""
SEEDS = (1, 2)
PER_GROUP = 1
"""Cells that are run of each set and mesh, out of 48."""
CONTEXT = (1, 2, 4, 8, 16)
"""Numbers of ranks that share every document, of which each method is given the best."""
MEASURED = RESULTS / "gpu" / "h100-llama-3-8b.json"
"""Rates by `vl.calibrate`, of PyTorch's variable-length attention and of transformers' layers."""
LEAST_ROWS = 2048
"""Of the unit that the bound fills pipelines with."""

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, order=True)
class Cell:
    """One step of one model on one mesh."""

    lengths: str
    """The set that lengths are drawn from."""
    capacity: int
    documents: int
    model: str
    dp: int
    pp: int
    tp: int
    seed: int
    mode: str = "calibrated"
    recompute: Recompute = "none"
    memory_fraction: float = 0.92
    virtual_stages: int = 1
    exchange_overlap: float = 0.0
    """0 as measured of the engine; 1 hides the exchange of shared documents behind attention."""
    rates: Literal["measured", "published"] = "measured"
    """Of an H100: PyTorch's attention and transformers' layers, or FlashAttention 3 and a planning default."""
    attention_share: float = 1.0
    """Of the rates of attention, at which it runs."""

    @property
    def key(self) -> str:
        """The cell in one word, the same in every run; what is as usual isn't named."""
        parts = [
            self.lengths,
            f"{self.capacity // 1024}K",
            self.documents,
            self.model,
            self.mesh_text,
            self.seed,
        ]
        usual = ((field.name, field.default) for field in fields(self) if field.default is not MISSING)
        parts += [f"{name}={getattr(self, name)}" for name, value in usual if getattr(self, name) != value]
        return "/".join(map(str, parts))

    @property
    def mesh(self) -> Mesh:
        return Mesh(dp=self.dp, pp=self.pp, tp=self.tp, virtual_stages=self.virtual_stages)

    @property
    def meshes(self) -> list[Mesh]:
        """The same GPUs with more context parallelism and fewer data-parallel ranks."""
        dividing = [cp for cp in CONTEXT if self.dp % cp == 0]
        return [replace(self.mesh, dp=self.dp // cp, cp=cp) for cp in dividing]

    @property
    def mesh_text(self) -> str:
        """`dp x pp x tp`, without spaces."""
        return f"{self.dp}x{self.pp}x{self.tp}"

    def cost(self) -> CostModel:
        """Return the cost model; positions have no end, since the shapes stand for models of long context."""
        hardware = _measured() if self.rates == "measured" else Hardware.named("h100")
        attention = [
            replace(table, tflops=self.attention_share * table.tflops) for table in hardware.attention
        ]
        changed = {**_fields(hardware), "attention": tuple(attention)}
        return CostModel(
            model=ModelShape(**{**_fields(ModelShape.named(self.model)), "max_positions": None}),
            hardware=Hardware(**changed),
            recompute=self.recompute,
            mode=self.mode,  # type: ignore[arg-type]
            memory_fraction=self.memory_fraction,
            exchange_overlap=self.exchange_overlap,
        )

    def drawn(self) -> tuple[Int32Array, dict[str, float]]:
        """Return the step's lengths, int32 `[documents]`, and how much of them truncation took."""
        whole = _lengths(self.lengths)
        random = np.random.default_rng((self.seed, self.documents))
        chosen = random.choice(whole, self.documents, replace=self.documents > whole.size)
        cut = np.minimum(chosen, self.capacity).astype(np.int32)
        lost = 1 - cut.sum(dtype=np.int64) / chosen.sum(dtype=np.int64)
        return cut, {
            "tokens": int(cut.sum(dtype=np.int64)),
            "longest": int(cut.max()),
            "truncated_documents": int((chosen > self.capacity).sum()),
            "truncated_share": float(lost),
        }

    @property
    def is_large(self) -> bool:
        """Whether a data-parallel rank has tokens enough that filling a pipeline matters little."""
        tokens = self.drawn()[1]["tokens"]
        return tokens / self.dp >= 10 * (self.pp - 1) * LEAST_ROWS


@functools.cache
def _measured() -> Hardware:
    """Return the H100 that was measured, eight in a node; attention needs rows times heads to reach its rates."""
    return replace(
        load_hardware(MEASURED), gpus_per_node=Hardware.named("h100").gpus_per_node, heads_exponent=1.0
    )


def grid(per_group: int = PER_GROUP) -> list[Cell]:
    """Return the cells that are run, the same every time.

    Of each set and mesh `per_group` cells are drawn; capacities, numbers of documents, models and seeds take turns in
    a shuffled order, so that each of their combinations comes about equally often. Cells that two groups share come
    once.
    """
    groups = list(itertools.product(SETS, MESHES))
    variants = list(itertools.product(CAPACITIES, DOCUMENTS, MODELS, SEEDS))
    random = np.random.default_rng(20)
    order = random.permutation(len(groups))
    turns = itertools.cycle(random.permutation(len(variants)).tolist())
    cells = {}
    for group in order.tolist():
        name, (dp, pp, tp) = groups[group]
        for _ in range(per_group):
            capacity, documents, model, seed = variants[next(turns)]
            # The 52 heads of 30B can't be divided by 8: half the tp, twice the dp, as many GPUs.
            spread = 2 if model == "llama-30b" and tp == 8 else 1
            cell = Cell(name, capacity, documents, model, dp * spread, pp, tp // spread, seed)
            cells[cell.key] = cell
    return list(cells.values())


def hidden(cells: list[Cell]) -> list[Cell]:
    """Return the cells with exchanges that cost nothing."""
    return [replace(cell, exchange_overlap=1.0) for cell in cells]


def published(cells: list[Cell]) -> list[Cell]:
    """Return the cells at published rates, and at shares of those of attention, which other kernels have."""
    return [
        replace(cell, rates="published", attention_share=share)
        for cell in cells
        for share in ATTENTION_SHARES
    ]


def drawn_from(cell: Cell, num_steps: int) -> Int32Array:
    """Return the lengths of several steps, int32 `[num_steps * documents]`."""
    size = num_steps * cell.documents
    chosen = np.random.default_rng((cell.seed, size)).choice(_lengths(cell.lengths), size)
    return np.minimum(chosen, cell.capacity).astype(np.int32)


def interleaved(cells: list[Cell]) -> list[Cell]:
    return [replace(cell, virtual_stages=chunks) for cell in cells for chunks in MORE_CHUNKS]


def equal_rates() -> list[Cell]:
    """Return every cell of 4x4 ranks at equal rates: FLOPs, no launches."""
    every = itertools.product(SETS, CAPACITIES, DOCUMENTS, SEEDS)
    return [
        Cell(name, capacity, documents, "llama-2-7b", 4, 4, 4, seed, mode="flops")
        for name, capacity, documents, seed in every
    ]


@functools.cache
def _lengths(name: str) -> Int32Array:
    path = REAL_LENGTHS / f"{name}.npz"
    if not path.exists():
        raise FileNotFoundError(f"{name}.npz is not in shared/data/lengths beside the checkout")
    with np.load(path) as stored:
        lengths: Int32Array = stored["lengths"]
    return lengths[lengths > 0]


def _fields(noun: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as they are; `asdict` would take arrays apart."""
    return {name: getattr(noun, name) for name in noun.__dataclass_fields__}
