"""Two runs that write one output at the same time: one makes it, and the other finds it or says who has it."""

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.interleaved import interleaved
from tests.support.offline_packs import write_texts
from tests.support.rarely import examples

from varlen.documents.source import open_source
from varlen.errors import SettingError
from varlen.files.ours import may_be_used
from varlen.offline import outputs
from varlen.offline.crew import Crew
from varlen.offline.index import index_source
from varlen.offline.pack import PackSettings, pack_source
from varlen.store.store import open_store

TURNS = st.lists(st.integers(0, 60), max_size=8) | st.tuples(*map(st.integers, (0, 20, 0), (0, 50, 99)))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder of texts, and a store of some of them; a lock that is held is given up at once."""
    home = tmp_path_factory.mktemp("home")
    for name in ("a", "b"):
        write_texts(home / f"{name}.jsonl", seed=ord(name))
    index_source(open_source(home / "a.jsonl"), home / "one")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(outputs, "_LOCK_S", 0)
        yield home


def made(home, names, run, turns):
    """Return what two runs give that write one output; of those that fail, another run has the output."""
    sources = [open_source([home / f"{name}.jsonl" for name in each]) for each in names]
    found = interleaved(*(lambda source=source: run(source) for source in sources), turns)
    for error in (one for one in found if isinstance(one, Exception)):
        assert isinstance(error, SettingError), error
        assert isinstance(error.__cause__, BlockingIOError), error
    assert [path.name for path in home.glob("out*")] == ["out"]
    assert not (home / "out" / ".work").exists()
    return [one for one in found if not isinstance(one, Exception)]


@pytest.mark.parametrize("is_grown", [False, True])
@examples(30, 120)
@given(turns=TURNS)
def test_of_two_runs_that_index_one_store_one_makes_it(home, is_grown, turns):
    def run(source):
        return index_source(source, home / "out", crew=Crew(processes=1))[0].fingerprint

    shutil.rmtree(home / "out", ignore_errors=True)
    if is_grown:
        shutil.copytree(home / "one", home / "out")

    stores = made(home, ("ab", "ab") if is_grown else ("a", "a"), run, turns)

    assert set(stores) == {open_store(home / "out").fingerprint}


@pytest.mark.parametrize("num_calls", range(12))
def test_a_folder_that_is_marked_and_filled_during_the_look_counts_as_marked(tmp_path, num_calls):
    def fill():
        (tmp_path / "marker").write_text('{"varlen": 1}')
        (tmp_path / "filled").write_text("text")

    found = interleaved(lambda: may_be_used(tmp_path, "marker", bool), fill, [num_calls, 99])

    assert found == [True, None]


@examples(30, 120)
@given(turns=TURNS)
def test_of_two_runs_that_pack_one_set_one_makes_it(home, turns):
    def run(source):
        return pack_source(source, home / "out", PackSettings(capacity=64), crew=Crew(processes=1))

    shutil.rmtree(home / "out", ignore_errors=True)

    sets = made(home, ("a", "a"), run, turns)

    assert [one.was_there for one in sets].count(False) == 1
