"""`admit`: prove that slices of a model are the model, by a small one of the same class and config.

    class, config ──► small config ──► small model on the CPU ─┬─► its own forward, document by document ─┐
                                                               └─► slices of the documents, two passes ───┴─► equal?

A probe of the real weights would cost their memory again, and models on "meta", cut to a stage or sharded can't be
run whole. So the small model has the same code and kinds of layers, with few heads, narrow matrices and short
windows, and float64 weights of its own. It takes some tenths of a second, once a process for a class and a config.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from varlen.attention.kernels import Kernels
from varlen.errors import ModelError, VarlenError, described
from varlen.plan.one_gpu import micropacks_of_pieces
from varlen.runtime.decoder import DecoderParts, check_model, decoder_of, set_attention
from varlen.runtime.kv_cache import CachedSlice, DocumentCache
from varlen.runtime.step import run_stages, step_data
from varlen.step_plan import BACKWARD, FORWARD, Mesh, StepPlan

_LENGTHS = [19, 9]
_Slices = tuple[tuple[tuple[int, int, int], ...], ...]
_FORWARD: _Slices = (((0, 0, 7), (1, 0, 4)), ((0, 7, 12), (1, 4, 9)), ((0, 12, 19),))
_BACKWARD: _Slices = (((1, 2, 9), (0, 10, 19)), ((1, 0, 2), (0, 3, 10)), ((0, 0, 3),))
_TOLERANCE = 1e-4  # norms and softmax of a float64 model are in float32; what slices break is off by percents
_LARGEST = 30_000_000  # weights; a model with more wasn't made small


class _Fault(NamedTuple):
    """What keeps a model from being run in slices."""

    what: str
    instead: str = "train them unsliced"


_PROVEN: dict[tuple[type, str], _Fault | None] = {}
"""By class and small config: what is wrong, None for nothing."""


def admit(model: Any, kernels: Kernels) -> None:
    """Refuse a model that slices don't run, by looking at it and by a probe; leave it as it is.

    Raises:
        ModelError: what slices would compute is not what the model computes; says of which layers, and by how much.
    """
    check_model(model, kernels)
    kind, config = _plain_class(model), model.config
    try:
        smalls = [_small_config(model, number) for number in range(len(_SHRUNK))]
        key = (kind, smalls[0].to_json_string(use_diff=False))
        if key not in _PROVEN:
            _PROVEN[key] = _fault(kind, smalls)
        fault = _PROVEN[key]
    except Exception as error:
        fault = _Fault(f"their config can't be made small to prove them ({described(error, kind=True)})")
    if fault is not None:
        name = getattr(config.get_text_config(), "model_type", None) or kind.__name__
        raise ModelError(f"slices don't run {name} models ({kind.__name__}): {fault.what}; {fault.instead}")


def _plain_class(model: Any) -> Any:
    """Return the class of the transformers model inside an adapter's wrapper, apart from what `fully_shard` made."""
    kind: Any = type(model.get_base_model() if hasattr(model, "get_base_model") else model)
    bases = kind.__bases__
    is_sharded = len(bases) == 2 and bases[0].__module__.startswith("torch.distributed.")
    return bases[1] if is_sharded else kind


def _fault(kind: Any, smalls: list[Any]) -> _Fault | None:
    """Return what is wrong with the slices of a class's models; None for nothing."""
    with _apart():
        model, why, failed = None, "", None
        for small in smalls:
            try:
                model = _small_model(kind, small)
                whole = _whole(model)
                break
            except Exception as error:
                why, failed, model = why or described(error, kind=True), failed or model, None
        if model is None and failed is not None:
            return _Fault(
                f"a small one fails in its own forward, so nothing proves them ({why})", _instead(failed)
            )
        if model is None:
            return _Fault(f"no small model of their class and config could be made to prove them ({why})")
        try:
            found = _sliced(model)
            off = _difference(found, whole)
            return _Fault(f"{off}, {_layer(model)}") if off else None
        except VarlenError as error:
            return _Fault(str(error))
        except Exception as error:
            return _Fault(f"a small one fails in slices ({described(error, kind=True)})")


