"""The models that a comparison begins with: trained a little on documents of their own, the same for every strategy.

Trained from nothing, a small model stays at the frequency of tokens for a while, and how long is a matter of luck
that would hide everything else. The paper fine-tunes trained models, too. Weights are kept in the folder for
temporary files, under the hash of all that they depend on.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import strategies_models
from benchmarks.strategies_feeds import Feed
from benchmarks.strategies_models import build
from benchmarks.strategies_sets import TextSet
from benchmarks.strategies_train import one_thread, train

RATE = 4e-3


def base_of(family: str, of_set: TextSet) -> str:
    """Train a base unless it is there; returns the file that holds its weights.

    Args:
        family: of models.
        of_set: whose `base` documents it learns, as random minibatches, once.
    """
    said = hashlib.sha256(of_set.base.tokens.tobytes() + of_set.base.offsets.tobytes())
    said.update(f"{family} {RATE} {of_set.shape} {torch.__version__}".encode())
    said.update(Path(strategies_models.__file__).read_bytes())
    place = Path(tempfile.gettempdir(), f"varlen-strategies-{said.hexdigest()[:16]}.pt")
    if not place.exists():
        one_thread()
        feed = Feed(strategy="online", documents=of_set.base, shape=of_set.shape, seed=0)
        model = build(family, 0, feed.attention)
        train(model, feed, of_set.validation, points=1, learning_rate=RATE)
        new = place.with_suffix(".new")
        torch.save(model.state_dict(), new)
        new.replace(place)
    return str(place)


def started(family: str, attention: str, weights: str) -> Any:
    """Build a model that begins with weights from a file.

    Args:
        family: of models.
        attention: transformers' name of it, or "varlen".
        weights: of `base_of`.
    """
    model = build(family, 0, attention)
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model
