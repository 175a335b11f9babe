"""Parameters and examples that each take their time: a few are tried in every run, all of them in the soak."""

import os
from collections.abc import Collection, Iterable
from typing import Any

import hypothesis
import pytest

IS_SOAK = os.environ.get("VARLEN_HYPOTHESIS") == "soak"


def mostly(often: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """All values, of which those that aren't among the first ones are left to the soak."""
    found = list(values)
    assert all(one in found for one in often), f"{often} are to be tried often, and there are {found}"
    return [
        one
        if one in often
        else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.soak)
        for one in found
    ]


def examples(often: int, every: int | None = None) -> hypothesis.settings:
    """So many random examples in every run; in the soak `every`, or as many as other properties have."""
    if not IS_SOAK:
        return hypothesis.settings(max_examples=often)
    return hypothesis.settings() if every is None else hypothesis.settings(max_examples=every)
