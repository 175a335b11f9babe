"""Decide by a model's modules whether its arguments can keep the documents of a row apart.

Causal attention is accepted. Modules that always mix tokens are refused by name, and unknown code is refused until
`vl.verify` has tried the model.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
from transformers.utils.generic import ModelOutput

from varlen.adapters.hf.model import (
    family,
    is_known,
    named_kinds,
    own_code,
    plain_class,
    put_on,
    text_config,
    text_decoder,
    unwrap,
    wrappers,
)
from varlen.attention.rules import MASKED_LAYERS, SINGLE_TOKENS
from varlen.errors import ModelError, described
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
_ONE_A_ROW = "give it one document a row (padded)"
_TRY = (
    "call vl.verify(model) once in this program: if it finds the documents isolated, model_inputs accepts the model "
    f"from then on; otherwise {_ONE_A_ROW}"
)

_INSPECTED: WeakKeyDictionary[Any, tuple[str | None, str | None]] = WeakKeyDictionary()
"""By model: the first reason to refuse it, and what is unknown about it."""
_TRIED: WeakSet[Any] = WeakSet()  # models that keep documents apart, by a run of `vl.verify`
_TRYING: ContextVar[bool] = ContextVar("_TRYING", default=False)


def check_family(model: Any) -> None:
    """Refuse models whose documents no argument keeps apart."""
    base, config = unwrap(model), text_config(model)
    reason = _two_sequences(base) or _both_directions(config) or _soft_prompt(model) or _flat_masks(model)
    if not reason and not family(model).boundaries:
        reason = _foreign_layers(config) or _recurrence(base)
    if not reason:
        reason, unknown = _inspected(base, has_boundaries=bool(family(model).boundaries))
        if not reason and unknown and base not in _TRIED and not _TRYING.get():
            raise ModelError(f"{type(base).__name__} {unknown}; {_TRY}")
    if reason:
        raise ModelError(f"{type(base).__name__} {reason}; {_ONE_A_ROW}")


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


def _both_directions(config: Any) -> str | None:
    for name, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        actual = getattr(config, name, None)
        if actual is value or (name == "use_bidirectional_attention" and actual == "all"):
            return f"attends in both directions (config.{name} is {actual!r}), and varlen packs for causal models"
    return None


def _flat_masks(model: Any) -> str | None:
    if family(model).takes_flat_masks:
        return "takes masks of padding alone, in which documents of a row can't be told apart"
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


def _inspected(base: Any, *, has_boundaries: bool) -> tuple[str | None, str | None]:
    """Inspect a model's modules, once per model, as there may be thousands and this runs for every batch."""
    if base not in _INSPECTED:
        decoder = _decoder_of(base)
        reason, unknown = _bidirectional_reason(decoder), None
        if not reason:
            reason, unknown = _modules(decoder, has_boundaries=has_boundaries)
        if not reason and decoder is base and getattr(base, "pooler", None) is not None:
            reason = (
                "pools (its pooler gives one vector per row, which the row's documents would share), unless it is "
                "made with add_pooling_layer=False"
            )
        for look in (_unproven_causality, partial(head_fault, base)):
            if not reason and (look is _unproven_causality or decoder is not base):
                reason, more = look(decoder)
                unknown = unknown or more
        _INSPECTED[base] = reason, unknown
    return _INSPECTED[base]


def _decoder_of(base: Any) -> Any:
    """Return the decoder; if the model doesn't name one, the only transformers model within it."""
    decoder = text_decoder(base)
    if decoder is not base or is_known(type(base)):
        return decoder
    from transformers import PreTrainedModel

    within = [module for module in base.children() if isinstance(module, PreTrainedModel)]
    return text_decoder(within[0]) if len(within) == 1 else decoder


