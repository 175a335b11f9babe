"""`varlen`: gathers the verbs, and turns what goes wrong into one sentence and an exit code."""

from __future__ import annotations

import inspect
import io
import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec

import typer

from varlen import __version__
from varlen.cli.demo import demo
from varlen.cli.index import index
from varlen.cli.inspect import inspect_data
from varlen.cli.options import counts_documents, reads_documents
from varlen.cli.pack import pack
from varlen.cli.plan import plan
from varlen.cli.train import train
from varlen.cli.verify import verify
from varlen.errors import InputError, MissingExtraError, SettingError, VarlenError
from varlen.launch import launched
from varlen.signals import (
    INTERRUPTED,
    Stopped,
    end_at_interrupt,
    end_soon,
    ignore,
    install_handlers,
    last_stopped,
    mark_reported,
)

FAILED, BAD_INPUT = 1, 2
_Arguments = ParamSpec("_Arguments")
_endings: list[str] = []
"""Messages with which verbs ended; where there is none, `main` prints one."""

app = typer.Typer(
    name="varlen",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    add_completion=False,
)


def main() -> None:
    """Run the command line.

    Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted, 143 ended by SIGTERM, 138 by SIGUSR1.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal or file that can't take a character is given its number, and never a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            install_handlers()
            app()
        finally:
            ignore()
            end_at_interrupt()
    except (KeyboardInterrupt, SystemExit) as error:  # typer exits with 130 if Ctrl-C comes before a verb
        if isinstance(error, SystemExit) and (error.code != INTERRUPTED or _endings):
            raise
        stopped = last_stopped()
        how = "interrupted" if stopped is None else f"stopped by {stopped.name}"
        mark_reported()
        print(f"varlen: {how}; nothing was written", file=sys.stderr)
        sys.exit(INTERRUPTED if stopped is None else stopped.code)


def _verb(
    function: Callable[_Arguments, None], interrupted: str = "nothing was written"
) -> Callable[_Arguments, None]:
    """Wrap a verb: a known error ends in one sentence instead of a traceback."""

    @wraps(function)
    def run(*arguments: _Arguments.args, **settings: _Arguments.kwargs) -> None:
        try:
            function(*arguments, **settings)
        except (InputError, MissingExtraError) as error:
            _stop(str(error), BAD_INPUT)
        except VarlenError as error:
            _stop(str(error), FAILED)
        except Stopped as error:
            ignore()
            mark_reported()
            end_soon(error.number)  # Python's exit waits for threads, one of which may hang
            _stop(f"stopped by {error.name}; {error.message or interrupted}", error.code)
        except KeyboardInterrupt as error:
            _stop(f"interrupted; {error if error.args else interrupted}", INTERRUPTED)

    return run


def _once(function: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Wrap a verb that writes a folder: it refuses to run in several processes of a job."""

    @wraps(function)
    def run(*arguments: _Arguments.args, **settings: _Arguments.kwargs) -> None:
        launch = launched()
        if launch is not None:
            raise SettingError(
                f"{launch.words}, all of which would write the same folder; run the command once, before the job or "
                f"as a step of one task (srun -n 1), or unset {launch.source} where this process is alone"
            )
        function(*arguments, **settings)

    return run


def _stop(sentence: str, code: int) -> NoReturn:
    """Print a message to standard error, with the rank in a job of several processes, and exit with a code."""
    _endings.append(sentence)
    launch = launched()
    rank = (launch.rank if launch else None) or "0"
    if code in (FAILED, BAD_INPUT) or rank == "0":
        print(f"varlen: {sentence}" if rank == "0" else f"varlen: rank {rank}: {sentence}", file=sys.stderr)
    raise typer.Exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"varlen {__version__}")
        raise typer.Exit


@app.callback()
def _varlen(
    version: bool = typer.Option(  # noqa: ARG001 - its callback reads it
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    """Pack, balance, feed and run variable-length sequences for LLM training."""
    # transformers imports torchao where it is installed, which logs whatever of it doesn't suit the machine.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _flowing(function: Callable[..., None]) -> str:
    """Return a docstring with every paragraph on one line, which the terminal wraps."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)


app.command(help=_flowing(demo))(_verb(demo))
app.command("inspect", help=_flowing(inspect_data))(_verb(counts_documents(inspect_data)))
for verb in (index, pack):
    app.command(help=_flowing(verb))(
        _verb(_once(reads_documents(verb)), "the same command again goes on where it stopped")
    )
app.command(help=_flowing(plan))(_verb(counts_documents(plan)))
app.command(help=_flowing(verify))(_verb(verify))
app.command(help=_flowing(train))(_verb(train, "the same command goes on from the newest checkpoint"))
