"""Long runs of the whole: a hundred million lengths, and the demo as a newcomer runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import varlen as vl

ROUNDING = 1e-4


@pytest.mark.soak
def test_a_hundred_million_lengths_are_packed_to_the_bound() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.lognormal(6.0, 1.0, 10_000_000).clip(1, 8192).astype(np.int32) for _ in range(10)]
    lengths = np.concatenate(parts)

    packing = vl.pack(lengths, capacity=8192)

    assert packing.num_tokens == int(lengths.sum(dtype=np.int64))
    assert packing.num_pieces == lengths.size
    assert packing.num_packs <= vl.lower_bound(lengths, capacity=8192) * 1.0001


@pytest.mark.soak
def test_the_whole_demo_trains_padded_and_flattened_to_the_same_loss(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "varlen", "demo", "--json", "--output", str(tmp_path / "report.html")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)

    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout)
    methods = {method["name"]: method for method in figures["methods"]}
    assert figures["isolation"]["is_proved"]
    assert methods["padded"]["flattened_step_loss_difference"] < ROUNDING
    assert methods["padded_with_mask"]["flattened_step_loss_difference"] < ROUNDING
    assert methods["padded"]["slots_per_token"] > methods["flattened"]["slots_per_token"]
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
