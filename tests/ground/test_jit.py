"""Compiled kernels work in every folder, and are read only from where nobody else can have put them."""

import json
import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.rarely import mostly

import varlen
import varlen as vl
from varlen import jit, kernel_cache
from varlen.kernel_cache import Reader, folder_for, is_private

KERNEL = '''
"""One kernel that adds, and what became of its cache."""
import json, logging, sys
from pathlib import Path
from varlen.jit import compiled

messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("varlen").addHandler(handler)
logging.getLogger("varlen").setLevel(logging.INFO)

@compiled
def add(a, b):
    return a + b

def report():
    total = add(2, 3)
    stats = getattr(add.dispatcher, "stats", None)
    hits = sum(stats.cache_hits.values()) if stats else 0
    path = stats.cache_path if stats else None
    print(json.dumps({"total": total, "hits": hits, "path": path, "messages": messages}))

if __name__ == "__main__":
    report()
'''
DISK_FULL = (
    "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); import kernel; kernel.report()"
)


@dataclass
class Machine:
    """A folder with a kernel, a home and a working folder, each of which a test may spoil."""

    folder: Path

    def __post_init__(self) -> None:
        for place in (self.source, self.home, self.work, self.temporary):
            place.mkdir()
        (self.source / "kernel.py").write_text(KERNEL)

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def temporary(self) -> Path:
        return self.folder / "temporary"

    def make_source_read_only(self) -> None:
        # A file in the place of the cache folder stops root too, whom no permission stops.
        (self.source / "__pycache__").write_text("")
        self.source.chmod(0o555)

    def make_home_read_only(self) -> None:
        self.home.rmdir()
        self.home.write_text("")

    def make_temporary_read_only(self) -> None:
        self.temporary.rmdir()
        self.temporary.write_text("")

    def run(
        self, script: str = "import kernel; kernel.report()", **environment: str | None
    ) -> dict[str, object]:
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA", "XDG", "VARLEN"))}
        places = [self.source, Path(varlen.__file__).parent.parent]
        variables |= {"HOME": str(self.home), "PYTHONPATH": os.pathsep.join(map(str, places))}
        variables["TMPDIR"] = str(self.temporary)
        variables = {k: v for k, v in (variables | environment).items() if v is not None}
        command = [sys.executable, "-B", "-W", "error", "-c", script]
        run = subprocess.run(
            command, env=variables, cwd=self.work, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        report = json.loads(run.stdout)
        assert report["total"] == 5
        return report

    def found_again(self, **environment: str) -> Path:
        """Where the first of two runs keeps the kernel, which the second finds."""
        first, second = self.run(**environment), self.run(**environment)
        assert (first["hits"], second["hits"]) == (0, 1)
        assert second["messages"] == []
        return Path(str(second["path"]))

    def kept(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*.nb[ci]"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_kernel_is_kept_beside_its_source_and_found_again(machine):
    assert machine.found_again() == machine.source / "__pycache__"


def test_a_kernel_of_a_read_only_package_is_kept_in_the_users_cache_folder(machine):
    machine.make_source_read_only()

    assert machine.home in machine.found_again().parents


@pytest.mark.soak
def test_a_kernel_of_a_read_only_package_follows_xdg_cache_home(machine):
    machine.make_source_read_only()
    machine.make_home_read_only()
    elsewhere = machine.folder / "elsewhere"

    assert elsewhere in machine.found_again(XDG_CACHE_HOME=str(elsewhere)).parents


@pytest.mark.soak
@pytest.mark.parametrize("variable", mostly(["XDG_CACHE_HOME"], ["XDG_CACHE_HOME", "NUMBA_CACHE_DIR"]))
def test_a_named_cache_folder_that_cannot_be_written_is_no_error(machine, variable):
    machine.make_source_read_only()
    machine.make_home_read_only()

    assert machine.temporary in machine.found_again(**{variable: str(machine.home / "cache")}).parents


@pytest.mark.soak
def test_a_kernel_is_kept_among_temporary_files_where_neither_package_nor_home_can_be_written(machine):
    machine.make_source_read_only()
    machine.make_home_read_only()

    folder = machine.temporary / f"varlen-kernels-{os.geteuid()}"
    assert folder in machine.found_again().parents
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


NOWHERE = """
from varlen import kernel_cache
def fail(*_, **__): raise FileNotFoundError
class tempfile:
    gettempdir = mkdtemp = TemporaryFile = fail
kernel_cache.tempfile = tempfile
import kernel
kernel.report()
"""


def test_a_kernel_runs_where_no_folder_can_be_written(machine):
    report = machine.run(NOWHERE)

    assert report["messages"] == ["no folder can hold compiled kernels; each process compiles add"]
    assert machine.kept() == []


@pytest.mark.soak
def test_no_folder_called_tilde_appears_for_a_user_without_a_home(machine):
    machine.make_source_read_only()
    nobody = "import os.path; os.path.expanduser = lambda path: path; "

    machine.run(nobody + "import kernel; kernel.report()", HOME=None)

    assert list(machine.work.iterdir()) == []


def test_a_full_disk_costs_a_log_line_and_not_the_call(machine):
    report = machine.run(DISK_FULL)

    assert len(report["messages"]) == 1
    assert "could not be kept on disk" in str(report["messages"])
    assert machine.run()["hits"] == 0


@pytest.mark.parametrize(("length", "kind"), mostly([(40, ".nbc")], product((0, 40), (".nbi", ".nbc"))))
def test_a_cache_file_cut_short_is_written_anew(machine, kind, length):
    machine.run()
    (damaged,) = (path for path in machine.kept() if path.suffix == kind)
    damaged.write_bytes(damaged.read_bytes()[:length])

    after = machine.run()
    healed = machine.run()

    assert "could not be read from disk" in str(after["messages"])
    assert (after["hits"], healed["hits"], healed["messages"]) == (0, 1, [])


@pytest.mark.soak
def test_a_damaged_cache_on_a_full_disk_is_left_aside(machine):
    machine.run()
    for path in machine.kept():
        path.write_bytes(b"")

    report = machine.run(DISK_FULL)

    assert "could not be read from disk" in str(report["messages"])
    assert report["hits"] == 0


def test_a_changed_kernel_is_compiled_anew(machine):
    machine.run()
    (machine.source / "kernel.py").write_text(KERNEL.replace("a + b", "b + a"))

    report = machine.run()

    assert report["hits"] == 0


def test_kernels_run_in_python_where_numba_is_told_to(machine):
    report = machine.run(NUMBA_DISABLE_JIT="1")

    assert report["path"] is None
    assert machine.kept() == []


REFERENCES = """
import json, sys
import varlen as vl
documents = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
packing = vl.pack([3, 2, 4], capacity=6)
batch = vl.collate(documents, packing)
loaded = sorted({name.partition(".")[0] for name in sys.modules} & {"numba", "torch"})
print(json.dumps({"total": 5, "packs": packing.to_lists(), "ids": batch.input_ids.tolist(), "loaded": loaded}))
"""


def test_switched_off_kernels_give_the_same_arrays_and_never_load_numba(machine):
    compiled = machine.run(REFERENCES)
    references = machine.run(REFERENCES, VARLEN_JIT="0")

    assert compiled.pop("loaded") == ["numba"]
    assert references.pop("loaded") == []
    assert references == compiled


SMALL_AND_LARGE = """
import json, sys
import varlen as vl
def pack(count):
    packing = vl.pack([1 + i % 7 for i in range(count)], capacity=16)
    return [packing.num_packs, packing.document_ids[:9].tolist(), "numba" in sys.modules]
few = pack(100_000)
many = [pack(100_000) for _ in range(40)][-1]
print(json.dumps({"total": 5, "few": few, "many": many}))
"""


def test_small_work_waits_for_no_compiler_until_there_is_much_of_it(machine):
    report = machine.run(SMALL_AND_LARGE, VARLEN_JIT=None)

    assert report["few"][:2] == report["many"][:2]
    assert (report["few"][2], report["many"][2]) == (False, True)


class Compiled(Exception):
    """A kernel was asked for."""


@pytest.mark.parametrize(
    ("call", "compiles"),
    [
        ('vl.pack([1_000_000], 100, "first_fit", "split")', True),
        ('vl.pack([1_000_000], 100, "balanced", "split")', True),
        ('vl.pack([100_000_000], 50, "wrapped")', True),
        ('vl.pack([60] * 5_000, 100, "balanced")', True),
        ("vl.pack([3] * 20_000, 64, groups=[i // 2 for i in range(20_000)], max_documents=7)", True),
        ('vl.pack([1_000_000], 100, "first_fit", "truncate")', False),
        ('vl.pack([6] * 4_000, 8192, "balanced")', False),
        ("vl.pack([3] * 20_000, 64, groups=[i // 2 for i in range(20_000)])", False),
    ],
)
def test_work_is_sized_by_what_is_packed_and_not_by_what_is_given(monkeypatch, call, compiles):
    called = jit._Kernel.__call__

    def only_in_python(kernel: Any, *arguments: Any) -> Any:
        if not jit.in_python():
            raise Compiled
        return called(kernel, *arguments)

    monkeypatch.delenv("VARLEN_JIT", raising=False)
    monkeypatch.setattr(jit, "sys", SimpleNamespace(modules={}))  # numba isn't loaded
    monkeypatch.setattr(jit, "_spent_s", 0.0)
    monkeypatch.setattr(jit._Kernel, "__call__", only_in_python)

    with pytest.raises(Compiled) if compiles else nullcontext():
        exec(call, {"vl": vl})


ME, OTHER, ROOT = 1000, 1001, 0
READER = Reader(user=ME, private_group=ME)


def place(mode: int, user: int = ME, group: int = ME) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, user, group, 0, 0, 0, 0))


