"""Texts of strangers in JSON, TOML and YAML: each is read in time, or refused in a sentence, at every entry point."""

import ast
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import varlen as vl
from varlen.adapters.megatron.config.reading import read
from varlen.cli.plan_job import model_of
from varlen.cost.hardware import load_hardware
from varlen.errors import VarlenError
from varlen.parsed import UnreadableError, parse_json, parse_python, parse_toml, parse_yaml
from varlen.train.configuration import read_config

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], k{n}: 1}}\n" for n in range(1, 40)
)
YAML = {
    "laughs": LAUGHS,
    "merges": MERGES,
    "loop": "a: &a [*a]\n",
    "merge loop": "a: &a {<<: *a}\n",
    "brackets": "a: " + "[" * 100_000,
    "braces": "a: " + "{a: " * 10_000,
    "blocks": "".join(" " * n + "a:\n" for n in range(2_000)),
    "dashes": "- " * 50_000 + "a",
    "digits": "a: " + "9" * 100_000,
    "hexadecimal": "a: 0x" + "f" * 100_000,
    "sexagesimal": "a: 1" + ":11" * 50_000,
    "sexagesimal float": "a: 1" + ":11" * 50_000 + ".5",
    "date": "a: 2001-99-99",
    "empty int": "a: !!int ''",
    "odd bool": "a: !!bool x",
    "odd date": "a: !!timestamp x",
    "code": "a: !!python/object/apply:os.system ['touch RUN']",
    "unhashable": "? {a: 1}\n: 2",
    "long": "a: " + "x" * 5_000_000,
    "nul": "a: \0",
}
TOML = {
    "brackets": "a = " + "[" * 100_000,
    "tables": "a = " + "{a = " * 10_000,
    "dots": ".".join("a" * 50_000) + " = 1",
    "digits": "a = " + "9" * 100_000,
    "66 bits": "a = 36893488147419103232",
    "hexadecimal": "a = 0x" + "f" * 100_000,
    "long": 'a = "' + "x" * 5_000_000 + '"',
    "date": "a = 2001-99-99",
}
JSON = {
    "brackets": "[" * 100_000,
    "braces": '{"a":' * 100_000,
    "digits": '{"a": ' + "9" * 100_000 + "}",
    "cut": '{"a": 1',
    "halves": b'{"a": "\xff"}',
}


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *(pytest.param(parse_yaml, text, id=f"YAML {name}") for name, text in YAML.items()),
        *(pytest.param(parse_toml, text, id=f"TOML {name}") for name, text in TOML.items()),
        *(pytest.param(parse_json, text, id=f"JSON {name}") for name, text in JSON.items()),
    ],
)
def test_what_stands_for_too_much_is_refused_in_time(parse, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = time.process_time()

    with pytest.raises(UnreadableError):
        parse(text)

    assert time.process_time() - begun < 5
    assert not (tmp_path / "RUN").exists()


def test_what_is_usual_is_read():
    assert parse_yaml("a: &a {x: 1, y: [1, 2]}\nb: {<<: *a, z: 1.5e-3}\nc: *a\nd: 2026-11-26\ne: 0x10") == {
        "a": {"x": 1, "y": [1, 2]},
        "b": {"x": 1, "y": [1, 2], "z": 0.0015},
        "c": {"x": 1, "y": [1, 2]},
        "d": datetime.date(2026, 11, 26),
        "e": 16,
    }
    assert parse_yaml("") is None
    assert parse_toml("a = 9223372036854775807\n[b.c]\nd = [[1]]") == {
        "a": 2**63 - 1,
        "b": {"c": {"d": [[1]]}},
    }
    assert parse_json('{"model_max_length": 1000000000000000019884624838656}')["model_max_length"] == int(
        1e30
    )


ENTRY_POINTS: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "varlen train": (lambda path: read_config(path), TOML, "c.toml"),
    "varlen verify --megatron": (lambda path: read(str(path)), YAML, "c.yaml"),
    "hardware": (lambda path: load_hardware(path), JSON, "h.json"),
    "model": (lambda path: model_of(str(path)), JSON, "config.json"),
    "card": (lambda path: list(vl.PackedLoader(path.parent, "bytes", **LOADER)), YAML, "README.md"),
}
LOADER: dict[str, Any] = {"capacity": 64, "global_batch_size": 1, "worker": "thread"}


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_every_entry_point_says_it_in_a_sentence(entry_point, tmp_path):
    open_it, texts, file = ENTRY_POINTS[entry_point]
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n')
    for name, text in texts.items():
        if entry_point == "card":
            text = f"---\nconfigs:\n- config_name: x\n  data_files: y\n  more:\n    {text}\n---\n"
            if "\n" in texts[name].strip() or len(text) > 10**6:
                continue
        (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
        try:
            open_it(tmp_path / file)
        except VarlenError:
            continue
        pytest.fail(name)


OWN = {
    # What our own processes say to each other, and what was written a line before.
    *("src/varlen/plan/planner_process.py", "src/varlen/plan/serialize.py", "src/varlen/feed/worker/main.py"),
    *("src/varlen/feed/exchange.py", "src/varlen/feed/worker/process.py", "src/varlen/feed/worker/ring.py"),
    *("src/varlen/files/paths.py", "src/varlen/offline/index.py", "src/varlen/train/model.py"),
    *("src/varlen/text/load_tokenizer.py", "src/varlen/files/remote.py"),
    "src/varlen/train/plans.py",  # its handlers stand in a variable
}


def test_parsers_are_called_by_one_file_or_where_deep_nesting_is_answered_for():
    root = Path(vl.__file__).parents[2]
    found = []
    for path in sorted((root / "src").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name in OWN or name == "src/varlen/parsed.py":
            continue
        tree = ast.parse(path.read_text())
        answered = {
            id(call)
            for node in ast.walk(tree)
            if isinstance(node, ast.Try)
            and any("RecursionError" in ast.unparse(one) for one in node.handlers)
            for call in ast.walk(node)
        } | {
            id(call)
            for node in ast.walk(tree)
            if isinstance(node, ast.With) and "RecursionError" in ast.unparse(node.items[0].context_expr)
            for call in ast.walk(node)
        }
        for call in ast.walk(tree):
            parses = isinstance(call, ast.Call) and ast.unparse(call.func) in (
                *("json.loads", "json.load", "tomllib.loads", "tomllib.load"),
                *("yaml.safe_load", "yaml.load", "yaml.parse", "ast.parse"),
            )
            if parses and id(call) not in answered and "json.dumps" not in ast.unparse(call):
                found.append(f"{name}:{call.lineno} {ast.unparse(call)}")
    assert found == []


def test_python_is_parsed_while_other_threads_parse(monkeypatch):
    parse, calls = ast.parse, []

    def failing(source):
        calls.append(source)
        if len(calls) < 3:
            raise SystemError("AST constructor recursion depth mismatch (before=201, after=50)")
        return parse(source)

    monkeypatch.setattr(ast, "parse", failing)
    assert ast.dump(parse_python("f(1)")) == ast.dump(parse("f(1)"))
    assert len(calls) == 3
    with pytest.raises(SyntaxError):
        parse_python("f(")
