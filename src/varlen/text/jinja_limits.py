"""Limits of what an untrusted chat template may use: the size of its values, its computing time and its memory.

Every operation whose result can exceed its operands is checked beforehand. A text has a limit, and so has the total
content of a list, tuple or mapping that the template makes, where repeated references count repeatedly: a list that
contains one list many times is short, but its text isn't. So the text of every value is bounded, and operations that
don't grow their operands (`trim`, `upper`, a comparison) need no check.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from itertools import islice
from threading import get_ident
from typing import Any, TypeVar

from jinja2.exceptions import TemplateError

LONGEST = 2**20  # characters, items or bits that one number of a template may request
LARGEST_TEXT = 2**27  # bytes of one text
LARGEST = 2**25  # characters of everything in a list or mapping that a template makes
MOST_ITEMS = 2**21  # pieces of one text, or items that one filter consumes
MOST_UNASKED = 4  # operands joined before their result is checked; each of them is within the limit
LARGE = 2**12  # characters above which values are accounted for
_DEEPEST = 200
_VIEWS: tuple[type, ...] = (type({}.items()), type({}.keys()), type({}.values()))
_CONTAINERS = (list, tuple, dict, set, frozenset, *_VIEWS)


class TooLongError(TemplateError):
    """A template requested more text than a chat can have."""


def _shown(number: int) -> str:
    """Write a number of any size; beyond 1e300, only that."""
    return f"{max(min(number, 10**300), -(10**300)):.3g}"


def check_number(length: int) -> None:
    """Raise if a number requests a very large size."""
    if length > LONGEST:
        raise TooLongError(
            f"one expression asks for {_shown(length)} characters, items or bits; {LONGEST:,} at most"
        )


def check_text(length: int, what: str) -> None:
    """Raise if an operation would make a very large text."""
    if length > LARGEST_TEXT:
        raise TooLongError(f"{what} asks for a text of {_shown(length)} characters; {LARGEST_TEXT:,} at most")
    if length > LARGE:
        account(length)


def within(value: Any) -> Any:
    """Return the value of an expression; raise if it is very large."""
    if type(value) is str:
        if len(value) > LARGE:
            _check_made(value)
        return value
    return made(value) if isinstance(value, _CONTAINERS) else _within_odd(value)


def _within_odd(value: Any) -> Any:
    if isinstance(value, str | bytes) and len(value) > LARGE:
        _check_made(value)
    return value


def _check_made(value: str | bytes) -> None:
    size = sys.getsizeof(value)
    if size > LARGEST_TEXT:
        raise TooLongError(f"one expression makes a text of {size:.3g} bytes; {LARGEST_TEXT:,} at most")
    account(size)


def made(value: Any) -> Any:
    """Return a list, tuple or mapping that a template made; raise if its content is very large."""
    run = current()
    if run is None:
        return value
    if run.known is None:
        run.known = {}
    size, depth = _measured(value, run.known)
    if size > LARGEST:
        raise TooLongError(
            f"a {type(value).__name__} holds {size:.3g} characters, counting what stands in it repeatedly; "
            f"{LARGEST:,} at most"
        )
    if depth > _DEEPEST:
        raise TooLongError(f"a {type(value).__name__} is nested more than {_DEEPEST} deep")
    return value


def repeated(value: Any, once: Any, times: int) -> Any:
    """Return a repeated list or tuple; raise if its content is very large."""
    run = current()
    if run is None or isinstance(value, str | bytes):
        return within(value)
    size = size_of(once) * max(times, 0)
    if size > LARGEST:
        raise TooLongError(f"'*' asks for {_shown(size)} characters in a list; {LARGEST:,} at most")
    run.known = {} if run.known is None else run.known
    depth = run.known[id(once)][2] if id(once) in run.known else 1
    run.known[id(value)] = (value, size, depth)
    return value


def joined(parts: tuple[Any, ...], join: Callable[[Iterable[Any]], Any]) -> Any:
    """Join several values into one text (`~`)."""
    if len(parts) <= MOST_UNASKED:  # each of them is within the limit
        return within(join(parts))
    check_text(sum(map(size_of, parts)), "'~'")
    return join(parts)


def size_of(value: Any) -> int:
    """Return the approximate number of characters that a value takes when written."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    if isinstance(value, _CONTAINERS):
        run = current()
        if run is not None and run.known is None:
            run.known = {}
        return _measured(value, {} if run is None else run.known or {})[0]
    return 16