def test_a_place_is_private_if_its_owner_is_trusted_and_nobody_else_may_write_or_replace():
    for user, group, mode, has_acl, is_above in product(
        (ME, OTHER, ROOT), (ME, 100), range(0o2000), (False, True), (False, True)
    ):
        writers = {user} if mode & 0o200 else set()
        if mode & 0o020:
            writers |= {ME} if group == ME and not has_acl else {OTHER}
        if mode & 0o002:
            writers.add(OTHER)
        # The owner can always change the mode; in a folder with the sticky bit, others can't replace entries.
        is_safe = user != OTHER and (OTHER not in writers or (is_above and bool(mode & 0o1000)))

        found = is_private(place(mode, user, group), READER, is_above=is_above, has_acl=has_acl)

        assert found == is_safe, (user, group, oct(mode), has_acl, is_above)


@pytest.mark.parametrize(
    ("names", "members", "others", "found"),
    [
        (("ann", "ann"), [], [], 7),
        (("ann", "ann"), ["ann"], [], 7),
        (("ann", "ann"), ["ann", "bob"], [], None),
        (("ann", "users"), [], [], None),
        (("ann", "ann"), [], [("bob", 8, 7)], None),
    ],
)
def test_a_group_is_private_if_named_as_its_only_member(monkeypatch, names, members, others, found):
    import grp
    import pwd
    from types import SimpleNamespace as Entry

    mine = Entry(pw_name=names[0], pw_uid=5, pw_gid=7)
    rest = [Entry(pw_name=name, pw_uid=user, pw_gid=group) for name, user, group in others]
    monkeypatch.setattr(pwd, "getpwuid", lambda user: mine)
    monkeypatch.setattr(pwd, "getpwall", lambda: [mine, *rest])
    monkeypatch.setattr(grp, "getgrgid", lambda group: Entry(gr_name=names[1], gr_mem=members))

    assert kernel_cache._private_group(5) == found


