"""Calls to a server that may fail for a moment: how often and how long they are tried, and what is worth it."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from varlen.counts import many
from varlen.errors import MissingExtraError, SettingError, SourceError, VarlenError

Result = TypeVar("Result")

"""Within this, a thread that was started runs."""
_MOST_CHARACTERS = 200
"""Of what a library says that a sentence repeats: some say all that they have read."""
_PACKAGES = {
    "s3": '"varlen[s3]"',
    "s3a": '"varlen[s3]"',
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "abfs": "adlfs",
    "az": "adlfs",
}
"""What pip installs for the URLs that begin so."""
_NOTHING_THERE = (None, 404, 410)
_NO_SUCH_RANGE = 416
_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}
_PASSING_CODES = {
    "InternalError",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_PASSING_KINDS = {
    "aiohttp.ClientConnectionError",
    "aiohttp.ClientPayloadError",
    "botocore.FlexibleChecksumError",
    "botocore.HTTPClientError",
    "botocore.IncompleteReadError",
    "botocore.ResponseParserError",
    "http.IncompleteRead",
    "httpx.TransportError",
    "requests.ConnectionError",
    "requests.ChunkedEncodingError",
    "requests.Timeout",
}
"""By package and name, since none of them need be installed; what is derived from them counts too."""
_LASTING_KINDS = {"aiohttp.ClientSSLError", "botocore.SSLError", "requests.SSLError"}
_PASSING_ERRNO = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.ETIMEDOUT,
}
_jitter = random.Random()
"""Of its own: the caller's random numbers stay what they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """How often and how long one read of a remote file is tried.

    Waits double from `first_s` up to `most_s`, each shortened by chance to between half and all of it, so that
    readers that failed together don't come back together.
    """

    attempts: int = 8
    """Tries of one read, the first among them."""
    first_s: float = 0.5
    most_s: float = 20.0
    silence_s: float = 30.0
    """A read that has not been answered in full for so long is given up and tried again."""
    deadline_s: float = 180.0
    """Seconds for all tries of one read, waits among them."""

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if self.attempts < 1:
            raise SettingError(f"attempts must be at least 1, got {self.attempts:,}")
        for name in ("first_s", "most_s", "silence_s", "deadline_s"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name} must be above 0 seconds, got {getattr(self, name)}")

    def wait_s(self, failures: int) -> float:
        """Return how long to wait after so many failures in a row."""
        longest = min(self.first_s * 2.0 ** min(failures - 1, 60), self.most_s)
        return longest * (0.5 + _jitter.random() / 2)


def retried(
    call: Callable[[], Result], url: str, retry: Retry, *, place: str = "", silence_s: float | None = None
) -> Result:
    """Return what a call to a server gives, made again while it fails for reasons that pass."""
    began = time.monotonic()
    most_s = silence_s or retry.silence_s
    attempt = 0
    failed: Exception | None = None
    while True:
        attempt += 1
        left_s = max(retry.deadline_s - (time.monotonic() - began), 0.001)
        try:
            return within(min(most_s, left_s), call)
        except VarlenError:
            raise
        except ImportError as error:
            raise missing_package(url, error) from error
        except Exception as error:
            if not is_passing(error):
                raise SourceError(_sentence(url, error, place)) from as_os_error(error)
            # A last try cut off by the deadline says less than the one before.
            failed = failed if failed and left_s < most_s and isinstance(error, TimeoutError) else error
            wait_s = retry.wait_s(attempt)
            spent_s = time.monotonic() - began
            if attempt >= retry.attempts or spent_s + wait_s >= retry.deadline_s:
                tried = f"tried {many(attempt, 'time')} in {spent_s:.1f} s"
                raise SourceError(f"{_sentence(url, failed, place)}; {tried}") from as_os_error(failed)
        time.sleep(wait_s)


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return what a call gives, or give it up.

    What is given up goes on by itself until its own library gives it up too: nothing can end a thread.
    """
    given: list[Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            given.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="varlen-read", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised.pop()
    if not given:
        raise TimeoutError(f"no full answer within {seconds:.3g} s")
    return given[0]


def first_line(error: BaseException) -> str:
    """Return what an error says, short enough for a sentence; its kind where it says nothing."""
    said = next(iter(str(error).splitlines()), "").rstrip(". ")
    return (said if len(said) <= _MOST_CHARACTERS else said[:_MOST_CHARACTERS] + "…") or type(error).__name__


def missing_package(url: str, error: ImportError) -> MissingExtraError:
    """Say what to install for a URL."""
    package = _PACKAGES.get(url.partition("://")[0])
    way_out = f"; run: pip install {package}" if package else ""
    return MissingExtraError(f"{url} can't be opened: {first_line(error)}{way_out}")


def is_passing(error: BaseException) -> bool:
    """Whether a failure may be gone a moment later: overload, silence, a connection that broke."""
    chain = list(_chain(error))
    for each in chain:  # what the server said goes before what a library makes of it
        status, code = _answer(each)
        if code in _PASSING_CODES:
            return True
        if status is not None:
            return status in _PASSING_STATUS
    for each in chain:
        kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(each).__mro__}
        if kinds & _LASTING_KINDS:
            return False
        if isinstance(each, TimeoutError | ConnectionError) or kinds & _PASSING_KINDS:
            return True
        if isinstance(each, OSError) and each.errno in _PASSING_ERRNO:
            return True
    return False


def is_outside(error: BaseException) -> bool:
    """Whether a failure is one of a disk, a network or a server, and none of what a file holds."""
    if is_passing(error):
        return True
    chain = list(_chain(error))
    if any(_answer(each)[0] is not None for each in chain):
        return True
    return any(isinstance(each, OSError) and each.errno is not None for each in chain)


def is_nothing_there(error: FileNotFoundError) -> bool:
    """Whether nothing is there; some libraries call so whatever a server refuses."""
    return not is_passing(error) and answer_of(error)[0] in _NOTHING_THERE


def answer_of(error: BaseException) -> tuple[int | None, str]:
    """Return the status and the code that a server answered with, or (None, "")."""
    return next((answer for answer in map(_answer, _chain(error)) if answer[0] is not None), (None, ""))


def as_os_error(error: BaseException) -> OSError:
    """Return a failure as one of reading, which readers tell from faults of what they read."""
    if isinstance(error, OSError):
        return error
    failed = OSError(first_line(error))
    failed.__cause__ = error
    return failed


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it came from."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _answer(error: BaseException) -> tuple[int | None, str]:
    """Return the status and the code that a server answered with, as the libraries of clouds keep them."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(response.get("Error", {}).get("Code", ""))
    else:
        status = getattr(response, "status_code", None)
        code = ""
    # What aiohttp calls `code` of a body that it can't read is no answer of the server's.
    for name in ("status", "status_code", *(["code"] if type(error).__module__.startswith("gcsfs") else [])):
        status = getattr(error, name, None) if status is None else status
    return (status if isinstance(status, int) and 100 <= status < 600 else None), code


def _sentence(url: str, error: BaseException, place: str) -> str:
    """Say what failed, and what the server said."""
    said = getattr(error, "strerror", None) or first_line(error)
    status, code = answer_of(error)
    if status is not None and str(status) not in said:
        said = f"{said} (status {status}{f', {code}' if code and not code.isdigit() else ''})"
    if status == _NO_SUCH_RANGE:
        said = f"{said}; it has become shorter since it was listed"
    if isinstance(error, FileNotFoundError) and status in _NOTHING_THERE:
        said = f"it is not there (any more); {said}" if said != url else "it is not there (any more)"
    return f"{url} can't be read{f' at {place}' if place else ''}: {said}"
