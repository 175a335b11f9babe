"""Runs with `[plan]` in one process: the loss curve of whole packs, plans that don't wait, and exact resume."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_train_ranks import write_toml
from training import (
    LLAMA,
    Notes,
    metrics_of,
    rewound,
    same_end,
    settings,
    start_training,
    table,
    weights_of,
    write_store,
)

import varlen as vl
from varlen.cost.hardware import Hardware, RateCurve, RateTable
from varlen.cost.saved import load_hardware, save_hardware
from varlen.errors import InputError, PlanError, SettingError
from varlen.plan.ahead import Planner
from varlen.train import trainer as trainer_module
from varlen.train.affordable import affordable
from varlen.train.config import read_config
from varlen.train.plans import PlansAhead
from varlen.train.trainer import train

PLAIN = {"model__settings": {**LLAMA, "attention_dropout": 0.0}, "optimizer__schedule": "constant"}
EVEN = {"plan": {"slice_tokens": 24}}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def hardware(tmp_path_factory):
    """A file of rates of a machine so slow that tiny documents are worth cutting, with little memory."""
    rows = np.array([1.0, 1e6])
    flat = RateTable(query_rows=rows, key_lengths=rows, tflops=np.full((2, 2), 1e-3))
    slow = replace(
        Hardware.named("h100"),
        name="slow",
        memory_bytes=1e9,
        attention=(flat, flat),
        gemm=RateCurve(rows=rows, tflops=np.full(2, 1e-3)),
        launch_s=0.0,
    )
    path = tmp_path_factory.mktemp("hardware") / "slow.json"
    save_hardware(slow, path)
    return str(path)


def priced(hardware, **changes):
    return {"plan": {"hardware": hardware, "least_rows": 8, **changes}}


def planned(store, output, plan, **changes):
    """Settings of a run by plans; its tables come with it."""
    made = table(store, output, **PLAIN, **changes)
    return trainer_module_settings(made | plan)


def trainer_module_settings(made):
    from varlen.train.config import as_settings
    from varlen.train.settings import TrainSettings

    return as_settings(TrainSettings, made, "")


@pytest.fixture
def in_float64(monkeypatch):
    """Train in float64, so that a wrong term can't hide behind rounding."""
    inner = trainer_module.build_model
    monkeypatch.setattr(trainer_module, "build_model", lambda *a, **named: inner(*a, **named).double())


@pytest.mark.parametrize("method", ["even", "micropack", "packed"])
def test_two_hundred_steps_in_slices_have_the_loss_curve_of_whole_packs(
    store, hardware, tmp_path, in_float64, method
):
    plan = EVEN if method == "even" else priced(hardware, method=method)
    more = {"run__steps": 200, "run__checkpoint_every": 0, "optimizer__learning_rate": 3e-3}
    curves = {}
    for name, table_ in (("plain", {}), ("planned", plan)):
        notes = Notes()
        train(planned(store, tmp_path / name, table_, **more), notes)
        curves[name] = notes.steps

    assert len(curves["planned"]) == 200
    for ours, theirs in zip(curves["planned"], curves["plain"], strict=True):
        # float64 rounds at 1e-16; what Adam makes of gradients near 0 lets curves drift apart by far less than this.
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-9)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-7)
        assert (ours.tokens, ours.supervised_tokens, ours.fill) == (
            theirs.tokens,
            theirs.supervised_tokens,
            theirs.fill,
        )
    assert curves["planned"][-1].loss < curves["planned"][0].loss - 1
    assert curves["planned"][0].plan_method == ("sliced" if method == "even" else method)
    for name, value in weights_of(tmp_path / "plain").items():
        torch.testing.assert_close(weights_of(tmp_path / "planned")[name], value, rtol=0, atol=1e-7)


def test_a_wrong_plan_would_be_seen_in_the_curve(store, tmp_path, in_float64, monkeypatch):
    from varlen.runtime.chunk import ChunkStep

    inner = ChunkStep.backward
    monkeypatch.setattr(
        ChunkStep,
        "backward",
        lambda self, key, gradient: inner(self, key, gradient) if key[0][1] == 0 else inner(self, key, gradient),
    )
    losses = []
    for plan in ({}, EVEN):
        notes = Notes()
        train(planned(store, tmp_path / f"{len(losses)}", plan, run__steps=3), notes)
        losses.append([step.loss for step in notes.steps])

    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
