"""`Rates`: all that a kernel needs to price a slice on one mesh; and the columns of a price."""

from __future__ import annotations

from typing import Final, NamedTuple

from varlen.types import FloatArray

FORWARD_LAYER: Final = 0
"""Seconds of the forward pass through an average layer."""
FORWARD_HEAD: Final = 1
"""Seconds of the vocabulary head, which the last chunk of layers adds."""
INPUT_LAYER: Final = 2
"""Seconds of a layer's input gradients, attention's backward pass and recomputation."""
INPUT_HEAD: Final = 3
"""Seconds of the head's input gradients."""
WEIGHT_LAYER: Final = 4
"""Seconds of a layer's weight gradients."""
WEIGHT_HEAD: Final = 5
"""Seconds of the head's weight gradients."""
ROWS: Final = 6
"""Rows of one GPU."""
NUM_COLUMNS: Final = 7


class Rates(NamedTuple):
    """What one GPU of a mesh needs for a slice, per average layer; `CostModel.rates` makes it.

    Seconds per FLOP stand on grids and are interpolated linearly in 1 / rows and 1 / keys, so that seconds are
    linear in rows between two grid points: a rate r·n / (n + n0) is met exactly, and more rows never take less
    time where that holds on the grid. Past the last grid point the rate stays; under the first row, fewer rows
    take as long as that many.
    """

    query_rows: FloatArray
    """`[Q]`, rising."""
    key_lengths: FloatArray
    """`[K]`, rising."""
    forward_s: FloatArray
    """`[Q, K]`: seconds per FLOP of attention's forward pass."""
    backward_s: FloatArray
    """`[Q, K]`: of its backward pass."""
    gemm_rows: FloatArray
    """`[G]`, rising."""
    gemm_s: FloatArray
    """`[G]`: seconds per FLOP of matrix products."""
    gemm_backward_s: FloatArray
    """`[G]`: of those of the backward pass."""
    link_latency_s: FloatArray
    """`[2]`: of a collective within a node, and between nodes."""
    link_s_per_byte: FloatArray
    """`[2]`."""
    row_scale: float
    """Rows are scaled by this before attention is looked up: fewer heads than measured fill a GPU less."""
    attention_flops: float
    """Forward FLOPs per pair of query and key, of the layers that see everything, averaged over all layers."""
    windowed_flops: float
    """The same of the layers with a window."""
    window: float
    """Keys that a windowed layer's query sees, itself included; 0 without."""
    backward_ratio: float
    """Backward FLOPs of attention over its forward FLOPs."""
    linear_flops: float
    """Forward FLOPs per row of matrix products in an average layer."""
    head_flops: float
    """Forward FLOPs per row of the vocabulary head."""
    num_layers: float
    """Layers of the model."""
    launch_s: float
    """Seconds that a layer takes however few rows there are, each time it runs."""
    recompute: float
    """Forward passes that the backward pass runs again: 1 or 0."""
    reuse_s: float
    """Seconds per row and layer of selective recomputation."""
    collective_s: float
    """Seconds per row, layer and pass of tensor-parallel collectives."""
    cp: float
    """GPUs that share every document."""
    node_group: float
    """The largest number of GPUs sharing a slice that still stand in one node, with their tensor-parallel peers."""
    key_value_bytes: float
    """Bytes of keys and values per token and layer, on one GPU."""
    key_value_back_bytes: float
    """Bytes per token and layer that travel backward where keys and values go to the queries: they themselves again,
    and their gradients back."""
    query_bytes: float
    """Bytes per token that travel forward where queries go to the keys: queries out, outputs back; infinite where
    they never do."""
    query_gradient_bytes: float
    """The same backward: queries and output gradients out, query gradients back."""
    exchanges_back: float
    """Times that GPUs sharing slices meet in the backward pass of a layer; forward they do once."""
    exchange_overlap: float
    """Share of a slice's attention behind which that exchange hides."""
    host_s_per_token: float
    """Seconds per earlier token and layer to fetch keys and values from host memory; 0 without offload."""
    host_back_s_per_token: float
    """The same backward: keys and values, and their gradients in and out."""
