"""Forms of tokenizer folders: vocabularies of every kind, and all that may lie beside them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.tokenizer_kinds import (
    byte_bpe,
    llama_bpe,
    normalized,
    padded,
    sentencepiece_model,
    slow_bert,
    slow_gpt2,
    split_bpe,
    stripping,
    unigram,
    wordlevel,
    wordpiece,
)
from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Form:
    """A folder."""

    name: str
    backend: Callable[[], Tokenizer] | None = byte_bpe
    """What tokenizer.json holds; None: there is none."""
    config: dict[str, Any] | None = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    """Others by name: text as it is, all else as JSON."""
    slow: Callable[[Path], None] | None = None
    """Writes the vocabulary that a folder without tokenizer.json has."""
    is_plain: bool = False
    """Whether it must be read without transformers."""

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if self.backend is not None:
            self.backend().save(str(folder / "tokenizer.json"))
        if self.slow is not None:
            self.slow(folder)
        if self.config is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(self.config))
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return folder


Make = Callable[[], Tokenizer] | None
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS = {"eos_token": "<|im_end|>"}
UNKNOWN = {"unk_token": "<unk>"}
TEMPLATES = "additional_chat_templates"
NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


def mark(content: str, **flags: bool) -> dict[str, Any]:
    """A special token as configurations spell it."""
    usual = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, **usual, "special": True, **flags}


IM = {"400": mark("<|im_start|>"), "401": mark("<|im_end|>")}


def of_type(model_type: str) -> dict[str, Any]:
    """The file of a model."""
    return {"config.json": {"model_type": model_type}}


def plain(name: str, make: Make, config: dict[str, Any] | None, **files: Any) -> Form:
    """A folder that is read without transformers; files by name, a dot spelled as two underscores."""
    return Form(name=name, backend=make, config=config, files=_named(files), is_plain=True)


def other(name: str, make: Make, config: dict[str, Any] | None, **files: Any) -> Form:
    """A folder that is read by transformers."""
    return Form(name=name, backend=make, config=config, files=_named(files))


def slow(name: str, write: Callable[[Path], None] | None, config: dict[str, Any], **files: Any) -> Form:
    """A folder without tokenizer.json."""
    return Form(name=name, backend=None, slow=write, config=config, files=_named(files))


def _named(files: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("__", "."): content for name, content in files.items()}


def of(kind: str, *more: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """The configuration of a class."""
    made: dict[str, Any] = {"tokenizer_class": kind}
    for one in more:
        made |= one
    return made | keys


def fast(*more: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """The configuration of the general class, with its BOS and EOS."""
    return of("PreTrainedTokenizerFast", SPECIAL, *more, **keys)


FORMS = [
    plain("nothing beside", byte_bpe, None),
    plain("empty configuration", byte_bpe, {}),
    plain("class and special tokens", byte_bpe, fast()),
    plain(
        "special tokens as objects", byte_bpe, {**FAST, "eos_token": {"__type": "AddedToken", **mark("</s>")}}
    ),
    Form(
        name="llama 3",
        backend=split_bpe,
        config=fast(clean_up_tokenization_spaces=True, model_max_length=131072, chat_template="T"),
        files=of_type("llama"),
        is_plain=True,
    ),
    Form(
        name="llama 3 of the wrong class",
        backend=split_bpe,
        config=of("LlamaTokenizerFast", SPECIAL),
        files=of_type("llama"),
    ),
    Form(
        name="gpt-oss",
        backend=split_bpe,
        config={**FAST, **ENDS, "pad_token": "<|im_start|>"},
        files={**of_type("gpt_oss"), "chat_template.jinja": "J"},
        is_plain=True,
    ),
    plain("map that says the same", byte_bpe, fast(), special_tokens_map__json={"eos_token": mark("</s>")}),
    other("stale special_tokens_map", split_bpe, fast(), special_tokens_map__json=ENDS),
    other(
        "stale map beside a decoder", split_bpe, fast(added_tokens_decoder=IM), special_tokens_map__json=ENDS
    ),
    other(
        "only special_tokens_map",
        split_bpe,
        FAST,
        special_tokens_map__json={**SPECIAL, "additional_special_tokens": ["<|im_end|>", "<extra>"]},
    ),
    other(
        "added_tokens.json",
        byte_bpe,
        fast(ENDS),
        added_tokens__json={"<|im_end|>": 400, "<|im_start|>": 401, "<extra>": 402},
    ),
    other("more added_tokens.json", byte_bpe, fast(), added_tokens__json={"<extra>": 400}),
    other("added_tokens.json of other ids", split_bpe, fast(), added_tokens__json={"<|im_end|>": 2}),
    plain("added_tokens.json that says the same", split_bpe, fast(), added_tokens__json={"<|im_end|>": 3}),
    other("added_tokens_decoder", byte_bpe, fast(added_tokens_decoder=IM)),
    other(
        "added_tokens_decoder with blanks",
        byte_bpe,
        fast(added_tokens_decoder={"400": mark("<|im_end|>", rstrip=True, lstrip=True)}),
    ),
    other(
        "added_tokens_decoder with other flags",
        split_bpe,
        fast(added_tokens_decoder={"3": mark("<|im_end|>", rstrip=True)}),
    ),
    plain(
        "added_tokens_decoder that says the same",
        split_bpe,
        fast(added_tokens_decoder={"2": mark("<|im_start|>"), "3": mark("<|im_end|>")}),
    ),
    other("additional_special_tokens", byte_bpe, fast(additional_special_tokens=["<extra>", "<|im_end|>"])),
    plain(
        "additional_special_tokens that are there", split_bpe, fast(additional_special_tokens=["<|im_end|>"])
    ),
    other("extra_special_tokens as a list", byte_bpe, fast(extra_special_tokens=["<extra>"])),
    other("extra_special_tokens by name", byte_bpe, fast(extra_special_tokens={"image_token": "<img>"})),
    other("a token of the model's own", byte_bpe, fast(image_token="<img>")),
    other("an EOS that tokenizer.json lacks", byte_bpe, {**FAST, **ENDS, "pad_token": "<pad>"}),
    other("an EOS that is a word", lambda: byte_bpe("<s>"), {**FAST, "eos_token": "hello"}),
    other("split_special_tokens", split_bpe, fast(split_special_tokens=True)),
    plain("split_special_tokens off", split_bpe, fast(split_special_tokens=False)),
    other("add_prefix_space", byte_bpe, fast(add_prefix_space=True)),
    other("add_bos_token", byte_bpe, fast(add_bos_token=True, add_eos_token=True)),
    other("add_bos_token off", split_bpe, fast(add_bos_token=False)),
    other("padding in tokenizer.json", padded, fast()),
    plain("marks that strip", stripping, fast()),
    plain("normalized added tokens", normalized, fast()),
    Form(
        name="qwen2",
        backend=split_bpe,
        config=of(
            "Qwen2Tokenizer",
            ENDS,
            pad_token="<|endoftext|>",
            add_prefix_space=False,
            added_tokens_decoder={"2": mark("<|im_start|>"), "3": mark("<|im_end|>")},
        ),
        files=of_type("qwen2"),
    ),
    other("qwen2 of the fast class", split_bpe, of("Qwen2TokenizerFast", eos_token="</s>")),
    Form(
        name="qwen2 of the general class",
        backend=split_bpe,
        config={**FAST, "eos_token": "</s>"},
        files=of_type("qwen2"),
    ),
    other("gpt2", byte_bpe, of("GPT2Tokenizer", eos_token="</s>", bos_token="</s>")),
    other(
        "gpt2 with a prefix space", byte_bpe, of("GPT2TokenizerFast", eos_token="</s>", add_prefix_space=True)
    ),
    Form(name="gpt2 without its class", config=None, files=of_type("gpt2")),
    other(
        "llama 2",
        llama_bpe,
        of("LlamaTokenizer", SPECIAL, UNKNOWN, legacy=False, add_bos_token=True, sp_model_kwargs={}),
    ),
    other("llama 2, legacy", llama_bpe, of("LlamaTokenizerFast", SPECIAL, UNKNOWN, legacy=True)),
    other(
        "llama 2, metaspace",
        lambda: llama_bpe(metaspace=True),
        of("LlamaTokenizer", SPECIAL, add_prefix_space=False),
    ),
    plain("llama 2 of the general class", llama_bpe, fast(UNKNOWN)),
    other("gemma", llama_bpe, of("GemmaTokenizer", SPECIAL, UNKNOWN, pad_token="<pad>")),
    other("bert", wordpiece, of("BertTokenizer", do_lower_case=True)),
    other("bert, cased", wordpiece, of("BertTokenizerFast", do_lower_case=False, strip_accents=False)),
    plain(
        "bert of the general class",
        wordpiece,
        {**FAST, "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"},
    ),
    other("t5", unigram, of("T5Tokenizer", extra_ids=3)),
    plain("unigram", unigram, {**FAST, "eos_token": "</s>", "pad_token": "<pad>"}),
    plain("word level", wordlevel, fast()),
    other("a class that nobody knows", byte_bpe, of("NoSuchTokenizer", SPECIAL)),
    slow("slow gpt2", slow_gpt2, of("GPT2Tokenizer", eos_token="<|endoftext|>")),
    slow(
        "slow gpt2, added tokens",
        slow_gpt2,
        of("GPT2Tokenizer", ENDS),
        added_tokens__json={"<|im_end|>": 400},
    ),
    slow("slow qwen2", slow_gpt2, of("Qwen2Tokenizer", eos_token="<|endoftext|>")),
    slow("slow bert", slow_bert, of("BertTokenizer")),
    slow("slow llama", sentencepiece_model, of("LlamaTokenizer", SPECIAL, UNKNOWN, add_bos_token=True)),
    slow("slow t5", lambda folder: sentencepiece_model(folder, "unigram"), of("T5Tokenizer", extra_ids=0)),
    slow("a tokenizer of Python", slow_gpt2, of("CTRLTokenizer", unk_token="<|endoftext|>")),
    slow("a tokenizer of bytes", None, of("ByT5Tokenizer")),
    plain("named templates", byte_bpe, fast(chat_template=NAMED)),
    Form(
        name="named templates as files",
        config=fast(chat_template="old"),
        files={"chat_template.jinja": "D", f"{TEMPLATES}/tool_use.jinja": "T", f"{TEMPLATES}/rag.jinja": "R"},
        is_plain=True,
    ),
    Form(
        name="named templates without a default",
        config=fast(chat_template="old"),
        files={f"{TEMPLATES}/tool_use.jinja": "T"},
        is_plain=True,
    ),
    Form(
        name="named templates that transformers reads",
        config=fast(add_bos_token=True),
        files={"chat_template.jinja": "D", f"{TEMPLATES}/tool_use.jinja": "T"},
    ),
]
