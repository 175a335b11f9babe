"""What mixes the tokens of a row in a model, judged on the modules that are there.

Causal attention passes; what no argument keeps apart is refused by name; what is unknown is refused until
`vl.verify` has tried it.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache, partial
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from varlen.adapters.hf.heads import acts_on_tokens, head_fault
from varlen.adapters.hf.model import (
    family,
    is_known,
    own_code,
    put_on,
    text_config,
    text_decoder,
    unwrap,
    wrappers,
)
from varlen.attention.rules import MASKED_LAYERS, SINGLE_TOKENS, named_kinds
from varlen.errors import ModelError
from varlen.model_families import family_named
from varlen.parsed import parse_python

CROSS_ATTENTION = ("encoder_attn", "crossattention", "cross_attn")
"""Modules that aren't called where there is no encoder."""
_CAUSAL_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
_NEIGHBOURS = (
    *(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d),
    *(torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d),
)
_ALL_TOKENS = (
    *(torch.nn.RNNBase, torch.nn.MultiheadAttention, torch.nn.Transformer),
    *(torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer),
    *(torch.nn.InstanceNorm1d, torch.nn.GroupNorm),
    *(torch.nn.AvgPool1d, torch.nn.MaxPool1d, torch.nn.AdaptiveAvgPool1d, torch.nn.AdaptiveMaxPool1d),
)
"""torch's own modules that mix the tokens of a row without regard to documents."""
_ONE_A_ROW = "give it one document a row (padded)"
_TRY = (
    "call vl.verify(model) once in this program: where it finds documents apart, model_inputs takes the model "
    f"from then on; else {_ONE_A_ROW}"
)

_LOOKED_THROUGH: WeakKeyDictionary[Any, tuple[str | None, str | None]] = WeakKeyDictionary()
"""Models that were looked through, each with the first reason found to refuse it, and what is unknown of it."""
_TRIED: WeakSet[Any] = WeakSet()
"""Models that `vl.verify` has found to keep documents apart."""
_TRYING: ContextVar[bool] = ContextVar("_TRYING", default=False)


def check_family(model: Any) -> None:
    """Refuse models whose documents no argument keeps apart."""
    base, config = unwrap(model), text_config(model)
    reason = _two_sequences(base) or _both_directions(config) or _soft_prompt(model) or _flat_masks(model)
    if not reason and not family(model).boundaries:
        reason = _foreign_layers(config) or _recurrence(base)
    if not reason:
        reason, unknown = _looked_through(base, told=bool(family(model).boundaries))
        if not reason and unknown and base not in _TRIED and not _TRYING.get():
            raise ModelError(f"{type(base).__name__} {unknown}; {_TRY}")
    if reason:
        raise ModelError(f"{type(base).__name__} {reason}; {_ONE_A_ROW}")


@contextlib.contextmanager
def trying() -> Iterator[None]:
    """Let models through that hold unknown code, to be tried."""
    token = _TRYING.set(True)
    try:
        yield
    finally:
        _TRYING.reset(token)


def found_apart(model: Any, is_apart: bool) -> None:
    """Remember whether a model that was tried keeps documents apart."""
    (_TRIED.add if is_apart else _TRIED.discard)(unwrap(model))


def _two_sequences(base: Any) -> str | None:
    if getattr(base.config, "is_encoder_decoder", False):
        return "is an encoder-decoder: it takes two sequences, inputs and targets, and a PackedBatch has one"
    return None


def _both_directions(config: Any) -> str | None:
    for name, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        said = getattr(config, name, None)
        if said is value or (name == "use_bidirectional_attention" and said == "all"):
            return (
                f"attends in both directions (config.{name} is {said!r}), and varlen packs for causal models"
            )
    return None


def _flat_masks(model: Any) -> str | None:
    if family(model).takes_flat_masks:
        return "takes masks of padding alone, in which documents of a row can't be told apart"
    return None


def _soft_prompt(model: Any) -> str | None:
    for wrapper in wrappers(model):
        told: Any = getattr(wrapper, "active_peft_config", None)
        if getattr(told, "is_prompt_learning", False):
            return (
                f"has a soft prompt of {told.num_virtual_tokens:,} tokens (PEFT's prompt learning), which stands "
                "before a row and not before each of its documents"
            )
    return None


def _foreign_layers(config: Any) -> str | None:
    foreign = [kind for kind in named_kinds(config) if kind not in (*MASKED_LAYERS, *SINGLE_TOKENS)]
    if not foreign:
        return None
    count = sum(kind in foreign for kind in config.layer_types)
    return (
        f"has {count:,} of {len(config.layer_types):,} layers of kind {', '.join(foreign)}, in which a mask "
        "doesn't keep documents apart"
    )


