"""`Rates`: the numbers with which kernels price a slice on one mesh; and the columns of a price."""

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


LAYER_LAUNCHES: Final = (36, 78)
"""Kernels that a layer of transformers (Llama) launches in a forward and in a backward run on a MicroPack, however
many documents are whole in it. Recomputation is a forward run besides."""
SLICE_LAUNCHES: Final = (4, 12)
"""Kernels that each slice with earlier tokens adds: its keys and values go into a cache, its attention is a call of
its own, and what it sends to earlier tokens is added up."""


class Rates(NamedTuple):
    """Seconds and bytes of a slice on one GPU of a mesh, per average layer, from `CostModel.rates`.

    Seconds per FLOP are interpolated linearly in 1 / rows and 1 / keys, so that seconds are linear in rows between
    two grid points: a rate r·n / (n + n0) is exact, and more rows never take less time if that holds on the grid.
    Beyond the last grid point the rate is constant; fewer rows than the first grid point take as long as these.
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
    """`[G]`: of matrix products of the backward pass."""
    link_latency_s: FloatArray
    """`[2]`: latency of a collective within a node, and between nodes."""
    link_s_per_byte: FloatArray
    """`[2]`."""
    row_scale: float
    """Factor on rows before attention is looked up, since fewer heads than measured use a GPU less."""
    attention_flops: float
    """Forward FLOPs per pair of query and key of the layers without window, averaged over all layers."""
    windowed_flops: float
    """The same for the layers with a window."""
    window: float
    """Keys that a windowed layer's query attends to, itself included; 0 without windows."""
    backward_ratio: float
    """Backward FLOPs of attention over its forward FLOPs."""
    linear_flops: float
    """Forward FLOPs per row of matrix products in an average layer."""
    head_flops: float
    """Forward FLOPs per row of the vocabulary head."""
    weight_ratio: float
    """FLOPs of weight gradients in an average layer over those of its matrix products; frozen weights have none."""
    head_weight_ratio: float
    """The same of the vocabulary head."""
    num_layers: float
    """Layers of the model."""
    launch_s: float
    """Fixed seconds of each run of a layer."""
    slice_launch_s: float
    """Fixed seconds of each slice with earlier tokens in a forward run of a layer; others are launched together."""
    slice_launch_back_s: float
    """The same in a backward run."""
    recompute: float
    """Recomputed forward passes of an average layer."""
    reuse_s: float
    """Seconds per row and layer of selective recomputation."""
    collective_s: float
    """Seconds per row, layer and pass of tensor-parallel collectives."""
    cp: float
    """GPUs that share every document."""
    node_group: float
    """Most GPUs that share a slice within one node, together with their tensor-parallel peers."""
    key_value_bytes: float
    """Bytes of keys and values per token and layer, on one GPU."""
    key_value_back_bytes: float
    """Bytes per token and layer sent in the backward pass if keys and values are sent to the queries: they themselves
    again, and their gradients back."""
    query_bytes: float
    """Bytes per token sent in the forward pass if queries are sent to the keys: queries out, outputs back; infinite
    if they never are."""
    query_gradient_bytes: float
    """The same in the backward pass: queries and output gradients out, query gradients back."""
    exchanges_back: float
    """Number of exchanges in the backward pass of a layer; there is one in the forward pass."""
    exchange_overlap: float
    """Share of a slice's attention that overlaps with the exchange."""
    host_s_per_token: float
    """Seconds per earlier token and layer to fetch keys and values from host memory; 0 without offload."""
    host_back_s_per_token: float
    """The same in the backward pass: keys and values in, and their gradients in and out."""
