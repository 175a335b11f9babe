"""Files that break a rule of the house, with what it must say; and a sound checkout that breaks none."""

from collections.abc import Callable
from pathlib import Path

from tests.house import habits, imports, map, papers, shape, words

Rule = Callable[[Path], list[str]]

LONG_FUNCTION = '"""A file."""\n\n\ndef f() -> None:\n    """Print."""\n' + "    print()\n" * 61
README = "# varlen\n\n```bash\nmake demo\nmake test\n```\n"
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- a\n"
DRAWN = '"""Every error as one tree.\n\n::\n\n    VarlenError\n    └── InputError\n"""\n'
TREE = DRAWN + 'class VarlenError(Exception):\n    """A."""\nclass InputError(VarlenError):\n    """B."""\n'
DOCUMENTED = '''
def f(a: int) -> int:
    """Do.

    Args:
        a: one.

    Raises:
        InputError: no.
    """
'''
RAISES = "    raise InputError(a)\n"
FILE, TEST = "src/varlen/pack/a.py", "tests/test_a.py"
KERNEL = '''
def best(a):
    """Find."""
    return a
'''

# Each rule with files that break it, and the words its finding must hold.
BROKEN: list[tuple[Rule, dict[str, str], str]] = [
    (
        map.contributing_has_the_map,
        {"CONTRIBUTING.md": f"{map.BEGIN}\n| old |\n{map.END}"},
        "the map is another",
    ),
    (
        map.rooms_open_with_where_to_begin,
        {"src/varlen/pack/__init__.py": '"""Packs of lengths."""'},
        "a picture",
    ),
    (
        map.rooms_open_with_where_to_begin,
        {
            "src/varlen/pack/__init__.py": '"""Lengths to packs.\n\n    a ──► b\n\nIn: a.\nBegin in `gone.py`.\n"""'
        },
        "which file to begin in",
    ),
    (
        map.rooms_name_what_they_have,
        {"src/varlen/pack/__init__.py": '"""Lengths to packs; `gone` says more."""'},
        "names gone",
    ),
    (
        map.rooms_name_what_they_have,
        {"src/varlen/pack/__init__.py": '"""lengths ──► a.Gone"""', FILE: "class A: ..."},
        "names a.Gone",
    ),
    (map.rooms_name_what_they_have, {"src/varlen/pack/__init__.py": '"""See `gone.py`."""'}, "names gone.py"),
    (imports.imports_point_down, {FILE: "from varlen.feed import b"}, "must not know feed"),
    (imports.imports_point_down, {FILE: "from varlen.batch.b import c"}, "must not know batch"),
    (imports.imports_point_down, {"src/varlen/jit.py": "import varlen.types"}, "must not know types"),
    (
        imports.imports_point_down,
        {FILE: "def f():\n    from varlen import plan"},
        "a.py:2: pack must not know plan",
    ),
    (imports.imports_point_down, {FILE: "from ..verify import b"}, "must not know verify"),
    (
        imports.imports_point_down,
        {FILE: "if TYPE_CHECKING:\n    from varlen.cli import b"},
        "must not know cli",
    ),
    (
        imports.imports_point_down,
        {FILE: "import importlib\nimportlib.import_module('varlen.cli')"},
        "must not know cli",
    ),
    (imports.imports_point_down, {FILE: "import varlen as vl"}, "imports the public face"),
    (imports.imports_point_down, {FILE: "from varlen import collate"}, "imports the public face"),
    (imports.imports_point_down, {"src/varlen/cellar/a.py": ""}, "cellar stands on no floor"),
    (imports.torch_stays_upstairs, {FILE: "def f():\n    import torch.nn"}, "below its floor"),
    (imports.torch_stays_upstairs, {"src/varlen/batch/packed.py": "import torch"}, "outside a function"),
    (imports.torch_stays_upstairs, {"src/varlen/types.py": "from transformers import A"}, "below its floor"),
    (
        imports.readers_stay_in_their_rooms,
        {"src/varlen/batch/a.py": "import pyarrow"},
        "is for rooms that read",
    ),
    (
        imports.files_go_in_no_circle,
        {
            FILE: "from varlen.pack.b import B",
            "src/varlen/pack/b.py": "def f():\n    from varlen.pack import c",
            "src/varlen/pack/c.py": "import varlen.pack.a",
        },
        "a circle",
    ),
    (
        imports.small_files_join_their_importer,
        {FILE: "from varlen.pack.b import B", "src/varlen/pack/b.py": "B = 1"},
        "varlen.pack.a alone imports it",
    ),
    (imports.numba_waits_for_a_kernel, {"src/varlen/pack/api.py": "from numba import njit"}, "imports numba"),
    (
        imports.kernels_call_their_own_file,
        {"src/varlen/pack/kernels.py": "from varlen.pack.kernels import best"},
        "numba's cache sees one file",
    ),
    (shape.long_files_justify_themselves, {FILE: "a = 1\n" * 801}, "801 lines"),
    (
        shape.kernels_are_called_by_name,
        {FILE: 'best = kernel("varlen.pack", "kernels_tree", "best")'},
        "import the kernel",
    ),
    (
        shape.neighbours_have_names_of_their_own,
        {"src/varlen/pack/inner/score.py": "", "src/varlen/pack/score.py": ""},
        "score is also",
    ),
    (shape.functions_are_short, {FILE: LONG_FUNCTION}, "f has 61 lines"),
    (shape.names_name_a_noun, {"src/varlen/pack/helpers.py": ""}, "helpers.py"),
    (shape.names_name_a_noun, {"tests/common/a.py": ""}, "tests/common"),
    (shape.names_name_a_noun, {"src/varlen/feed/base_loader.py": ""}, "base_loader.py"),
    (shape.files_open_with_a_sentence, {FILE: "import numpy"}, "opens without"),
    (shape.files_open_with_a_sentence, {FILE: '"""Packs."""'}, "opens without"),
    (
        shape.kernels_have_references,
        {"src/varlen/pack/kernels.py": KERNEL.replace("best", "worst")},
        "worst has no oracle",
    ),
    (
        shape.kernels_have_references,
        {"src/varlen/batch/kernels_rows.py": KERNEL, "tests/oracles/batch.py": KERNEL.replace("(a)", "(b)")},
        "take different arguments",
    ),
    (
        shape.kernels_have_references,
        {"src/varlen/pack/kernels.py": "def _best(a):\n    return a"},
        "no kernel with a public name",
    ),
    (shape.collections_are_flat, {FILE: "def f(packs: list[list[int]]) -> None: ..."}, "use flat arrays"),
    (shape.collections_are_flat, {FILE: "def f() -> Sequence[int | Sequence[int]]: ..."}, "use flat arrays"),
    (words.public_things_are_documented, {FILE: "class A: ..."}, "A has no docstring"),
    (
        words.public_things_are_documented,
        {FILE: 'class A:\n    """A noun."""\n    def verb(self): ...'},
        "A.verb has no docstring",
    ),
    (
        words.what_users_call_explains_its_arguments,
        {FILE: DOCUMENTED.replace("f(a", "f(b, a") + RAISES},
        "explains no b",
    ),
    (
        words.raised_errors_are_documented,
        {FILE: DOCUMENTED + RAISES.replace("InputError", "LedgerError")},
        "raises LedgerError",
    ),
    (words.errors_come_from_the_tree, {FILE: "def f():\n    raise ValueError('a')"}, "bare"),
    (
        words.errors_are_drawn,
        {"src/varlen/errors.py": TREE + "class New(VarlenError): ..."},
        "New is not drawn",
    ),
    (
        words.errors_are_drawn,
        {"src/varlen/errors.py": TREE.replace("InputError(VarlenError)", "InputError(Exception)")},
        "drawn below VarlenError but is a Exception",
    ),
    (
        words.errors_are_drawn,
        {"src/varlen/errors.py": DRAWN + "class VarlenError(Exception): ..."},
        "InputError is drawn but not written",
    ),
    (papers.readme_is_one_read, {"README.md": README + "line\n" * 150}, "156 lines"),
    (papers.readme_is_one_read, {"README.md": "word\n" * 30 + README}, "nothing to run"),
    (papers.readme_is_one_read, {"README.md": README.replace("make test", "pytest")}, "`make test`"),
    (papers.changelog_keeps_its_form, {"CHANGELOG.md": CHANGELOG + "### New\n"}, "another form"),
    (papers.changelog_keeps_its_form, {"CHANGELOG.md": CHANGELOG + "## 1.0\n"}, "another form"),
    (
        papers.changelog_keeps_its_form,
        {"CHANGELOG.md": "# Changelog\n\n## [1.0.0] - 2026-01-01\n"},
        "Unreleased",
    ),
    (papers.files_name_no_machine, {"docs/a.md": "see `/root" + "/varlen`"}, "docs/a.md:1: names a folder"),
    (papers.files_name_no_machine, {"a.sh": "pip install --index" + "-url x"}, "where packages come from"),
    (habits.test_names_are_sentences, {TEST: "def test_pack_works(): ..."}, "is no sentence"),
    (habits.skips_say_why, {TEST: "def f():\n    pytest.skip()"}, "does not say why"),
    (habits.skips_say_why, {TEST: "@pytest.mark.xfail\ndef f(): ..."}, "hides a failure"),
    (habits.skips_say_why, {TEST: "torch = pytest.importorskip('torch')"}, "hides a failure"),
    (habits.tests_use_fakes, {TEST: "from unittest import mock"}, "write a fake"),
    (
        habits.rooms_of_tests_stand_alone,
        {"tests/pack/test_a.py": "from tests.plan.b import c"},
        "tests/support",
    ),
    (
        habits.rooms_of_tests_stand_alone,
        {"tests/pack/test_a.py": "from tests.pack.test_b import c"},
        "test_b",
    ),
]

