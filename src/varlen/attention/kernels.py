"""Kernels that compute the attention of many slices in one call on CUDA, each wrapped once.

They take the rows of several slices end to end, and the keys of each slice's document up to the slice's end, with
different `cu_seqlens` for queries and keys; the causal diagonal ends at the bottom right. So a slice with earlier
tokens is one call on its document's cache, and slices that begin their documents share one call. In whole packs
queries and keys have the same `cu_seqlens`.

To add a kernel, write a class with the methods of `Kernel`, add its name to `Kernels` and its line to `MAKERS`.
`choice` tries it on a small case before using it; `tests/support/kernel_stand_ins.py` needs a stand-in for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from varlen.attention.rules import LayerRules

FLEX_BLOCK = 128  # rows, and keys, of a block of FlexAttention's masks
BoolArray = npt.NDArray[np.bool_]


class Lengths(NamedTuple):
    """Rows and keys of the slices of one call."""

    queries: tuple[int, ...]  # rows of each slice
    keys: tuple[int, ...]  # tokens of its document up to the slice's end
    sees_all: bool = False  # whether keys are earlier tokens, all of which each row sees


class SliceEnds(NamedTuple):
    """The same as tensors on the kernels' device; whole packs come in this form, and lengths aren't read back."""

    query_ends: torch.Tensor  # `cu_seqlens`, int32 `[slices + 1]`
    key_ends: torch.Tensor
    longest_query: int
    longest_key: int


class Qkv(NamedTuple):
    """Queries, keys and values, or the gradients of each."""

    query: torch.Tensor  # `[rows, query_heads, dim]`
    key: torch.Tensor  # `[tokens, key_heads, dim]`
    value: torch.Tensor  # as `key`


Merged = tuple[torch.Tensor, torch.Tensor]
"""Output, `[rows, query_heads, dim]`, and its log-sum-exp, float32 or wider `[query_heads, rows]`."""


class Kernel(Protocol):
    """Causal attention of slices, `[tokens, heads, dim]`, with the diagonal at the bottom right."""

    has_softcap: ClassVar[bool]
    has_window: ClassVar[bool]

    def forward(self, given: Qkv, lengths: Lengths, rules: LayerRules) -> Merged:
        """Return the output and its log-sum-exp."""

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Merged, lengths: Lengths, rules: LayerRules
    ) -> Qkv:
        """Return the gradients of `given`; `merged` is the result of `forward`, with sinks merged in."""


WholePacks = Callable[[Qkv, SliceEnds, LayerRules], torch.Tensor]
"""Computes all documents of packs in one call, `[tokens, query_heads, dim]`; differentiated by PyTorch."""


class TorchVarlen:
    """PyTorch's own variable-length kernel, which `torch.nn.attention.varlen` calls.

    `varlen_attn` itself takes no scale, window or grouped heads in PyTorch 2.11.
    """

    has_softcap: ClassVar = False
    has_window: ClassVar = True

    def __init__(
        self, forward: Callable[..., Any] | None = None, backward: Callable[..., Any] | None = None
    ) -> None:
        self._forward = forward or torch.ops.aten._flash_attention_forward
        self._backward = backward or torch.ops.aten._flash_attention_backward

    def forward(self, given: Qkv, lengths: Lengths | SliceEnds, rules: LayerRules) -> Merged:
        """As `Kernel.forward`."""
        ends = _as_ends(lengths, given.query.device)
        causal, sides = self._sides(rules, lengths)
        out, lse, *_ = self._forward(*given, *ends, 0.0, causal, False, scale=rules.scale, **sides)
        return out, lse

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Merged, lengths: Lengths, rules: LayerRules
    ) -> Qkv:
        """As `Kernel.backward`."""
        ends = _as_ends(lengths, gradient.device)
        seed = torch.zeros(2, dtype=torch.uint64, device=gradient.device)  # of a dropout of 0
        causal, sides = self._sides(rules, lengths)
        of_dropout = 0.0, causal, seed, gradient.new_empty(0)
        return Qkv(*self._backward(gradient, *given, *merged, *ends, *of_dropout, scale=rules.scale, **sides))

    def whole(self, given: Qkv, ends: SliceEnds, rules: LayerRules) -> torch.Tensor:
        """As `WholePacks`."""
        return self.forward(given, ends, rules)[0]

    def _sides(self, rules: LayerRules, lengths: Lengths | SliceEnds) -> tuple[bool, dict[str, int | None]]:
        """Return `is_causal`, and the two sides of a window, which replaces the causal diagonal."""
        if isinstance(lengths, Lengths) and lengths.sees_all:
            return False, {"window_size_left": None, "window_size_right": None}
        left, right = (None, None) if rules.window is None else (rules.window - 1, 0)
        if not rules.is_causal:
            return False, {"window_size_left": left, "window_size_right": left}
        return rules.window is None, {"window_size_left": left, "window_size_right": right}


class FlashAttn:
    """The variable-length kernel of the flash-attn package, 2.7 or later."""

    has_softcap: ClassVar = True
    has_window: ClassVar = True

    def __init__(
        self, forward: Callable[..., Any] | None = None, backward: Callable[..., Any] | None = None
    ) -> None:
        if forward is None or backward is None:
            from flash_attn import flash_attn_interface as package

            forward, backward = package._flash_attn_varlen_forward, package._flash_attn_varlen_backward
        self._forward, self._backward = forward, backward

    def forward(self, given: Qkv, lengths: Lengths, rules: LayerRules) -> Merged:
        """As `Kernel.forward`."""
        ends = _as_ends(lengths, given.query.device)
        out, lse, *_ = self._forward(*given, *ends, 0.0, rules.scale, **self._options(rules, lengths))
        return out, lse

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Merged, lengths: Lengths, rules: LayerRules
    ) -> Qkv:
        """As `Kernel.backward`."""
        found = Qkv(*(torch.empty_like(x) for x in given))
        both = (gradient, *given, *merged, *found, *_as_ends(lengths, gradient.device))
        options = self._options(rules, lengths) | {"alibi_slopes": None, "deterministic": False}
        self._backward(*both, 0.0, rules.scale, **options)
        return found

    @staticmethod
    def whole(given: Qkv, ends: SliceEnds, rules: LayerRules) -> torch.Tensor:
        """As `WholePacks`."""
        from flash_attn import flash_attn_varlen_func

        out: torch.Tensor = flash_attn_varlen_func(
            *given,
            *ends,
            dropout_p=rules.dropout,
            softmax_scale=rules.scale,
            causal=rules.is_causal,
            window_size=(_to_the_left(rules), 0 if rules.is_causal else _to_the_left(rules)),
            softcap=rules.softcap or 0.0,
        )
        return out

    def _options(self, rules: LayerRules, lengths: Lengths) -> dict[str, Any]:
        left, right = (-1, -1) if lengths.sees_all else (_to_the_left(rules), 0)
        sides = {"window_size_left": left, "window_size_right": right}
        return {"causal": not lengths.sees_all, **sides, "softcap": rules.softcap or 0.0}


class FlashAttn3:
    """The variable-length kernel of FlashAttention 3, for Hopper GPUs (Shah et al. 2024, arXiv 2407.08608)."""

    has_softcap: ClassVar = True
    has_window: ClassVar = True

    def __init__(
        self, forward: Callable[..., Any] | None = None, backward: Callable[..., Any] | None = None
    ) -> None:
        if forward is None or backward is None:
            import flash_attn_interface as package

            forward, backward = package._flash_attn_forward, package._flash_attn_backward
        self._forward, self._backward = forward, backward

    def forward(self, given: Qkv, lengths: Lengths, rules: LayerRules) -> Merged:
        """As `Kernel.forward`."""
        named = self._named(lengths, rules, given.query.device)
        out, lse, *_ = self._forward(*given, causal=not lengths.sees_all, **named)
        return out, lse

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Merged, lengths: Lengths, rules: LayerRules
    ) -> Qkv:
        """As `Kernel.backward`."""
        found = Qkv(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in given))
        into = dict(zip(("dq", "dk", "dv"), found))
        named = self._named(lengths, rules, gradient.device)
        self._backward(gradient, *given, *merged, is_causal=not lengths.sees_all, **into, **named)
        return found

    @staticmethod
    def _named(lengths: Lengths, rules: LayerRules, device: torch.device) -> dict[str, Any]:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        left, right = (-1, -1) if lengths.sees_all else (_to_the_left(rules), 0)
        sides = {"window_size_left": left, "window_size_right": right}
        ends = dict(zip(names, _as_ends(lengths, device)))
        return {**ends, **sides, "softmax_scale": rules.scale, "softcap": rules.softcap or 0.0}


class Cudnn:
    """cuDNN's kernel, by its Python package nvidia-cudnn-frontend, for Hopper GPUs and later.

    On an H100, slices with many earlier tokens run 1.3 to 1.7 times as fast as in PyTorch's kernel, whole documents
    about as fast, and the backward pass of a window 12 times slower (benchmarks/results/gpu/2026-11-27.json). A graph
    is compiled for a call's sizes, rounded up, in 0.1 to 2 s, and kept: new lengths rarely compile another.
    """

    has_softcap: ClassVar = False
    has_window: ClassVar = False  # its backward pass computes all pairs, those outside the window too

    def __init__(self, run: Callable[..., None] | None = None) -> None:
        self._run = run or CudnnGraphs().run

    def forward(self, given: Qkv, lengths: Lengths, rules: LayerRules) -> Merged:
        """As `Kernel.forward`."""
        given = Qkv(*(x.contiguous() for x in given))
        rows, heads, _ = given.query.shape
        wide = torch.promote_types(given.query.dtype, torch.float32)
        out = given.query.new_empty(rows, heads, given.value.shape[2])
        lse = given.query.new_empty(rows, heads, dtype=wide)
        self._run({**given._asdict(), "out": out, "lse": lse}, lengths, rules)
        return out, lse.T

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Merged, lengths: Lengths, rules: LayerRules
    ) -> Qkv:
        """As `Kernel.backward`."""
        given = Qkv(*(x.contiguous() for x in given))
        found = Qkv(*(torch.empty_like(x) for x in given))
        known = {
            "out": merged[0].contiguous(),
            "lse": merged[1].T.contiguous(),
            "by_out": gradient.contiguous(),
        }
        self._run(
            {**given._asdict(), **known, **{f"by_{name}": x for name, x in found._asdict().items()}},
            lengths,
            rules,
        )
        return found


CUDNN_TENSORS = {
    name: index
    for index, name in enumerate(
        ("query", "key", "value", "out", "lse", "by_out", "by_query", "by_key", "by_value"), start=1
    )
}
"""Numbers by which a graph of cuDNN knows its tensors; each one's offsets have a number 100 higher."""
CUDNN_ROWS, CUDNN_KEYS = 201, 202
"""The numbers of the tensors of slices' lengths."""


