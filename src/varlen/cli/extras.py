"""What some verbs need beyond a plain installation, and the sentence that says how to get it."""

from __future__ import annotations

from importlib.util import find_spec

from varlen.errors import MissingExtraError


def require_training(verb: str, does: str = "trains a model") -> None:
    """Refuse to start without the packages that train.

    Args:
        verb: that needs them.
        does: what it needs them for.

    Raises:
        MissingExtraError: one isn't installed; names the command that installs it.
    """
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"varlen {verb} {does} and needs {' and '.join(missing)}, not installed here; "
            'run: pip install "varlen[train]"'
        )
