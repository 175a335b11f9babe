"""Decide by a model's modules whether its arguments can keep the documents of a row apart.

Attention by transformers' own masks is accepted, causal or in both directions. Modules that always mix tokens are
refused by name, and unknown code is refused until `vl.verify` has tried the model.
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
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from varlen.adapters.hf.head_trial import EVEN_ROWS, ONE_A_ROW, acts_on_tokens, head_fault
from varlen.adapters.hf.model import (
    family,
    is_known,
    named_kinds,
    own_code,
    put_on,
    text_config,
    text_decoder,
    unwrap,
    uses_registry,
    wrappers,
)
from varlen.attention.rules import MASKED_LAYERS, SINGLE_TOKENS
from varlen.errors import ModelError
from varlen.model_families import FAMILIES, UNKNOWN, names_in
from varlen.parsed import parse_python

CROSS_ATTENTION = ("encoder_attn", "crossattention", "cross_attn")  # not called without an encoder
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
_BY_DOCUMENT = (
    "varlen.adapters.hf.document_outputs(model, batch) calls it for one answer a document, if it pools as heads of "
    f"transformers do; otherwise {ONE_A_ROW}"
)
_TRY = (
    "call vl.verify(model) once in this program: if it finds the documents isolated, model_inputs accepts the model "
    f"from then on; otherwise {ONE_A_ROW}"
)

_INSPECTED: dict[bool, WeakKeyDictionary[Any, tuple[str | None, str | None]]] = {
    with_head: WeakKeyDictionary() for with_head in (True, False)
}
"""By model, with its head or without: the first reason to refuse it, and what is unknown about it."""
_DIRECTIONS: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
"""By decoder: how it attends in both directions, by its modules or its code."""
_TRIED: WeakSet[Any] = WeakSet()  # models that keep documents apart, by a run of `vl.verify`
_TRYING: ContextVar[bool] = ContextVar("_TRYING", default=False)


def check_family(model: Any) -> None:
    """Refuse models whose documents no argument keeps apart."""
    _check(model, unwrap(model), with_head=True)


def check_trunk(model: Any, trunk: Any) -> None:
    """Refuse models of whose documents no argument keeps the hidden states apart, whatever is made of these.

    Args:
        model: a transformers model, bare or wrapped.
        trunk: the transformers model within it that gives the hidden states.
    """
    _check(model, trunk, with_head=False)


def pools(model: Any) -> bool:
    """Return whether a model's head or pooler makes one answer a row, so that `model_inputs` refuses it."""
    base = unwrap(model)
    reason, _ = _inspected(base, bool(family(base).boundaries), True)
    return reason is not None and reason.startswith("pools")


def _check(model: Any, base: Any, *, with_head: bool) -> None:
    config = text_config(base)
    reason = _two_sequences(base) or _soft_prompt(model) or _by_family(base)
    if not reason and not family(base).boundaries:
        reason = _foreign_layers(config) or _recurrence(base)
    if not reason:
        reason, unknown = _inspected(base, bool(family(base).boundaries), with_head)
        if not reason and unknown and base not in _TRIED and not _TRYING.get():
            raise ModelError(f"{type(base).__name__} {unknown}; {_TRY}")
    if reason:
        way_out = {"pools": _BY_DOCUMENT, "attends": EVEN_ROWS}.get(reason.partition(" ")[0], ONE_A_ROW)
        raise ModelError(f"{type(base).__name__} {reason}; {way_out}")


@contextlib.contextmanager
def accepting_unknown_code() -> Iterator[None]:
    """Accept models with unknown code within the block, in order to try them."""
    token = _TRYING.set(True)
    try:
        yield
    finally:
        _TRYING.reset(token)


def record_isolation(model: Any, is_isolated: bool) -> None:
    """Record whether a model that was tried keeps documents apart."""
    (_TRIED.add if is_isolated else _TRIED.discard)(unwrap(model))


def _two_sequences(base: Any) -> str | None:
    if getattr(base.config, "is_encoder_decoder", False):
        return "is an encoder-decoder: it takes two sequences, inputs and targets, and a PackedBatch has one"
    return None


def is_bidirectional(model: Any) -> bool:
    """Return whether tokens see later ones of their document."""
    return _both_directions(text_config(model), _decoder_of(unwrap(model))) is not None


def _both_directions(config: Any, decoder: Any) -> str | None:
    """Return by what a model attends in both directions; None if it is causal."""
    for name, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        actual = getattr(config, name, None)
        if actual is value or (name == "use_bidirectional_attention" and actual == "all"):
            return f"config.{name} is {actual!r}"
    if decoder not in _DIRECTIONS:
        _DIRECTIONS[decoder] = _direction_of(decoder)
    return _DIRECTIONS[decoder]