def _measured(value: Any, known: dict[int, Any]) -> tuple[int, int]:
    """Return the size of a container's content, and its depth."""
    entry = known.get(id(value))
    if entry is not None and entry[0] is value:
        return entry[1], entry[2]
    items: Iterable[Any] = value
    if isinstance(value, dict):
        items = (element for pair in value.items() for element in pair)
    size, depth = 2, 0
    for item in items:
        if type(item) is str:
            size += len(item) + 4
        elif isinstance(item, _CONTAINERS):
            if len(known) > MOST_ITEMS:
                raise TooLongError(f"it makes more than {MOST_ITEMS:,} lists and mappings")
            inner, below = _measured(item, known)
            size += inner + 2
            depth = max(depth, below)
        else:
            size += size_of(item) + 2
    known[id(value)] = (value, size, depth + 1)
    return size, depth + 1


def items_of(values: Any) -> Any:
    """Return the items that a filter consumes; raise if there are very many."""
    if isinstance(values, str | bytes):
        if len(values) > MOST_ITEMS:
            raise TooLongError(f"a filter takes {len(values):,} characters as items; {MOST_ITEMS:,} at most")
        return values
    if isinstance(values, _CONTAINERS) or not hasattr(values, "__iter__"):
        return values
    items = list(islice(values, MOST_ITEMS + 1))
    if len(items) > MOST_ITEMS:
        raise TooLongError(f"a filter takes more than {MOST_ITEMS:,} items")
    return items


# Checks before Jinja's filters and Python's methods are run.

_NUMBERS = re.compile(r"\d+")
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +.\d]*(?:\*|\d{7})")
_WIDE_BRACES = re.compile(r"\{[^{}]*(?:\d{7}|:[^{}]*\{)")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def check_percent(form: str, values: Any) -> None:
    """Raise if `'%s' % value` would make a very large text."""
    if _WIDE_PERCENT.search(form):
        raise TooLongError(f"{form[:40]!r} asks for a text of more than {LONGEST:,} characters")
    given = values if isinstance(values, tuple) else (values,)
    sizes = [size_of(value) for value in given]
    repeated = form.count("%") * max(sizes, default=0) if isinstance(values, Mapping) else sum(sizes)
    check_text(len(form) + 4 * repeated + sum(map(int, _NUMBERS.findall(form))), "'%'")


def check_braces(form: str, values: Iterable[Any]) -> None:
    """Raise if `'{}'.format(value)` would make a very large text."""
    if _WIDE_BRACES.search(form):
        raise TooLongError(f"{form[:40]!r} asks for a text of more than {LONGEST:,} characters")
    largest = max(map(size_of, values), default=0)
    check_text(len(form) + 4 * form.count("{") * largest + sum(map(int, _NUMBERS.findall(form))), "'format'")


def _check_replace(text: Any, old: Any = "", new: Any = "", count: Any = None, *_: Any, **more: Any) -> None:
    text, old, new = str(text), str(more.get("old", old)), str(more.get("new", new))
    grown = len(new) - len(old)
    if grown <= 0:
        return
    times = len(text) // max(len(old), 1) + 1
    if grown * times + len(text) > LARGE:
        times = text.count(old)
        times = (
            times if not isinstance(count, int) or isinstance(count, bool) or count < 0 else min(times, count)
        )
        check_text(grown * times + len(text), "'replace'")


def _check_width(text: Any, width: Any = 0, *_: Any, **more: Any) -> None:
    width = more.get("width", width)
    if isinstance(width, int):
        check_number(width)
        check_text(max(width, len(text) if isinstance(text, str) else 0), "a width")


def _check_tabs(text: Any, tabsize: Any = 8, **_: Any) -> None:
    if isinstance(tabsize, int):
        check_number(tabsize)
        check_text(text.count("\t" if isinstance(text, str) else b"\t") * tabsize + len(text), "'expandtabs'")


def _check_translate(text: Any, table: Any = None, *_: Any) -> None:
    if isinstance(table, Mapping):
        check_text(len(text) * max(map(size_of, table.values()), default=1), "'translate'")


