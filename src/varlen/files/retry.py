"""Retried calls to servers: how often, how long, and which failures are worth a retry."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from varlen.counts import many
from varlen.errors import MissingExtraError, SettingError, SourceError, VarlenError, described

Result = TypeVar("Result")

# What pip installs, by URL protocol.
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
# By package and name, since none of them need be installed; derived classes count too.
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
_jitter = random.Random()  # own state: the caller's random numbers are unaffected


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """How often and for how long one read of a remote file is tried.

    Delays double from `first_s` to `most_s`, each reduced by a random factor of up to one half, so that readers that
    fail together don't retry together.
    """

    attempts: int = 8  # tries of one read, including the first
    first_s: float = 0.5
    most_s: float = 20.0
    silence_s: float = 30.0  # timeout of a single try
    deadline_s: float = 180.0  # seconds for all tries of one read, including delays

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise SettingError(f"attempts must be at least 1, got {self.attempts:,}")
        for name in ("first_s", "most_s", "silence_s", "deadline_s"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name} must be above 0 seconds, got {getattr(self, name)}")

    def wait_s(self, failures: int) -> float:
        """Return the delay after so many consecutive failures."""
        longest = min(self.first_s * 2.0 ** min(failures - 1, 60), self.most_s)
        return longest * (0.5 + _jitter.random() / 2)


USUAL = Retry()


def retried(
    call: Callable[[], Result], url: str, retry: Retry, *, where: str = "", silence_s: float | None = None
) -> Result:
    """Return the result of a call to a server, retried on transient failures."""
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
                raise SourceError(_sentence(url, error, where)) from as_os_error(error)
            # A last try that the deadline cuts off is less informative than the one before.
            failed = failed if failed and left_s < most_s and isinstance(error, TimeoutError) else error
            wait_s = retry.wait_s(attempt)
            spent_s = time.monotonic() - began
            if attempt >= retry.attempts or spent_s + wait_s >= retry.deadline_s:
                tried = f"tried {many(attempt, 'time')} in {spent_s:.1f} s"
                raise SourceError(f"{_sentence(url, failed, where)}; {tried}") from as_os_error(failed)
        time.sleep(wait_s)


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return the result of a call, or raise TimeoutError.

    The abandoned call continues in its thread until its own library gives up: threads can't be killed.
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


def missing_package(url: str, error: ImportError) -> MissingExtraError:
    """Return the error that says what to install for a URL."""
    package = _PACKAGES.get(url.partition("://")[0])
    way_out = f"; run: pip install {package}" if package else ""
    return MissingExtraError(f"{url} can't be opened: {described(error)}{way_out}")


def is_passing(error: BaseException) -> bool:
    """Whether a failure is transient: overload, a timeout, a broken connection."""
    chain = list(_chain(error))
    for link in chain:  # a server's response takes precedence over a library's interpretation of it
        status, code = _status(link)
        if code in _PASSING_CODES:
            return True
        if status is not None:
            return status in _PASSING_STATUS
    for link in chain:
        kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(link).__mro__}
        if kinds & _LASTING_KINDS:
            return False
        if isinstance(link, TimeoutError | ConnectionError) or kinds & _PASSING_KINDS:
            return True
        if isinstance(link, OSError) and link.errno in _PASSING_ERRNO:
            return True
    return False


def is_outside(error: BaseException) -> bool:
    """Whether a failure is one of a disk, a network or a server, and not of the file's content."""
    if is_passing(error):
        return True
    chain = list(_chain(error))
    if any(_status(link)[0] is not None for link in chain):
        return True
    return any(isinstance(link, OSError) and link.errno is not None for link in chain)


def is_nothing_there(error: FileNotFoundError) -> bool:
    """Whether nothing exists; some libraries report any refusal so."""
    return not is_passing(error) and response_of(error)[0] in _NOTHING_THERE


def response_of(error: BaseException) -> tuple[int | None, str]:
    """Return the status and the code of a server's response, or (None, "")."""
    return next((response for response in map(_status, _chain(error)) if response[0] is not None), (None, ""))


def as_os_error(error: BaseException) -> OSError:
    """Return a failure as an OSError, which readers distinguish from faults in the content."""
    if isinstance(error, OSError):
        return error
    failed = OSError(described(error))
    failed.__cause__ = error
    return failed


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _status(error: BaseException) -> tuple[int | None, str]:
    """Return the status and the code of a server's response, as the cloud libraries store them."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(response.get("Error", {}).get("Code", ""))
    else:
        status = getattr(response, "status_code", None)
        code = ""
    # aiohttp's `code` of an unreadable body isn't a server's response.
    for name in ("status", "status_code", *(["code"] if type(error).__module__.startswith("gcsfs") else [])):
        status = getattr(error, name, None) if status is None else status
    return (status if isinstance(status, int) and 100 <= status < 600 else None), code


def _sentence(url: str, error: BaseException, where: str) -> str:
    """Describe what failed, with the server's response."""
    message = getattr(error, "strerror", None) or described(error)
    status, code = response_of(error)
    if status is not None and str(status) not in message:
        message = f"{message} (status {status}{f', {code}' if code and not code.isdigit() else ''})"
    if status == _NO_SUCH_RANGE:
        message = (
            f"{message}; it has become shorter since it was listed; run the same again, which lists it anew"
        )
    if isinstance(error, FileNotFoundError) and status in _NOTHING_THERE:
        message = f"it is not there (any more); {message}" if message != url else "it is not there (any more)"
    return f"{url} can't be read{f' at {where}' if where else ''}: {message}"
