"""What a task takes at its peaks, as factors of what its MicroPack counts: logits, layers and attention in turn.

The head's logits are gone before the first layer runs backward, and gradients of keys and values come with each
layer's attention, when what the layers behind it left is gone. So a backward task has its peak at the head, or where
some layer's backward pass begins, or in some layer's attention; all of these are affine in the layers that are done,
and the extremes are asked for alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.cost.layer import Kernels, LayerBytes
from varlen.cost.shape import ModelShape
from varlen.cost.stages import Stages
from varlen.types import FloatArray

LOGIT_ROWS: Final = 1024
"""Rows whose logits are there at once: the loss is computed chunk by chunk."""
LOGIT_BYTES: Final = 6
"""bf16 logits, and their softmax in float32."""
LAYERS_ON_DEVICE: Final = 2
"""With keys and values in host memory: the layer that runs, and the one that is being fetched."""
BACKWARD_KEYS: Final = 8192
"""Keys before a slice whose gradients attention's backward pass gives at once."""
PLACE_BYTES: Final = 24.0
"""Of a token of a shared document, while keys and values are gathered: where it stands among those of the ranks."""

OWN, AHEAD, NEAR, GATHERED, SHARED, NEXT, BEFORE = range(7)
"""What a forward MicroPack counts, on one GPU: its rows; rows of documents that begin in it, beyond its own, less its
own of documents that began before; tokens of its documents up to its end; all of those of the longest document that
ranks share, and this rank's; rows of the MicroPack that comes next, and of the one before."""
OPENED, CLOSED, KEYS, MOVED, HEAD, ANY, RETURNED, COPIED = 1, 7, 8, 9, 10, 11, 12, 13
"""What a backward MicroPack counts beside `OWN`, `NEAR`, `GATHERED`, `SHARED`, `NEXT` and `BEFORE`: earlier rows of
documents that end in it, whose dK/dV is opened; its rows that aren't at an end, whose dK/dV is closed; earlier tokens
of one document, up to `BACKWARD_KEYS`; the same, or what is copied as memory is given back, if that is more; rows of
its logits; 1 where it holds rows; rows of forward slices whose first row it holds, which came in one piece and go as
one; where it takes several pieces, its rows less those, below 0 perhaps. `NEAR` counts tokens that have gradients
three times, as their bytes are."""
FORWARD_COUNTS, BACKWARD_COUNTS = 7, 14


class Messages(NamedTuple):
    """Of a row, what a stage holds of what stages give each other, each float64 `[num_chunks]`.

    The next MicroPack is received ahead, and what was sent last stays until the next is.
    """

    received_forward: FloatArray
    received_backward: FloatArray
    sent_forward: FloatArray
    sent_backward: FloatArray

    def taken(self, counts: int) -> tuple[FloatArray, FloatArray]:
        """Return what changes as a task of each pass takes its message, float64 `[chunks, counts]` of its counts.

        Args:
            counts: how many there are.
        """
        found = np.zeros((2, len(self.sent_forward), counts))
        for of_pass, received in zip(found, (self.received_forward, self.received_backward)):
            of_pass[:, OWN], of_pass[:, NEXT] = -received, received
        return found[0], found[1]

    def given(self, counts: int) -> tuple[FloatArray, FloatArray]:
        """Return what changes as a task of each pass gives its message, as `taken`."""
        found = np.zeros((2, len(self.sent_forward), counts))
        for of_pass, sent in zip(found, (self.sent_forward, self.sent_backward)):
            of_pass[:, OWN], of_pass[:, BEFORE] = sent, -sent
        return found[0], found[1]