def _check_split(text: Any, sep: Any = None, maxsplit: Any = -1, **more: Any) -> None:
    if len(text) <= MOST_ITEMS:
        return
    sep, maxsplit = more.get("sep", sep), more.get("maxsplit", maxsplit)
    most = maxsplit if isinstance(maxsplit, int) and maxsplit >= 0 else len(text)
    if sep is None:
        pieces = len(text.split(None, MOST_ITEMS + 1)) if most > MOST_ITEMS else most
    else:
        pieces = min(text.count(sep) if sep else 0, most)
    if pieces > MOST_ITEMS:
        raise TooLongError(f"'split' asks for more than {MOST_ITEMS:,} pieces")


def _check_lines(text: Any, *_: Any, **__: Any) -> None:
    if len(text) > MOST_ITEMS and isinstance(text, str):
        pieces = sum(text.count(end) for end in _LINE_ENDS)
        if pieces > MOST_ITEMS:
            raise TooLongError(f"'splitlines' asks for {pieces:,} lines; {MOST_ITEMS:,} at most")


def _check_keys(_: Any, keys: Any = (), value: Any = None) -> None:
    count = len(keys) if hasattr(keys, "__len__") else LONGEST
    if count * (size_of(value) + 1) > LARGEST:
        raise TooLongError(
            f"'fromkeys' asks for {count:,} times {size_of(value):,} characters; {LARGEST:,} at most"
        )


def _check_join(text: Any, values: Any = (), *_: Any) -> None:
    if hasattr(values, "__len__"):
        check_text(sum(map(size_of, values)) + len(text) * max(len(values) - 1, 0), "'join'")


def check_call(
    check: Callable[..., None], owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Check a method call; return its arguments."""
    if check is _check_join and args:
        args = (items_of(args[0]), *args[1:])
    check(owner, *args, **kwargs)
    return args


# Methods of Python's types whose result can exceed their operands, checked with the object and the arguments.
METHODS: dict[str, Callable[..., None]] = {
    "replace": _check_replace,
    "center": _check_width,
    "ljust": _check_width,
    "rjust": _check_width,
    "zfill": _check_width,
    "expandtabs": _check_tabs,
    "translate": _check_translate,
    "split": _check_split,
    "rsplit": _check_split,
    "splitlines": _check_lines,
    "fromkeys": _check_keys,
    "join": _check_join,
}


def _check_indent(text: Any, width: Any = 4, *_: Any, **more: Any) -> None:
    width = more.get("width", width)
    each = len(width) if isinstance(width, str) else width
    if isinstance(each, int):
        check_number(each)
        text = text if isinstance(text, str) else str(text)
        if each * len(text) > LARGE:
            check_text(each * (1 + sum(map(text.count, _LINE_ENDS))) + len(text), "'indent'")


def _check_joined(values: Any, d: Any = "", *_: Any, **more: Any) -> None:
    check_text(sum(map(size_of, values)) + len(str(more.get("d", d))) * len(values), "'join'")


def _check_batch(_: Any, count: Any = 0, fill_with: Any = None, **more: Any) -> None:
    count = more.get("linecount", more.get("slices", count))
    filler = more.get("fill_with", fill_with)
    if isinstance(count, int):
        check_number(count)
        if count * (size_of(filler) if filler is not None else 0) > LARGEST:
            raise TooLongError(
                f"a filter asks for {count:,} times {size_of(filler):,} characters; {LARGEST:,} at most"
            )


def _check_format(form: Any, *values: Any, **more: Any) -> None:
    check_percent(str(form), more or values)


def _check_mapped(_: Any, *names: Any, **more: Any) -> None:
    """Raise if one large default value would stand for many items."""
    last = names[1:] if names and names[0] in ("default", "d") else ()
    for value in (*last, *(more[name] for name in ("default", "default_value") if name in more)):
        if size_of(value) > LARGE:
            raise TooLongError(
                f"'map' asks for {size_of(value):,} characters for each item; {LARGE:,} at most"
            )


def _check_numbers(_: Any, *values: Any, **more: Any) -> None:
    for value in (*values, *more.values()):
        if isinstance(value, int) and abs(value) > 1000:
            raise TooLongError(f"'round' asks for {_shown(value)} digits; 1,000 at most")


def _of_size(name: str, most: int) -> Callable[..., None]:
    """Limit the input of a filter with superlinear or otherwise high cost."""

    def check(*values: Any, **more: Any) -> None:
        size = sum(map(size_of, (*values, *more.values())))
        if size > most:
            raise TooLongError(f"{name!r} is asked to take {size:,} characters; {most:,} at most")
        for value in (*values[1:], *more.values()):
            if isinstance(value, int):
                check_number(value)

    return check


FILTERS: dict[str, Callable[..., None]] = {
    "batch": _check_batch,
    "center": _check_width,
    "format": _check_format,
    "indent": _check_indent,
    "join": _check_joined,
    "map": _check_mapped,
    "pprint": _of_size("pprint", 2**18),
    "replace": _check_replace,
    "round": _check_numbers,
    "slice": _check_batch,
    "striptags": _of_size("striptags", 2**22),
    "urlencode": _of_size("urlencode", 2**24),
    "urlize": _of_size("urlize", 2**14),
    "wordwrap": _of_size("wordwrap", 2**18),
    "xmlattr": _of_size("xmlattr", 2**22),
}
_TAKE_ALL = ("batch", "dictsort", "groupby", "join", "list", "reverse", "slice", "sort", "sum", "unique")


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Jinja filter that checks its call beforehand."""
    check, takes_all = FILTERS.get(name), name in _TAKE_ALL
    if check is None and not takes_all:
        return function
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)  # Jinja stores what to pass to it as attributes of the function
    def asking(*args: Any, **kwargs: Any) -> Any:
        run = current()
        if run is None or run.is_compiling:  # Jinja evaluates constants while compiling
            raise TooLongError("a filter is computed when the template runs")
        if takes_all and len(args) > skip:
            args = (*args[:skip], items_of(args[skip]), *args[skip + 1 :])
        if check is not None:
            check(*args[skip:], **kwargs)
        return within(function(*args, **kwargs)) if check is not None else function(*args, **kwargs)

    return asking