def _recurrence(base: Any) -> str | None:
    if getattr(base, "_is_stateful", False):
        return "carries a recurrent state from token to token, from one document into the next"
    return None


def _looked_through(base: Any, *, told: bool) -> tuple[str | None, str | None]:
    """Look through a model's modules, once a model: there are thousands, and a batch comes every step."""
    if base not in _LOOKED_THROUGH:
        decoder = _mixer(base)
        reason, unknown = _direction(decoder), None
        if not reason:
            reason, unknown = _modules(decoder, told=told)
        if not reason and decoder is base and getattr(base, "pooler", None) is not None:
            reason = (
                "pools (its pooler gives one vector a row, which the row's documents would share), unless it is made "
                "with add_pooling_layer=False"
            )
        for look in (_no_sign_of_causality, partial(head_fault, base)):
            if not reason and (look is _no_sign_of_causality or decoder is not base):
                reason, more = look(decoder)
                unknown = unknown or more
        _LOOKED_THROUGH[base] = reason, unknown
    return _LOOKED_THROUGH[base]


def _mixer(base: Any) -> Any:
    """Return the decoder; of a model that has no name for it, the one transformers model within it."""
    decoder = text_decoder(base)
    if decoder is not base or is_known(type(base)):
        return decoder
    from transformers import PreTrainedModel

    within = [module for module in base.children() if isinstance(module, PreTrainedModel)]
    return text_decoder(within[0]) if len(within) == 1 else decoder


def _direction(decoder: Any) -> str | None:
    """Say that a decoder attends in both directions: by its modules, or by the masks that its code makes."""
    for name, module in decoder.named_modules():
        if name.rpartition(".")[2] not in CROSS_ATTENTION and getattr(module, "is_causal", True) is False:
            where = f"in {name}" if name else "by its is_causal"
            return f"attends in both directions ({where}), and varlen packs for causal models"
    names = _names_of(decoder)
    if not any(name.startswith("create_bidirectional") for name in names):
        return None
    if not names.intersection(_CAUSAL_MASKS):
        return "attends in both directions (its code makes bidirectional masks), and varlen packs for causal models"
    if "is_decoder" in names and not getattr(decoder.config, "is_decoder", False):
        return "attends in both directions (config.is_decoder is False), and varlen packs for causal models"
    return None


def _no_sign_of_causality(decoder: Any) -> tuple[str | None, str | None]:
    """Say that nothing shows a decoder to be causal: neither its code nor transformers' list of such families."""
    from transformers.models.auto import modeling_auto as auto

    name = getattr(getattr(decoder, "config", None), "model_type", "")
    known = _names_of(decoder).intersection((*_CAUSAL_MASKS, "create_masks_for_generate"))
    if known or name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None, None
    if name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return (
            f"attends in both directions ({name} fills in masked tokens, and its code makes no causal masks), and "
            "varlen packs for causal models",
            None,
        )
    return None, (
        "makes no causal masks and isn't among transformers' causal models, so it may mix documents"
    )


def _names_of(module: Any) -> frozenset[str]:
    kind: Any = type(module)
    return _names_in(kind)


@lru_cache(maxsize=1024)
def _names_in(kind: Any) -> frozenset[str]:
    """Return the globals and attributes that the code of a class, and of those that it derives from, refers to.

    Code objects are read: sources may be absent, and finding a class in one parses the whole file.
    """
    codes: list[CodeType] = []
    for each in kind.__mro__:
        if each.__module__ not in (
            "transformers.modeling_utils",
            "builtins",
        ) and not each.__module__.startswith("torch."):
            for member in vars(each).values():
                codes += _codes_of(member)
    found: set[str] = set()
    while codes:
        code = codes.pop()
        found.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(found)


def _codes_of(member: Any) -> list[CodeType]:
    """Return the code of a member of a class: of a method, behind its decorators, or of a property's functions."""
    if isinstance(member, property):
        return [code for each in (member.fget, member.fset, member.fdel) if each for code in _codes_of(each)]
    function: Any = getattr(member, "__func__", member)
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return [code] if isinstance(code, CodeType) else []


