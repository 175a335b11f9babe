"""What all tests share: threads, hypothesis profiles, real data where it is at hand."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support import forked
from tests.support.rarely import IS_SOAK

# Test processes side by side share the cores, and threads of MKL spin while they wait for one another: a second one
# makes steps of tiny models several times as long. numpy and torch read these when they are first imported. What the
# first process sets here is what xdist's processes inherit, so it can't depend on how many those are.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Small work would run in plain Python until something imports numba; tests of kernels want kernels.
os.environ.setdefault("VARLEN_JIT", "1")
forked.AT_FIRST.update(os.environ)

# A shell starts what runs in its background deaf to Ctrl-C, and so would be the programs that tests interrupt.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The first call of a kernel compiles it, so no example has a deadline.
hypothesis.settings.register_profile("test", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.register_profile(
    "soak",
    deadline=None,
    max_examples=int(os.environ.get("VARLEN_SOAK_EXAMPLES", "3000")),
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile(os.environ.get("VARLEN_HYPOTHESIS", "test"))

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"

# Modules that prepare for a minute what many of their tests look at. Of two processes each has one half of all tests,
# and the first to finish takes the last ones of the other: a module among them would be prepared twice.
_FIRST = tuple(f"tests/distributed/test_{name}.py" for name in ("pipelines", "runs", "shares", "planner"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest."""
    assert all((ROOT / name).is_file() for name in _FIRST)
    items.sort(key=lambda item: not item.nodeid.startswith(_FIRST))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print failures of the soak at once: it may be out of time before pytest does."""
    if IS_SOAK and report.failed:
        print(f"\n{report.nodeid} failed in its {report.when}\n{report.longreprtext[-3000:]}", flush=True)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real lengths, texts and tokens, which is no part of the project."""
    if not DATA.is_dir():
        pytest.skip("no real data here: it is read from ../shared/data beside the checkout")
    return DATA


@pytest.fixture(scope="module", autouse=True)
def only_new_garbage() -> None:
    """Leave what libraries hold out of garbage collections: Accelerate asks for one whenever a Trainer begins.

    Each would look through millions of objects of torch, transformers and thousands of tests, for a second. What
    is made from here on is collected as ever.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def replace_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, str, Any], None]]:
    """Put a fake in a kernel's place, given its file as a module, its name and the fake, until the test ends."""
    yield monkeypatch.setattr
    monkeypatch.undo()


@pytest.fixture
def plain_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Switch from compiled kernels to their source in Python and back, as `VARLEN_JIT=0` does."""
    from varlen import jit  # once its environment is set

    def switch(on: bool) -> None:
        monkeypatch.setattr(jit, "_is_enabled", not on)

    yield switch
    monkeypatch.undo()


@pytest.fixture
def verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Any, str, str]]:
    """Run `varlen` in this process, in a folder of its own; returns exit code, standard output and error.

    Of the error stream, lines of progress are left out.
    """
    from varlen.cli import app

    monkeypatch.chdir(tmp_path)

    def call(*arguments: Any) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            app.app([*map(str, arguments)])
        out, said = capfd.readouterr()
        kept = (line for line in said.splitlines(keepends=True) if " %  " not in line)
        return ended.value.code, out, "".join(kept)

    return call


@pytest.fixture(autouse=True)
def forked_children(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the children of loaders, planners and crews, but in the soak and where a test wants fresh interpreters."""
    if forked.IS_POSSIBLE and not IS_SOAK and "fresh_children" not in request.fixturenames:
        from varlen.workers import child  # once its environment is set

        monkeypatch.setattr(child, "subprocess", forked.FORKING)


@pytest.fixture
def fresh_children() -> None:
    """A test that asks for this has fresh interpreters for children."""
