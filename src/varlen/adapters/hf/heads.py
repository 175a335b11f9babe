"""Whether what stands around a decoder acts on each token alone: tried on a copy that holds none of its weights.

A class's name says little: `score` pools in one class and labels tokens in another, and a class of one's own has any
name. So the model's own code runs once, with small stand-ins in the places of the decoder and of large matrices, each
of which acts on every token by itself; then whatever reaches from one token to another is the head's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch

from varlen.adapters.hf.model import is_known, plain_class, put_on
from varlen.errors import ModelError

TOKENS = 6
"""In a row that is tried."""
_LARGE = 1 << 16
"""Numbers of a parameter that is copied as random ones; of larger ones one row stands for all."""
_DOCUMENTS = (torch.arange(5, 45)[None], torch.arange(45, 62)[None])
"""Two documents of a row that is tried; one reaches further than heads look that look at neighbours."""
Call: TypeAlias = Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]
"""Gives outputs by name for one row and its positions."""
Tries: TypeAlias = list[tuple[int, torch.Tensor]]
"""Answers, each with the token that was changed; that of none changed is the first."""
_MULTIMODAL = ("vision_config", "audio_config")


def head_fault(base: Any, decoder: Any) -> tuple[str | None, str | None]:
    """Look at what a model does beside its decoder."""
    inside = set(map(id, decoder.modules()))
    for name, module in base.named_modules():
        if id(module) not in inside and (put := put_on(module)):
            return (
                None,
                f"runs code of its own ({put} in {name or 'the model'}), and which tokens that mixes is unknown",
            )
    own = plain_class(type(base)).__name__
    trusted = own in _tried_classes() and is_known(type(base))
    if trusted and any(getattr(base.config, name, None) is not None for name in _MULTIMODAL):
        return None, None
    if trusted and not _replaced(base, decoder):
        return None, None
    try:
        copied = _copy(base, decoder)
        found = _outputs(base, copied)
        by_token = all(map(_is_of_tokens, found.values()))
        joined = (
            _joined(copied, lambda *given: dict(_answer_of(base, copied, *given)), *_DOCUMENTS)
            if by_token
            else None
        )
    except Exception as error:  # any code may stand here
        if own in _pooling_classes() and is_known(type(base)):
            return f"pools ({own}): it gives one answer a row, which the row's documents would share", None
        said = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        return (
            None,
            f"has a head that couldn't be tried alone ({said}), so it may mix tokens of different documents",
        )
    if not found:
        return None, "gives no numbers to compare, so its head may mix tokens of different documents"
    for name, values in found.items():
        if not _is_of_tokens(values):
            return (
                f"pools ({own}): {name} has the shape {list(values[0][1].shape)} for a row of {TOKENS} tokens, so "
                "the documents of a row share it",
                None,
            )
        if name == joined or _reaches(values):
            return (
                f"mixes the tokens of a row in its head ({own}): {name} at one token depends on others",
                None,
            )
    if not any(_moves(values) for values in found.values()):
        return None, "has a head that answers the same to any token when it is tried alone"
    return None, None


def acts_on_tokens(module: Any, width: int | None) -> bool:
    """Return whether a module maps each value (or, for an embedding, each id) by itself."""
    widths = [layer.in_features for layer in module.modules() if hasattr(layer, "in_features")][:1]
    for size in dict.fromkeys([*([width] if width else []), *widths]):
        try:
            copied, tries = _copy(module, None), []
            is_table = isinstance(module, torch.nn.Embedding)
            values = torch.randn(1, TOKENS, size, generator=_random())
            first = torch.arange(TOKENS)[None] if is_table else values
            with torch.no_grad():
                for place in range(-1, TOKENS):
                    given = first.clone()
                    if place >= 0:
                        given[:, place] += TOKENS if is_table else 1.0
                    tries.append((place, copied(given)))
        except Exception:  # any code may stand here
            continue
        if not all(torch.is_tensor(each) for _, each in tries) or not _is_of_tokens(tries):
            continue
        if _reaches(tries) or not _moves(tries):
            continue
        hidden = [torch.sin(ids[..., None] * torch.arange(1.0, size + 1)) for ids in _DOCUMENTS]
        try:
            if _joined(copied, partial(_named, copied), *(_DOCUMENTS if is_table else hidden)) is None:
                return True
        except Exception:  # any code may stand here
            continue
    return False


def _named(module: Any, given: torch.Tensor, _: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {"": module(given)}


def _tried_classes() -> frozenset[str]:
    """Return names of transformers' classes whose heads give logits of each token, or which have none."""
    return _names(
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
        "MODEL_MAPPING_NAMES",
    )


def _pooling_classes() -> frozenset[str]:
    """Return names of transformers' classes that give one answer for each row."""
    return _names(
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
        "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES",
    )


@lru_cache
def _names(*tables: str) -> frozenset[str]:
    """Return the classes in some of transformers' tables."""
    from transformers.models.auto import modeling_auto

    return frozenset(
        name
        for table in tables
        for names in getattr(modeling_auto, table, {}).values()
        for name in ((names,) if isinstance(names, str) else names)
    )


