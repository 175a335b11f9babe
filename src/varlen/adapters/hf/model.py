"""Facts about a transformers model: its family, attention, sizes, arguments, and whose code its modules run."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from functools import lru_cache, partial
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from varlen.batch.packed import PackedBatch
from varlen.batch.tree_batch import TreeBatch
from varlen.errors import ModelError
from varlen.model_families import FAMILIES, UNKNOWN, Family

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""How configurations call their number of routed experts."""

_FIRST_POSITIONS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by decoder


def unwrap(model: Any) -> Any:
    """Return the transformers model inside DDP, FSDP, `torch.compile` or PEFT wrappers.

    Args:
        model: a transformers model, bare or wrapped.
    """
    *_, inner = wrappers(model)
    return inner


def wrappers(model: Any) -> Iterator[Any]:
    """Yield a model, what it wraps, and so on."""
    while True:
        yield model
        wrapped = getattr(model, "_orig_mod", None)
        # FSDP1 forwards attribute lookups, that of `config` too, so ask for its own attribute first.
        if wrapped is None:
            wrapped = getattr(model, "_fsdp_wrapped_module", None)
        if wrapped is None and not hasattr(model, "config"):
            wrapped = getattr(model, "module", None)
        if wrapped is None and hasattr(model, "get_base_model"):
            wrapped = model.get_base_model()
        if not isinstance(wrapped, torch.nn.Module):
            return
        model = wrapped


def model_inside(model: Any) -> Any:
    """Return the only transformers model inside a module of one's own; other models as they are."""
    held = {} if hasattr(unwrap(model), "config") else _held(model)
    return next(iter(held.values())) if len(held) == 1 else model


def _held(model: Any) -> dict[str, Any]:
    """Return the outermost transformers models inside a module, by name."""
    from transformers import PreTrainedModel

    held: dict[str, Any] = {}
    for name, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(module, PreTrainedModel) and not any(name.startswith(f"{other}.") for other in held):
            held[name] = module
    return held


def _way_in(model: Any) -> str:
    """Say which model to pass in place of one that isn't a transformers model."""
    held = [f"its .{name} ({type(inner).__name__})" for name, inner in _held(model).items()]
    return " or ".join(held) or "a PreTrainedModel"


def text_decoder(model: Any) -> Any:
    """Return the module that mixes tokens: the decoder without its head, or the text part of several."""
    base = unwrap(model)
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base
    # Some heads call their last matrix "decoder", which transformers then takes for one.
    return decoder if hasattr(decoder, "config") else getattr(base, "base_model", base)


def text_config(model: Any) -> Any:
    """Return the configuration of the model's text decoder.

    Args:
        model: a transformers model, bare or wrapped.

    Raises:
        ModelError: not a transformers model.
    """
    config = getattr(unwrap(model), "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ModelError(f"{type(model).__name__} has no transformers config; pass {_way_in(model)}")
    return config.get_text_config(decoder=True)


def model_type(model: Any) -> str:
    """Return the family of the model's text decoder, as transformers names it.

    Args:
        model: a transformers model, bare or wrapped.
    """
    return getattr(text_config(model), "model_type", "")


def family(model: Any) -> Family:
    """Return what is known of a model's family."""
    return FAMILIES.get(model_type(model), UNKNOWN)


def first_position(model: Any) -> int:
    """Return the position of a document's first token: `padding_idx + 1` if positions have one, else 0.

    RoBERTa and its relatives are of the first kind.

    Args:
        model: a transformers model, bare or wrapped.
    """
    decoder = text_decoder(model)
    if decoder not in _FIRST_POSITIONS:
        padding = (
            getattr(module, "padding_idx", None)
            for name, module in decoder.named_modules()
            if name.endswith("position_embeddings")
        )
        found = next((index for index in padding if index is not None), None)
        _FIRST_POSITIONS[decoder] = 0 if found is None else found + 1
    return _FIRST_POSITIONS[decoder]


def implementation(model: Any) -> str:
    """Return the name of the attention function that the model is set to, "eager" where none is named.

    Args:
        model: a transformers model, bare or wrapped.
    """
    return getattr(text_config(model), "_attn_implementation", None) or "eager"


def named_kinds(config: Any) -> tuple[str, ...]:
    """Return the kinds of attention among the layers, by first use; empty where they have no names."""
    return tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))


_SLIDING = "bidirectional_sliding_window_mask"


def only_kind(model: Any) -> str:
    """Return the kind of attention of a model whose layers are all alike and have no names.

    A window in the config is not enough: some models (Moshi) carry one that they never use. So the source
    of the model is asked whether it makes windowed masks, as transformers does for such questions.
    """
    config = text_config(model)
    if getattr(config, "sliding_window", None) is not None:
        module = inspect.getmodule(type(text_decoder(model)))
        try:
            source = inspect.getsource(module) if module else ""
        except OSError:
            source = ""
        if not source or "sliding_window_causal_mask" in source or _SLIDING in source:
            return "sliding_attention"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "chunked_attention"
    return "full_attention"


