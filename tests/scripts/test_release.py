"""What is released: a wheel of the package alone, an sdist of the whole checkout, and extras that something uses."""

import contextlib
import re
import subprocess
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions

import pytest
from flit_core import buildapi
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import varlen
from varlen.missing import _EXTRAS

MOST_BYTES_OF_WHEEL = 2_000_000


@pytest.fixture(scope="module")
def project(root):
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def built(root, tmp_path_factory):
    """The folder with the wheel and the sdist of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    with contextlib.chdir(root):
        buildapi.build_wheel(str(folder))
        buildapi.build_sdist(str(folder))
    return folder


def test_the_wheel_holds_the_package_alone_and_is_small(built, root):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        about = wheel.read(f"varlen-{varlen.__version__}.dist-info/METADATA").decode()

    package = root / "src"
    files = {each.relative_to(package).as_posix() for each in package.rglob("*") if each.is_file()}
    assert {name for name in names if ".dist-info/" not in name} == {
        f for f in files if "__pycache__" not in f
    }
    assert path.stat().st_size <= MOST_BYTES_OF_WHEEL
    assert f"\nVersion: {varlen.__version__}\n" in about


def test_the_sdist_holds_all_files_of_the_checkout(built, root):
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this checkout isn't one of git, which lists its files")
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}

    assert set(listed.stdout.splitlines()) - names == set()
    assert {"constraints.txt", "docs/index.md", "tests/conftest.py"} <= names
    assert not any("__pycache__" in name or name.startswith((".venv", ".git/", "site/")) for name in names)


def test_the_changelog_has_the_version(root):
    assert f"\n## [{varlen.__version__}] - " in (root / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_distribution_of_every_extra_is_used(project, root):
    texts = [
        path.read_text(encoding="utf-8")
        for folder in ("src", "docs")
        for path in (root / folder).rglob("*.py")
    ]
    modules: dict[str, list[str]] = {}
    for module, distributions in packages_distributions().items():
        for distribution in distributions:
            modules.setdefault(canonicalize_name(distribution), []).append(module)
    modules["alembic"] = modules["mlflow-skinny"]  # which uses it

    for extra, needed in project["optional-dependencies"].items():
        for requirement in map(Requirement, needed if extra != "dev" else ()):
            names = "|".join(map(re.escape, modules[canonicalize_name(requirement.name)]))
            use = re.compile(rf'^\s*(?:import|from) (?:{names})\b|"(?:{names})(?:\.[\w.]+)?"', re.MULTILINE)
            assert any(use.search(text) for text in texts), (
                f"{requirement} of the extra {extra} is used nowhere"
            )


def test_a_missing_library_is_installed_by_an_extra_that_has_it(project):
    for library, extra in _EXTRAS.items():
        needed = [Requirement(each).name for each in project["optional-dependencies"][extra]]
        assert any(name == library or name == f"{library}-skinny" for name in needed), (library, extra)


def test_constraints_pin_everything_that_the_tests_need(project, root):
    pinned = {line.partition("==")[0] for line in (root / "constraints.txt").read_text().splitlines()}
    needed = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {canonicalize_name(Requirement(each).name) for some in needed for each in some} - {"varlen"}

    assert names - pinned == set()


def test_classifiers_name_the_pythons_that_the_long_tests_ran_with_and_no_others(project, root):
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))

    assert named == re.findall(r"Python (3\.\d+)", (root / "docs" / "soak.md").read_text(encoding="utf-8"))