def _replaced(base: Any, decoder: Any) -> bool:
    """Return whether something stands beside the decoder that isn't transformers' or torch's linear and norm."""
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
    """Run a copy with one token changed after another, by other ids and by those that mark something."""
    ids = torch.arange(TOKENS)[None] + 5
    marks = [getattr(base.config, f"{name}_token_id", None) for name in ("pad", "eos", "sep", "cls", "bos")]
    changes = [(place, int(ids[0, place]) + 31) for place in range(TOKENS)]
    changes += [(place, mark) for mark in marks if isinstance(mark, int) for place in (0, 2, TOKENS - 1)]
    found: dict[str, Tries] = {}
    for place, to in [(-1, 0), *changes]:
        given = ids.clone()
        if place >= 0:
            given[:, place] = to
        for name, value in _answer_of(base, copied, given, torch.arange(TOKENS)[None]):
            found.setdefault(name, []).append((place, value))
    return {name: values for name, values in found.items() if len(values) == len(changes) + 1}


def _answer_of(
    base: Any, copied: Any, ids: torch.Tensor, places: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    """Run a copy of a model on one row."""
    arguments = _taken(base, {"input_ids": ids, "position_ids": places, "use_cache": False})
    with torch.no_grad():
        return _numbers(type(base).forward(copied, **arguments))


def _joined(copied: Any, call: Call, first: torch.Tensor, second: torch.Tensor) -> str | None:
    """Name an output in which a document's tokens depend on others of the row, its width, or where they are in it.

    In training, where parts may act otherwise and by chance, rows of one width are compared by one seed.
    """
    cut = first.shape[1]
    places = torch.cat([torch.arange(cut), torch.arange(second.shape[1])])[None]
    halves, row = (slice(None, cut), slice(cut, None)), torch.cat([first, second], 1)
    pairs = [([call(row, places), call(row[:, half], places[:, half])], half, slice(None)) for half in halves]
    for module in copied.modules():
        module.training = True
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    for half, other in (halves, halves[::-1]):
        changed = row.clone()
        changed[:, other] = row[:, other] + 2
        with torch.random.fork_rng(devices=[]):
            answers = []
            for given in (row, changed):
                torch.manual_seed(0)
                answers.append(call(given, places))
        pairs.append((answers, half, half))
    for (one, two), here, there in pairs:
        for name in one.keys() & two.keys():
            ours, theirs = one[name][:, here].float(), two[name][:, there].float()
            scale = float(one[name].float().abs().max().clamp(min=1e-6))
            if not float((ours - theirs).abs().max()) <= 1e-4 * scale:
                return name
    return None


def _taken(base: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(type(base).forward).parameters
    has_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {
        name: v for name, v in arguments.items() if name in parameters or (has_rest and name == "input_ids")
    }


def _numbers(answer: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of numbers in an answer by name; one number is a loss."""
    if hasattr(answer, "items"):
        pairs = [(str(name), value) for name, value in answer.items()]
    elif isinstance(answer, tuple | list):
        pairs = [(f"output {number}", value) for number, value in enumerate(answer)]
    else:
        pairs = [("the output", answer)]
    return [
        (name, value)
        for name, value in pairs
        if torch.is_tensor(value) and value.is_floating_point() and value.ndim
    ]


def _is_of_tokens(tries: Tries) -> bool:
    return all(each.ndim >= 2 and tuple(each.shape[:2]) == (1, TOKENS) for _, each in tries)


def _reaches(tries: Tries) -> bool:
    """Return whether the answer at any token moves with another one."""
    before = tries[0][1][0].reshape(TOKENS, -1).float()
    scale = float(before.abs().max().clamp(min=1e-6))
    for place, after in tries[1:]:
        moved = (after[0].reshape(TOKENS, -1).float() - before).abs().amax(1)
        moved[place] = 0
        if float(moved.max()) > 1e-4 * scale or bool(moved.isnan().any()):
            return True
    return False


def _moves(tries: Tries) -> bool:
    """Return whether the answer at a token depends on the token at all."""
    return any(not torch.equal(tries[0][1][0, place], each[0, place]) for place, each in tries[1:])


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _copy(module: Any, decoder: Any) -> Any:
    """Return a module of the same classes with stand-ins for the decoder, large matrices and all weights."""
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


_LEFT_OUT = ("forward", "_old_forward", "_hf_hook")
"""What Accelerate puts on single modules, bound to the module with the weights."""


def _stand_in(weight: Any) -> Any:
    """Return numbers in the shape of a parameter."""
    if weight is None:
        return None
    shape = tuple(weight.shape)
    if not weight.is_floating_point():
        return torch.zeros(shape, dtype=weight.dtype)
    if weight.numel() <= _LARGE:
        return torch.randn(shape, generator=_random()) * 0.2
    return (torch.randn(shape[-1], generator=_random()) * 0.2).expand(shape)


class _Table(torch.nn.Module):
    """Stands for an embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding_dim = width
        self.phase = torch.randn(width, generator=_random())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.sin(ids[..., None].float() * (self.phase + 1.3) + self.phase)


class _Matrix(torch.nn.Module):
    """Stands for a linear layer: all outputs depend on all inputs of a token, and on no other token's."""

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
    """Stands for a decoder: hidden states that depend on their own token alone."""

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
        return _answer()(last_hidden_state=hidden, pooler_output=pooled, hidden_states=(hidden, hidden))


def _answer() -> Any:
    from dataclasses import dataclass

    from transformers.utils.generic import ModelOutput

    global _ANSWER
    if _ANSWER is None:

        @dataclass
        class Answer(ModelOutput):
            """A decoder's answer, with nothing of what else decoders give."""

            last_hidden_state: Any = None
            pooler_output: Any = None
            hidden_states: Any = None

            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return None

        _ANSWER = Answer
    return _ANSWER


_ANSWER: Any = None