# A checkout that comes close to breaking every rule, and breaks none.
SOUND = {
    "README.md": README,
    "CHANGELOG.md": CHANGELOG + "\n## [0.1.0] - 2026-01-01\n\n### Fixed\n\n- b\n",
    ".gitignore": ".venv/\n",
    ".venv/x.py": "/root" + "/x",
    "src/varlen/__init__.py": '"""The public face of varlen."""\nfrom varlen.cli import main\n'
    '_HOMES = {"f": "varlen.pack.a"}\n',
    "src/varlen/errors.py": TREE,
    FILE: f'''\
"""Packs of some documents."""
from varlen.errors import InputError
from . import b
{DOCUMENTED}{RAISES}
def to_lists() -> list[list[int]]:
    """Read."""
''',
    "src/varlen/pack/kernels.py": f'"""Kernels of this room."""\nimport numba\n@numba.njit\n{KERNEL}',
    "tests/oracles/pack.py": f'"""References of this room."""\n{KERNEL.replace("(a)", "(a: int)")}',
    "src/varlen/batch/packed.py": '''\
"""Tensors of a batch."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import torch
def _f():
    import torch
''',
    "src/varlen/documents/texts.py": '"""Documents from files."""\nimport pyarrow\n',
    "src/varlen/adapters/hf.py": '"""Spellings of a peer."""\nimport torch\nfrom varlen.batch import torch\n',
    "src/varlen/cli/main.py": '"""The command line here."""\nfrom varlen import __version__\n'
    "from varlen.train import run\ndef table(rows: list[tuple[str, list[str]]]) -> None:\n"
    '    """Print."""\n',
    "src/varlen/pack/long.py": LONG_FUNCTION.removesuffix("    print()\n").replace("A file", "A long file"),
    TEST: '''\
"""Tests of one thing."""
import pytest
from tests.support.a import b
def test_one_thing_is_tested():
    pytest.skip('no such folder here')
''',
}
