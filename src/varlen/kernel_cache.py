"""Where compiled kernels are kept: only in folders that nobody else can write, since reading them runs them.

numba keeps machine code and pickles. A folder is taken if this user or root owns it, and nobody else can write it or
put another in its place: that is asked of the folder, of each folder above it, and of the files. The private group of
the user is nobody else. Where the usual folders are open to others, the kernels are kept in a private one.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """The user who would run what a file holds."""

    user: int
    private_group: int | None = None
    """The group that has this user for its only member, if there is one."""


def is_private(
    place: os.stat_result, reader: Reader, *, is_above: bool = False, has_acl: bool = False
) -> bool:
    """Return whether nobody but the reader and root decides what stands in a file or folder."""
    if place.st_uid not in (0, reader.user):
        return False
    open_to = place.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if place.st_gid == reader.private_group and not has_acl:
        open_to &= ~stat.S_IWGRP
    return not open_to or (is_above and bool(place.st_mode & stat.S_ISVTX))


@functools.cache
def reader() -> Reader:
    """Return the user of this process."""
    user = os.geteuid()
    return Reader(user=user, private_group=_private_group(user))


def _private_group(user: int) -> int | None:
    """Return the group that is named as the user, is their first, and has no other member."""
    import grp
    import pwd

    try:
        found = pwd.getpwuid(user)
        group = grp.getgrgid(found.pw_gid)
    except (KeyError, OSError):
        return None
    is_shared = group.gr_name != found.pw_name or set(group.gr_mem) - {found.pw_name}
    others = any(one.pw_gid == found.pw_gid and one.pw_uid != user for one in pwd.getpwall())
    return None if is_shared or others else int(found.pw_gid)


def is_trusted(folder: Path) -> bool:
    """Return whether nobody else can write a folder, or put another in its place."""
    places = [folder, *folder.parents]
    try:
        return all(
            is_private(place.stat(), reader(), is_above=place is not folder, has_acl=_has_acl(place))
            for place in places
        )
    except OSError:
        return False


def _has_acl(place: Path) -> bool:
    try:
        return "system.posix_acl_access" in os.listxattr(place)
    except (OSError, AttributeError):  # a file system, or an operating system, without such lists
        return False


def folder_for(source: str) -> Path | None:
    """Return the folder that holds the compiled kernels of a source file, made if need be.

    Looked at in this order: NUMBA_CACHE_DIR, `__pycache__` beside the source, the user's cache folder, a folder of
    the user's own among the temporary ones, and a new one that this process alone uses.
    """
    for candidate in _candidates(source):
        with suppress(OSError):
            for folder in (*reversed(candidate.parents), candidate):
                if not folder.exists():
                    folder.mkdir(mode=0o700, exist_ok=True)
            found = candidate.resolve()
            if not is_trusted(found):
                _log.info("compiled kernels are not kept in %s, which others than this user can write", found)
                continue
            tempfile.TemporaryFile(dir=found).close()  # only a try says whether it can be written
            return found
    return _of_this_process(source)


def _candidates(source: str) -> Iterator[Path]:
    """Yield the folders that could hold the kernels of a file."""
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(named, _name_of(source))
    yield Path(source).parent / "__pycache__"
    if home := _user_cache():
        yield home / "numba" / _name_of(source)
    with suppress(OSError):
        yield Path(tempfile.gettempdir(), f"varlen-kernels-{os.geteuid()}", _name_of(source))


def _user_cache() -> Path | None:
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    home = os.path.expanduser("~")  # noqa: PTH111, pathlib raises where there is none
    if home == "~":
        return None
    return Path(home, "Library/Caches" if os.uname().sysname == "Darwin" else ".cache")


def _name_of(source: str) -> str:
    folder = os.path.dirname(os.path.abspath(source))  # noqa: PTH100, PTH120, as numba names it
    return f"{os.path.basename(folder)}_{hashlib.sha1(folder.encode()).hexdigest()}"  # noqa: PTH119


def _of_this_process(source: str) -> Path | None:
    """Return a new folder, which goes with this process."""
    try:
        return _temporary(os.getpid()) / _name_of(source)
    except OSError:
        return None


@functools.cache
def _temporary(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="varlen-kernels-"))

    def remove() -> None:
        if os.getpid() == process:  # a fork leaves it to its parent
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def keep(kernel: Any, source: str) -> bool:
    """Have numba keep the machine code of a kernel on disk, in a folder that only this user can write."""
    folder = folder_for(source) if os.path.exists(source) else None  # noqa: PTH110, it may come from no file
    if folder is None:
        return False
    folder.mkdir(mode=0o700, exist_ok=True)
    cache = _cache_type()(kernel.py_func, str(folder), source)
    files = cache._cache_file
    files._load_index = _if_private(files._load_index, lambda: files._index_path, {})
    files._load_data = _if_private(files._load_data, files._data_path, None)
    kernel._cache = cache
    return True


def _if_private(load: Callable[..., Any], path_of: Callable[..., str], otherwise: Any) -> Callable[..., Any]:
    """Load a file only if nobody else wrote it."""

    def loaded(*arguments: Any) -> Any:
        path = path_of(*arguments)
        try:
            place = os.lstat(path)
        except FileNotFoundError:
            return load(*arguments)
        if not stat.S_ISREG(place.st_mode) or not is_private(place, reader(), has_acl=_has_acl(Path(path))):
            _log.info("the compiled kernel in %s is left aside: others than this user can write it", path)
            return otherwise
        return load(*arguments)

    return loaded


@functools.cache
def _cache_type() -> Any:
    """Return numba's cache in a folder that is given, whatever a configuration file of the current folder names."""
    from numba.core import caching

    class Locator(caching._SourceFileBackedLocatorMixin, caching._CacheLocator):
        def __init__(self, function: Any, folder: str, source: str) -> None:
            self._py_file, self._folder = source, folder
            self._lineno = function.__code__.co_firstlineno

        def get_cache_path(self) -> str:
            return self._folder

    class Contents(caching.CompileResultCacheImpl):
        def __init__(self, function: Any, folder: str, source: str) -> None:
            self._lineno = function.__code__.co_firstlineno
            self._locator = Locator(function, folder, source)
            name = f"{Path(source).stem}.{function.__qualname__}"
            self._filename_base = cast(Any, self).get_filename_base(name, getattr(sys, "abiflags", ""))

    class Kept(caching.FunctionCache):
        def __init__(self, function: Any, folder: str, source: str) -> None:
            own = cast(Any, self)
            own._impl_class = lambda function: Contents(function, folder, source)
            cast(Any, super()).__init__(function)

    return Kept
