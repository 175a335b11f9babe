"""Compiled kernels are read only from where nobody else can have put them."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from tests.ground.test_jit import Machine
from tests.support.rarely import mostly

from varlen import kernel_cache
from varlen.kernel_cache import Reader, folder_for, is_private

ME, OTHER, ROOT = 1000, 1001, 0
READER = Reader(user=ME, private_group=ME)


def place(mode: int, user: int = ME, group: int = ME) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, user, group, 0, 0, 0, 0))


def test_a_place_is_private_if_its_owner_is_trusted_and_nobody_else_may_write_or_replace() -> None:
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
def test_a_group_is_private_if_named_as_its_only_member(monkeypatch, names, members, others, found) -> None:
    import grp
    import pwd
    from types import SimpleNamespace as Entry

    mine = Entry(pw_name=names[0], pw_uid=5, pw_gid=7)
    rest = [Entry(pw_name=name, pw_uid=user, pw_gid=group) for name, user, group in others]
    monkeypatch.setattr(pwd, "getpwuid", lambda user: mine)
    monkeypatch.setattr(pwd, "getpwall", lambda: [mine, *rest])
    monkeypatch.setattr(grp, "getgrgid", lambda group: Entry(gr_name=names[1], gr_mem=members))

    assert kernel_cache._private_group(5) == found


def test_a_user_without_an_entry_has_no_private_group(monkeypatch) -> None:
    assert kernel_cache._private_group(2**31 - 77) is None


@pytest.mark.parametrize("level", mostly(["folder", "file"], ["folder", "above", "file"]))
def test_a_planted_kernel_is_not_run(machine: Machine, level: str) -> None:
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


@pytest.mark.parametrize("variable", mostly(["NUMBA_CACHE_DIR"], ["NUMBA_CACHE_DIR", "XDG_CACHE_HOME"]))
def test_a_named_folder_that_others_can_write_is_not_used(machine: Machine, variable: str) -> None:
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


def test_where_all_usual_folders_are_open_there_is_still_a_private_one(machine: Machine) -> None:
    for folder in (machine.source, machine.home):
        folder.chmod(0o777)
    machine.temporary.chmod(0o1777)

    machine.run()
    report = machine.run()

    assert report["hits"] == 1
    folder = machine.temporary / f"varlen-kernels-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder in Path(str(report["path"])).parents


def test_where_no_folder_lasts_there_is_one_for_the_process_which_goes_with_it(machine: Machine) -> None:
    machine.folder.chmod(0o777)
    try:
        report = machine.run()
    finally:
        machine.folder.chmod(0o700)

    assert machine.temporary in Path(str(report["path"])).parents
    assert list(machine.temporary.glob("varlen-kernels-*/*.nb*")) == []
    assert not Path(str(report["path"])).exists()


def test_a_configuration_of_the_current_folder_names_no_cache(machine: Machine) -> None:
    planted = machine.work / "planted"
    planted.mkdir()
    (machine.work / ".numba_config.yaml").write_text(
        f"cache_dir: {planted}\ncache_locator_classes: planted_module.Locator\n"
    )

    report = machine.run()

    assert report["messages"] == []
    assert list(planted.iterdir()) == []


def test_a_link_is_followed_to_what_it_names(tmp_path, monkeypatch) -> None:
    real, link, source = tmp_path / "real", tmp_path / "link", tmp_path / "kernel.py"
    real.mkdir()
    link.symlink_to(real)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(link))

    assert real in folder_for(str(source)).parents
    real.chmod(0o777)
    assert real not in folder_for(str(source)).parents


def test_a_reader_other_than_the_owner_does_not_trust(monkeypatch, tmp_path) -> None:
    stranger = replace(kernel_cache.reader(), user=4711)
    tmp_path.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(tmp_path, 4712, 4712)
    monkeypatch.setattr(kernel_cache, "reader", lambda: stranger)

    assert not kernel_cache.is_trusted(tmp_path)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)
