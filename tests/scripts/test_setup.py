"""The commands that make the environment say in one sentence what is missing, and stay out of read-only clones."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534
TOOLS = ("sh", "cat", "cksum", "cut", "dirname", "id", "ls", "mkdir", "rm")
NEEDED = ("scripts", "pyproject.toml", "constraints.txt")


class Clone:
    """A clone in a folder that others may read, and a `bin` with no Python in it."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.checkout = folder / "clone"
        self.home = folder / "home"
        self.bin = folder / "bin"
        for place in (self.checkout, self.home, self.bin):
            place.mkdir()
        for name in NEEDED:
            copy = shutil.copytree if (root / name).is_dir() else shutil.copy
            copy(root / name, self.checkout / name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or "")
        folder.chmod(0o755)

    def add_python(self, name: str, version: str, modules: bool = True) -> None:
        """Put a fake Python on the path, which answers the questions of `scripts/setup`."""
        is_new = "exit 0" if version in ("3.11", "3.12", "3.13", "3.14") else "exit 1"
        script = f"""#!/bin/sh
case "$*" in
    -V) echo "Python {version}.0" ;;
    *"%d.%d"*) echo {version} ;;
    *"3, 11"*) {is_new} ;;
    *"import ensurepip"*) {"exit 0" if modules else "exit 1"} ;;
    *"-m venv"*) echo "$0 makes an environment" ; exit 9 ;;
esac
"""
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def run(
        self, *command: str, as_reader: bool = False, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "HOME": str(self.home)} | variables
        # Root may write everywhere, so a test of what others may not runs as another user.
        other = as_reader and os.geteuid() == 0
        return subprocess.run(
            ["sh", *command],
            cwd=self.checkout,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            user=NOBODY if other else None,
            group=NOBODY if other else None,
            extra_groups=[] if other else None,
        )

    def give_home_away(self) -> None:
        """Make the home the reader's own, and the clone read-only."""
        if os.geteuid() == 0:
            os.chown(self.home, NOBODY, NOBODY)
        self.checkout.chmod(0o555)


@pytest.fixture
def clone(root: Path) -> Iterator[Clone]:
    with tempfile.TemporaryDirectory() as folder:
        yield Clone(Path(folder), root)


def test_no_python_at_all_is_one_sentence(clone):
    run = clone.run("scripts/setup", ".venv")

    assert run.returncode == 1
    assert run.stderr.startswith("varlen: Python 3.11 to 3.14 is needed")
    assert "no python3 at all" in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("version", "modules", "said"),
    [("3.9", True, "python3 is 3.9;"), ("3.12", False, "apt install python3.12-venv")],
)
def test_an_older_python_and_one_without_venv_are_named_with_the_way_out(clone, version, modules, said):
    clone.add_python("python3", version, modules=modules)

    run = clone.run("scripts/setup", ".venv")

    assert run.returncode == 1
    assert said in run.stderr


def test_the_first_python_that_will_do_is_taken(clone):
    clone.add_python("python3", "3.9")
    clone.add_python("python3.13", "3.13", modules=False)
    clone.add_python("python3.12", "3.12")

    run = clone.run("scripts/setup", ".venv")

    assert run.returncode == 9
    assert f"{clone.bin}/python3.12 makes an environment" in run.stdout


def test_the_python_that_is_named_is_the_only_one_asked(clone):
    clone.add_python("python3", "3.12")
    clone.add_python("other", "3.9")

    run = clone.run("scripts/setup", ".venv", PYTHON="other")

    assert run.returncode == 1
    assert "other is 3.9;" in run.stderr


@pytest.mark.parametrize("reaches", [True, False])
def test_pip_installs_pytorch_and_uv_the_rest_or_pip_where_uv_reaches_nothing(clone, reaches):
    """An environment whose Python only records what it is called with."""
    clone.add_python("python3", "3.12")
    python = clone.home / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (clone.home / "venv" / "pyvenv.cfg").touch()
    fails = "" if reaches else 'case "$*" in "-m uv"*) exit 1 ;; esac\n'
    python.write_text(f'#!/bin/sh\necho "$*" >>{clone.home}/asked\n{fails}')
    python.chmod(0o755)

    run = clone.run("scripts/setup", str(clone.home / "venv"))

    assert run.returncode == 0, run.stderr
    asked = (clone.home / "asked").read_text().splitlines()
    installs = [line for line in asked if " install " in line]
    assert all("--only-binary :all:" in line for line in installs)
    # axolotl without the versions that it pins.
    expected = [("pip", "torch uv"), ("uv", "--editable .[dev]"), ("uv", "--no-deps axolotl")]
    if not reaches:
        expected[1:] = [one for _, what in expected[1:] for one in (("uv", what), ("pip", what))]
    assert [(line.split()[1], line.split("constraints.txt ")[1]) for line in installs] == expected
    assert clone.run("scripts/setup", "--ready", str(clone.home / "venv")).returncode == 0


def test_a_folder_with_something_else_in_it_is_left_alone(clone):
    clone.add_python("python3", "3.12")
    (clone.home / "letter.txt").write_text("dear")

    run = clone.run("scripts/setup", str(clone.home))

    assert run.returncode == 1
    assert "holds something else" in run.stderr
    assert (clone.home / "letter.txt").read_text() == "dear"


def test_a_clone_that_can_be_written_keeps_everything_in_itself(clone):
    assert clone.run("scripts/where", "venv").stdout == ".venv\n"
    assert clone.run("scripts/where", "scratch").stdout == ".\n"


def test_a_read_only_clone_keeps_its_environment_in_the_users_cache_folder(clone):
    clone.give_home_away()

    venv = clone.run("scripts/where", "venv", as_reader=True)
    scratch = clone.run("scripts/where", "scratch", as_reader=True)

    assert venv.stdout.startswith(f"{clone.home}/.cache/varlen/checkout-")
    assert venv.stdout == scratch.stdout.replace("\n", "/venv\n")


def test_two_read_only_clones_keep_apart(clone, root):
    with tempfile.TemporaryDirectory() as folder:
        other = Clone(Path(folder), root)
        other.home = clone.home
        clone.give_home_away()
        other.checkout.chmod(0o555)

        places = {c.run("scripts/where", "venv", as_reader=True).stdout for c in (clone, other)}

    assert len(places) == 2


def test_a_read_only_clone_of_a_user_without_a_home_uses_a_private_temporary_folder(clone):
    clone.checkout.chmod(0o555)
    clone.home.chmod(0o555)
    temporary = clone.checkout.parent / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)

    run = clone.run("scripts/where", "scratch", as_reader=True, TMPDIR=str(temporary))

    (private,) = temporary.iterdir()
    assert run.stdout.startswith(f"{private}/checkout-")
    assert private.stat().st_mode & 0o777 == 0o700


def test_a_temporary_folder_that_someone_else_made_is_refused(clone):
    clone.checkout.chmod(0o555)
    clone.home.chmod(0o555)
    user = NOBODY if os.geteuid() == 0 else os.geteuid()
    (clone.home.parent / f"varlen-{user}").symlink_to(clone.bin)

    run = clone.run("scripts/where", "venv", as_reader=True, TMPDIR=str(clone.home.parent))

    assert run.returncode != 0
    assert "VENV=FOLDER" in run.stderr
