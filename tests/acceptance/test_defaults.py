"""One default for one thing, and what messages and pages tell users to write is there."""

import ast
import functools
import inspect
import json
import logging
import re
import shlex
from dataclasses import fields

import pytest
import typer
from tests.support.command_line import asked

import varlen as vl
from varlen.adapters.axolotl.settings import VarlenSettings
from varlen.adapters.megatron.packing.offline import MegatronPackSettings
from varlen.cli.app import app
from varlen.feed.indexed.windows import WindowSettings
from varlen.feed.settings import LoaderSettings
from varlen.feed.streaming.feed import StreamingSettings
from varlen.offline.pack import PackSettings
from varlen.train.settings import DataSettings

LONG = "5 documents of 40 documents"


def of_fields(kind):
    return {field.name: field.default for field in fields(kind)}


def of_signature(function):
    return {name: one.default for name, one in inspect.signature(function).parameters.items()}


READ_DOCUMENTS = {
    "PackedLoader": of_signature(vl.PackedLoader),
    "LoaderSettings": of_fields(LoaderSettings),
    "StreamingSettings": of_fields(StreamingSettings),
    "WindowSettings": of_fields(WindowSettings),
    "WindowPacker": of_signature(vl.WindowPacker),
    "PackSettings": of_fields(PackSettings),
    "axolotl": {name: field.default for name, field in VarlenSettings.model_fields.items()},
}


@pytest.mark.parametrize("entry_point", READ_DOCUMENTS)
def test_what_reads_documents_packs_best_fit_and_splits(entry_point):
    assert READ_DOCUMENTS[entry_point]["method"] == "best_fit"
    assert READ_DOCUMENTS[entry_point]["overlong"] == "split"


def test_what_train_leaves_out_is_the_loaders():
    settings = of_fields(DataSettings)

    assert settings["method"] is settings["overlong"] is None


def test_lengths_alone_and_a_peer_that_refuses_keep_their_own():
    assert of_signature(vl.pack)["method"] == "best_fit_decreasing"
    assert of_signature(vl.pack)["overlong"] == "error"
    assert of_fields(MegatronPackSettings)["overlong"] == "error"
    assert "the default here" in vl.pack.__doc__


@pytest.fixture
def texts(tmp_path):
    lengths = [700 if n % 8 == 0 else 50 for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in lengths))
    return tmp_path


def test_pack_splits_and_says_how_many_documents_and_tokens(texts):
    printed = asked("pack", "a.jsonl", "-o", "out", "--capacity", 256, cwd=texts).stdout

    assert (
        "  5 documents longer than 256 tokens, 3,505 tokens in all, cut into pieces" in printed.splitlines()
    )


def said(caplog):
    return [one.getMessage() for one in caplog.records if "longer than capacity" in one.getMessage()]


def loader(source, **settings):
    given = {"capacity": 256, "global_batch_size": 2, "dp_rank": 0, "dp_world_size": 1, "worker": "thread"}
    tokenizer = "bytes" if str(source).endswith(".jsonl") else None
    return vl.PackedLoader(source, tokenizer, **{**given, **settings})


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_a_loader_of_a_store_says_it_once_before_the_first_batch(texts, caplog, overlong):
    asked("index", "a.jsonl", "-o", "store", cwd=texts)

    with caplog.at_level(logging.WARNING), loader(texts / "store", overlong=overlong, epochs=2) as loaded:
        before = said(caplog)
        batches = list(loaded)

    assert batches
    assert len(before) == len(said(caplog)) == 1
    assert before[0].startswith(LONG)
    assert "with 3,505 tokens, are longer than capacity 256" in before[0]


@pytest.mark.parametrize(
    "settings", [{"overlong": "error"}, {"capacity": 1024}, {"dp_rank": 1, "dp_world_size": 2}]
)
def test_nothing_is_said_where_nothing_is_cut_or_by_other_ranks(texts, caplog, settings):
    asked("index", "a.jsonl", "-o", "store", cwd=texts)

    with caplog.at_level(logging.WARNING):
        try:
            loader(texts / "store", **settings).close()
        except vl.VarlenError:
            assert settings == {"overlong": "error"}

    assert said(caplog) == []


def test_streaming_says_it_once_as_soon_as_it_is_known_and_counts_it(texts, caplog):
    with caplog.at_level(logging.WARNING), loader(texts / "a.jsonl", mode="streaming") as loaded:
        list(loaded)
        stats = loaded.stats()

    assert len(said(caplog)) == 1
    assert "longer than capacity 256, and cut into pieces" in said(caplog)[0]
    assert stats.ledger.split_documents == 5