class CudnnSizes(NamedTuple):
    """Sizes that a graph of cuDNN is compiled for, each at least that of a call."""

    slices: int
    longest_query: int
    longest_key: int
    queries: int
    keys: int


class CudnnGraphs:
    """Graphs of cuDNN, compiled as they are needed; calls of one thread."""

    def __init__(self) -> None:
        import cudnn

        self._package = cudnn
        self._handle: Any = None
        self._graphs: dict[tuple[Any, ...], tuple[Any, int]] = {}

    def run(self, tensors: dict[str, torch.Tensor], lengths: Lengths, rules: LayerRules) -> None:
        """Run the forward pass, or, if `tensors` has gradients, the backward pass."""
        query, key = tensors["query"], tensors["key"]
        sizes, *counts = _cudnn_lengths(lengths, query.device)
        named = dict(zip((CUDNN_ROWS, CUDNN_KEYS), counts))
        for name, tensor in tensors.items():
            number, of = CUDNN_TENSORS[name], lengths.keys if _is_of_keys(name) else lengths.queries
            named[number] = tensor
            named[100 + number] = _cudnn_offsets(of, sizes.slices, tensor[0].numel(), query.device)
        if self._handle is None:
            self._handle = self._package.create_handle()
        widths = tuple((name, *tensor.shape[1:]) for name, tensor in tensors.items())
        sight = _cudnn_sight(lengths, rules)
        known = (sizes, widths, query.dtype, rules.scale, *sight.items())
        if known not in self._graphs:
            self._graphs[known] = self._compiled(tensors, sizes, sight, rules.scale)
        graph, room = self._graphs[known]
        stream = torch.cuda.current_stream(query.device).cuda_stream
        self._package.set_stream(handle=self._handle, stream=stream)
        graph.execute(named, key.new_empty(max(room, 1), dtype=torch.uint8), handle=self._handle)

    def _compiled(
        self, tensors: dict[str, torch.Tensor], sizes: CudnnSizes, sight: dict[str, Any], scale: float
    ) -> tuple[Any, int]:
        """Return a graph, and the bytes that it needs beside its tensors."""
        kinds, slices = self._package.data_type, sizes.slices
        kind = kinds.HALF if tensors["query"].dtype == torch.float16 else kinds.BFLOAT16
        graph = self._package.pygraph(
            io_data_type=kind,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=self._handle,
        )

        def numbers(number: int, count: int, of: Any) -> Any:
            return graph.tensor(uid=number, dim=(count, 1, 1, 1), stride=(1, 1, 1, 1), data_type=of)

        def shaped(name: str) -> dict[str, tuple[int, ...]]:
            _, heads, width = (*tensors[name].shape, 1)[:3]
            most = sizes.longest_key if _is_of_keys(name) else sizes.longest_query
            row = heads * width
            return {"dim": (slices, heads, most, width), "stride": (most * row, width, row, 1)}

        def given(name: str) -> Any:
            number, of = CUDNN_TENSORS[name], kinds.FLOAT if name == "lse" else kind
            made = graph.tensor(uid=number, data_type=of, **shaped(name))
            made.set_ragged_offset(numbers(100 + number, slices + 1, kinds.INT64))
            return made

        def make(made: Any, name: str) -> None:
            number, shape = CUDNN_TENSORS[name], shaped(name)
            made.set_uid(number).set_output(True).set_dim(shape["dim"]).set_stride(shape["stride"])
            made.set_data_type(kinds.FLOAT if name == "lse" else kind)
            made.set_ragged_offset(numbers(100 + number, slices + 1, kinds.INT64))

        how: dict[str, Any] = {
            "attn_scale": float(scale),
            "use_padding_mask": True,
            "seq_len_q": numbers(CUDNN_ROWS, slices, kinds.INT32),
            "seq_len_kv": numbers(CUDNN_KEYS, slices, kinds.INT32),
        }
        for name, value in sight.items():
            is_alignment = name == "diagonal_alignment"
            how[name] = getattr(self._package.diagonal_alignment, value) if is_alignment else value
        inputs = {"q": given("query"), "k": given("key"), "v": given("value")}
        if "by_out" in tensors:
            inputs |= {"o": given("out"), "dO": given("by_out"), "stats": given("lse")}
            how |= {"max_total_seq_len_q": sizes.queries, "max_total_seq_len_kv": sizes.keys}
            made = dict(zip(("by_query", "by_key", "by_value"), graph.sdpa_backward(**inputs, **how)))
        else:
            made = dict(zip(("out", "lse"), graph.sdpa(generate_stats=True, **inputs, **how)))
        for name, each in made.items():
            make(each, name)
        graph.build([self._package.heur_mode.A, self._package.heur_mode.FALLBACK])
        return graph, graph.get_workspace_size()


