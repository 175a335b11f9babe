"""Texts whose parts are encoded at once give the tokens, and the mask, of texts that are cut."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rarely import examples
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from varlen.documents.documents import _encode_spans, dividing_id
from varlen.text.load_tokenizer import load_tokenizer
from varlen.text.rendering import Rendered
from varlen.text.tokenizer import FastTokenizer

END, HEAD = "<|im_end|>", "<|im_start|>"
WORDS = (
    "Hello",
    " there",
    "\n",
    "  ",
    "é",
    "user",
    "assistant\n",
    "<|im",
    "_end|>",
    "|>",
    "<",
    END,
    HEAD,
    "x<|im_end|>",
)
TEXT = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)
CORPUS = ["Hello there user assistant é is what we say and hear", "<|im_end|> x <|im_start|>"] * 40


@cache
def tokenizer_of(kind: str) -> FastTokenizer:
    """A small tokenizer with special tokens, and with what is odd about them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix space")
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    if kind == "lower":
        made.normalizer = normalizers.Lowercase()
    odd = {
        "takes blanks": "rstrip",
        "takes blanks before": "lstrip",
        "whole words": "single_word",
        "normalized": "normalized",
    }
    flags: dict[str, Any] = {"normalized": False} | ({odd[kind]: True} if kind in odd else {})
    made.add_special_tokens([AddedToken(text, special=True, **flags) for text in (END, HEAD)])
    more = {"overlap": "x<|im", "longer": f"{END}\n", "around": f"<{END}>"}.get(kind)
    if more:
        made.add_tokens([AddedToken(more, normalized=False)])
    if kind == "split":
        made.encode_special_tokens = True
    found = load_tokenizer(made)
    assert isinstance(found, FastTokenizer)
    return found


KINDS = (
    "plain",
    "lower",
    "prefix space",
    "takes blanks",
    "takes blanks before",
    "whole words",
    "normalized",
    "overlap",
    "longer",
    "around",
    "split",
)


def cut(rendered: list[Rendered], tokenizer: FastTokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """Ids and mask of each text, piece by piece."""
    tokens, masks = [], []
    for one in rendered:
        bounds = [0, *(place for span in one.spans for place in span), len(one.text)]
        pieces = [one.text[a:b] for a, b in zip(bounds, bounds[1:])]
        ids = [tokenizer.encode([piece])[0].tolist() if piece else [] for piece in pieces]
        tokens.append([id_ for part in ids for id_ in part])
        masks.append([number % 2 for number, part in enumerate(ids) for _ in part])
    return tokens, masks


@pytest.mark.parametrize("kind", KINDS)
@given(
    st.lists(st.lists(st.tuples(TEXT, TEXT, st.booleans()), min_size=1, max_size=4), min_size=1, max_size=3)
)
@examples(30, 80)
def test_texts_whose_parts_are_encoded_at_once_are_those_that_are_cut(kind: str, rows: Any) -> None:
    tokenizer, rendered = tokenizer_of(kind), []
    for turns in rows:
        text, spans = "", []
        for asked, answered, is_ended in turns:
            text += f"{HEAD}user\n{asked}{END}\n{HEAD}assistant\n"
            start = len(text)
            text += answered + END * is_ended
            if len(text) > start:
                spans.append((start, len(text)))
        if spans:
            rendered.append(Rendered(text=text + "\n" * len(turns), spans=tuple(spans), needs_eos=False))
    if not rendered or not tokenizer.is_cuttable:
        return

    tokens, offsets, mask = _encode_spans(rendered, tokenizer)

    wanted, masks = cut(rendered, tokenizer)
    assert [part.tolist() for part in np.split(tokens, offsets[1:-1])] == wanted
    assert [part.tolist() for part in np.split(mask, offsets[1:-1])] == masks


def test_only_what_is_surely_split_at_divides() -> None:
    found = {kind: dividing_id(tokenizer_of(kind), END) is not None for kind in KINDS}

    assert found == {kind: kind in ("plain", "lower", "prefix space") for kind in KINDS}
    assert dividing_id(tokenizer_of("plain"), "Hello") is None
    assert dividing_id(tokenizer_of("plain"), "nowhere") is None