def plain_sum(iterable: Iterable[Any], start: Any) -> Any:
    """Return a sum as Python's, also of lists and tuples, in linear time."""
    kind = type(start)
    if kind not in (list, tuple):
        return sum(iterable, start)
    total = list(start)
    for item in iterable:
        if not isinstance(item, kind):
            return start + item  # raises the TypeError
        total += item
    return made(kind(total))


# Watchdog for untrusted templates: stops one that computes for long or takes much memory, in any thread.
#
# A thread checks several times per second what runs, and raises an exception in a thread that exceeds a limit. In
# addition, templates report large values (`account`), so that a few of them don't go unnoticed until the next check.

Result = TypeVar("Result")

LONGEST_S = 10.0  # seconds of computing after which a run is stopped
_LONGEST_WALL_S = 40.0  # the same in wall time, where other threads use the processor
MOST_BYTES = 2**29  # growth of the process's memory during a run; concurrent runs may each take so much
_LOOK_S = 0.1
_LONGEST_LOOK_S = 1.0  # longer intervals between checks have other causes, such as a suspended process
_IDLE_LOOKS = 100
_ACCOUNT_BYTES = 2**26  # bytes that templates make between two checks of the memory
_MOST_OVERDUE = 3  # stops for taking too long after which a template isn't run again
_SLOW_S = 0.5
_MOST_SLOW_S = 30.0  # Total seconds of slow runs after which a template isn't run again, if its mean is slow


class StoppedError(BaseException):
    """A run was stopped; not an Exception, so that the template's own error handling doesn't catch it."""


class Run:
    """One run of a template."""

    why = ""  # why it is stopped
    is_overdue = False
    is_compiling = False  # only constants are evaluated so far
    made = 0
    looked = 0
    grown_from: int | None = None
    began: float | None = None
    waited = 0.0
    known: dict[int, tuple[object, int, int]] | None = None  # size and depth of the containers that it made


_running: dict[int, Run] = {}
_overdue: Counter[str] = Counter()  # stops for taking too long, by template
_runs: Counter[str] = Counter()  # by template
_slow_s: dict[str, float] = {}  # seconds of computing of slow runs, by template
_lock = threading.Lock()
_watcher: threading.Thread | None = None


def current() -> Run | None:
    """Return the run of this thread, or None."""
    return _running.get(get_ident())