def _cudnn_sight(lengths: Lengths, rules: LayerRules) -> dict[str, Any]:
    """Return cuDNN's arguments that say which keys a row sees."""
    if lengths.sees_all:
        return {}
    # Of whole documents both corners are the same. At the bottom right the backward pass runs at half its rate.
    corner = "TOP_LEFT" if lengths.queries == lengths.keys else "BOTTOM_RIGHT"
    band = {} if rules.window is None else {"diagonal_band_left_bound": rules.window}
    return {"diagonal_alignment": corner, "diagonal_band_right_bound": 0, **band}


def _is_of_keys(name: str) -> bool:
    return name.removeprefix("by_") in ("key", "value")


@lru_cache(maxsize=256)
def _cudnn_lengths(lengths: Lengths, device: torch.device) -> tuple[CudnnSizes, torch.Tensor, torch.Tensor]:
    """Return sizes rounded up, and rows and keys of slices, int32; slices beyond a call's have none of either."""
    slices = 1 << (len(lengths.queries) - 1).bit_length()
    longest, totals = (tuple(_rounded_up(count(each)) for each in lengths[:2]) for count in (max, sum))
    filled = (torch.tensor([*each, *[0] * (slices - len(each))], dtype=torch.int32) for each in lengths[:2])
    rows, keys = (on_device(each, device) for each in filled)
    return CudnnSizes(slices, *longest, *totals), rows, keys