VERBS = typer.main.get_command(app).commands
OF_OTHERS = {
    "--nproc-per-node", "--standalone", "--signals-to-handle", "--help", "--version", "--ntasks", "--signal",
    "--rdzv-endpoint", "--nnodes", "--node-rank", "--no-kill",
}  # fmt: skip
"""Options of torchrun, srun and pip."""
OF_TRANSFORMERS = {"output_router_logits", "attn_implementation", "trust_remote_code", "stop_strings"}
PUBLIC = re.compile(r"\bvl\.([A-Za-z_]\w*)((?:\.[a-z_]\w*)?)(\([^()]*\))?")
COMMAND = re.compile(r"\bvarlen (pack|index|inspect|plan|train|verify|demo|audit)\b([^;,.)\n`]*)")


def strings(path):
    """Texts of a file as users see them, parts of a message joined; what is put into them is "X"."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(child) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


@functools.cache
def messages(root):
    """Every text of the package, and where it stands."""
    return [
        (f"{path.relative_to(root)}:{line}", text)
        for path in sorted(root.glob("src/varlen/**/*.py"))
        for line, text in strings(path)
    ]


def pages(root):
    return sorted([root / "README.md", *root.glob("docs/**/*.md")])


def options(verb):
    return {name for parameter in VERBS[verb].params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_every_option_that_a_message_names_is_one_of_a_verb(root):
    known = set().union(*map(options, VERBS)) | OF_OTHERS
    named = {
        name: where
        for where, text in messages(root)
        if "adapters/" not in where  # which name options of other programs
        for name in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)
    }

    assert len(named) > 30
    assert {name: where for name, where in named.items() if name not in known} == {}


def test_every_command_that_a_message_names_takes_the_options_that_stand_behind_it(root):
    count = 0
    for where, text in messages(root):
        for verb, rest in COMMAND.findall(text):
            assert verb in VERBS, (where, verb)
            for name in re.findall(r"(?<![\w-])--[a-z][a-z-]+", rest):
                count += 1
                assert name in options(verb) | OF_OTHERS, (where, verb, name)
    assert count > 5


def test_every_public_name_that_a_message_writes_is_there_and_takes_its_arguments(root):
    count = 0
    for where, text in messages(root):
        for name, attribute, called in PUBLIC.findall(text):
            if name not in vl.__all__:
                assert name in ("__version__",), (where, name)
            found = getattr(vl, name)
            if attribute:
                assert hasattr(found, attribute[1:]) or attribute[1:] in getattr(
                    found, "__annotations__", {}
                ), where
                continue
            count += 1
            check_arguments(where, found, called)
    assert count > 40


def check_arguments(where, function, called):
    """Every keyword of a call is a parameter of the function."""
    known = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for keyword in re.findall(r"\b([a-z_]\w*)=", called):
        assert keyword in known, (where, called)


def test_every_argument_that_a_message_names_is_one_of_some_function(root):
    known = set()
    for path in root.glob("src/varlen/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.arg):
                known.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                known.add(node.target.id)
    wrong = {}
    for where, text in messages(root):
        if "adapters/" in where or "\n" in text:
            continue
        for name in re.findall(r"\b(?:pass|Pass|take|set|with|give|raise) ([a-z_]{3,})=", text):
            if name not in known | OF_TRANSFORMERS:
                wrong[where] = name
    assert wrong == {}


def commands(path):
    text = path.read_text(encoding="utf-8")
    for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("varlen "):
                yield line
    yield from re.findall(r"`(varlen (?:pack|index|inspect|plan|train|verify|demo) [^`]*)`", text)


def test_every_command_of_a_page_is_parsed_by_the_command_line(root):
    count = 0
    for path in pages(root):
        for line in commands(path):
            words = shlex.split(
                line.partition(" > ")[0].partition(" # ")[0].partition(" | ")[0].partition(" 2>")[0]
            )
            words = [word for word in words[1:] if word not in ("\u2026", "...")]
            if not words or words[0] not in VERBS:
                continue
            count += 1
            try:
                VERBS[words[0]].make_context(words[0], words[1:], resilient_parsing=False)
            except (typer.Exit, SystemExit):
                pass
            except Exception as error:
                said = f"{getattr(error, 'message', '')} {error}"
                # A page may name a verb with the option alone that it speaks of.
                assert "Missing" in said or "requires an argument" in said, f"{path.name}: {line}: {said}"
    assert count > 40
