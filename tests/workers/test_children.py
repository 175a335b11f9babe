"""Processes that are started import what their parent imports, and nothing that merely lies in the current folder."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.rarely import mostly

import varlen

PLANTED = (
    "json",
    "numpy",
    "varlen",
    "encodings",
    "pickle",
    "struct",
    "selectors",
    "importlib",
    "site",
    "runpy",
)
LOADER = """
import varlen as vl
with vl.PackedLoader("../t.jsonl", {tokenizer}, capacity=64, global_batch_size=2) as loader:
    print("sum", sum(batch.num_tokens for batch in loader))
"""
CREW = """
import operator
from varlen.offline.crew import Crew
print("sum", sum(Crew(processes=2).run(operator.add, 2, range(16))) + 8)
"""
PLANNER = """
import varlen as vl
cost = vl.CostModel(model=vl.ModelShape.named("llama-3-8b"), hardware=vl.Hardware.named("h100"))
with vl.Planner([[160] * 8], cost=cost, mesh=vl.Mesh(dp=2, tp=8), method="balanced") as planner:
    print("sum", planner.take(0).num_tokens // 8)
"""
DEMO = """
from multiprocessing import get_context
from varlen.train.demo.worker import prepare
if __name__ == "__main__":
    prepare()
    process = get_context("forkserver").Process(target=print, args=("in the child",))
    process.start()
    process.join()
    print("sum", 160 + process.exitcode)
"""
KINDS = {"loader": LOADER, "crew": CREW, "planner": PLANNER, "demo": DEMO}
AS_A_NOTEBOOK = """
import sys
sys.path.remove("")
import multiprocessing.forkserver, multiprocessing.popen_forkserver, multiprocessing.resource_tracker
import json, numpy, pickle, struct, numba, runpy, selectors
import varlen.feed.loader, varlen.offline.crew, varlen.plan.planner, varlen.train.demo.worker
sys.path.insert(0, "")
"""
TOKENIZER = """
class Letters:
    def __call__(self, text):
        import beside
        assert beside.IS_HERE
        return [ord(letter) % 97 for letter in text] + [50]
"""


@dataclass(frozen=True)
class Here:
    """A current folder of planted modules, a folder of scripts, and what ran."""

    root: Path

    def __post_init__(self) -> None:
        (self.root / "t.jsonl").write_text('{"text": "abc"}\n' * 40)
        for place in (self.planted, self.scripts):
            place.mkdir()
        (self.scripts / "letters.py").write_text(TOKENIZER)
        (self.scripts / "beside.py").write_text("IS_HERE = True\n")

    @property
    def planted(self) -> Path:
        return self.root / "planted"

    @property
    def scripts(self) -> Path:
        return self.root / "scripts"

    def plant(self) -> None:
        for name in PLANTED:
            mark = self.root / f"RUN_{name}"
            (self.planted / f"{name}.py").write_text(
                f"open({str(mark)!r}, 'w').close()\nraise SystemExit(9)\n"
            )

    def run(self, *command: str, **variables: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            [sys.executable, *command],
            env=kept | variables,
            cwd=self.planted,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        ran = sorted(path.name for path in self.root.glob("RUN_*"))
        assert (done.returncode, ran) == (0, []), (ran, done.stderr[-2000:])
        return done.stdout

    def script(self, code: str) -> str:
        (self.scripts / "job.py").write_text(code)
        return str(self.scripts / "job.py")


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


SOURCES = str(Path(varlen.__file__).parent.parent)
WAYS = {
    "script": ([], {}),
    "safe path": ([], {"PYTHONSAFEPATH": "1"}),
    "search path": ([], {"PYTHONPATH": SOURCES}),
    "relative search path": ([], {"PYTHONPATH": "../scripts"}),
    "isolated": (["-I"], {}),
    "no environment": (["-E", "-s"], {}),
}
OFTEN = [("loader", "script"), ("crew", "script"), ("planner", "script"), ("loader", "isolated")]


@pytest.mark.parametrize(("kind", "way"), mostly(OFTEN, [(kind, way) for kind in KINDS for way in WAYS]))
def test_a_script_beside_which_nothing_is_planted_runs_nothing_of_the_current_folder(here, kind, way):
    here.plant()
    flags, variables = WAYS[way]

    said = here.run(*flags, here.script(KINDS[kind].format(tokenizer="'bytes'")), **variables)

    assert "sum 160" in said


@pytest.mark.parametrize("kind", mostly(["planner"], KINDS))
def test_a_notebook_which_takes_in_its_folder_late_has_children_that_do_so_too(here, kind):
    here.plant()

    said = here.run("-c", AS_A_NOTEBOOK + KINDS[kind].format(tokenizer="'bytes'"))

    assert "sum 160" in said


def test_the_installed_command_runs_nothing_of_the_current_folder(here):
    here.plant()
    command = here.script("import sys\nfrom varlen.cli import main\nsys.exit(main())\n")

    said = here.run(command, "pack", "../t.jsonl", "-o", "../out", "--capacity", "64", "--processes", "2")

    assert "40 documents" in said


def test_a_tokenizer_beside_the_script_is_found_by_every_child(here):
    code = LOADER.format(tokenizer="letters.Letters(), append_eos=False")

    for command in (
        [here.script(f"import letters{code}")],
        ["-c", f"import sys; sys.path.append({str(here.scripts)!r})\nimport letters{code}"],
    ):
        assert "sum 160" in here.run(*command)


@pytest.mark.parametrize("how", mostly(["-m"], ["-c", "-m"]))
def test_a_tokenizer_in_the_current_folder_is_found_where_the_parent_finds_it(here, how):
    for name in ("letters", "beside"):
        (here.planted / f"{name}.py").write_text((here.scripts / f"{name}.py").read_text())
    code = "import letters" + LOADER.format(tokenizer="letters.Letters(), append_eos=False")
    (here.planted / "job.py").write_text(code)

    assert "sum 160" in here.run(*(["-c", code] if how == "-c" else ["-m", "job"]))


def test_a_child_has_the_path_and_the_variables_of_its_parent_exactly(here):
    code = """
import os, sys
from varlen.offline.crew import Crew
import seen
if __name__ == "__main__":
    sys.path[:] = [*sys.path, "", "no such folder", "a:b", "\\udcff", "../scripts"]
    (theirs,) = set(Crew(processes=2).run(seen.path, None, [0, 0]))
    assert theirs == seen.path(None, 0), theirs
    print("same")
"""
    (here.scripts / "seen.py").write_text(
        "import os, sys\n"
        "def path(shared, task): return tuple(sys.path), os.environ.get('PYTHONPATH'), os.getcwd()\n"
    )

    assert "same" in here.run(here.script(code), PYTHONPATH=f"{SOURCES}::../nothing")


def test_varlen_that_is_found_only_in_the_current_folder_works(here):
    code = LOADER.format(tokenizer="'bytes'").replace("../t.jsonl", str(here.root / "t.jsonl"))
    hidden = (
        f"import os, sys; os.chdir({SOURCES!r}); sys.path[:] = [p for p in sys.path if p != {SOURCES!r}]\n"
    )

    assert "sum 160" in here.run("-c", hidden + code)
