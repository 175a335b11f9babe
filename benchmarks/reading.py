"""Reading and tokenizing files, beside the bare tokenizer on the same text; and chats, beside transformers.

Section `reading`: Python sources in files of four forms, and chats of them, in one process. Section `chats`:
rendering, finding what is supervised, checking and encoding, beside transformers' rendering and encoding. Every
template that TRL ships, on rows that it takes: chats of one to six turns, each of other texts, with tools, calls
and thoughts where the template writes them; and the same with short texts, where rendering is most of the time.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.checks import WrongResultError
from benchmarks.inputs import TEXT_VOCABULARY, source_texts, trained_tokenizer
from benchmarks.rows import Limit, Race, Row, Step
from benchmarks.stopwatch import alternate, race
from varlen.documents.documents import Encoding, encode_rows
from varlen.documents.source import open_source
from varlen.files.columns import Columns
from varlen.files.rows import Rows
from varlen.text.chat_template import ChatTemplate, chat_template
from varlen.text.load_tokenizer import load_tokenizer

ROUNDS = 5
TARGET = 1 / 1.15
"""At most 15 % over the bare tokenizer."""
FORMS = ("JSON lines", "JSON lines, zstd", "Parquet", "CSV")


def reading_steps() -> list[Step]:
    return [*(Step(form, partial(_race_texts, form)) for form in FORMS), Step("chats", _race_chats)]


def _race_texts(form: str) -> list[Row]:
    with _file(form, [{"text": text} for text in source_texts()]) as path:
        return [_race(f"read and tokenize {form}", path, source_texts(), append_eos=False)]


def _race_chats() -> list[Row]:
    """Race chats: finding out what the assistant says counts as reading."""
    texts = source_texts()
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(texts[::2], texts[1::2])
    ]
    rendered = [
        "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat) for chat in chats
    ]
    with _file("JSON lines", [{"messages": chat} for chat in chats]) as path:
        what = "read and tokenize chats, ChatML, with the mask of what is supervised"
        return [_race(what, path, rendered, append_eos=True)]


def _race(what: str, path: Path, texts: list[str], *, append_eos: bool) -> Race:
    tokenizer = trained_tokenizer()
    source = open_source(path, tokenizer, append_eos=append_eos, text_cut="file")

    def read() -> int:
        return sum(len(some.tokens) for part in source.parts() for some in source.read(part))

    def bare() -> int:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return sum(len(encoding.ids) for encoding in encodings)

    ours, theirs = read(), bare()
    if not 0.98 * theirs <= ours <= 1.02 * theirs or (not append_eos and ours != theirs):
        raise WrongResultError(f"{ours:,} tokens were read, {theirs:,} made by the tokenizer")
    size = f"{sum(map(len, texts)) / 1e6:.0f} MB of Python sources"
    return race(
        what,
        ("open_source(file).read", read),
        ("tokenizers", "encode_batch_fast and the ids, texts in memory", bare),
        rounds=ROUNDS,
        tokens=theirs,
        target=TARGET,
        note=f"{size}, vocabulary of {TEXT_VOCABULARY:,}, one thread",
    )


@contextmanager
def _file(form: str, rows: list[dict[str, Any]]) -> Iterator[Path]:
    import csv

    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as folder:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if form == "Parquet":
            path = Path(folder, "data.parquet")
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1000)
        elif form == "CSV":
            path = Path(folder, "data.csv")
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        elif form.endswith("zstd"):
            path = Path(folder, "data.jsonl.zst")
            with pa.CompressedOutputStream(str(path), "zstd") as file:
                file.write(lines)
        else:
            path = Path(folder, "data.jsonl")
            path.write_bytes(lines)
        yield path


NUM_ROWS = 96
BATCHES = 8
"""Calls that take other rows, so that nothing is known of a chat but what another one taught."""
CHAT_ROUNDS = 7
SIZES = {"usual": 1.0, "short": 0.2}
"""Length of the texts, as a share."""
LIMIT = 1.15
"""Times what transformers' rendering and the same encoding take on the same rows."""

Chat = dict[str, Any]
"""A row: `messages` and `tools`."""

_SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|?>|<[a-z_]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<(?:start|end)_of_[a-z]+>|\[gMASK\]|<sop>|<image>"
)
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|return|>", "<|endoftext|>", "<｜end▁of▁sentence｜>")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'-]+[,.;:]?")
_KINDS = ("plain", "thoughts", "tools", "tools and thoughts")


