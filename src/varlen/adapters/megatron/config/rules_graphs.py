"""Rules about CUDA graphs: what is recorded once has one shape, boundaries of packed rows included."""

from __future__ import annotations

from collections.abc import Iterator

from varlen.adapters.megatron.config.finding import found
from varlen.adapters.megatron.config.reading import Reading
from varlen.adapters.megatron.config.report import ConfigFinding

IMPL = "model.cuda_graph_impl"
ROUTER = {"moe", "moe_router", "moe_preprocess"}
_WHOLE = {"full", "full_iteration", "full_iteration_inference"}


def implementation(reading: Reading) -> str:
    """Return which graphs are recorded, older switches included.

    Args:
        reading: of the configuration.
    """
    if reading[IMPL] == "none" and reading["model.enable_cuda_graph"]:
        return "local"
    if reading[IMPL] == "none" and reading["model.external_cuda_graph"]:
        return "transformer_engine"
    return str(reading[IMPL])


def is_full_iteration(reading: Reading) -> bool:
    """Return whether one graph holds a whole step."""
    kind = implementation(reading)
    return kind == "full_iteration" or (kind == "local" and "full_iteration" in _scopes(reading))


def captured(reading: Reading) -> set[str]:
    """Return the parts of a layer that Transformer Engine's graphs hold; none for all of it."""
    return _scopes(reading) - _WHOLE


def _scopes(reading: Reading) -> set[str]:
    return {*(reading["model.cuda_graph_scope"] or ()), *(reading["model.cuda_graph_modules"] or ())}


def _captures_attention(reading: Reading) -> bool:
    parts = captured(reading)
    is_by_layer = implementation(reading) == "transformer_engine" or (
        implementation(reading) == "local" and reading.dialect != "0.6"
    )
    return is_full_iteration(reading) or (is_by_layer and (not parts or "attn" in parts))


def local_graphs_hold_a_step(reading: Reading) -> Iterator[ConfigFinding]:
    """From 0.6 on `local` means graphs of a whole step; parts of layers are Transformer Engine's."""
    if reading.dialect == "0.6" and implementation(reading) == "local" and not is_full_iteration(reading):
        parts = ", ".join(sorted(captured(reading))) or "no scope"
        yield found(
            reading,
            "cuda_graph_impl",
            IMPL,
            limit="transformer_engine for parts of layers; local only with the scope full_iteration",
            what=f"local graphs with {parts}; Megatron-Bridge stops with a ValueError",
            outcome="stops",
            changes={IMPL: "transformer_engine"},
        )


def boundaries_need_a_width(reading: Reading) -> Iterator[ConfigFinding]:
    """Boundaries padded to one number are those of rows of one width."""
    setting = f"{reading.specs}.pad_cu_seqlens"
    if reading.is_offline and reading[setting] and not reading[reading.width]:
        yield found(
            reading,
            "static_width",
            reading.width,
            limit="true with pad_cu_seqlens",
            what="boundaries are padded with the row's width, which must be one; Megatron-Bridge stops "
            + ("with a ValueError" if reading.dialect == "0.6" else "as it opens the data set"),
            outcome="stops",
            changes={reading.width: True},
        )


def graphs_need_one_shape(reading: Reading) -> Iterator[ConfigFinding]:
    """Graphs over packed rows need rows of one width, and where they hold attention, boundaries of one number."""
    if not reading.is_offline:
        return
    kind = implementation(reading)
    is_graph = is_full_iteration(reading) or kind == "transformer_engine" or _captures_attention(reading)
    checked = (
        "Megatron-Bridge stops with a ValueError"
        if reading.dialect == "0.6"
        else "releases before 0.6 don't check it: the graph replays the first row's shape, or its recording ends in "
        "an error"
    )
    setting = f"{reading.specs}.pad_cu_seqlens"
    is_said_already = reading[setting] and not reading[reading.width]
    if is_graph and not reading[reading.width] and not is_said_already:
        yield found(
            reading,
            "static_width",
            reading.width,
            limit=f"true with CUDA graphs ({kind})",
            what=f"rows of several widths don't fit one graph; {checked}",
            outcome="stops" if reading.dialect == "0.6" else "silently wrong",
            changes={reading.width: True},
        )
    if _captures_attention(reading) and not reading[setting]:
        yield found(
            reading,
            "static_boundaries",
            setting,
            limit=f"true with CUDA graphs that hold attention ({kind})",
            what=f"the number of documents differs from pack to pack; {checked}",
            outcome="stops" if reading.dialect == "0.6" else "silently wrong",
            changes={setting: True, reading.width: True},
        )


def routers_stay_out_of_graphs(reading: Reading) -> Iterator[ConfigFinding]:
    """From 0.6 on: the mask that keeps padding from experts doesn't reach a router within a graph."""
    parts = captured(reading)
    is_packed = reading.is_offline or reading.is_in_batch
    if reading.dialect != "0.6" or not is_packed or not reading["model.num_moe_experts"]:
        return
    if implementation(reading) == "transformer_engine" and (not parts or parts & ROUTER):
        setting = (
            "model.cuda_graph_modules"
            if reading.says("model.cuda_graph_modules")
            else "model.cuda_graph_scope"
        )
        yield found(
            reading,
            "graph_router",
            setting,
            limit="attn only, with packed rows and experts",
            what="the padding of packed rows can't be kept from a router inside a graph; Megatron-Bridge stops with "
            "a ValueError at the first step",
            outcome="stops",
            changes={
                setting: ("attn",),
                **({"model.cuda_graph_scope": None} if setting.endswith("modules") else {}),
            },
        )


def in_batch_rows_vary(reading: Reading) -> Iterator[ConfigFinding]:
    """Rows packed within a micro-batch are as long as their documents, so no graph fits the next."""
    if reading.is_in_batch and (
        is_full_iteration(reading) or implementation(reading) == "transformer_engine"
    ):
        yield found(
            reading,
            "graph_in_batch",
            IMPL,
            limit="none with in-batch packing, unless rows have one width and one number of boundaries",
            what="the length of a row and the number of its documents change with every micro-batch",
            outcome="advice",
            changes={IMPL: "none"},
        )


RULES = (
    local_graphs_hold_a_step,
    boundaries_need_a_width,
    graphs_need_one_shape,
    routers_stay_out_of_graphs,
    in_batch_rows_vary,
)