@lru_cache(maxsize=1024)
def _cudnn_offsets(lengths: tuple[int, ...], slices: int, row: int, device: torch.device) -> torch.Tensor:
    """Return where slices begin and end in a tensor of `row` numbers a token, int64 `[slices + 1]`."""
    ends = list(accumulate(lengths, initial=0))
    ends += [ends[-1]] * (slices - len(lengths))
    return on_device(torch.tensor(ends, dtype=torch.int64) * row, device)


def _rounded_up(size: int) -> int:
    """Return the next power of two, or three quarters of it, at least 64.

    >>> [_rounded_up(size) for size in (5, 96, 97, 4097)]
    [64, 96, 128, 6144]
    """
    power = 1 << (max(size, 64) - 1).bit_length()
    return power * 3 // 4 if power > 64 and size <= power * 3 // 4 else power


def _to_the_left(rules: LayerRules) -> int:
    """Return flash-attn's left window, which doesn't count the token itself; -1 for no window."""
    return -1 if rules.window is None else rules.window - 1


class Flex:
    """FlexAttention, compiled: windows and soft caps without flash-attn.

    The backward runs the forward again, so nothing is stored between the passes.
    """

    has_softcap: ClassVar = True
    has_window: ClassVar = True

    def __init__(self, attention: Callable[..., Any] | None = None) -> None:
        if attention is None:
            from torch.nn.attention.flex_attention import flex_attention

            attention = torch.compile(flex_attention, dynamic=True)
        self._attention = attention
        self._caps: dict[float, torch.Tensor] = {}

    def forward(self, given: Qkv, lengths: Lengths, rules: LayerRules) -> Merged:
        """As `Kernel.forward`."""
        out, lse = self._run(given, lengths, rules)
        return tokens_of(out), lse[0]

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Merged, lengths: Lengths, rules: LayerRules
    ) -> Qkv:
        """As `Kernel.backward`. Sinks and other keys are only in `merged`, so gradients are scaled."""
        with torch.enable_grad():
            leaves = Qkv(*(x.detach().requires_grad_() for x in given))
            out, lse = self._run(leaves, lengths, rules)
            # The weight that sinks and other keys leave to these.
            share = (lse.detach() - merged[1][None]).exp()
            # d(whole) = share * d(out) + (out - whole) * share * d(lse), all other scores being fixed.
            wide = heads_of(gradient).to(lse.dtype)
            by_lse = (wide * (out.detach() - heads_of(merged[0]))).sum(-1) * share
            by_out = (wide * share.unsqueeze(-1)).to(out.dtype)
            return Qkv(*torch.autograd.grad((out, lse), leaves, (by_out, by_lse)))

    def _run(self, given: Qkv, lengths: Lengths, rules: LayerRules) -> Merged:
        heads = [heads_of(x) for x in given]
        if rules.softcap is not None and rules.softcap not in self._caps:
            self._caps[rules.softcap] = torch.full((), rules.softcap, device=given.query.device)
        # A number would become symbolic under dynamic shapes, which the kernel doesn't take.
        cap = None if rules.softcap is None else self._caps[rules.softcap]

        def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return score if cap is None else cap * torch.tanh(score / cap)

        from torch.nn.attention.flex_attention import AuxRequest

        out, aux = self._attention(
            *heads,
            score_mod=None if cap is None else capped,
            block_mask=_block_mask(lengths, rules.window, given.query.device),
            scale=rules.scale,
            enable_gqa=given.query.shape[1] != given.key.shape[1],
            return_aux=AuxRequest(lse=True),
            # The kernel for few queries takes at most 128 rows times query heads of a key head.
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )
        return out, aux.lse


