"""Small tokenizers of every kind, made on the spot, and the files of those that transformers has to convert."""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "hi there, hello you. 1 2 3 system user assistant\nHello there, what is 12 + 34?",
    "def f(x):\n    return x ** 2\n\n\tclass A: pass",
    "zażółć gęślą jaźń, café, naïve, über",
] * 9
TEXTS = [
    "hello you",
    " leading and trailing ",
    "",
    "a<s>b</s> c <|im_start|>user\nhi<|im_end|>\nx <extra> y",
    "Hi  there,\n\n what's 1234 + 5?\tżółć 🦆 你好 CAFÉ e\u0301",
    "<pad> [CLS] [SEP] <unk> <0x41> ▁hello <img>",
]


def _marked(backend: Tokenizer, *marks: str, **flags: bool) -> Tokenizer:
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False, **flags) for mark in marks])
    return backend


def byte_bpe(*marks: str, **settings: Any) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **settings})
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(marks or ("<s>", "</s>")),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def split_bpe() -> Tokenizer:
    """Llama 3's and Qwen's kind: a pattern cuts, then bytes; BOS before each text."""
    backend = byte_bpe("<s>", "</s>", "<|im_start|>", "<|im_end|>")
    pattern = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.normalizer = normalizers.NFC()
    return _begun(backend)


def _begun(backend: Tokenizer, bos: str = "<s>") -> Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return backend


def llama_bpe(*, metaspace: bool = False) -> Tokenizer:
    """Llama 2's kind: pieces of SentencePiece, and bytes for all others."""
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    learned.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=180, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False),
    )
    spec = json.loads(learned.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += [piece for piece in spec["vocab"] if piece not in pieces]
    merges = [tuple(merge) for merge in spec["merges"]]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _begun(_marked(backend, "<unk>", "<s>", "</s>"))


def wordpiece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=marks, show_progress=False)
    )
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(mark, backend.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")],
    )
    return backend


def unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def wordlevel() -> Tokenizer:
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>"]))
    return backend


def padded() -> Tokenizer:
    """A file that says how to pad, with a token that it hasn't."""
    backend = byte_bpe()
    backend.enable_padding(pad_token="<nowhere>", length=40)
    backend.enable_truncation(3)
    return backend


def stripping() -> Tokenizer:
    """Phi's kind: marks that take the blanks beside them."""
    return _marked(split_bpe(), "<extra>", lstrip=True, rstrip=True)


def normalized() -> Tokenizer:
    """Added tokens that aren't special, found in normalized text."""
    backend = llama_bpe()
    backend.add_tokens([AddedToken("<extra>", normalized=True), AddedToken("hello", single_word=True)])
    return backend


def slow_gpt2(folder: Path) -> None:
    spec = json.loads(byte_bpe("<|endoftext|>").to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(spec["vocab"]))
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(" ".join(m) + "\n" for m in spec["merges"])
    )


def slow_bert(folder: Path) -> None:
    vocab = json.loads(wordpiece().to_str())["model"]["vocab"]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in sorted(vocab, key=vocab.get)))


def sentencepiece_model(folder: Path, kind: str = "bpe") -> None:
    """tokenizer.model."""
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf()
    model = proto.ModelProto()
    if kind == "bpe":
        vocab = json.loads(llama_bpe().to_str())["model"]["vocab"]
        pieces = [
            (piece, -float(number)) for piece, number in sorted(vocab.items(), key=lambda item: item[1])
        ]
    else:
        pieces = [(piece, score) for piece, score in json.loads(unigram().to_str())["model"]["vocab"]]
    for piece, score in pieces:
        added = model.pieces.add()
        added.piece, added.score = piece, score
        added.type = (
            2
            if piece == "<unk>"
            else 3
            if piece in ("<s>", "</s>", "<pad>")
            else 6
            if piece.startswith("<0x")
            else 1
        )
    model.trainer_spec.model_type = 2 if kind == "bpe" else 1
    model.trainer_spec.byte_fallback = kind == "bpe"
    model.trainer_spec.unk_id = [piece for piece, _ in pieces].index("<unk>")
    model.trainer_spec.bos_id = [piece for piece, _ in pieces].index("<s>") if kind == "bpe" else -1
    model.trainer_spec.eos_id = [piece for piece, _ in pieces].index("</s>")
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    (folder / ("tokenizer.model" if kind == "bpe" else "spiece.model")).write_bytes(model.SerializeToString())
