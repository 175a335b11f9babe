"""The GPU script's check of isolation runs, on whatever device there is."""

from __future__ import annotations

import torch
from benchmarks import gpu


def test_families_are_verified_with_every_attention() -> None:
    found = gpu.isolation("cpu", ["llama", "no such family"], [torch.float32])

    assert [row["attention"] for row in found[:-1:2]] == [
        "eager",
        "sdpa",
        "flex_attention",
        "varlen",
        "flash_attention_2",
    ]
    assert {row["verdict"] for row in found[:-1]} == {"isolated"}
    assert found[0]["kernels"] == {"softmax": 2}
    assert (found[-1]["attention"], found[-1]["verdict"]) == ("all", "not run")
    assert "no such family" in found[-1]["reason"]


def test_the_families_are_ones_that_transformers_has() -> None:
    from varlen.verify.families import families

    assert set(gpu.FAMILIES) <= set(families())
