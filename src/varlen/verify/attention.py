"""AttentionPicture: who attends to whom in a row, with boundaries and without, read from eager attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.adapters import hf
from varlen.verify.trial import Inputs, Trial

SHADES = "·░▒▓█"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionPicture:
    """Attention weights of the batch's fullest row of documents, the largest of all layers and heads."""

    owner: npt.NDArray[np.int64]
    """`[width]`: the document of each token, from 0; -1 at padding."""
    kept_apart: npt.NDArray[np.float32]
    """`[width, width]`: from each token to each, with boundaries."""
    without: npt.NDArray[np.float32] | None
    """The same without boundaries; None where the model shows none."""

    def between(self, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the largest weight from any token of a document to any of another, `[documents, documents]`.

        Args:
            weights: `[width, width]`, one of the two above.
        """
        count = int(self.owner.max()) + 1
        found = np.zeros((count, count), np.float32)
        for i in range(count):
            for j in range(count):
                found[i, j] = weights[np.ix_(self.owner == i, self.owner == j)].max()
        return found

    def __str__(self) -> str:
        """Draw both in characters, documents by documents."""
        pictures = [("with boundaries", self.between(self.kept_apart))]
        if self.without is not None:
            pictures.append(("without", self.between(self.without)))
        drawn = [[title, *map(_shaded, weights)] for title, weights in pictures]
        width = max(len(line) for line in drawn[0]) + 6
        return "\n".join("".join(part.ljust(width) for part in line).rstrip() for line in zip(*drawn))


def attention_picture(trial: Trial) -> AttentionPicture | None:
    """Read the attention weights of one row; None where the model returns none.

    Args:
        trial: a model set to eager attention, and its batch.
    """
    row = max(range(len(trial.owner)), key=lambda i: len(np.unique(trial.owner[i])))
    kept_apart = _weights(trial, trial.inputs, row)
    if kept_apart is None:
        return None
    owner = trial.owner[row]
    first = int(owner[owner >= 0].min())
    return AttentionPicture(
        owner=np.where(owner >= 0, owner - first, -1),
        kept_apart=kept_apart,
        without=_weights(trial, hf.inputs_without_boundaries, row),
    )


def _weights(trial: Trial, inputs: Inputs, row: int) -> npt.NDArray[np.float32] | None:
    """Return the largest weight over layers and heads, `[width, width]`."""
    if not hf.accepts(trial.model, "output_attentions"):
        return None
    outputs: Any = trial.call(inputs(trial.batch, trial.model), output_attentions=True)
    width = trial.owner.shape[1]
    found = [w for w in getattr(outputs, "attentions", None) or () if w is not None]
    square = [w[row].abs().amax(0) for w in found if w.ndim == 4 and w.shape[-2:] == (width, width)]
    if not square:
        return None
    largest = square[0]
    for each in square[1:]:
        largest = largest.maximum(each)
    return np.asarray(largest.float().cpu().numpy(), dtype=np.float32)


def _shaded(weights: Any) -> str:
    """Write a row of weights as one character each: a dot only for exactly nothing."""
    steps = [0 if w == 0 else 1 + min(3, int(w * 4)) for w in weights]
    return " ".join(SHADES[step] for step in steps)
