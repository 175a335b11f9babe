"""Parameters that each take their time: a few are tried in every run, all of them in the soak."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


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
