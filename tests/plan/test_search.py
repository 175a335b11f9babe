"""Settings of the search that can't be are refused before anything is planned."""

from __future__ import annotations

from typing import Any

import pytest

import varlen as vl
from varlen.errors import SettingError

BAD: list[tuple[dict[str, Any], str]] = [
    ({"grades": 1}, "search grades=1; it is True or False"),
    ({"least_rows": 0}, "least_rows=0; it must be a whole number of at least 1"),
    ({"least_rows": 1.5}, "least_rows=1.5; it must be a whole number"),
    ({"most_merged_ranks": 3}, "most_merged_ranks=3; it must be a power of two"),
    ({"most_merged_ranks": 2.0}, "most_merged_ranks=2.0; it must be a power of two"),
    ({"micropacks_per_stage": 4}, "micropacks_per_stage=4; it must be a tuple of numbers"),
    ({"micropacks_per_stage": ("a",)}, "it must be a tuple of numbers"),
    ({"micropacks_per_stage": ()}, r"micropacks_per_stage=\(\); it must hold numbers above 0"),
    ({"micropacks_per_stage": (0, 1)}, "must hold numbers above 0"),
    ({"micropacks_per_stage": (5, 1)}, r"=\(5, 1\); .* each above the one before"),
    ({"micropacks_per_stage": (1, float("nan"))}, "must hold numbers above 0"),
    ({"micropacks_per_stage": (1, float("inf"))}, "must hold numbers above 0"),
]


@pytest.mark.parametrize(("settings", "words"), BAD)
def test_a_search_that_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        vl.Search(**settings)


def test_one_size_is_enough() -> None:
    assert vl.Search(micropacks_per_stage=(4,), most_merged_ranks=1).least_rows == 2048
