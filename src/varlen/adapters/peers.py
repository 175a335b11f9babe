"""Shared by drop-in replacements: errors that also have the classes of their peers', and the number of replicas."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from varlen.arguments import as_count
from varlen.batch.packed import import_torch
from varlen.errors import SettingError, VarlenError
from varlen.launch import launched

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
        for name, attribute in list(vars(made).items()):
            if inspect.isfunction(attribute) and (name in _SPECIAL or not name.startswith("_")):
                setattr(made, name, _wrapped(attribute, kinds, only))
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
    """Unpickle an error."""
    return _joined(own, kinds)(*args)


# How many replicas take part and which this is, for samplers whose originals ask torch.distributed.


def as_replicas(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of replicas and the rank."""
    if num_replicas is None or rank is None:
        group = _group()
        launch = launched()
        if group is None and (num_replicas != rank or launch is not None):
            several = f"one of {launch.size} processes by {launch.source}" if launch else "in a process alone"
            raise SettingError(
                f"num_replicas={num_replicas} and rank={rank} were given, {several}, and torch.distributed isn't "
                "initialised; pass both, or initialise it first"
            )
        here, size = group or (0, 1)
        num_replicas = size if num_replicas is None else num_replicas
        rank = here if rank is None else rank
    count = as_count(num_replicas, "num_replicas")
    return count, as_count(rank, "rank", 0, count - 1)


def as_num_replicas(num_replicas: int | None) -> int:
    """Return the number of replicas where one process deals for all of them."""
    return as_replicas(None, None)[0] if num_replicas is None else as_count(num_replicas, "num_replicas")


def check_processes(
    known: int, lib: str = "accelerate", way: str = "on CPUs pass use_cpu=True or set ACCELERATE_USE_CPU=true"
) -> None:
    """Refuse a job of several processes of which the framework doesn't know, as on CPUs by default.

    Each process would take itself for the only one, train on all of the data, and share no gradient.
    """
    launch = launched()
    if launch is not None and launch.size != str(known):
        raise SettingError(
            f"{launch.words}, and {lib} knows of {known:,}, so each would train on all of the data; {way}, and where "
            f"this process does train alone, unset {launch.source}"
        )


def _group() -> tuple[int, int] | None:
    """Return rank and size of the default process group; None if there is none."""
    distributed: Any = import_torch().distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank(), distributed.get_world_size()