def tokens_of(heads: torch.Tensor) -> torch.Tensor:
    """View `[1, heads, tokens, dim]` as `[tokens, heads, dim]`."""
    return heads[0].transpose(0, 1)


def heads_of(tokens: torch.Tensor) -> torch.Tensor:
    """View `[tokens, heads, dim]` as `[1, heads, tokens, dim]`."""
    return tokens.transpose(0, 1)[None]


def on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor of the host; the host doesn't wait for what the device still has to do."""
    values = values.pin_memory() if device.type == "cuda" else values
    return values.to(device, non_blocking=True)


def seen_by(lengths: Lengths, window: int | None, device: torch.device) -> torch.Tensor:
    """Return which keys the rows of a call see, bool `[rows, keys]`."""
    row_slice, row_at, key_slice, key_at = positions(lengths, device)
    if lengths.sees_all:
        return row_slice[:, None] == key_slice
    distance = row_at[:, None] - key_at
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return near & (row_slice[:, None] == key_slice)


def _as_ends(lengths: Lengths | SliceEnds, device: torch.device) -> SliceEnds:
    return lengths if isinstance(lengths, SliceEnds) else _ends_on(lengths, device)


@lru_cache(maxsize=256)
def _ends_on(lengths: Lengths, device: torch.device) -> SliceEnds:
    """Return lengths as tensors; cached, since all layers of a MicroPack ask for the same."""
    ends = [list(accumulate(each, initial=0)) for each in lengths[:2]]
    queries, keys = (on_device(torch.tensor(each, dtype=torch.int32), device) for each in ends)
    return SliceEnds(queries, keys, max(lengths.queries), max(lengths.keys))


