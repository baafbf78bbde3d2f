"""The program `shardset`: finds the command, and turns whatever goes wrong in it into lines and an exit code."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from .failures import ExitCode, Failure, describe
from .tables import bold
from .text import one_line, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# With the first line of each help text, so that the list of commands loads none of them.
COMMANDS: Final = {
    "index": "Index shards, so that any sample can be read at once.",
    "ls": "List the shards of a dataset, or the samples of a shard.",
    "show": "Show one sample, or one shard, with offsets and findings.",
    "cat": "Write one payload to standard output, byte for byte.",
    "stats": "Count samples, fields, sizes, captions and shapes.",
    "order": "List what a loader reads when, and explain what a shuffle costs.",
    "check": "Check TFRecord shards, and say what can be saved of damaged ones.",
    "fix": "Copy the good records of damaged TFRecord shards to new files.",
    "extract-metadata": "Write an index for each shard, with its captions.",
    "optimize-captions": "Write the captions in the sidecars of shards into their indexes.",
    "convert": "Convert tar shards to TFRecord, or TFRecord shards to tar, with nothing lost.",
    "optimize-dataset": "Pack loose files with sidecars, or old archives, into indexed shards.",
    "cache": "Look at cached shards, clear them, or check them.",
    "completion": "Print the completion script of a shell.",
}

_MEANT: Final = {
    **dict.fromkeys(("count", "len", "summary"), "stats"),
    **dict.fromkeys(("describe", "head", "info", "inspect"), "show"),
    "schema": "show --schema",
    **dict.fromkeys(("list", "dir"), "ls"),
    **dict.fromkeys(("validate", "verify"), "check"),
    **dict.fromkeys(("repair", "salvage"), "fix"),
}
"""What other programs call what ours do."""

EXIT_CODES: Final = """\
Exit codes: 0 fine; 1 a check found problems; 2 wrong usage; 3 cannot read (missing, refused, no shard, or damaged); 4
input or output failed part-way; 130 interrupted; 70 a bug. A closed pipe is no error."""


@dataclass(slots=True)
class Settings:
    """What the options that every command has say."""

    debug: bool = False
    quiet: bool = False
    verbosity: int = 0

    @property
    def log_level(self) -> int:
        """The lowest level of log messages to print."""
        if self.quiet:
            return logging.ERROR
        return max(logging.WARNING - 10 * self.verbosity, logging.DEBUG)


def shared_options() -> list[click.Parameter]:
    """Return the options that stand before or behind the command's name alike."""

    def keep(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
        def callback(ctx: click.Context, _: click.Parameter, value: Any) -> None:
            settings = ctx.ensure_object(Settings)
            if value:
                setattr(settings, name, value)
                logging.getLogger("shardset").setLevel(settings.log_level)

        return callback

    options = [
        click.Option(["-q", "--quiet"], is_flag=True, callback=keep("quiet"), help="Print results and errors alone."),
        click.Option(
            ["-v", "--verbose"], count=True, callback=keep("verbosity"), help="Say what is done; twice: in detail."
        ),
        click.Option(["--debug"], is_flag=True, callback=keep("debug"), help="Print the traceback of an error."),
    ]
    for option in options:
        option.expose_value = False
    return list(options)


class Command(click.Command):
    """A command whose help begins with an example.

    Args:
        examples: Pairs of a command line and what it is for.
    """

    def __init__(self, *args: Any, examples: Sequence[tuple[str, str]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.examples = examples
        self.params += shared_options()

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first example, what click writes, and all examples."""
        formatter.write(f"Example: {self.examples[0][0]}\n\n")
        super().format_help(ctx, formatter)

    def format_epilog(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, each above what it is for."""
        formatter.write("\nExamples:\n")
        for line, purpose in self.examples:
            formatter.write(f"  {line}\n      {purpose}\n")


class Program(click.Group):
    """The group of all commands."""

    def list_commands(self, _: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        """Load a command."""
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f".{name.replace('-', '_')}", __package__).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say what the one that was meant is called here."""
        if args and args[0] in _MEANT:
            raise MisuseError(f"no such command {args[0]!r}", f"shardset {_MEANT[args[0]]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command or an option."""
        names = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. A closed pipe ends it quietly: whoever read from it has seen enough."""
        try:
            answer = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt as error:
            raise click.Abort from error
        except BrokenPipeError:
            _drop_output()
            ctx.exit(ExitCode.FINE)
        return answer

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the program, and exit with its code; without `standalone_mode` return or raise, as click does."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        settings = extra.setdefault("obj", Settings())
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a terminal of few characters is no reason to fail
                stream.reconfigure(errors="backslashreplace")
        with _logging_to_stderr():
            code = _exit_code(
                settings,
                lambda: super(Program, self).main(args, prog_name, complete_var, standalone_mode=False, **extra),
            )
        sys.exit(code)


def _exit_code(settings: Settings, run: Callable[[], Any]) -> int:
    """Run a command, print what goes wrong, and return the exit code."""
    try:
        answer = run()
    except (click.Abort, KeyboardInterrupt):
        # At a terminal ^C stands on the line already.
        click.echo(f"{chr(10) if sys.stderr.isatty() else ''}shardset: interrupted", err=True)
        return ExitCode.INTERRUPTED
    except click.ClickException as error:
        return _show_usage_error(error)
    except Exception as error:  # noqa: BLE001 - the last place that can say something
        failure = describe(error)
        if settings.debug:
            for line in "".join(traceback.format_exception(error)).splitlines():
                click.echo(printable(line), err=True)
        _show(failure)
        return failure.code
    return answer if isinstance(answer, int) else ExitCode.FINE


class MisuseError(click.UsageError):
    """A command line that cannot be carried out, with what to write instead."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def _show_usage_error(error: click.ClickException) -> int:
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        error.show()
        return error.exit_code
    ctx = getattr(error, "ctx", None)
    hint = getattr(error, "hint", None) or (f"{ctx.command_path} --help" if ctx is not None else None)
    message = error.format_message()
    _show(Failure(ExitCode.USAGE, message[:1].lower() + message[1:].rstrip("."), hint))
    return error.exit_code


def _show(failure: Failure) -> None:
    click.echo(f"{bold('shardset:')} {one_line(failure.what)}", err=True)
    if failure.hint:
        click.echo(f"{bold('hint:')} {one_line(failure.hint)}", err=True)


def _drop_output() -> None:
    """Send what is still to be written to standard output nowhere, or the interpreter complains as it ends."""
    try:
        handle = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, handle)
    os.close(nowhere)


class _Handler(logging.Handler):
    """Prints log messages as the program prints everything else that is no result."""

    def emit(self, record: logging.LogRecord) -> None:
        label = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        # Not through click, which would go round the progress bar that stands in for standard error.
        sys.stderr.write(f"shardset: {label}{one_line(record.getMessage())}\n")


@contextmanager
def _logging_to_stderr() -> Iterator[None]:
    logger, handler = logging.getLogger("shardset"), _Handler()
    level = logger.level
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def note(text: str) -> None:
    """Print a remark, which is no result, to standard error; not with ``--quiet``."""
    if not click.get_current_context().ensure_object(Settings).quiet:
        click.echo(printable(text), err=True)


@click.group(
    cls=Program,
    params=shared_options(),
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)
@click.version_option(package_name="shardset", message="shardset %(version)s")
def main() -> None:
    """Look into training data in shards, and index it: WebDataset tar and TFRecord files, as they are.

    A SOURCE is a folder (searched at any depth), a shard, a glob, or a pattern such as train-{000..063}.tar or
    train@64.tfrecord. One sample is named SHARD#KEY, or SHARD#NUMBER.
    """
