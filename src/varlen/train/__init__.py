"""The reference trainer behind `varlen train`, and the experiment behind `varlen demo` in `demo/`.

    TOML ──► settings ──► trainer: tokens, model, parallel, plans ──► step ──► metrics, checkpoint, callbacks

In: a configuration. Out: a trained model's folder, checkpoints from which a run goes on exactly, metrics.
Begin in `trainer.py`. Public names are loaded when first used, since most need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from varlen.missing import report_missing

if TYPE_CHECKING:
    from varlen.train.callbacks import Callback, RunOverview, TrainSummary
    from varlen.train.evaluate import Evaluation
    from varlen.train.metrics import StepMetrics
    from varlen.train.trainer import train

_HOMES = {
    "Callback": "varlen.train.callbacks",
    "Evaluation": "varlen.train.evaluate",
    "RunOverview": "varlen.train.callbacks",
    "StepMetrics": "varlen.train.metrics",
    "TrainSummary": "varlen.train.callbacks",
    "train": "varlen.train.trainer",
}
__all__ = ["Callback", "Evaluation", "RunOverview", "StepMetrics", "TrainSummary", "train"]
report_missing(__name__)


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"varlen.train has no attribute {name!r}; public names: {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