def positions(
    lengths: Lengths, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the slice and the position in its document of each row, and of each key; int64."""
    found = []
    for each in lengths[:2]:
        count = torch.tensor(each)
        owner = torch.repeat_interleave(torch.arange(len(each)), count)
        first = torch.tensor(lengths.keys) - count - (count.cumsum(0) - count)
        found += [on_device(owner, device), on_device(torch.arange(sum(each)) + first[owner], device)]
    return found[0], found[1], found[2], found[3]


@lru_cache(maxsize=32)
def _block_mask(lengths: Lengths, window: int | None, device: torch.device) -> Any:
    """Return FlexAttention's own form of `seen_by`, made of the ends of slices and not of pairs of rows and keys."""
    from torch.nn.attention.flex_attention import BlockMask

    row_slice, row_at, key_slice, key_at = positions(lengths, device)

    def sees(_batch: Any, _head: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        distance = row_at[row] - key_at[key]
        near = row_slice[row] == key_slice[key]
        near = near if lengths.sees_all else near & (distance >= 0)
        return near if window is None else near & (distance < window)

    def listed(seen: BoolArray) -> tuple[torch.Tensor, torch.Tensor]:
        counts, order = seen.sum(1, dtype=np.int32), np.argsort(~seen, axis=1, kind="stable").astype(np.int32)
        first, other = (on_device(torch.from_numpy(each)[None, None], device) for each in (counts, order))
        return first, other

    (some, some_order), (whole, whole_order) = map(listed, _blocks_seen(lengths, window))
    sizes = (sum(lengths.queries), sum(lengths.keys))
    return BlockMask.from_kv_blocks(some, some_order, whole, whole_order, FLEX_BLOCK, sees, sizes)


def _blocks_seen(lengths: Lengths, window: int | None) -> tuple[BoolArray, BoolArray]:
    """Return which blocks of keys blocks of rows see in part, and which wholly; bool `[row blocks, key blocks]`.

    Cost: constant for each slice and for each block of rows.
    """
    size, reach = FLEX_BLOCK, np.iinfo(np.int64).max // 2 if window is None else window
    row_ends, key_ends = (np.cumsum([0, *each]) for each in lengths[:2])
    some = np.zeros((-(-row_ends[-1] // size), -(-key_ends[-1] // size)), np.bool_)
    whole = np.zeros_like(some)
    for first_row, stop_row, first_key, stop_key in zip(row_ends, row_ends[1:], key_ends, key_ends[1:]):
        blocks = np.arange(first_row // size, -(-stop_row // size))
        rows = np.stack([np.maximum(first_row, blocks * size), np.minimum(stop_row, (blocks + 1) * size) - 1])
        # Of the first and the last row of each block, the keys that it sees.
        stops = np.full_like(rows, stop_key) if lengths.sees_all else rows + stop_key - stop_row + 1
        starts = np.maximum(first_key, stops - reach)
        for block, row, start, stop in zip(blocks, rows.T, starts.T, stops.T):
            some[block, start[0] // size : -(-stop[1] // size)] = True
            if row[1] - row[0] == size - 1:
                whole[block, -(-start[1] // size) : stop[0] // size] = True
    return some & ~whole, whole


Kernels = Literal["auto", "sdpa", "flash_attn_3", "cudnn", "varlen", "flash_attn", "flex"]
"""What computes slices: PyTorch's dense kernels rectangle by rectangle ("sdpa"), its variable-length one ("varlen"),
those of FlashAttention 3, of cuDNN and of flash-attn, FlexAttention, or ("auto") the first of "flash_attn_3",
"varlen", "flash_attn", "flex" and "sdpa" that can, with cuDNN for slices that have many earlier tokens."""
MAKERS: dict[str, type[Kernel]] = {
    "flash_attn_3": FlashAttn3,
    "varlen": TorchVarlen,
    "flash_attn": FlashAttn,
    "flex": Flex,
    "cudnn": Cudnn,
}
"""Kernels of whole slices, in the order in which "auto" tries them."""
