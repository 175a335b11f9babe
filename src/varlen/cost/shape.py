"""`ModelShape`: the numbers of a decoder that decide what a token of it costs, in FLOPs and in bytes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from varlen.cost import config
from varlen.cost.shapes import POSITIONS, SHAPES
from varlen.errors import SettingError

_LEAST_ONE = ("hidden", "layers", "heads", "vocab")
_MAY_BE_NONE = ("name", "max_positions")


def _words(name: str) -> list[str]:
    """The letters and numbers of a name: llama, 3, 8 and b of llama-3-8b."""
    return re.findall(r"[a-z]+|[0-9.]+", name)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder's shape: grouped or latent attention, dense or mixture-of-experts layers, windows, the head.

    Layers that differ are averaged: a planner moves whole layers between stages and cannot tell them apart.
    Experts are divided among tensor-parallel GPUs like every other column, and run at the rate of all rows of a
    MicroPack; expert parallelism over data-parallel ranks, its all-to-all and uneven routing are not modelled.
    Latents are expanded once a token, not again for each later slice. Multi-token prediction is not counted.
    """

    name: str = ""
    hidden: int
    layers: int
    heads: int
    """Query heads."""
    vocab: int
    ffn: int = 0
    """Inner width of a dense layer; may be 0 where every layer has experts."""
    kv_heads: int = 0
    """Heads of keys and values; 0 is read as `heads`. Latent attention expands its latents to all heads."""
    head_dim: int = 0
    """Of queries and keys; 0 is read as `hidden / heads`."""
    value_head_dim: int = 0
    """0 is read as `head_dim`."""
    gated: bool = True
    """Whether a layer has three matrices of width `ffn` (SwiGLU), or two."""
    latent_rank: int = 0
    """Width of the latent that keys and values are made of (MLA; DeepSeek-AI 2024, arXiv 2405.04434); 0 without."""
    latent_rope_dim: int = 0
    """Dimensions of the rotated key that all heads share; part of `head_dim`."""
    query_rank: int = 0
    """Width of the latent that queries are made of; 0 where they come from the hidden state."""
    experts: int = 0
    """Routed experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    """Inner width of one expert."""
    shared_ffn: int = 0
    """Inner width of the experts that every token visits, all together."""
    dense_layers: int = 0
    """Layers without experts in a model with experts."""
    window: int = 0
    """Keys that a query of a windowed layer sees, itself included."""
    windowed_layers: int = 0
    max_positions: int | None = None
    """The longest document; None for any."""
    tied: bool = False
    """Whether embedding and head are one matrix."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool | str) or (value is None and field.name in _MAY_BE_NONE):
                continue
            least = 1 if field.name in (*_LEAST_ONE, "max_positions") else 0
            if not isinstance(value, int) or value < least:
                raise SettingError(
                    f"model {field.name}={value!r}; it must be a whole number of at least {least}"
                )
        for name, value in (("kv_heads", self.heads), ("head_dim", self.hidden // self.heads)):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        if self.value_head_dim == 0:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        self._check()

    def _check(self) -> None:
        """Refuse numbers that contradict each other."""
        if self.heads % self.kv_heads:
            raise SettingError(
                f"{self.heads} query heads can't share {self.kv_heads} key heads; kv_heads must divide heads"
            )
        if self.windowed_layers > self.layers or self.dense_layers > self.layers:
            raise SettingError(
                f"windowed_layers={self.windowed_layers} and dense_layers={self.dense_layers}: "
                f"the model has {self.layers} layers"
            )
        if self.windowed_layers and not self.window:
            raise SettingError(f"windowed_layers={self.windowed_layers} but window is 0; give the window")
        if self.experts and not (self.expert_ffn and 0 < self.experts_per_token <= self.experts):
            raise SettingError(
                f"experts={self.experts} need expert_ffn (got {self.expert_ffn}) and "
                f"experts_per_token from 1 to {self.experts} (got {self.experts_per_token})"
            )
        if not self.ffn and self.num_dense_layers:
            raise SettingError(
                f"ffn is 0, but {self.num_dense_layers} layers are dense; give their inner width"
            )

    @classmethod
    def named(cls, name: str) -> ModelShape:
        """Return a known shape, which limits no positions; `published_positions` says what its checkpoint has.

        Args:
            name: such as "llama-3-8b"; upper case and underscores are read too.

        Raises:
            SettingError: an unknown name; the nearest ones are named.

        >>> ModelShape.named("llama-3-8b").kv_bytes_per_token_layer * 32 // 1024
        128
        """
        key = str(name).lower().replace("_", "-")
        if key not in SHAPES:
            # By words first: llama3 means llama-3-8b, though llama-30b has as many of its letters.
            words = _words(key)
            begun = [known for known in SHAPES if words and _words(known)[: len(words)] == words]
            alike = difflib.get_close_matches(key, SHAPES, n=3, cutoff=0.5)
            near = list(dict.fromkeys([*begun, *alike]))[:3] or sorted(SHAPES)
            raise SettingError(f"no model is called {name!r}; nearest: {', '.join(near)}")
        return cls(name=key, **SHAPES[key])

    @classmethod
    def from_config(cls, config_like: Any, *, name: str = "") -> ModelShape:
        """Read a shape out of a transformers configuration.

        Args:
            config_like: the object, or its mapping (`config.json`); of a model of several modalities the text part.
            name: what to call it; without, the model type.

        Raises:
            SettingError: names what the configuration lacks.
        """
        settings: Mapping[str, Any] = config.read(config_like)
        return cls(**{**settings, "name": name or settings["name"]})

    @property
    def published_positions(self) -> int | None:
        """Positions of the checkpoint that a known shape was published as; None for another name.

        >>> ModelShape.named("llama-3-8b").published_positions
        8192
        """
        return POSITIONS.get(self.name)

    @property
    def num_dense_layers(self) -> int:
        """Layers without experts."""
        return self.dense_layers if self.experts else self.layers

    @property
    def active_ffn(self) -> float:
        """Inner width that a token passes in an average layer."""
        routed = self.experts_per_token * self.expert_ffn + self.shared_ffn
        dense = self.num_dense_layers
        return (dense * self.ffn + (self.layers - dense) * routed) / self.layers

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's projections."""
        out = self.heads * self.value_head_dim * self.hidden
        if not self.latent_rank:
            keys_and_values = self.kv_heads * (self.head_dim + self.value_head_dim)
            return self.hidden * (self.heads * self.head_dim + keys_and_values) + out
        unrotated = self.head_dim - self.latent_rope_dim
        down = self.hidden * (self.latent_rank + self.latent_rope_dim)
        up = self.latent_rank * self.heads * (unrotated + self.value_head_dim)
        queries = self.heads * self.head_dim
        into = self.query_rank * (self.hidden + queries) if self.query_rank else self.hidden * queries
        return into + down + up + out

    @property
    def linear_parameters_per_layer(self) -> float:
        """Parameters that a token is multiplied with in an average layer; FLOPs are twice that."""
        router = self.hidden * self.experts * (1 - self.num_dense_layers / self.layers)
        return self.attention_parameters + self._matrices * self.hidden * self.active_ffn + router

    @property
    def parameters_per_layer(self) -> float:
        """Parameters of an average layer, all experts and both norms."""
        sparse = self.layers - self.num_dense_layers
        idle = self._matrices * self.hidden * self.expert_ffn * (self.experts - self.experts_per_token)
        return self.linear_parameters_per_layer + idle * sparse / self.layers + 2 * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the vocabulary head; of the embedding too."""
        return self.hidden * self.vocab

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        ends = self.head_parameters * (1 if self.tied else 2) + self.hidden
        return round(self.parameters_per_layer * self.layers) + ends

    @property
    def num_active_parameters(self) -> int:
        """Parameters that a token is multiplied with: the layers' and the head's."""
        return round(self.linear_parameters_per_layer * self.layers) + self.head_parameters

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Bytes that later slices need of a token in one layer: keys and values, or the latents they are made of."""
        if self.latent_rank:
            return 2 * (self.latent_rank + self.latent_rope_dim)
        return 2 * self.kv_heads * (self.head_dim + self.value_head_dim)

    @property
    def windowed_share(self) -> float:
        """Share of layers with a window."""
        return self.windowed_layers / self.layers

    @property
    def _matrices(self) -> int:
        """Matrices of one feed-forward part."""
        return 3 if self.gated else 2