def chat_steps() -> list[Step]:
    if importlib.util.find_spec("trl") is None:
        return [Step.absent("templates of TRL", "trl is not installed, whose templates are measured")]
    return [Step(path.stem, partial(_race_chat, path.stem)) for path in template_paths()]


def template_paths() -> list[Path]:
    """Return the files of all templates that TRL ships, training twins included."""
    found = importlib.util.find_spec("trl")
    places = (found.submodule_search_locations if found else None) or []
    return sorted(path for place in places for path in Path(place, "chat_templates").glob("*.jinja"))


def contestants(name: str, size: str) -> tuple[Callable[[], int], Callable[[], int], int, int]:
    """Return varlen's call and transformers' on the rows that one template takes."""
    source = next(path for path in template_paths() if path.stem == name).read_text(encoding="utf-8")
    tokenizer = _tokenizer(source)
    loaded = load_tokenizer(tokenizer)
    specials = loaded.specials
    template = chat_template(source, special_tokens=specials.texts, end_marks=specials.end_marks)
    encoding = Encoding(tokenizer=loaded, template=template)
    columns = Columns(kind="messages", names={"messages": "messages", "tools": "tools"})
    batches, refused = [], 0
    for chats in _batches(tokenizer, SIZES[size]):
        taken = encode_rows(_as_rows(chats), columns, encoding)
        kept = range(len(chats)) if taken.rows is None else taken.rows.tolist()
        refused += len(chats) - len(kept)
        batches.append([chats[number] for number in kept])
    if not all(batches):
        raise WrongResultError(f"{name}: all rows are refused: {taken.faults[0]}")
    fresh = Encoding(tokenizer=loaded, template=_anew(template))
    rows, others = cycle(map(_as_rows, batches)), cycle(batches)
    backend = loaded.backend  # type: ignore[union-attr]

    def ours() -> int:
        return len(encode_rows(next(rows), columns, fresh).tokens)

    def theirs() -> int:
        texts = [
            tokenizer.apply_chat_template(chat["messages"], tools=chat["tools"], tokenize=False)
            for chat in next(others)
        ]
        return sum(len(one.ids) for one in backend.encode_batch_fast(texts, add_special_tokens=False))

    return ours, theirs, sum(map(len, batches)), refused


def _anew(template: ChatTemplate) -> ChatTemplate:
    return chat_template(
        template.source, special_tokens=template.special_tokens, end_marks=template.end_marks
    )


def _race_chat(name: str) -> list[Row]:
    return [_chat_row(name, size) for size in SIZES]


def _chat_row(name: str, size: str) -> Limit:
    ours, theirs, taken, refused = contestants(name, size)
    tokens, others = ours(), theirs()
    if not 0.97 * others <= tokens <= 1.03 * others:
        raise WrongResultError(f"{name}: {tokens:,} tokens of varlen, {others:,} of transformers")
    mine, peer = alternate(ours, theirs, rounds=CHAT_ROUNDS)
    ratios = [
        median(a / b for a, b in zip(one, other, strict=True))
        for one, other in ((mine.wall_s, peer.wall_s), (mine.cpu_s, peer.cpu_s))
    ]
    said = f"; {refused:,} more are refused by varlen and left out of both" if refused else ""
    return Limit(
        what=f"chats with the mask, checks included, template {name}, {size} texts",
        value=max(ratios),
        unit="times",
        limit=LIMIT,
        limit_text="1.15 times apply_chat_template and encode_batch_fast on the same rows",
        group=f"chats, {'twins' if name.endswith('_training') else 'originals'}, {size}",
        samples=[*mine.wall_s, *peer.wall_s],
        note=f"{taken:,} rows, {others:,} tokens, one thread, seconds of varlen and then of transformers{said}",
    )


def _as_rows(chats: list[Chat]) -> Rows:
    columns = {key: [chat[key] for chat in chats] for key in ("messages", "tools")}
    return Rows(columns=columns, numbers=list(range(1, len(chats) + 1)), path="chats")


