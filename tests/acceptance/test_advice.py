"""What messages and pages tell users to write is there: options, verbs, public names, and arguments of these."""

import ast
import functools
import inspect
import re
import shlex

import typer

import varlen as vl
from varlen.cli.app import app

VERBS = typer.main.get_command(app).commands
OF_OTHERS = {
    "--nproc-per-node", "--standalone", "--signals-to-handle", "--help", "--version", "--ntasks", "--signal",
    "--rdzv-endpoint", "--nnodes", "--node-rank", "--no-kill",
}  # fmt: skip
"""Options of torchrun, srun and pip."""
OF_TRANSFORMERS = {"output_router_logits", "attn_implementation", "trust_remote_code"}
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
