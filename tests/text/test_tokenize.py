"""Byte-level BPE and flat arrays of tokens."""

import numpy as np
import pytest

from varlen.errors import SettingError
from varlen.text.load_tokenizer import load_tokenizer, train_bpe

TEXTS = ["def one():\n    return 1\n", "", "żółć 🦆\x00", "def two():\n    return 2\n"] * 30


def test_documents_come_back_from_their_tokens_whatever_their_characters():
    tokenizer = train_bpe(TEXTS[::4], 300)

    tokens, offsets = load_tokenizer(tokenizer).encode(TEXTS)

    assert tokens.dtype == np.int32
    assert offsets.dtype == np.int64
    assert offsets[0] == 0
    assert offsets[-1] == len(tokens)
    back = [tokenizer.decode(tokens[a:b].tolist()) for a, b in zip(offsets, offsets[1:])]
    assert back == TEXTS


def test_more_documents_than_a_batch_keep_their_order():
    tokenizer = train_bpe(TEXTS, 260)
    texts = [str(number) for number in range(2500)]

    tokens, offsets = load_tokenizer(tokenizer).encode(texts)

    assert len(offsets) == 2501
    assert tokenizer.decode(tokens[offsets[1700] : offsets[1701]].tolist()) == "1700"


def test_the_same_texts_give_the_same_vocabulary():
    assert train_bpe(TEXTS, 320).get_vocab() == train_bpe(TEXTS, 320).get_vocab()


def test_the_vocabulary_holds_every_byte_and_never_more_than_asked():
    assert train_bpe(["aaaa"], 256).get_vocab_size() == 256
    assert 256 < train_bpe(TEXTS, 290).get_vocab_size() <= 290


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(SettingError, match="at least 256"):
        train_bpe(TEXTS, 255)


def test_no_texts_give_no_tokens():
    tokens, offsets = load_tokenizer(train_bpe(TEXTS, 256)).encode([])

    assert len(tokens) == 0
    assert offsets.tolist() == [0]