def _tokenizer(source: str) -> Any:
    """Return a transformers tokenizer of 16,384 tokens that knows a template's special tokens."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(trained_tokenizer().to_str())
    eos = next((text for text in _ENDS if text in source), "</s>")
    texts = sorted({*_SPECIAL.findall(source), "<s>", "</s>", eos})
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos)
    made.chat_template = source
    return made


def _batches(tokenizer: Any, share: float) -> list[list[Chat]]:
    """Return batches of chats of the kinds that a template writes whole, in the form that it takes."""
    forms = [
        (kind, form)
        for kind in _KINDS
        for form in ({}, {"parts": True}, {"text_arguments": True}, {"null": True, "text_arguments": True})
        if _writes(tokenizer, _chat(kind, random.Random(0), num_turns=2, **form))
    ]
    first = dict(reversed(forms))
    if not first:
        raise WrongResultError("transformers renders none of the kinds of chats with this template")
    draw, kinds = random.Random(7), [kind for kind in _KINDS if kind in first]
    # Half of the rows are plain; the others have what the template can write beside contents.
    mixed = [kinds[0] if n % 2 else kinds[(n // 2) % len(kinds)] for n in range(NUM_ROWS)]
    return [[_chat(kind, draw, share=share, **first[kind]) for kind in mixed] for _ in range(BATCHES)]


def _writes(tokenizer: Any, chat: Chat) -> bool:
    """Return whether a template writes all texts of a chat's last answer, and its tools."""
    try:
        text = tokenizer.apply_chat_template(chat["messages"], tools=chat["tools"], tokenize=False)
    except Exception:  # a template refuses by whatever error it likes
        return False
    names = [tool["function"]["name"] for tool in chat["tools"] or ()]
    last = chat["messages"][-1]
    content = last["content"] if isinstance(last["content"], str) else last["content"][0]["text"]
    called = [call["function"]["arguments"] for m in chat["messages"] for call in m.get("tool_calls", ())]
    queries = [(json.loads(c) if isinstance(c, str) else c)["query"] for c in called]
    return all(piece in text for piece in (*names, content, last.get("reasoning_content", ""), *queries))


def _chat(
    kind: str,
    draw: random.Random,
    *,
    num_turns: int | None = None,
    share: float = 1.0,
    parts: bool = False,
    text_arguments: bool = False,
    null: bool = False,
) -> Chat:
    messages: list[dict[str, Any]] = []
    for number in range(num_turns or draw.randint(1, 6)):
        messages.append({"role": "user", "content": _text(draw, 8, 60, share)})
        if kind.startswith("tools") and number % 2 == 0:
            arguments: Any = {"query": _text(draw, 2, 8), "limit": draw.randint(1, 99)}
            called = {"name": "search", "arguments": json.dumps(arguments) if text_arguments else arguments}
            call = {"id": f"call{len(messages):05d}", "type": "function", "function": called}
            asked = {"role": "assistant", "content": None if null else "", "tool_calls": [call]}
            if kind.endswith("thoughts"):
                asked["reasoning_content"] = _text(draw, 10, 60, share)
            result = {"role": "tool", "name": "search", "tool_call_id": call["id"]}
            messages += [asked, result | {"content": _text(draw, 10, 80, share)}]
        answer = {"role": "assistant", "content": _text(draw, 20, 200, share)}
        if kind.endswith("thoughts"):
            answer["reasoning_content"] = _text(draw, 20, 150, share)
        messages.append(answer)
    if parts:
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"] or ""}]
    return {"messages": messages, "tools": _tools(draw, share) if kind.startswith("tools") else None}


def _tools(draw: random.Random, share: float) -> list[Any]:
    names = ["search", *draw.sample(("open_page", "run_code", "send_mail", "get_weather", "list_files"), 3)]
    properties = {
        "query": {"type": "string", "description": _text(draw, 3, 12, share)},
        "limit": {"type": "integer", "description": "The most results."},
    }
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": _text(draw, 5, 25, share),
                "parameters": {"type": "object", "properties": properties, "required": ["query"]},
            },
        }
        for name in names[: draw.randint(1, 4)]
    ]


def _text(draw: random.Random, least: int, most: int, share: float = 1.0) -> str:
    words, count = _words(), max(1, round(share * draw.randint(least, most)))
    start = draw.randrange(len(words) - count)
    return " ".join(words[start : start + count])


@cache
def _words() -> list[str]:
    """Return the words of Python sources: names and what comments and docstrings say."""
    return _WORDS.findall("\n".join(source_texts()[:2000]))


SECTIONS = {"reading": reading_steps, "chats": chat_steps}