def watched(program: str, call: Callable[..., Result], *arguments: object) -> Result:
    """Run a function of an untrusted template under the watchdog."""
    if _watcher is None:
        _begin()
    if _overdue and _overdue[program] >= _MOST_OVERDUE:
        raise StoppedError(f"it was stopped {_MOST_OVERDUE} times for taking too long, and isn't run again")
    if _slow_s and (slow_s := _slow_s.get(program, 0.0)) > max(_MOST_SLOW_S, _SLOW_S * _runs[program]):
        raise StoppedError(
            f"{_runs[program]:,} runs of it took {slow_s:.0f} s of computing; {_MOST_SLOW_S:.0f} s at most where a "
            f"run takes over {_SLOW_S} s in the mean, and it isn't run again"
        )
    ident = get_ident()
    if ident in _running:
        return call(*arguments)
    run, began = Run(), time.thread_time()
    try:
        _running[ident] = run
        try:
            return call(*arguments)
        finally:
            del _running[ident]
            if run.why:
                _settle(ident)
    except StoppedError as error:  # it may be raised anywhere above
        _running.pop(ident, None)
        _settle(ident)
        if run.is_overdue:
            _overdue[program] += 1
        raise StoppedError(run.why or str(error)) from None
    finally:
        _runs[program] += 1
        if (took := time.thread_time() - began) > _SLOW_S:
            _slow_s[program] = _slow_s.get(program, 0.0) + took


def account(size: int) -> None:
    """Record that the template of this thread made something large."""
    run = _running.get(get_ident())
    if run is None:
        return
    run.made += size
    if run.grown_from is None:
        run.grown_from = _memory() - size
    if run.made - run.looked > _ACCOUNT_BYTES:
        run.looked = run.made
        if why := _too_large(run):
            raise StoppedError(why)


def _too_large(run: Run) -> str:
    grown = _memory() - (run.grown_from or 0)
    most = MOST_BYTES * max(len(_running), 1)
    if grown <= most:
        return ""
    return f"it takes {grown / 1e6:,.0f} MB of memory; {most / 1e6:,.0f} MB at most"


def _settle(ident: int) -> None:
    """Cancel an exception that was scheduled in this thread and hasn't been raised yet."""
    while True:
        try:
            with _lock:
                _raise_in(ident, None)
            return
        except StoppedError:
            continue


def _raise_in(ident: int, error: type[BaseException] | None) -> None:
    import ctypes

    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), raised)


def _begin() -> None:
    global _watcher
    with _lock:
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="varlen watches programs", daemon=True)
            _watcher.start()


def _forked() -> None:
    """Reset in a forked process, which has no watchdog thread."""
    global _watcher, _lock
    _watcher, _lock = None, threading.Lock()
    _running.clear()


os.register_at_fork(after_in_child=_forked)


def _watch() -> None:
    global _watcher
    last, idle = time.monotonic(), 0
    while idle < _IDLE_LOOKS:
        time.sleep(_LOOK_S)
        now = time.monotonic()
        passed, last = min(now - last, _LONGEST_LOOK_S), now
        idle = 0 if _running else idle + 1
        for ident, run in list(_running.items()):
            _look(ident, run, passed)
    _watcher = None  # the next run starts another one


def _look(ident: int, run: Run, passed: float) -> None:
    with _lock:
        if _running.get(ident) is not run:
            return
        computed = _computed(ident)
        if run.began is None:  # it may have run since the last check
            run.began = computed
            if run.grown_from is None:
                run.grown_from = _memory()
            return
        run.waited += passed
        if not run.why:
            is_long = computed - run.began > LONGEST_S
            run.is_overdue = is_long or run.waited > _LONGEST_WALL_S
            if is_long:
                run.why = f"it computes for more than {LONGEST_S:.0f} s"
            elif run.is_overdue:
                run.why = f"it runs for more than {_LONGEST_WALL_S:.0f} s of wall time"
            else:
                run.why = _too_large(run)
        if run.why and _running.get(ident) is run:
            _raise_in(ident, StoppedError)


def _computed(ident: int) -> float:
    """Return a thread's CPU seconds; where unavailable, wall time."""
    if hasattr(time, "pthread_getcpuclockid"):
        with suppress(OSError):
            return time.clock_gettime(time.pthread_getcpuclockid(ident))
    return time.monotonic()


def _memory() -> int:
    """Return the resident memory of this process in bytes; where unavailable, its peak."""
    try:
        # No file object: a thread stopped at this point would leave it open, with a warning.
        descriptor = os.open("/proc/self/statm", os.O_RDONLY)
        try:
            return int(os.read(descriptor, 128).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        finally:
            os.close(descriptor)
    except (OSError, ValueError, IndexError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
