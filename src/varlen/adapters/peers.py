"""Errors of drop-ins, which `except` of their peer's classes catches as `except VarlenError` does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from varlen.errors import VarlenError

Raising = TypeVar("Raising", bound=Callable[..., Any])


def raises_too(
    *kinds: type[Exception], only: type[VarlenError] = VarlenError
) -> Callable[[Raising], Raising]:
    """Decorate a drop-in, a function or a class, so that its errors are of its peer's classes as well.

    >>> from varlen.errors import SettingError
    >>> @raises_too(AssertionError)
    ... def checked(size: int) -> None:
    ...     raise SettingError(f"size must be at least 1; got {size}")
    >>> try:
    ...     checked(0)
    ... except AssertionError as error:
    ...     print(type(error).__name__, isinstance(error, SettingError))
    SettingError True
    """

    def decorate(made: Raising) -> Raising:
        if not inspect.isclass(made):
            wrapped: Raising = _wrapped(made, kinds, only)
            return wrapped
        for name, member in list(vars(made).items()):
            if inspect.isfunction(member) and (name in _SPECIAL or not name.startswith("_")):
                setattr(made, name, _wrapped(member, kinds, only))
        return made

    return decorate


_SPECIAL = ("__init__", "__post_init__", "__call__", "__iter__", "__len__")


def _wrapped(function: Any, kinds: tuple[type[Exception], ...], only: type[VarlenError]) -> Any:
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def iterated(*args: Any, **rest: Any) -> Any:
            try:
                yield from function(*args, **rest)
            except only as error:
                raise of_kinds(error, kinds) from error.__cause__

        return iterated

    @functools.wraps(function)
    def called(*args: Any, **rest: Any) -> Any:
        try:
            return function(*args, **rest)
        except only as error:
            raise of_kinds(error, kinds) from error.__cause__

    return called


def of_kinds(error: VarlenError, kinds: tuple[type[Exception], ...]) -> VarlenError:
    """Return an error of the same class that is of other classes too."""
    missing = tuple(kind for kind in kinds if not isinstance(error, kind))
    if not missing:
        return error
    own: Any = type(error)
    made = _joined(own, missing)(*error.args)
    made.__dict__.update(error.__dict__)
    return made.with_traceback(error.__traceback__)


@functools.lru_cache
def _joined(own: Any, kinds: tuple[Any, ...]) -> type[VarlenError]:
    def pickled(self: Any) -> tuple[Any, ...]:
        return _made, (own, kinds, self.args)

    body = {
        "__module__": own.__module__,
        "__doc__": own.__doc__,
        "__reduce__": pickled,
        "__str__": own.__str__,
    }
    return type(own.__name__, (own, *kinds), body)


def _made(own: Any, kinds: tuple[Any, ...], args: tuple[Any, ...]) -> VarlenError:
    """Make an error anew that was pickled."""
    return _joined(own, kinds)(*args)
