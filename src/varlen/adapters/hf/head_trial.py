"""Trials of a head on a copy without the model's weights: whether it acts on each token alone, and how it pools.

Names don't decide: `score` pools in one class and labels tokens in another, and users name classes freely. So
the model's own code runs with small stand-ins for the decoder and for large matrices, which act on each token
independently; any dependence between tokens then comes from the head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from transformers.utils.generic import ModelOutput

from varlen.adapters.hf.model import is_known, plain_class, put_on, text_config
from varlen.errors import ModelError, described

ONE_A_ROW = "give it one document a row (padded)"
EVEN_ROWS = f"{ONE_A_ROW}, in even batches by vl.PaddedSampler"
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


# Which hidden state of a row a head or a pooler makes its answer of, tried on a copy in the same way. A row of one
# token that has that hidden state then has the same answer.

POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "first": lambda hidden: hidden[:, :1],
    "last": lambda hidden: hidden[:, -1:],
    "mean": lambda hidden: hidden.mean(1, keepdim=True),
    "max": lambda hidden: hidden.amax(1, keepdim=True),
}
"""Ways to pool hidden states `[1, tokens, width]` into those of a row of one token."""
LAST_REAL = "last_real"  # the last that isn't the configuration's token of padding
_POOLINGS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # by model
_FIRST: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # by pooler


def head_pooling(base: Any, trunk: Any) -> str:
    """Return how a model's head pools the hidden states of its trunk: a name of `POOLED`, or `LAST_REAL`.

    Raises:
        ModelError: the head gives an answer for each token, pools in a way of its own, or couldn't be run alone.
    """
    if base not in _POOLINGS:
        _POOLINGS[base] = _tried_pooling(base, trunk)
    return _POOLINGS[base]


def _tried_pooling(base: Any, trunk: Any) -> str:
    own = plain_class(type(base)).__name__
    pad = getattr(text_config(base), "pad_token_id", None)
    try:
        copied = _copy(base, trunk)
        stand_in = next(module for module in copied.modules() if isinstance(module, _Decoder))
        width = stand_in.table.embedding_dim
        ids = torch.tensor([[token for token in range(5, 8 + TOKENS) if token != pad][:TOKENS]])
        hidden = torch.randn(2, TOKENS, width, generator=_random())

        def answer(tokens: torch.Tensor, given: torch.Tensor) -> dict[str, torch.Tensor]:
            stand_in.given = given
            positions = torch.arange(tokens.shape[1])[None]
            return dict(_output_of(base, copied, tokens, positions))

        def found_as(tokens: torch.Tensor, pooled: Callable[[torch.Tensor], torch.Tensor]) -> bool:
            one = torch.zeros(1, 1, dtype=torch.long)
            return all(
                _are_alike(answer(tokens, each[None]), answer(one, pooled(each[None]))) for each in hidden
            )

        whole, shorter = answer(ids, hidden[:1]), answer(ids[:, 1:], hidden[:1, 1:])
        by_token = [
            name for name in whole.keys() & shorter.keys() if whole[name].shape != shorter[name].shape
        ]
        how = next((name for name, pooled in POOLED.items() if found_as(ids, pooled)), None)
        if pad is not None and how is not None:
            padded = torch.cat([ids[:, :-2], torch.full((1, 2), pad)], 1)
            if how == "last" and found_as(padded, lambda given: given[:, -3:-2]):
                how = LAST_REAL
            elif not found_as(padded, POOLED[how]):
                how = None
    except Exception as error:  # the head may run any code
        why = described(error, kind=True, most=120)
        raise ModelError(f"the head of {own} couldn't be run alone ({why}); {EVEN_ROWS}") from None
    if by_token:
        raise ModelError(
            f"{own} answers for each token ({', '.join(by_token)}); call model(**model_inputs(batch, model))"
        )
    if how is None:
        raise ModelError(
            f"{own} pools a row neither by its first or last token nor by the mean or maximum of all; {EVEN_ROWS}"
        )
    return how


def pools_first_token(pooler: Any, width: int) -> bool:
    """Return whether a pooler, called with hidden states `[rows, tokens, width]`, makes its answer of the first."""
    if pooler not in _FIRST:
        hidden = torch.randn(1, TOKENS, width, generator=_random())
        try:
            copied = _copy(pooler, None)
            with torch.no_grad():
                _FIRST[pooler] = _are_alike({"": copied(hidden)}, {"": copied(hidden[:, :1])})
        except Exception:  # the pooler may run any code
            _FIRST[pooler] = False
    return _FIRST[pooler]


def _are_alike(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Return whether outputs are the same numbers but for rounding."""
    return (
        bool(first)
        and first.keys() == second.keys()
        and all(
            value.shape == second[name].shape and torch.allclose(value, second[name], rtol=1e-4, atol=1e-5)
            for name, value in first.items()
        )
    )


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
        self.given: torch.Tensor | None = None  # hidden states to return whatever the tokens
        self.pools = getattr(decoder, "pooler", None) is not None

    def get_input_embeddings(self) -> Any:
        return self.table

    def forward(self, input_ids: Any = None, *_: Any, inputs_embeds: Any = None, **__: Any) -> Any:
        if self.given is not None:
            hidden = self.given
        else:
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