def test_a_user_without_an_entry_has_no_private_group(monkeypatch):
    assert kernel_cache._private_group(2**31 - 77) is None


@pytest.mark.parametrize("level", mostly(["folder"], ["folder", "above", "file"]))
def test_a_planted_kernel_is_not_run(machine, level):
    first = machine.run()
    folder = Path(str(first["path"]))
    planted = next(path for path in machine.kept() if path.suffix == ".nbi")
    planted.write_bytes(b"cos\nsystem\n(S'touch " + str(machine.work / "RUN").encode() + b"'\ntR.")
    (folder if level == "folder" else folder.parent if level == "above" else planted).chmod(0o777)

    report = machine.run()

    assert not (machine.work / "RUN").exists()
    assert report["hits"] == 0
    assert "others than this user" in str(report["messages"]) or level == "file"
    if level == "file":
        assert "is left aside" in str(report["messages"])
    else:
        again = machine.run()
        assert again["hits"] == 1, "a private folder, never none"
        assert machine.home in Path(str(again["path"])).parents


@pytest.mark.soak
@pytest.mark.parametrize("variable", mostly(["NUMBA_CACHE_DIR"], ["NUMBA_CACHE_DIR", "XDG_CACHE_HOME"]))
def test_a_named_folder_that_others_can_write_is_not_used(machine, variable):
    named = machine.folder / "named"
    named.mkdir()
    named.chmod(0o777)
    if variable == "XDG_CACHE_HOME":
        machine.make_source_read_only()

    machine.run(**{variable: str(named)})
    report = machine.run(**{variable: str(named)})

    assert report["hits"] == 1
    assert named not in Path(str(report["path"])).parents
    assert not [path for path in machine.kept() if named in path.parents]


