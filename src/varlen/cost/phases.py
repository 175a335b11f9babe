"""What a task takes at its peaks, as factors of what its MicroPack counts: logits, layers and attention in turn.

The head's logits are gone before the first layer runs backward, and gradients of keys and values come with each
layer's attention, when what the layers behind it left is gone. So a backward task has its peak at the head, or where
some layer's backward pass begins, or in some layer's attention; all of these are affine in the layers that are done,
and the extremes are asked for alone.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from varlen.cost.layer import Kernels, LayerBytes
from varlen.cost.shape import ModelShape
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

OWN, AHEAD, NEAR, GATHERED, SHARED = range(5)
"""What a forward MicroPack counts, on one GPU: its rows; rows of documents that begin in it, beyond its own, less its
own of documents that began before; tokens of its documents up to its end; all of those of the longest document that
ranks share, and this rank's."""
OPENED, CLOSED, KEYS, MOVED, HEAD = 1, 5, 6, 7, 8
"""What a backward MicroPack counts beside `OWN`, `NEAR`, `GATHERED` and `SHARED`: earlier rows of documents that end
in it, whose dK/dV is opened; its rows that aren't at an end, whose dK/dV is closed; earlier tokens of one document,
up to `BACKWARD_KEYS`; the same, or what is copied as memory is given back, if that is more; rows of its logits.
`NEAR` counts tokens that have gradients three times, as their bytes are."""
FORWARD_COUNTS, BACKWARD_COUNTS = 5, 9


def forward_peaks(
    layer: LayerBytes,
    layers: FloatArray,
    num_again: FloatArray,
    left: FloatArray,
    kv: FloatArray,
    moves: FloatArray,
) -> FloatArray:
    """Return what a forward task takes at its peaks, float64 `[chunks, peaks, 5]`.

    Args:
        layer: bytes of a row.
        layers: `[chunks]`.
        num_again: `[chunks]`: layers that are computed again.
        left: `[chunks, 5]`: what it leaves.
        kv: `[2, chunks]`: of keys and values, per row and layer, where they stay on the device and where they don't.
        moves: `[chunks]`: of what goes into the last layer, where that isn't left.
    """
    far, has_kept = kv[1], num_again < layers
    run, attention = left.copy(), left.copy()
    run[:, OWN] += np.where(has_kept, layer.forward_kept, layer.forward_again + moves)
    run[:, NEAR] = attention[:, NEAR] = LAYERS_ON_DEVICE * far
    attention[:, OWN] += np.where(has_kept, layer.attention_kept, layer.attention_again)
    if layer.gathers:
        attention[:, GATHERED], attention[:, SHARED] = 2 * layer.kv + PLACE_BYTES, layer.kv
    return _needed([run, attention])


def backward_peaks(
    layer: LayerBytes,
    layers: FloatArray,
    num_again: FloatArray,
    kv: FloatArray,
    made_inputs: FloatArray,
    waiting: FloatArray,
    head: FloatArray,
) -> FloatArray:
    """Return what a backward task takes at its peaks, float64 `[chunks, peaks, 9]`.

    Args:
        layer: bytes of a row.
        layers: `[chunks]`.
        num_again: `[chunks]`: layers that are computed again, the first ones.
        kv: `[2, chunks]`: of keys and values, per row and layer, where they stay on the device and where they don't.
        made_inputs: `[chunks]`: layers whose input is made again.
        waiting: `[chunks]`: of a layer, what waits for weight gradients; 0 where these aren't apart.
        head: `[chunks]`: of a row of logits that is there at once; 0 where there is no head, or it is counted apart.
    """
    near, far = kv
    num_kept, last = layers - num_again, layers - 1
    found = []
    # Affine in the layers that are done, but where layers begin to be computed again, and until both layers' worth of
    # gradients is there.
    corners = [0 * last, np.maximum(num_kept - 1, 0), np.minimum(num_kept, last), last]
    corners += [np.minimum(some, last) for some in range(1, LAYERS_ON_DEVICE + 1) if far.any()]
    for done in corners:
        is_again = done >= num_kept
        made = np.where(is_again, layer.hidden * made_inputs, 0.0)
        gone = np.minimum(done, num_kept) * (layer.kept - far)
        gone += np.maximum(done - num_kept, 0) * (layer.hidden + near)
        begins, attention = (np.zeros((len(layers), BACKWARD_COUNTS)) for _ in range(2))
        own = made - gone + done * waiting
        begins[:, OWN] = own + np.where(is_again, layer.backward_again, layer.backward_kept)
        attention[:, OWN] = own + np.where(is_again, layer.attention_again, layer.attention_kept)
        attention[:, OWN] += layer.waiting * (waiting > 0)
        for peak, opened in ((begins, done), (attention, done + 1)):
            peak[:, OPENED] = 2 * near * opened + 2 * far * np.minimum(opened, LAYERS_ON_DEVICE)
            peak[:, NEAR] = LAYERS_ON_DEVICE * far * (is_again | (opened > 0))
        attention[:, KEYS], attention[:, MOVED] = far, near
        if layer.gathers:
            attention[:, GATHERED], attention[:, SHARED] = 5 * layer.kv + PLACE_BYTES, 2 * layer.kv
        found += [begins, attention]
    logits = np.zeros((len(layers), BACKWARD_COUNTS))
    logits[:, HEAD] = head
    logits[:, OWN] = (layer.hidden + 4 + (layer.made + layer.hidden * made_inputs) * (num_kept == 0)) * (
        head > 0
    )
    logits[:, NEAR] = LAYERS_ON_DEVICE * far * (num_kept == 0) * (head > 0)
    return _needed([*found, logits])


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
        if not any((other >= peak).all() for other in others):
            kept.append(peak)
    return np.stack(kept, axis=1)
