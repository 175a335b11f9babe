"""The error for a library that isn't installed, wherever a public name or an adapter needs it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

from varlen.errors import MissingExtraError

# Extras of varlen that install a library.
_EXTRAS = {
    **{"torch": "train", "transformers": "train", "peft": "lora", "torchao": "adamw-8bit"},
    **{"tensorboard": "track", "wandb": "track", "mlflow": "track"},
    **{"highspy": "plan", "ray": "ray", "s3fs": "s3"},
}
# Distributions with another name than their import.
_PACKAGES = {"yaml": "pyyaml", "megatron": "megatron-core"}


def library_in(error: BaseException | None) -> str:
    """Return the missing library that an import error or its cause reports; "" for other errors."""
    library = ""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            library = error.name.partition(".")[0]
        error = error.__cause__ or error.__context__
    return "" if library == "varlen" else library


def of_missing(library: str, needed_by: str) -> MissingExtraError:
    """Return the error that names a missing library, what needs it, and the command that installs it."""
    return MissingExtraError(
        f"{library} is not installed, and {needed_by} needs it; `{installation(library)}` installs it"
    )


def installation(library: str) -> str:
    """Return the command that installs a library, by varlen's extra where there is one."""
    extra = _EXTRAS.get(library)
    return f'pip install "varlen[{extra}]"' if extra else f"pip install {_PACKAGES.get(library, library)}"


def report_missing(package: str) -> None:
    """Make imports of a package's modules raise MissingExtraError for libraries that aren't installed.

    Args:
        package: a package of varlen.
    """
    if not any(isinstance(each, _Finder) and each.package == package for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder(package))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a package's modules as Python does, and loads them by `_Loader`."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{self.package}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        try:
            super().exec_module(module)
        except ModuleNotFoundError as error:
            library = library_in(error)
            if not library:
                raise
            raise of_missing(library, module.__name__) from None
