"""varlen packs, balances, feeds and runs variable-length sequences for LLM training.

Public names are loaded when first used, so that `import varlen` costs a few milliseconds.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    from varlen.errors import PlatformError

    raise PlatformError("varlen runs on Linux and macOS, not on Windows itself; install it inside WSL")

import varlen.pack
import varlen.simulate
import varlen.verify  # noqa: F401

# `varlen.pack` is a package and `vl.pack` a function; likewise `simulate` and `verify`. Python binds a subpackage to
# its parent when it is first imported; imported here and unbound, it can't hide the function later.
del pack, simulate, verify  # noqa: F821

if TYPE_CHECKING:
    from varlen import losses
    from varlen.batch.collate import collate
    from varlen.batch.log_probs import log_probs
    from varlen.batch.packed import PackedBatch
    from varlen.batch.tree_batch import TreeBatch
    from varlen.cost.hardware import Hardware
    from varlen.cost.model import CostModel
    from varlen.cost.shape import ModelShape
    from varlen.documents.source import Mixture
    from varlen.errors import VarlenError
    from varlen.feed.loader import PackedLoader
    from varlen.feed.sampler import PaddedSampler
    from varlen.feed.state import merge_states
    from varlen.forest import Forest
    from varlen.pack.api import lower_bound, pack
    from varlen.pack.fold import fold
    from varlen.pack.score import Score, score
    from varlen.pack.trees import pack_forest
    from varlen.pack.window import WindowPacker
    from varlen.plan.api import plan_step
    from varlen.plan.delay import Waiting, delay_outliers, delay_step
    from varlen.plan.planner import Planner
    from varlen.plan.search import Search
    from varlen.plan.serialize import load_plan, save_plan
    from varlen.runtime.engine import SliceEngine, StepStats
    from varlen.simulate.api import simulate
    from varlen.simulate.timeline import Timeline
    from varlen.step_plan import Mesh, StepPlan
    from varlen.types import Ledger, Packing
    from varlen.verify.batches.check import check_batch
    from varlen.verify.models.api import verify
    from varlen.verify.models.report import VerifyReport

__version__ = "0.2.0"

_HOMES = {
    "CostModel": "varlen.cost.model",
    "Forest": "varlen.forest",
    "Hardware": "varlen.cost.hardware",
    "Ledger": "varlen.types",
    "Mesh": "varlen.step_plan",
    "Mixture": "varlen.documents.source",
    "ModelShape": "varlen.cost.shape",
    "PackedBatch": "varlen.batch.packed",
    "PackedLoader": "varlen.feed.loader",
    "Packing": "varlen.types",
    "PaddedSampler": "varlen.feed.sampler",
    "Planner": "varlen.plan.planner",
    "Score": "varlen.pack.score",
    "Search": "varlen.plan.search",
    "SliceEngine": "varlen.runtime.engine",
    "StepPlan": "varlen.step_plan",
    "StepStats": "varlen.runtime.engine",
    "Timeline": "varlen.simulate.timeline",
    "TreeBatch": "varlen.batch.tree_batch",
    "VarlenError": "varlen.errors",
    "VerifyReport": "varlen.verify.models.report",
    "Waiting": "varlen.plan.delay",
    "WindowPacker": "varlen.pack.window",
    "check_batch": "varlen.verify.batches.check",
    "collate": "varlen.batch.collate",
    "delay_outliers": "varlen.plan.delay",
    "delay_step": "varlen.plan.delay",
    "fold": "varlen.pack.fold",
    "load_plan": "varlen.plan.serialize",
    "log_probs": "varlen.batch.log_probs",
    "lower_bound": "varlen.pack.api",
    "merge_states": "varlen.feed.state",
    "pack": "varlen.pack.api",
    "pack_forest": "varlen.pack.trees",
    "plan_step": "varlen.plan.api",
    "save_plan": "varlen.plan.serialize",
    "score": "varlen.pack.score",
    "simulate": "varlen.simulate.api",
    "verify": "varlen.verify.models.api",
}

__all__ = [
    "CostModel",
    "Forest",
    "Hardware",
    "Ledger",
    "Mesh",
    "Mixture",
    "ModelShape",
    "PackedBatch",
    "PackedLoader",
    "Packing",
    "PaddedSampler",
    "Planner",
    "Score",
    "Search",
    "SliceEngine",
    "StepPlan",
    "StepStats",
    "Timeline",
    "TreeBatch",
    "VarlenError",
    "VerifyReport",
    "Waiting",
    "WindowPacker",
    "check_batch",
    "collate",
    "delay_outliers",
    "delay_step",
    "fold",
    "load_plan",
    "log_probs",
    "losses",
    "lower_bound",
    "merge_states",
    "pack",
    "pack_forest",
    "plan_step",
    "save_plan",
    "score",
    "simulate",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use and keep it."""
    if name not in __all__:
        raise AttributeError(f"module 'varlen' has no attribute {name!r}; public names: {', '.join(__all__)}")
    import importlib

    try:
        # One name is a room by itself.
        home = _HOMES.get(name)
        value = (
            getattr(importlib.import_module(home), name)
            if home
            else importlib.import_module(f"varlen.{name}")
        )
    except ModuleNotFoundError as error:
        from varlen.missing import library_in, of_missing

        library = library_in(error)
        if not library:
            raise
        raise of_missing(library, f"varlen.{name}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, whether loaded or not."""
    return sorted([*__all__, "__version__"])