@pytest.mark.soak
def test_where_all_usual_folders_are_open_there_is_still_a_private_one(machine):
    for folder in (machine.source, machine.home):
        folder.chmod(0o777)
    machine.temporary.chmod(0o1777)

    machine.run()
    report = machine.run()

    assert report["hits"] == 1
    folder = machine.temporary / f"varlen-kernels-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder in Path(str(report["path"])).parents


@pytest.mark.soak
def test_where_no_folder_lasts_there_is_one_for_the_process_which_goes_with_it(machine):
    machine.folder.chmod(0o777)
    try:
        report = machine.run()
    finally:
        machine.folder.chmod(0o700)

    assert machine.temporary in Path(str(report["path"])).parents
    assert list(machine.temporary.glob("varlen-kernels-*/*.nb*")) == []
    assert not Path(str(report["path"])).exists()


def test_a_configuration_of_the_current_folder_names_no_cache(machine):
    planted = machine.work / "planted"
    planted.mkdir()
    (machine.work / ".numba_config.yaml").write_text(
        f"cache_dir: {planted}\ncache_locator_classes: planted_module.Locator\n"
    )

    report = machine.run()

    assert report["messages"] == []
    assert list(planted.iterdir()) == []


def test_a_link_is_followed_to_what_it_names(tmp_path, monkeypatch):
    real, link, source = tmp_path / "real", tmp_path / "link", tmp_path / "kernel.py"
    real.mkdir()
    link.symlink_to(real)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(link))

    assert real in folder_for(str(source)).parents
    real.chmod(0o777)
    assert real not in folder_for(str(source)).parents


def test_a_reader_other_than_the_owner_does_not_trust(monkeypatch, tmp_path):
    stranger = replace(kernel_cache.reader(), user=4711)
    tmp_path.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(tmp_path, 4712, 4712)
    monkeypatch.setattr(kernel_cache, "reader", lambda: stranger)

    assert not kernel_cache.is_trusted(tmp_path)
