"""Texts that a model writes while it is trained, to look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from varlen.adapters import hf
from varlen.errors import SettingError
from varlen.model_families import cache_name
from varlen.text.chat_template import ChatTemplate
from varlen.text.tokenizer import ByteTokenizer, Tokenizer
from varlen.train.parallel import reshard
from varlen.train.settings import TrainSettings
from varlen.train.tokens import RunTokenizer, stop_ids, template_of
from varlen.types import IntArray

SAMPLES: Final = "samples.jsonl"
"""File in a run's folder with one line a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What a model writes after a prompt."""

    step: int
    prompt: str
    """As it stands in the settings."""
    text: str
    is_chat: bool = False
    """Whether the chat template was put around the prompt."""

    @property
    def words(self) -> str:
        """Prompt and text on one line."""
        return f"{self.prompt} → {self.text}" if self.is_chat else f"{self.prompt}|{self.text}"


class Sampler:
    """Writes texts after the prompts of a run; every rank writes the same, since ranks may share the model."""

    def __init__(self, run: TrainSettings, tokenizer: RunTokenizer, templates: Mapping[str, str]) -> None:
        assert run.sample is not None, "such a run has prompts"
        settings = run.sample
        if tokenizer.made is None and not tokenizer.is_of_bytes:
            raise SettingError(
                "[sample] needs the tokenizer that made the data's tokens, which isn't named; set data.tokenizer to "
                "it"
            )
        own = tokenizer.made.specials.chat_templates if tokenizer.made is not None and settings.chats else {}
        template = template_of(templates or own, run.data, tokenizer)
        if settings.chats and template is None:
            raise SettingError(
                "sample.chats needs a chat template: the tokenizer has none, and the data holds no chats; use "
                "sample.prompts, for texts as they stand"
            )
        self._settings, self._seed, self._last = settings, run.run.seed, 0
        self._tokenizer: Tokenizer = ByteTokenizer() if tokenizer.made is None else tokenizer.made
        self._ends = {self._tokenizer.specials.eos_id, *stop_ids(templates or own, run.data, tokenizer)}
        self._given = [(prompt, False, self._begun(prompt)) for prompt in settings.prompts]
        for chat in settings.chats:
            assert template is not None, "it was checked"
            self._given.append((chat, True, self._asked(chat, template)))

    def _begun(self, prompt: str) -> IntArray:
        """Return the ids of a text's beginning."""
        ids, _ = self._tokenizer.encode([prompt])
        return np.append(np.array(self._tokenizer.specials.prefix_ids, np.int64), ids)

    def _asked(self, words: str, template: ChatTemplate) -> IntArray:
        """Return the ids of what a user says, up to the answer."""
        text = template.prompt([{"role": "user", "content": words}])
        return self._tokenizer.encode([text], is_chat=True)[0].astype(np.int64)

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Return whether texts are written after a step."""
        every = self._settings.every
        return step > self._last and (is_last or (every > 0 and step % every == 0))

    def write(self, step: int, model: Any) -> list[Sample]:
        """Return a text for each prompt; all ranks call it together."""
        found, self._last = [], step
        with _generating(model):
            for prompt, is_chat, ids in self._given:
                written = self._continued(model, torch.from_numpy(ids)[None].to(model.device), step)
                text = self._tokenizer.decode(written)
                found.append(Sample(step=step, prompt=prompt, text=text, is_chat=is_chat))
        return found

    def _continued(self, model: Any, ids: torch.Tensor, step: int) -> list[int]:
        """Return the ids that follow, up to the end of a text or of a turn."""
        generator = torch.Generator(device=ids.device).manual_seed(self._seed + step)
        written, cache = list[int](), None
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
            if written[-1] in self._ends:
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