def _bidirectional_reason(decoder: Any) -> str | None:
    """Return why a decoder attends in both directions, by its modules or by its masks; None if it doesn't."""
    for name, module in decoder.named_modules():
        if name.rpartition(".")[2] not in CROSS_ATTENTION and getattr(module, "is_causal", True) is False:
            where = f"in {name}" if name else "by its is_causal"
            return f"attends in both directions ({where}), and varlen packs for causal models"
    names = names_in(decoder)
    if not any(name.startswith("create_bidirectional") for name in names):
        return None
    if not names.intersection(_CAUSAL_MASKS):
        return "attends in both directions (its code makes bidirectional masks), and varlen packs for causal models"
    if "is_decoder" in names and not getattr(decoder.config, "is_decoder", False):
        return "attends in both directions (config.is_decoder is False), and varlen packs for causal models"
    return None


def _unproven_causality(decoder: Any) -> tuple[str | None, str | None]:
    """Return why a decoder may not be causal, judged by its code and transformers' list of causal families."""
    from transformers.models.auto import modeling_auto as auto

    name = getattr(getattr(decoder, "config", None), "model_type", "")
    known = names_in(decoder).intersection((*_CAUSAL_MASKS, "create_masks_for_generate"))
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

_READ: WeakKeyDictionary[Any, tuple[str | None, bool]] = WeakKeyDictionary()
"""Results of `_read` by decoder."""


def drops_boundaries(model: Any) -> str | None:
    """Return the class of a layer that takes keyword arguments and doesn't pass them on, or None.

    The model passes FlashAttention's boundaries through its layers as keyword arguments.
    """
    return _read(model)[0]


def drops_block_masks(model: Any) -> bool:
    """Return whether the model converts its masks, and ignores FlexAttention's block masks."""
    return _read(model)[1]


def _read(model: Any) -> tuple[str | None, bool]:
    """Return both results for a decoder, whose modules' code is read once."""
    decoder = text_decoder(model)
    if decoder not in _READ:
        kinds: dict[Any, None] = dict.fromkeys(type(module) for module in decoder.modules())
        dropping = next((kind.__name__ for kind in kinds if _drops_arguments(kind)), None)
        _READ[decoder] = dropping, any(map(_ignores_block_masks, kinds))
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


# Whether the modules around a decoder act on each token independently, tested on a copy without the model's weights.
#
# Names don't decide: `score` pools in one class and labels tokens in another, and users name classes freely. So
# the model's own code runs with small stand-ins for the decoder and for large matrices, which act on each token
# independently; any dependence between tokens then comes from the head.

