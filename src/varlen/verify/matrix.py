"""The compatibility matrix: every causal family of the installed transformers, verified, as one mapping for JSON.

Each verdict comes from a run of a tiny model with random weights; nothing is known beforehand about any family.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from varlen.errors import ModelError
from varlen.verify.api import verify
from varlen.verify.backends import CPU_BACKENDS
from varlen.verify.model_report import CallCell, VerifyReport
from varlen.verify.said import named

FAULT = "the check itself failed"


def matrix_row(family: str) -> dict[str, Any]:
    """Verify one family, and return all verdicts.

    Args:
        family: `config.model_type`.

    Returns:
        `model`, `verdict` and `weights`; `cells`, by backend and layout: `verdict`, `reason`, `stand_in`,
        `gradients`, `moved`, `control`, `kernels`; `calls`, by way of calling, backend and layout, a verdict each.
        Where no tiny model can be made, `reason` says why and every cell is "not run".

    Cost: some seconds.
    """
    torch.set_num_threads(1)  # models this small lose more by waking a second thread than it computes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # families warn of their own settings
        try:
            return _row(verify(family))
        except ModelError as error:
            return _not_run(str(error))
        except Exception as error:  # one family must not cost the others; a test looks for these words
            return _not_run(f"{FAULT}: {named(error)}")


def _not_run(reason: str) -> dict[str, Any]:
    cell = {"verdict": "not run", "reason": reason}
    cells = {backend: {"rows": cell, "flat": cell} for backend in CPU_BACKENDS}
    return {"verdict": "not run", "reason": reason, "cells": cells, "calls": {}}


def _row(report: VerifyReport) -> dict[str, Any]:
    cells: dict[str, dict[str, Any]] = {}
    for cell in report.cells:
        found: dict[str, Any] = {"verdict": cell.verdict}
        if cell.reason:
            found["reason"] = cell.reason
        if cell.stand_in:
            found["stand_in"] = list(cell.stand_in)
        if cell.isolation is not None and cell.kernels:
            moved = cell.isolation.movements
            found["moved"] = _rounded(max(moved.largest_difference, moved.padding_difference))
            found["control"] = _rounded(moved.control_difference)
            found["kernels"] = [name for name, _ in cell.kernels]
        if cell.gradients is not None:
            found["gradients"] = _rounded(cell.gradients.difference)
        cells.setdefault(cell.backend, {})[cell.layout] = found
    row: dict[str, Any] = {"verdict": report.verdict, "model": report.model, "weights": report.weights}
    return row | {"cells": cells, "calls": _calls(report.calls)}


def _calls(calls: Sequence[CallCell]) -> dict[str, dict[str, dict[str, str]]]:
    found: dict[str, dict[str, dict[str, str]]] = {}
    for cell in calls:
        found.setdefault(cell.call, {}).setdefault(cell.backend, {})[cell.layout] = cell.verdict
    return found


def _rounded(value: float | None) -> float | None:
    """Keep two digits: more would change from machine to machine."""
    return None if value is None else float(f"{value:.1e}")