def vocabulary_size(model: Any) -> int:
    """Return how many token ids the model embeds.

    Args:
        model: a transformers model, bare or wrapped.

    Raises:
        ModelError: neither the model nor its config says.
    """
    config = text_config(model)
    size = getattr(_embeddings(model, "get_input_embeddings"), "num_embeddings", None)
    if size is None and getattr(config, "vocab_size", None) is None:
        raise ModelError(
            f"{type(unwrap(model)).__name__} doesn't say how many tokens it embeds: its config has no vocab_size, "
            "and get_input_embeddings() returns no embedding; set config.vocab_size"
        )
    return int(config.vocab_size if size is None else size)


def _embeddings(model: Any, getter: str) -> Any:
    """Return what one of the model's getters returns; None if it has none."""
    try:
        return getattr(unwrap(model), getter)()
    except (NotImplementedError, AttributeError):
        return None


def logits_size(model: Any) -> int:
    """Return how many tokens the model can predict: a few models embed more than those.

    Args:
        model: a transformers model, bare or wrapped.
    """
    head = _embeddings(model, "get_output_embeddings")
    size = getattr(head, "out_features", None)
    return vocabulary_size(model) if size is None else int(size)


def has_experts(model: Any) -> bool:
    """Return whether tokens are routed to experts, whose grouping makes rounding depend on other tokens.

    Args:
        model: a transformers model, bare or wrapped.
    """
    config = text_config(model)
    return any((getattr(config, name, None) or 0) > 1 for name in EXPERT_COUNTS)


def uses_registry(model: Any) -> bool:
    """Return whether the model computes attention through transformers' registry of attention functions.

    A model that doesn't takes any registered name and computes its own attention all the same.
    """
    base = unwrap(model)
    method = getattr(base, "_can_set_attn_implementation", None)
    return bool(method()) if method is not None else bool(getattr(base, "_supports_attention_backend", False))


def accepts(model: Any, name: str) -> bool:
    """Return whether the model's forward takes an argument of this name, if need be in its `**kwargs`.

    `position_ids` must be in the signature, as models that compute positions themselves ignore it in `**kwargs`; and
    so must `token_type_ids`.

    Args:
        model: a transformers model, bare or wrapped.
        name: of the argument.
    """
    parameters = inspect.signature(unwrap(model).forward).parameters
    if name in parameters or name in ("position_ids", "token_type_ids"):
        return name in parameters
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def shifts_labels(model: Any) -> bool:
    """Return whether a model's own loss is that of the next token, which shifts the labels that it is given."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    base = unwrap(model)
    kind = getattr(base, "loss_type", None)
    if kind not in LOSS_MAPPING:
        return True  # transformers takes the next token's then
    return not is_known(type(base)) or LOSS_MAPPING[kind] is ForCausalLMLoss


def check_size(batch: PackedBatch | TreeBatch, model: Any, longest: int) -> None:
    """Refuse a batch with longer documents or larger token ids than the model was made for.

    Args:
        batch: of documents, or of trees of rows.
        model: a transformers model.
        longest: tokens of the longest document or row.
    """
    what = "row" if isinstance(batch, TreeBatch) else "document"
    name, positions = (
        type(unwrap(model)).__name__,
        getattr(text_config(model), "max_position_embeddings", None),
    )
    if isinstance(positions, int) and positions > 0:
        positions = max(positions - first_position(model), 1)
    if isinstance(positions, int) and 0 < positions < longest:
        out = (
            "leave longer rows out, or shorten them"
            if isinstance(batch, TreeBatch)
            else f'pack with capacity at most {positions:,} and overlong="split" or "truncate"'
        )
        raise ModelError(
            f"the longest {what} has {longest:,} tokens, but {name} has {positions:,} positions "
            f"(max_position_embeddings); {out}"
        )
    vocabulary = vocabulary_size(model)
    if batch.max_token_id >= vocabulary:
        raise ModelError(
            f"the batch holds token id {batch.max_token_id:,}, but {name} embeds ids below {vocabulary:,}; "
            "use the model's own tokenizer, or model.resize_token_embeddings"
        )
    if (smallest := _smallest_id(batch.input_ids)) < min(0, batch.pad_id):
        raise ModelError(
            f"the batch holds token id {smallest:,}, but {name} embeds ids from 0; replace placeholders before "
            "packing"
        )
    if not 0 <= batch.pad_id < vocabulary:
        raise ModelError(
            f"padding is token id {batch.pad_id:,}, but {name} embeds ids 0 to {vocabulary - 1:,}; collate "
            "with pad_id=0, since no document sees padding"
        )


def _smallest_id(input_ids: Any) -> int:
    """Return the smallest token id; 0 for an empty batch, and on a GPU, where asking would wait."""
    if torch.is_tensor(input_ids):
        return int(input_ids.min()) if input_ids.numel() and input_ids.device.type == "cpu" else 0
    return int(input_ids.min()) if input_ids.size else 0


# Whose code a module runs: that of known libraries, or the user's own.
#
# A class may be the user's own in part, and code is also put on single modules, on library classes and into hooks.

KNOWN_LIBRARIES = frozenset(
    (
        "torch",
        "transformers",
        "peft",
        "bitsandbytes",
        "torchao",
        "accelerate",
        "liger_kernel",
        "kernels",
        "trl",
        "varlen",
    )
)
"""Whose modules are known: those that mix tokens are named elsewhere, and the others act on each token alone."""
_COMPUTE_NOTHING = frozenset(("__init__", "__repr__", "extra_repr", "reset_parameters", "_init_weights"))
_WRAPPING = frozenset((*sys.stdlib_module_names, "typing_extensions"))  # their decorators call what they wrap
_FORWARDS = ("forward", "_old_forward", "_original_forward")
"""Attributes of single modules: what is called in place of the class's forward, and what accelerate wraps there."""