def _instead(model: Any) -> str:
    """Say what to train if a model's own forward fails: a language model with the same head inside, if there is one.

    transformers 5.24.0's Llama4ForConditionalGeneration fails so, whatever it is given.
    """
    head = model.get_output_embeddings()
    for path, inner in model.named_modules():
        if path and hasattr(inner, "get_output_embeddings") and inner.get_output_embeddings() is head:
            return f"give the {type(inner).__name__} inside (model.{path})"
    return "train them unsliced"


@contextmanager
def _apart() -> Iterator[None]:
    """Compute with gradients, in full precision, on the CPU, and leave random numbers as they are.

    By one thread: matrices are small, and the ranks of a machine do the same at once.
    """
    threads = torch.get_num_threads()
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
    ):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed GPUs too
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


# The small model.

_WIDTH = 128
_SIZES = {
    name: size
    for names, size in {
        "vocab_size vocab_size_per_layer_input": 96,
        "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
        "num_experts_per_tok num_experts_per_token moe_topk top_k top_k_experts moe_k": 2,
        "n_group topk_group num_expert_group": 1,
        "kv_lora_rank q_lora_rank": 16,
        "sliding_window sliding_window_size window_size": 5,
        "attention_chunk_size": 6,
        "floor_scale": 3,
        "original_max_position_embeddings": 12,
    }.items()
    for name in names.split()
}
"""Sizes of the small model, by the names that configs have for them; windows are shorter than the documents."""
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
_INNER = (
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_DEPTHS = ("num_hidden_layers", "num_layers", "depth", "n_layers")
_SHRUNK = ("all", "all but heads and width")
"""What is made small, in the order of trying: the config of an unknown class may need its own sizes."""


def _small_config(model: Any, level: int) -> Any:
    """Return a copy of a model's config for a small model with the same kinds of layers."""
    config = copy.deepcopy(model.config)
    text, own = config.get_text_config(), copy.deepcopy(decoder_of(model).config)
    overrides = own.to_dict().get("per_layer_config")
    for each in (text, own) if overrides else ():
        each.allow_global_per_layer_attribute_access = True
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if part is not None and part is not text:
            _set(part, _unused(part, level))
    depth = _depth(model)
    sizes = {name: size for name, size in _SIZES.items() if isinstance(getattr(own, name, None), int)}
    sizes = {name: min(size, getattr(own, name)) for name, size in sizes.items()}
    inner = {name: 64 for name in _INNER if isinstance(getattr(own, name, None), int)}
    lists: dict[str, Any] = {name: value[:depth] for name, value in _by_layer(own).items()}
    lists |= {name: [x for x in value if x < depth] for name, value in _numbers(own).items()}
    heads = _heads(own) if _SHRUNK[level] == "all" else {}
    tokens = {name: None for name in ("pad_token_id", "bos_token_id", "eos_token_id") if hasattr(own, name)}
    if isinstance(rope := getattr(own, "rope_parameters", None), dict):
        lists["rope_parameters"] = _short_rope(rope)
    _set(text, {"num_hidden_layers": depth, **lists, **sizes, **inner, **heads, **tokens})
    if overrides:
        text.per_layer_config = {
            int(layer): {name: min(value, heads.get(name, value)) for name, value in override.items()}
            for layer, override in overrides.items()
            if int(layer) < depth
        }
    for each in {id(x): x for x in (config, text)}.values():
        vars(each).pop("quantization_config", None)
        each._attn_implementation = "eager"
    return config


def _unused(part: Any, level: int) -> dict[str, int]:
    """Return sizes of a part that text doesn't run through, such as a vision tower: it need only be made."""
    given = {
        name: value for name, value in part.to_dict().items() if type(value) is int and "token" not in name
    }
    depths = {name: 1 for name in _DEPTHS if name in given}
    widths = {name: value // 8 for name, value in given.items() if value >= 512 and not value % 8}
    return {**(widths if _SHRUNK[level] == "all" else {}), **depths}


def _by_layer(config: Any) -> dict[str, list[Any]]:
    """Return a config's lists with a kind for each layer; not those of layers' numbers, which all differ."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if isinstance(value, list) and len(value) == config.num_hidden_layers and name not in _numbers(config)
    }


def _numbers(config: Any) -> dict[str, list[int]]:
    """Return a config's lists of numbers of layers, such as those that have experts."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if name.endswith("layers")
        and isinstance(value, list)
        and value
        and all(type(x) is int for x in value)
        and value == sorted(set(value))
        and 0 <= value[0] <= value[-1] < config.num_hidden_layers
    }


def _set(config: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        try:
            setattr(config, name, value)
        except Exception:  # derived from others
            continue


def _heads(config: Any) -> dict[str, int]:
    """Return numbers of heads, and the width that fits; the heads' dims stay, as rotary settings depend on them."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return {}
    few = {name: getattr(config, name) for name in _HEADS if isinstance(getattr(config, name, None), int)}
    few = {name: 4 if count == heads else 1 if count == 1 else 2 for name, count in few.items()}
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {**few, "hidden_size": dim * 4 if dim * heads == config.hidden_size else _WIDTH}


def _short_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return rotary settings of a text as short as the probe's."""
    short = {name: _short_rope(value) if isinstance(value, dict) else value for name, value in rope.items()}
    name = "original_max_position_embeddings"
    return {**short, name: _SIZES[name]} if isinstance(rope.get(name), int) else short


def _depth(model: Any) -> int:
    """Return how many of the first layers have a layer of each kind; at least 2."""
    decoder = decoder_of(model)
    config = decoder.config
    lists = list(_by_layer(config).values())
    layers = next(child for child in decoder.children() if isinstance(child, nn.ModuleList))
    first: dict[str, int] = {}
    for number, layer in enumerate(list(layers)[: config.num_hidden_layers]):
        kinds = [(path, type(module).__name__) for path, module in layer.named_modules()]
        first.setdefault(json.dumps([[each[number] for each in lists], kinds], default=str), number)
    return min(int(config.num_hidden_layers), max(2, 1 + max(first.values())))


def _small_model(kind: Any, config: Any) -> Any:
    """Return a model whose weights make each token matter to all that see it."""
    config = copy.deepcopy(config)
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
    if count > _LARGEST:
        raise ModelError(f"the smallest model that was found has {count:,} weights, above {_LARGEST:,}")
    # Experts run one by one: grouped kernels lack float64.
    model = kind._from_config(
        config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for part in (decoder_of(model), model.get_output_embeddings()):
            for weight in part.parameters():
                spread = torch.randn(weight.shape, dtype=torch.float64)
                scale = weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.2
                weight.copy_(spread * scale if weight.ndim > 1 else weight.nan_to_num() + spread * scale)
    inside = {id(p) for part in (decoder_of(model), model.get_output_embeddings()) for p in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in inside)
    return model.eval()


# Both ways to compute the small model.


class _Found(NamedTuple):
    losses: torch.Tensor  # `[num_tokens]`: cross-entropy of each token's next one, 0 for last ones
    gradients: dict[str, torch.Tensor]


def _tokens(model: Any) -> torch.Tensor:
    """Return the documents' tokens end to end, none of them a placeholder of images."""
    special = {v for name, v in model.config.to_dict().items() if "token" in name and isinstance(v, int)}
    text = model.config.get_text_config()
    free = [token for token in range(text.vocab_size) if token not in special]
    return torch.tensor(free)[torch.randint(len(free), (sum(_LENGTHS),))]


def _taken(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def _whole(model: Any) -> _Found:
    """Run the model as its class does, each document alone."""
    losses: list[torch.Tensor] = []
    torch.default_generator.manual_seed(0)
    for document in torch.split(_tokens(model), _LENGTHS):
        logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
        each = nn.functional.cross_entropy(logits.double(), document[1:], reduction="none")
        torch.autograd.backward(each.sum() / (sum(_LENGTHS) - len(_LENGTHS)))
        losses += [each.detach(), each.new_zeros(1)]
    return _Found(torch.cat(losses), _taken(model))


def _sliced(model: Any) -> _Found:
    """Run the model in slices of two documents, cut otherwise in the backward pass."""
    torch.default_generator.manual_seed(0)
    plan, tokens = _plan(), _tokens(model)
    parts = DecoderParts.of(model, "sdpa")
    run = run_stages(model, parts, step_data(plan, tokens, None), plan, keeps_losses=True)
    assert run.token_losses is not None
    return _Found(run.token_losses, _taken(model))


def _plan() -> StepPlan:
    numbers, count = np.zeros(len(_LENGTHS), np.int32), len(_FORWARD)
    return StepPlan(
        lengths=np.array(_LENGTHS, np.int32),
        first_ranks=numbers,
        num_ranks=numbers + 1,
        forward=micropacks_of_pieces(_FORWARD),
        backward=micropacks_of_pieces(_BACKWARD),
        tasks=np.array([FORWARD] * count + [BACKWARD] * count, np.uint8),
        task_offsets=np.array([0, 2 * count], np.int32),
        mesh=Mesh(),
        recompute="full",
    )


# How they differ.


def _difference(found: _Found, whole: _Found) -> str | None:
    """Return by how much slices are off; None if they aren't."""
    off = _off(found.losses, whole.losses)
    if not off < _TOLERANCE:
        return f"the losses of a small one in slices are off by {off:.2g} of their size"
    if missing := sorted(found.gradients.keys() ^ whole.gradients.keys()):
        return f"{missing[0]} of a small one has a gradient in slices alone, or never ({len(missing):,} such)"
    largest = max(float(x.norm()) for x in whole.gradients.values())
    distances = {
        name: float((found.gradients[name] - x).norm()) / max(float(x.norm()), 1e-3 * largest)
        for name, x in whole.gradients.items()
    }
    worst = max(
        distances, key=lambda name: distances[name] if distances[name] == distances[name] else float("inf")
    )
    if not distances[worst] < _TOLERANCE:
        return (
            f"the gradient of {worst} of a small one in slices is off by {distances[worst]:.2g} of its size"
        )
    return None


def _off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _layer(model: Any) -> str:
    """Say where slices first differ from the whole model, going forward layer by layer."""
    torch.default_generator.manual_seed(0)
    tokens, seen = torch.split(_tokens(model), _LENGTHS)[0], {}
    set_attention(model, "eager")
    parts = DecoderParts.of(model, "sdpa")
    set_attention(model, "eager")
    hooks = [
        layer.register_forward_hook(
            lambda _, given, out, n=number: seen.update(
                {n: (given[0], out if torch.is_tensor(out) else out[0])}
            )
        )
        for number, layer in enumerate(parts.layers)
    ]
    with torch.no_grad():
        model(input_ids=tokens[None], use_cache=False)
        for hook in hooks:
            hook.remove()
        parts = DecoderParts.of(model, "sdpa")
        if not _off(parts.embed(tokens), seen[0][0]) < _TOLERANCE:
            return "first before the first layer: more is done with the embedding than slices know"
        for number, (given, wanted) in sorted(seen.items()):
            cache = DocumentCache(len(tokens))
            for start, stop in ((0, 7), (7, len(tokens))):
                piece, rows = [CachedSlice(cache=cache, start=start, stop=stop)], given[:, start:stop]
                out = parts.run_layer(number, rows, parts.positions(piece, rows), piece)
                if not _off(out, wanted[:, start:stop]) < _TOLERANCE:
                    kinds = getattr(decoder_of(model).config, "layer_types", None)
                    kind = f" ({kinds[number]})" if kinds else ""
                    return (
                        f"first in layer {number}{kind}, a {type(parts.layers[number]).__name__}, whose tokens mix "
                        "otherwise than in its attention function over earlier tokens"
                    )
    return "after the last layer: more is done with norm, head or loss than slices know"
