"""Caching of compiled kernels: only in folders that only this user can write, since loading executes them.

numba stores machine code and pickles. A folder is trusted if this user or root owns it, and no other user can write
or replace it; the same is checked for each folder above it, and for the files. The user's private group is trusted
like the user. If the usual folders are writable by others, a private one is used.
"""

from __future__ import annotations

import atexit
import functools
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
    """A user whose processes would execute a file's content."""

    user: int
    private_group: int | None = None  # the group whose only member is this user, if there is one


def is_private(
    status: os.stat_result, reader: Reader, *, is_above: bool = False, has_acl: bool = False
) -> bool:
    """Whether only the reader and root can change a file or folder."""
    if status.st_uid not in (0, reader.user):
        return False
    open_to = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_gid == reader.private_group and not has_acl:
        open_to &= ~stat.S_IWGRP
    return not open_to or (is_above and bool(status.st_mode & stat.S_ISVTX))


@functools.cache
def reader() -> Reader:
    """Return the user of this process."""
    user = os.geteuid()
    return Reader(user=user, private_group=_private_group(user))


def _private_group(user: int) -> int | None:
    """Return the primary group of the user if it has the user's name and no other member."""
    import grp
    import pwd

    try:
        account = pwd.getpwuid(user)
        group = grp.getgrgid(account.pw_gid)
    except (KeyError, OSError):
        return None
    is_shared = group.gr_name != account.pw_name or set(group.gr_mem) - {account.pw_name}
    others = any(other.pw_gid == account.pw_gid and other.pw_uid != user for other in pwd.getpwall())
    return None if is_shared or others else int(account.pw_gid)


def is_trusted(folder: Path) -> bool:
    """Whether no other user can write a folder, or replace it."""
    folders = [folder, *folder.parents]
    try:
        return all(
            is_private(each.stat(), reader(), is_above=each is not folder, has_acl=_has_acl(each))
            for each in folders
        )
    except OSError:
        return False


def _has_acl(path: Path) -> bool:
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except (OSError, AttributeError):  # a file system or operating system without ACLs
        return False


def folder_for(source: str) -> Path | None:
    """Return the folder for the compiled kernels of a source file, created if need be.

    Tried in this order: NUMBA_CACHE_DIR, `__pycache__` beside the source, the user's cache folder, a private folder
    in the temporary folder, and a new one for this process only.
    """
    for candidate in _candidates(source):
        with suppress(OSError):
            for folder in (*reversed(candidate.parents), candidate):
                if not folder.exists():
                    folder.mkdir(mode=0o700, exist_ok=True)
            resolved = candidate.resolve()
            if not is_trusted(resolved):
                _log.info(
                    "compiled kernels are not kept in %s, which others than this user can write", resolved
                )
                continue
            tempfile.TemporaryFile(dir=resolved).close()  # only an attempt shows whether it can be written
            return resolved
    return _of_this_process(source)


def _candidates(source: str) -> Iterator[Path]:
    """Yield the folders to try for a file's kernels."""
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
    import hashlib  # a quarter of the time of `import varlen; varlen.pack`

    return f"{os.path.basename(folder)}_{hashlib.sha1(folder.encode()).hexdigest()}"  # noqa: PTH119


def _of_this_process(source: str) -> Path | None:
    """Return a new folder, which is removed at exit."""
    try:
        return _temporary(os.getpid()) / _name_of(source)
    except OSError:
        return None


@functools.cache
def _temporary(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="varlen-kernels-"))

    def remove() -> None:
        if os.getpid() == process:  # forks leave it to their parent
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def keep(kernel: Any, source: str) -> bool:
    """Make numba cache a kernel's machine code in a folder that only this user can write."""
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
    """Wrap a loading function to ignore files that others can write."""

    def loaded(*arguments: Any) -> Any:
        path = path_of(*arguments)
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return load(*arguments)
        if not stat.S_ISREG(status.st_mode) or not is_private(status, reader(), has_acl=_has_acl(Path(path))):
            _log.info("the compiled kernel in %s is left aside: others than this user can write it", path)
            return otherwise
        return load(*arguments)

    return loaded


@functools.cache
def _cache_type() -> Any:
    """Return a numba cache class with a given folder, regardless of configuration files."""
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

    class Cache(caching.FunctionCache):
        def __init__(self, function: Any, folder: str, source: str) -> None:
            own = cast(Any, self)
            own._impl_class = lambda function: Contents(function, folder, source)
            cast(Any, super()).__init__(function)

    return Cache