def is_known(kind: Any) -> bool:
    """Return whether the code of a class of modules is that of libraries whose modules are known."""
    return _own_class(kind) is None


def plain_class(kind: Any) -> Any:
    """Return the class that torch subclassed, as `fully_shard` does; the class itself if torch didn't."""
    bases = kind.__bases__
    return bases[1] if len(bases) == 2 and bases[0].__module__.startswith("torch.distributed.") else kind


def own_code(module: Any) -> str | None:
    """Name the user's own code that a module runs when it is called; None if it runs none."""
    own = _own_class(type(module))
    return own.__name__ if own is not None else put_on(module)


def put_on(module: Any) -> str | None:
    """Name the user's own code that was put on a single module; None if there is none."""
    for name in _FORWARDS:
        if (put := vars(module).get(name)) is not None and not _is_of_libraries(put):
            return f"a {name} that was put on it"
    for hook in (*vars(module)["_forward_pre_hooks"].values(), *vars(module)["_forward_hooks"].values()):
        if not _is_of_libraries(hook) and not _returns_none(hook):
            return f"the hook {getattr(hook, '__qualname__', type(hook).__name__)}"
    return None


def _own_class(kind: Any) -> Any:
    """Return the first unknown class in a module's bases that computes something; None for none."""
    for number, each in enumerate(kind.__mro__):
        if each is torch.nn.Module:
            return None
        functions = {
            name: v for name, v in vars(each).items() if name not in _COMPUTE_NOTHING and callable(v)
        }
        if _is_library(each.__module__):
            if not all(isinstance(v, type) or _is_of_libraries(v) for v in functions.values()):
                return each
        elif any(name in ("forward", "__call__") or _replaces(name, kind, number) for name in functions):
            return each
    return None


def _replaces(name: str, kind: Any, number: int) -> bool:
    """Return whether a method overrides one that a forward may call, so none of `Module` or `PreTrainedModel`."""
    for each in kind.__mro__[number + 1 :]:
        if each is torch.nn.Module or each.__module__ == "transformers.modeling_utils":
            return False
        if name in vars(each):
            return True
    return False


def _is_library(module: Any) -> bool:
    return str(module).partition(".")[0] in KNOWN_LIBRARIES


def _is_of_libraries(function: Any) -> bool:
    """Return whether a function and all that it wraps are defined in known libraries, whatever their names say."""
    wrapped = getattr(function, "__wrapped__", None)
    if isinstance(function, partial):
        function = function.func
    plain = getattr(function, "__func__", function)
    if not hasattr(plain, "__globals__"):
        plain = vars(type(plain)).get("__call__", plain)
    written = getattr(plain, "__globals__", {}).get("__name__") or type(function).__module__
    if wrapped is not None and str(written).partition(".")[0] in _WRAPPING:
        return _is_of_libraries(wrapped)
    if not _is_library(written) and written != "builtins":
        return False
    return wrapped is None or _is_of_libraries(wrapped)


def _returns_none(hook: Any) -> bool:
    """Return whether a hook always returns None, so that it changes neither input nor output."""
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return code is not None and _ends_with_none(code)


@lru_cache(maxsize=256)
def _ends_with_none(code: CodeType) -> bool:
    before = None
    for step in dis.get_instructions(code):
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return False
        is_none = before is not None and before.opname == "LOAD_CONST" and before.argval is None
        if step.opname == "RETURN_VALUE" and not is_none:
            return False
        before = step
    return True