def messages(layer: LayerBytes, is_again: npt.NDArray[np.bool_], stages: Stages) -> Messages:
    """Return what stages hold of messages; nothing of layers that aren't eager.

    Args:
        layer: bytes of a row.
        is_again: `[chunks]`: whether all layers are computed again; of others, what they give belongs to their graph.
        stages: which chunks are first and last.
    """
    row = layer.hidden * layer.is_eager
    comes, goes = np.where(stages.has_embedding, 0.0, row), np.where(stages.has_head, 0.0, row)
    return Messages(comes, goes, np.where(is_again, goes, 0.0), comes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunks:
    """How the layers of each chunk run; every array float64 `[num_chunks]`."""

    layers: FloatArray
    num_again: FloatArray
    """Layers that are computed again, the first ones."""
    made_inputs: FloatArray
    """Layers of which what goes in is made again."""
    near: FloatArray
    """Of keys and values, bytes per row and layer that stay on the device."""
    far: FloatArray
    """The same of those that wait in host memory."""
    head: FloatArray
    """Bytes of a row of logits that is there at once; 0 where there is no head, or it is counted apart."""
    splits: bool
    """Whether weight gradients are tasks of their own."""


def forward_peaks(layer: LayerBytes, chunks: Chunks, left: FloatArray, taken: FloatArray) -> FloatArray:
    """Return what a forward task takes at its peaks, float64 `[chunks, peaks, 7]`.

    Args:
        layer: bytes of a row.
        chunks: how they run.
        left: `[chunks, 7]`: what it leaves, messages apart.
        taken: `[chunks, 7]`: of messages.
    """
    has_kept = chunks.num_again < chunks.layers
    # What goes into the last layer, where that isn't left, and what was received, of which a copy may be left.
    beside = np.where(chunks.made_inputs > 0, layer.hidden, 0.0) + taken[:, NEXT]
    run, attention = left + taken, left + taken
    run[:, OWN] += np.where(has_kept, layer.forward_kept, layer.forward_again + beside)
    run[:, NEAR] = attention[:, NEAR] = LAYERS_ON_DEVICE * chunks.far
    if not layer.is_eager:
        return _needed([run])
    # Of the last layer; what it leaves isn't there before attention has run.
    attention[:, OWN] += layer.attention_forward - np.where(has_kept, layer.kept - layer.kv, 0.0)
    attention[:, GATHERED], attention[:, SHARED] = 2 * layer.kv + PLACE_BYTES, layer.kv
    return _needed([run, attention])


def backward_peaks(layer: LayerBytes, chunks: Chunks, taken: FloatArray) -> FloatArray:
    """Return what a backward task takes at its peaks, float64 `[chunks, peaks, 14]`.

    Args:
        layer: bytes of a row.
        chunks: how they run.
        taken: `[chunks, 14]`: of messages.
    """
    num_kept, last = chunks.layers - chunks.num_again, chunks.layers - 1
    # Affine in the layers that are done, but where layers begin to be computed again, and until both layers' worth of
    # gradients is there.
    corners = [0 * last, np.maximum(num_kept - 1, 0), np.minimum(num_kept, last), last]
    corners += [np.minimum(some, last) for some in range(1, LAYERS_ON_DEVICE + 1) if chunks.far.any()]
    found = [peak for done in corners for peak in _in_layer(layer, chunks, taken, done)]
    if chunks.splits and layer.is_eager:
        ended = taken.copy()
        ended[:, OWN] += layer.waiting_last
        _finish(ended, layer, chunks, chunks.layers)
        _open(ended, chunks, chunks.layers)
        ended[:, NEAR] = LAYERS_ON_DEVICE * chunks.far
        found.append(ended)
    logits, is_made = taken.copy(), num_kept == 0
    logits[:, HEAD] = chunks.head
    logits[:, OWN] += layer.hidden + 4 + (layer.made + layer.hidden * chunks.made_inputs) * is_made
    logits[:, NEAR] = LAYERS_ON_DEVICE * chunks.far * is_made
    logits[:, COPIED] = _copied(layer, chunks, is_made)
    logits *= (chunks.head > 0)[:, np.newaxis]
    return _needed([*found, logits])


def _in_layer(layer: LayerBytes, chunks: Chunks, taken: FloatArray, done: FloatArray) -> list[FloatArray]:
    """What a task takes as the backward pass of a layer begins and in its attention, so many layers being done."""
    is_again = done >= chunks.layers - chunks.num_again
    made = np.where(is_again, layer.hidden * chunks.made_inputs, 0.0)
    begins, attention = taken.copy(), taken.copy()
    begins[:, OWN] += made + np.where(is_again, layer.backward_again, layer.backward_kept)
    attention[:, OWN] += made + np.where(is_again, layer.attention_again, layer.attention_kept)
    for peak in (begins, attention):
        _finish(peak, layer, chunks, done)
        peak[:, COPIED] += _copied(layer, chunks, is_again)
    if chunks.splits:
        begins[:, OWN] += layer.waiting_first
        attention[:, OWN] += layer.waiting_behind + np.where(is_again, 0.0, layer.waiting_twice)
    else:
        # What was received is held until the task is done; else it waits among the others.
        begins[:, OWN] += taken[:, NEXT] * (done > 0)
        attention[:, OWN] += taken[:, NEXT] * (done > 0)
    _open(begins, chunks, done)
    begins[:, NEAR] = LAYERS_ON_DEVICE * chunks.far * (is_again | (done > 0))
    attention[:, NEAR] = LAYERS_ON_DEVICE * chunks.far
    found = [begins]
    if layer.is_eager and not chunks.splits:
        # The gradient of the last matrix comes before gradients are at their widest.
        first = begins.copy()
        first[:, OWN] -= layer.widened
        first[:, ANY] = layer.matrix
        found.append(first)
    if layer.is_eager:
        # Gradients of what was gathered are scattered before dK/dV of this layer is opened.
        scattered = attention.copy()
        _open(scattered, chunks, done)
        scattered[:, OWN] -= layer.kv
        scattered[:, GATHERED], scattered[:, SHARED] = 5 * layer.kv + PLACE_BYTES, 2 * layer.kv
        found.append(scattered)
    _open(attention, chunks, done + 1)
    attention[:, KEYS], attention[:, MOVED] = chunks.far, chunks.near
    return [*found, attention]


def _finish(peak: FloatArray, layer: LayerBytes, chunks: Chunks, done: FloatArray) -> None:
    """Count what layers that are done leave waiting, less what they gave back.

    What went into a layer is given back in the pieces that forward slices came in, what was made again row by row,
    and dK/dV as it is closed.
    """
    num_kept = chunks.layers - chunks.num_again
    kept, again = np.minimum(done, num_kept), np.maximum(done - num_kept, 0)
    made = np.minimum(again, chunks.made_inputs)
    gone: FloatArray = kept * (layer.kept - chunks.far) + again * chunks.near + made * layer.hidden
    gone += layer.shared * ((done >= num_kept) & (num_kept > 0))
    peak[:, OWN] += chunks.splits * (layer.waiting_kept * kept + layer.waiting_again * again) - gone
    peak[:, RETURNED] -= (again - made) * layer.hidden
    peak[:, CLOSED] -= 2 * chunks.near * done


def _copied(layer: LayerBytes, chunks: Chunks, is_again: npt.NDArray[np.bool_]) -> FloatArray:
    """Bytes of each row that is copied from pieces on the device, so that they go at once; `[chunks]`."""
    is_copied = is_again & (chunks.num_again > chunks.made_inputs) & layer.is_eager
    return np.where(is_copied, layer.hidden, 0.0)


def _open(peak: FloatArray, chunks: Chunks, layers: FloatArray) -> None:
    """Count dK/dV of some layers."""
    peak[:, OPENED] = 2 * chunks.near * layers + 2 * chunks.far * np.minimum(layers, LAYERS_ON_DEVICE)


def logit_bytes(model: ModelShape, kernels: Kernels = "fused") -> float:
    """Return bytes of a row's logits, and of the final norm's backward pass where it is an eager one.

    Of that norm: 30h at its widest, 12h beside the logits, of which 2h are a gradient that is there for all rows.

    Args:
        model: its widths.
        kernels: whose norm it is.
    """
    logits = float(LOGIT_BYTES * model.vocab)
    return logits if kernels == "fused" else max(10 * model.hidden + logits, 28.0 * model.hidden)


def _needed(peaks: list[FloatArray]) -> FloatArray:
    """Stack peaks, without those that another one is never below."""
    kept: list[FloatArray] = []
    for number, peak in enumerate(peaks):
        others = kept + peaks[number + 1 :]
        if not any((other >= peak).all() and _is_alike(other, peak) for other in others):
            kept.append(peak)
    return np.stack(kept, axis=1)


def _is_alike(one: FloatArray, other: FloatArray) -> bool:
    """Whether two peaks ask the same of what may be below 0."""
    return bool((one[:, COPIED:] == other[:, COPIED:]).all())
