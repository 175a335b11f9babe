"""What one run is asked to train, and what each of its steps reports; plain data that crosses processes."""

from __future__ import annotations

from dataclasses import dataclass

from varlen.train.demo.corpus import Documents
from varlen.train.demo.measure import Seconds
from varlen.train.demo.methods import LayoutName
from varlen.train.demo.orders import Order
from varlen.train.demo.settings import DemoSettings


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """What to train, and how to lay it out; plain data, so that another process can take it."""

    layout: LayoutName
    order: Order
    documents: Documents
    validation: Documents
    vocab_size: int
    seed: int
    """Of the initial weights."""
    settings: DemoSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step: what it computed, and what that took."""

    loss: float
    """Mean over targets, in nats, before the step's update."""
    num_tokens: int
    num_targets: int
    num_slots: int
    seconds: Seconds
    """From the documents' tokens to the updated weights: layout, forward, backward and optimizer."""
