"""Texts that a model writes while it is trained, to look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from varlen.adapters import hf
from varlen.errors import SettingError
from varlen.model_families import cache_name
from varlen.text.tokenizer import ByteTokenizer, Tokenizer
from varlen.train.parallel import reshard
from varlen.train.settings import SampleSettings
from varlen.train.tokens import RunTokenizer

SAMPLES: Final = "samples.jsonl"
"""File in a run's folder with one line a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What a model writes after a prompt."""

    step: int
    prompt: str
    text: str


class Sampler:
    """Writes texts after the prompts of a run; every rank writes the same, since ranks may share the model."""

    def __init__(self, settings: SampleSettings, tokenizer: RunTokenizer, seed: int) -> None:
        if tokenizer.made is None and not tokenizer.is_of_bytes:
            raise SettingError(
                "[sample] needs the tokenizer that made the data's tokens, which isn't named; set data.tokenizer to "
                "it"
            )
        self._settings, self._seed, self._last = settings, seed, 0
        self._tokenizer: Tokenizer = ByteTokenizer() if tokenizer.made is None else tokenizer.made

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Return whether texts are written after a step."""
        every = self._settings.every
        return step > self._last and (is_last or (every > 0 and step % every == 0))

    def write(self, step: int, model: Any) -> list[Sample]:
        """Return a text for each prompt; all ranks call it together."""
        found, self._last = [], step
        with _generating(model):
            for prompt in self._settings.prompts:
                ids, _ = self._tokenizer.encode([prompt])
                ids = np.append(np.array(self._tokenizer.specials.prefix_ids, np.int64), ids)
                given = torch.from_numpy(ids)[None].to(model.device)
                written = self._continued(model, given, step)
                found.append(Sample(step=step, prompt=prompt, text=self._tokenizer.decode(written)))
        return found

    def _continued(self, model: Any, ids: torch.Tensor, step: int) -> list[int]:
        """Return the ids that follow, up to the end of a text."""
        generator = torch.Generator(device=ids.device).manual_seed(self._seed + step)
        eos, written, cache = self._tokenizer.specials.eos_id, list[int](), None
        following, name = ids, cache_name(hf.unwrap(model))
        for _ in range(self._settings.tokens):
            out = model(input_ids=following, use_cache=True, **{name: cache})
            cache, logits = out[name], out.logits[0, -1].float()
            if self._settings.temperature > 0:
                shares = torch.softmax(logits / self._settings.temperature, dim=-1)
                following = torch.multinomial(shares, 1, generator=generator)[None]
            else:
                following = logits.argmax()[None, None]
            written.append(int(following))
            if written[-1] == eos:
                break
        return written


@contextmanager
def _generating(model: Any) -> Iterator[None]:
    """Let a model generate: without dropout and gradients, by an attention that takes a cache."""
    attention = hf.implementation(model)
    model.eval()
    model.set_attn_implementation("sdpa" if attention == "varlen" else attention)
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # each length is another shape
            yield
    finally:
        reshard(model)
        model.set_attn_implementation(attention)
        model.train()