def _modules(decoder: Any, *, told: bool) -> tuple[str | None, str | None]:
    """Return why a decoder's modules are unfit, and the first that is unknown."""
    unknown, passed = None, None
    hidden = getattr(getattr(decoder, "config", None), "hidden_size", None)
    for name, module in decoder.named_modules():
        if passed is not None and name.startswith(passed):
            continue
        last = name.rpartition(".")[2]
        if last in CROSS_ATTENTION:
            continue
        if not told and (fault := mixes(name, module)):
            return fault, None
        if isinstance(module, torch.nn.BatchNorm1d):
            unknown = unknown or f"takes statistics of the whole batch in {name} (BatchNorm1d)"
        if own := own_code(module):
            if name and not put_on(module) and acts_on_tokens(module, hidden):
                passed = f"{name}."
                continue
            unknown = unknown or (
                f"runs code of its own ({own} in {name or 'the decoder'}), and which tokens that mixes is unknown"
            )
    return None, unknown


def mixes(name: str, module: Any) -> str | None:
    """Say that one of torch's own modules mixes the tokens of a row."""
    if isinstance(module, _NEIGHBOURS) and any(size != 1 for size in module.kernel_size):
        return f"mixes neighbouring tokens in a convolution ({name}), from one document into the next"
    if isinstance(module, _ALL_TOKENS):
        return f"mixes all tokens of a row in {name} ({type(module).__name__}), which takes no boundaries"
    return None


# What a model's own code does with arguments that tell boundaries: some drop them on their way to attention.
#
# Read off the installed source and not off a list of names, which would age.

_READ: WeakKeyDictionary[Any, tuple[str | None, bool]] = WeakKeyDictionary()
"""Decoders whose code was read, each with what was found."""


def drops_boundaries(model: Any) -> str | None:
    """Return the class of a layer that takes keyword arguments and passes them on nowhere, or None.

    FlashAttention's boundaries travel as keyword arguments, from the model through its layers.
    """
    return _read(model)[0]


def drops_block_masks(model: Any) -> bool:
    """Return whether the model makes its masks over, and passes over those of FlexAttention while it does."""
    return _read(model)[1]


def _read(model: Any) -> tuple[str | None, bool]:
    """Read the code of a decoder's modules, once a model: there are thousands, and a batch comes every step."""
    decoder = text_decoder(model)
    if decoder not in _READ:
        kinds: dict[Any, None] = dict.fromkeys(type(module) for module in decoder.modules())
        swallowing = next((kind.__name__ for kind in kinds if _swallows(kind)), None)
        _READ[decoder] = swallowing, any(map(_passes_over, kinds))
    return _READ[decoder]


@lru_cache(maxsize=4096)
def _swallows(kind: Any) -> bool:
    if not kind.__module__.startswith("transformers."):
        return False
    function = _forward(kind)
    if function is None or function.args.kwarg is None:
        return False
    name = function.args.kwarg.arg
    return not any(
        keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id == name
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    )


@lru_cache(maxsize=4096)
def _passes_over(kind: Any) -> bool:
    if not kind.__module__.startswith("transformers."):
        return False
    phrase = "not isinstance(attention_mask, BlockMask)"
    try:
        if phrase not in inspect.getsource(sys.modules[kind.__module__]):
            return False
        functions = [inspect.unwrap(each) for each in vars(kind).values() if inspect.isfunction(each)]
        return any(phrase in inspect.getsource(function) for function in functions)
    except (OSError, TypeError, KeyError):
        return False


def _forward(kind: Any) -> ast.FunctionDef | None:
    """Return the syntax of a module's forward; None where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))
        found = parse_python(source).body[0]
    except (OSError, TypeError, SyntaxError, AttributeError, IndexError):
        return None
    return found if isinstance(found, ast.FunctionDef) else None


# The arguments that give recurrent and convolving layers the boundaries of segments.


def segment_arguments(name: str, ends: torch.Tensor, rows: int, width: int) -> dict[str, Any]:
    """Return the arguments that give recurrent layers the segments, beside those of attention.

    Args:
        ends: int32 `[segments + 1]`, over the flattened `rows * width` tokens.

    Returns:
        `seq_idx` int32 `[rows, width]`: the number of each token's segment in its row, those of padding included.
    """
    told = family_named(name).boundaries
    if not told:
        return {}
    if rows != 1 and told == "ends":
        raise ModelError(
            f"the recurrent layers of {name} take the segments of one row, and the batch has {rows:,} rows; "
            'collate with layout="flat"'
        )
    starts = torch.zeros(rows * width + 1, dtype=torch.int32, device=ends.device)
    starts[ends.long()] = 1  # one more, as segments may end where the last row does
    numbers = starts[:-1].cumsum(0, dtype=torch.int32).view(rows, width)
    return {"seq_idx": numbers - numbers[:, :1]}