TOKENS = 6  # length of the test row
_LARGE = 1 << 16  # parameters with more elements are copied as one random row
_DOCUMENTS = (torch.arange(5, 45)[None], torch.arange(45, 62)[None])
"""The two documents of a test row; the first is longer than the reach of heads that use neighbouring tokens."""
Call: TypeAlias = Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]
"""Returns outputs by name for one row and its positions."""
Tries: TypeAlias = list[tuple[int, torch.Tensor]]  # (changed token, output); -1 for none changed
_MULTIMODAL = ("vision_config", "audio_config")
# transformers' tables of classes whose heads give logits per token, or that have no head
_HEADS_OF_TOKENS = (
    *("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    *("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_MAPPING_NAMES"),
)
# transformers' tables of classes whose heads give one output per row
_POOLING_HEADS = (
    *("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES"),
    "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES",
)


def head_fault(base: Any, decoder: Any) -> tuple[str | None, str | None]:
    """Return why a model's head is refused, and what is unknown about it."""
    inside = set(map(id, decoder.modules()))
    for name, module in base.named_modules():
        if id(module) not in inside and (put := put_on(module)):
            return None, (
                f"runs custom code ({put} in {name or 'the model'}), which may mix tokens of different documents"
            )
    own = plain_class(type(base)).__name__
    trusted = own in _names(*_HEADS_OF_TOKENS) and is_known(type(base))
    if trusted and any(getattr(base.config, name, None) is not None for name in _MULTIMODAL):
        return None, None
    if trusted and not _replaced(base, decoder):
        return None, None
    try:
        copied = _copy(base, decoder)
        outputs = _outputs(base, copied)
        by_token = all(map(_is_of_tokens, outputs.values()))
        coupled = (
            _coupled_output(copied, lambda *given: dict(_output_of(base, copied, *given)), *_DOCUMENTS)
            if by_token
            else None
        )
    except Exception as error:  # the head may run any code
        if own in _names(*_POOLING_HEADS) and is_known(type(base)):
            return f"pools ({own}): it gives one answer per row, which the row's documents would share", None
        why = described(error, kind=True, most=120)
        return None, (
            f"has a head that couldn't be run alone ({why}), so it may mix tokens of different documents"
        )
    if not outputs:
        return None, "gives no numbers to compare, so its head may mix tokens of different documents"
    for name, values in outputs.items():
        if not _is_of_tokens(values):
            return (
                f"pools ({own}): {name} has the shape {list(values[0][1].shape)} for a row of {TOKENS} tokens, so "
                "the documents of a row share it",
                None,
            )
        if name == coupled or _depends_on_others(values):
            return (
                f"mixes the tokens of a row in its head ({own}): {name} at one token depends on others",
                None,
            )
    if not any(_depends_on_own_token(values) for values in outputs.values()):
        return None, "has a head whose output doesn't depend on its token when it is run alone"
    return None, None


def acts_on_tokens(module: Any, width: int | None) -> bool:
    """Return whether a module maps each token's values (for an embedding, each id) independently of other tokens."""
    widths = [layer.in_features for layer in module.modules() if hasattr(layer, "in_features")][:1]
    for size in dict.fromkeys([*([width] if width else []), *widths]):
        try:
            copied, tries = _copy(module, None), []
            is_table = isinstance(module, torch.nn.Embedding)
            values = torch.randn(1, TOKENS, size, generator=_random())
            first = torch.arange(TOKENS)[None] if is_table else values
            with torch.no_grad():
                for token in range(-1, TOKENS):
                    given = first.clone()
                    if token >= 0:
                        given[:, token] += TOKENS if is_table else 1.0
                    tries.append((token, copied(given)))
        except Exception:  # the module may run any code
            continue
        if not all(torch.is_tensor(each) for _, each in tries) or not _is_of_tokens(tries):
            continue
        if _depends_on_others(tries) or not _depends_on_own_token(tries):
            continue
        hidden = [torch.sin(ids[..., None] * torch.arange(1.0, size + 1)) for ids in _DOCUMENTS]
        documents = _DOCUMENTS if is_table else hidden
        try:
            if _coupled_output(copied, partial(_named, copied), *documents) is None:
                return True
        except Exception:  # the module may run any code
            continue
    return False


def _named(module: Any, given: torch.Tensor, _: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {"": module(given)}


@lru_cache
def _names(*tables: str) -> frozenset[str]:
    from transformers.models.auto import modeling_auto

    return frozenset(
        name
        for table in tables
        for names in getattr(modeling_auto, table, {}).values()
        for name in ((names,) if isinstance(names, str) else names)
    )


def _replaced(base: Any, decoder: Any) -> bool:
    """Return whether a module beside the decoder is neither transformers' nor one of torch's plain layers."""
    inside = set(map(id, decoder.modules()))
    beside = [module for module in base.modules() if id(module) not in inside]
    plain = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm, torch.nn.Dropout, torch.nn.Identity)
    holds = {id(module) for module in beside if any(child is decoder for child in module.modules())}
    return any(
        not is_known(type(module))
        or (type(module).__module__.startswith("torch.") and not isinstance(module, plain))
        for module in beside
        if id(module) not in holds
    )


def _outputs(base: Any, copied: Any) -> dict[str, Tries]:
    """Run a copy once per changed token; tokens are changed to ordinary ids and to special ones."""
    ids = torch.arange(TOKENS)[None] + 5
    specials = [
        getattr(base.config, f"{name}_token_id", None) for name in ("pad", "eos", "sep", "cls", "bos")
    ]
    changes = [(token, int(ids[0, token]) + 31) for token in range(TOKENS)]
    changes += [(token, id) for id in specials if isinstance(id, int) for token in (0, 2, TOKENS - 1)]
    outputs: dict[str, Tries] = {}
    for token, new_id in [(-1, 0), *changes]:
        given = ids.clone()
        if token >= 0:
            given[:, token] = new_id
        for name, value in _output_of(base, copied, given, torch.arange(TOKENS)[None]):
            outputs.setdefault(name, []).append((token, value))
    return {name: values for name, values in outputs.items() if len(values) == len(changes) + 1}


def _output_of(
    base: Any, copied: Any, ids: torch.Tensor, positions: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    arguments = _taken(base, {"input_ids": ids, "position_ids": positions, "use_cache": False})
    with torch.no_grad():
        return _float_tensors(type(base).forward(copied, **arguments))


def _coupled_output(copied: Any, call: Call, first: torch.Tensor, second: torch.Tensor) -> str | None:
    """Return an output in which a document's tokens depend on the other one, the row's width or their index in it.

    In training mode, in which modules may be random, only rows of one width are compared, with one seed.
    """
    cut = first.shape[1]
    positions = torch.cat([torch.arange(cut), torch.arange(second.shape[1])])[None]
    halves, row = (slice(None, cut), slice(cut, None)), torch.cat([first, second], 1)
    pairs = [
        ([call(row, positions), call(row[:, half], positions[:, half])], half, slice(None)) for half in halves
    ]
    for module in copied.modules():
        module.training = True
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    for half, other in (halves, halves[::-1]):
        changed = row.clone()
        changed[:, other] = row[:, other] + 2
        with torch.random.fork_rng(devices=[]):
            outputs = []
            for given in (row, changed):
                torch.manual_seed(0)
                outputs.append(call(given, positions))
        pairs.append((outputs, half, half))
    for (whole, again), part, other_part in pairs:
        for name in whole.keys() & again.keys():
            difference = whole[name][:, part].float() - again[name][:, other_part].float()
            scale = float(whole[name].float().abs().max().clamp(min=1e-6))
            if not float(difference.abs().max()) <= 1e-4 * scale:
                return name
    return None


def _taken(base: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(type(base).forward).parameters
    has_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {
        name: v for name, v in arguments.items() if name in parameters or (has_rest and name == "input_ids")
    }


def _float_tensors(output: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the floating-point tensors of an output by name, without scalars, which are losses."""
    if hasattr(output, "items"):
        pairs = [(str(name), value) for name, value in output.items()]
    elif isinstance(output, tuple | list):
        pairs = [(f"output {number}", value) for number, value in enumerate(output)]
    else:
        pairs = [("the output", output)]
    return [
        (name, value)
        for name, value in pairs
        if torch.is_tensor(value) and value.is_floating_point() and value.ndim
    ]


def _is_of_tokens(tries: Tries) -> bool:
    return all(each.ndim >= 2 and tuple(each.shape[:2]) == (1, TOKENS) for _, each in tries)


def _depends_on_others(tries: Tries) -> bool:
    """Return whether the output at any token depends on another token."""
    before = tries[0][1][0].reshape(TOKENS, -1).float()
    scale = float(before.abs().max().clamp(min=1e-6))
    for token, after in tries[1:]:
        moved = (after[0].reshape(TOKENS, -1).float() - before).abs().amax(1)
        moved[token] = 0
        if float(moved.max()) > 1e-4 * scale or bool(moved.isnan().any()):
            return True
    return False


def _depends_on_own_token(tries: Tries) -> bool:
    """Return whether the output at any token depends on that token."""
    return any(not torch.equal(tries[0][1][0, token], each[0, token]) for token, each in tries[1:])


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _copy(module: Any, decoder: Any) -> Any:
    """Return a copy of a module with stand-ins for the decoder, embeddings, linear layers and all weights."""
    if module is decoder:
        return _Decoder(module)
    if isinstance(module, torch.nn.Embedding) and is_known(type(module)):
        return _Table(module.embedding_dim)
    if is_known(type(module)) and hasattr(module, "in_features") and hasattr(module, "out_features"):
        return _Matrix(module.in_features, module.out_features)
    kind: Any = plain_class(type(module))
    copied = kind.__new__(kind)
    copied.__dict__.update({name: v for name, v in module.__dict__.items() if name not in _LEFT_OUT})
    copied.__dict__.update(
        {name: type(v)() for name, v in module.__dict__.items() if "_hooks" in name and v is not None}
    )
    copied.__dict__["_compiled_call_impl"] = None
    copied.__dict__["training"] = False
    copied.__dict__["_parameters"] = {name: _stand_in(v) for name, v in module._parameters.items()}
    if isinstance(module, torch.nn.Embedding):
        rows = torch.randn(64, module.embedding_dim, generator=_random())
        copied.__dict__["_parameters"]["weight"] = rows
    copied.__dict__["_buffers"] = {name: _stand_in(v) for name, v in module._buffers.items()}
    copied.__dict__["_modules"] = {
        name: None if child is None else _copy(child, decoder) for name, child in module._modules.items()
    }
    return copied


_LEFT_OUT = ("forward", "_old_forward", "_hf_hook")  # put on single modules by Accelerate


def _stand_in(weight: Any) -> Any:
    """Return random numbers in the shape of a parameter."""
    if weight is None:
        return None
    shape = tuple(weight.shape)
    if not weight.is_floating_point():
        return torch.zeros(shape, dtype=weight.dtype)
    if weight.numel() <= _LARGE:
        return torch.randn(shape, generator=_random()) * 0.2
    return (torch.randn(shape[-1], generator=_random()) * 0.2).expand(shape)


class _Table(torch.nn.Module):
    """A stand-in for an embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding_dim = width
        self.phase = torch.randn(width, generator=_random())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.sin(ids[..., None].float() * (self.phase + 1.3) + self.phase)


class _Matrix(torch.nn.Module):
    """A stand-in for a linear layer: each output depends on all inputs of its token, and on no other token."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.inward = torch.randn(inputs, generator=_random()) / inputs**0.5
        self.outward = torch.randn(outputs, generator=_random())
        self.weight = torch.zeros(1).expand(outputs, inputs)

    def forward(self, values: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if values.shape[-1] != self.in_features:
            raise ModelError(f"{values.shape[-1]} values for {self.in_features} inputs")
        return torch.sin((values.float() @ self.inward)[..., None] * self.outward + self.outward)


class _Decoder(torch.nn.Module):
    """A stand-in for a decoder: each hidden state depends only on its own token."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.config = decoder.config
        self.dtype = torch.float32
        sizes: Any = decoder.config
        width = int(getattr(sizes, "hidden_size", None) or getattr(sizes, "n_embd", None) or 32)
        self.table = _Table(width)
        self.matrix = _Matrix(width, width)
        self.pools = getattr(decoder, "pooler", None) is not None

    def get_input_embeddings(self) -> Any:
        return self.table

    def forward(self, input_ids: Any = None, *_: Any, inputs_embeds: Any = None, **__: Any) -> Any:
        hidden = self.table(input_ids) if inputs_embeds is None else self.matrix(inputs_embeds)
        pooled = hidden[:, 0] if self.pools else None
        return _Output(last_hidden_state=hidden, pooler_output=pooled, hidden_states=(hidden, hidden))


@dataclass
class _Output(ModelOutput):
    """A decoder's output; all other fields are None."""

    last_hidden_state: Any = None
    pooler_output: Any = None
    hidden_states: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None