def _by_family(model: Any) -> str | None:
    if family(model).takes_flat_masks:
        return "takes masks of padding alone, in which documents of a row can't be told apart"
    if family(model).mixes_neighbours:
        return "joins the embedding of each token with those beside it, also of another document"
    return None


def _soft_prompt(model: Any) -> str | None:
    for wrapper in wrappers(model):
        peft: Any = getattr(wrapper, "active_peft_config", None)
        if getattr(peft, "is_prompt_learning", False):
            return (
                f"has a soft prompt of {peft.num_virtual_tokens:,} tokens (PEFT's prompt learning), which stands "
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


def _inspected(base: Any, has_boundaries: bool, with_head: bool) -> tuple[str | None, str | None]:
    """Inspect a model's modules, once per model, as there may be thousands and this runs for every batch."""
    known = _INSPECTED[with_head]
    if base not in known:
        decoder = _decoder_of(base)
        reason, unknown = _own_masks(base, decoder), None
        if not reason:
            reason, unknown = _modules(decoder, has_boundaries=has_boundaries)
        if not reason and with_head and decoder is base and getattr(base, "pooler", None) is not None:
            reason = (
                "pools (its pooler gives one vector per row, which the row's documents would share), unless it is "
                "made with add_pooling_layer=False"
            )
        for look in (_unproven_masks, partial(head_fault, base)):
            if not reason and (look is _unproven_masks or (with_head and decoder is not base)):
                reason, more = look(decoder)
                unknown = unknown or more
        known[base] = reason, unknown
    return known[base]


def _decoder_of(base: Any) -> Any:
    """Return the decoder; if the model doesn't name one, the only transformers model within it."""
    decoder = text_decoder(base)
    if decoder is not base or is_known(type(base)):
        return decoder
    from transformers import PreTrainedModel

    within = [module for module in base.children() if isinstance(module, PreTrainedModel)]
    return text_decoder(within[0]) if len(within) == 1 else decoder


def _direction_of(decoder: Any) -> str | None:
    """Return by which of its modules or masks a decoder attends in both directions; None if by none."""
    for name, module in decoder.named_modules():
        if name.rpartition(".")[2] not in CROSS_ATTENTION and getattr(module, "is_causal", True) is False:
            return f"in {name}" if name else "by its is_causal"
    names = names_in(decoder)
    if not any(map(_is_bidirectional_mask, names)):
        return None
    if not names.intersection(_CAUSAL_MASKS):
        return "its code makes bidirectional masks"
    if "is_decoder" in names and not getattr(decoder.config, "is_decoder", False):
        return "config.is_decoder is False"
    return None


def _is_bidirectional_mask(name: str) -> bool:
    return name.startswith("create_bidirectional")


def _own_masks(base: Any, decoder: Any) -> str | None:
    """Return why a model that attends in both directions can't be given masks; None if it can, or is causal.

    Masks of transformers are passed on as they are given. Those for causal models serve both directions where the
    configuration asks for that.
    """
    why = _both_directions(text_config(base), decoder)
    if why is None:
        return None
    names, config = names_in(decoder), text_config(base)
    both, causal = any(map(_is_bidirectional_mask, names)), bool(names.intersection(_CAUSAL_MASKS))
    # Of code that makes masks of both kinds the configuration must choose, as a part of it may be another's.
    chosen = (
        getattr(config, "is_causal", None) is False
        or (why.startswith("config.use_bidirectional") and "use_bidirectional_attention" in names)
        or (both and "is_decoder" in names and not getattr(config, "is_decoder", False))
    )
    if (both and not causal) or (causal and chosen):
        if uses_registry(base):
            return None
        return f"attends in both directions ({why}), and computes attention by itself"
    return f"attends in both directions ({why}), by masks of its own"


def _unproven_masks(decoder: Any) -> tuple[str | None, str | None]:
    """Return why a decoder's masks may not be transformers', by its code and transformers' list of families."""
    from transformers.models.auto import modeling_auto as auto

    name = getattr(getattr(decoder, "config", None), "model_type", "")
    names = names_in(decoder)
    if names.intersection((*_CAUSAL_MASKS, "create_masks_for_generate")) or any(
        map(_is_bidirectional_mask, names)
    ):
        return None, None
    if name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None, None
    if name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return f"attends in both directions ({name} fills in masked tokens), by masks of its own", None
    return None, (
        "makes no causal masks and isn't among transformers' causal models, so it may mix documents"
    )


def _modules(decoder: Any, *, has_boundaries: bool) -> tuple[str | None, str | None]:
    """Return why a decoder's modules are refused, and the first unknown one; modules of accepted ones are skipped."""
    unknown, accepted = None, None
    hidden = getattr(getattr(decoder, "config", None), "hidden_size", None)
    for name, module in decoder.named_modules():
        if accepted is not None and name.startswith(accepted):
            continue
        last = name.rpartition(".")[2]
        if last in CROSS_ATTENTION:
            continue
        if not has_boundaries and (fault := mixes(name, module)):
            return fault, None
        if isinstance(module, torch.nn.BatchNorm1d):
            unknown = unknown or f"takes statistics of the whole batch in {name} (BatchNorm1d)"
        if own := own_code(module):
            if name and not put_on(module) and acts_on_tokens(module, hidden):
                accepted = f"{name}."
                continue
            unknown = unknown or (
                f"runs custom code ({own} in {name or 'the decoder'}), which may mix tokens of different documents"
            )
    return None, unknown


def mixes(name: str, module: Any) -> str | None:
    """Return how one of torch's own modules mixes the tokens of a row; None if it doesn't."""
    if isinstance(module, _NEIGHBOURS) and any(size != 1 for size in module.kernel_size):
        return f"mixes neighbouring tokens in a convolution ({name}), from one document into the next"
    if isinstance(module, _ALL_TOKENS):
        return f"mixes all tokens of a row in {name} ({type(module).__name__}), which takes no boundaries"
    return None


# Whether a model's own code drops boundaries before they reach attention, determined from the installed source, as a
# list of names would get out of date.

_READ: WeakKeyDictionary[Any, tuple[str | None, bool, bool]] = WeakKeyDictionary()
"""Results of `_read` by decoder."""


def drops_boundaries(model: Any) -> str | None:
    """Return the class of a layer that takes keyword arguments and doesn't pass them on, or None.

    The model passes FlashAttention's boundaries through its layers as keyword arguments.
    """
    return _read(model)[0]


def drops_block_masks(model: Any) -> bool:
    """Return whether the model converts its masks, and ignores FlexAttention's block masks."""
    return _read(model)[1]


def takes_mapping(model: Any) -> bool:
    """Return whether a model whose layers are of several kinds takes a mask for each; else it makes all of one."""
    return _read(model)[2]


def check_kinds(model: Any) -> None:
    """Refuse masks of several kinds for a model that takes one."""
    kinds = named_kinds(text_config(model))
    if len(kinds) > 1 and not takes_mapping(model):
        raise ModelError(
            f"{type(unwrap(model)).__name__} has layers of {len(kinds)} kinds ({', '.join(kinds)}) and takes one "
            "mask for all; use varlen.adapters.hf.use_varlen_attention(model), which takes no mask, or give it one "
            "document a row (padded)"
        )


def _read(model: Any) -> tuple[str | None, bool, bool]:
    """Return the results for a decoder, whose modules' code is read once."""
    decoder = text_decoder(model)
    if decoder not in _READ:
        kinds: dict[Any, None] = dict.fromkeys(type(module) for module in decoder.modules())
        dropping = next((kind.__name__ for kind in kinds if _drops_arguments(kind)), None)
        takes = any("dict" in names_in(m, "forward") for m in decoder.modules() if hasattr(m, "config"))
        _READ[decoder] = dropping, any(map(_ignores_block_masks, kinds)), takes
    return _READ[decoder]


@lru_cache(maxsize=4096)
def _drops_arguments(kind: Any) -> bool:
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
def _ignores_block_masks(kind: Any) -> bool:
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
    """Return the syntax tree of a module's forward; None without source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))
        first = parse_python(source).body[0]
    except (OSError, TypeError, SyntaxError, AttributeError, IndexError):
        return None
    return first if isinstance(first, ast.FunctionDef) else None


# The arguments that pass segment boundaries to recurrent and convolutional layers.


def segment_arguments(name: str, ends: torch.Tensor, rows: int, width: int) -> dict[str, Any]:
    """Return the arguments that pass segments to recurrent layers, in addition to those of attention.

    Args:
        ends: int32 `[segments + 1]`, over the flattened `rows * width` tokens.

    Returns:
        `seq_idx` int32 `[rows, width]`: the number of each token's segment in its row; padding has numbers too.
    """
    boundaries = FAMILIES.get(name, UNKNOWN).boundaries
    if not boundaries:
        return {}
    if rows != 1 and boundaries == "ends":
        raise ModelError(
            f"the recurrent layers of {name} take the segments of one row, and the batch has {rows:,} rows; "
            'collate with layout="flat"'
        )
    return {"seq_idx": segment_numbers(ends, rows, width)}


def segment_numbers(ends: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Return the number of each token's segment in its row, int32 `[rows, width]`."""
    starts = torch.zeros(rows * width + 1, dtype=torch.int32, device=ends.device)
    starts[ends.long()] = 1  # the array has one more entry, as a segment may end at the end of the last row
    numbers = starts[:-1].cumsum(0, dtype=torch.int32).view(rows, width)
    return numbers - numbers[:, :1]
