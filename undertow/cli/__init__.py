"""The command line: one module per verb, assembled here, and the one place where errors become exit codes.

A verb module has `register(app)`, which attaches its plain functions to the Typer app it is given, and appears once in
`VERBS`, in the order of `--help`. Its functions return nothing; they raise an `UndertowError` for a user's mistake and
`typer.Exit(code)` to end early. Torch, and whatever needs it, is imported inside them, so that `--help` is quick.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from undertow import __version__
from undertow.cli import bench, config, convert, data, doctor, generate, launch, plan, quickstart, report, train
from undertow.cli.memory import out_of_memory
from undertow.cli.streams import drop_output, prepare_output
from undertow.config.errors import DoesNotFit, UndertowError
from undertow.config.spelling import printable

VERBS = (quickstart, plan, launch, train, data, report, generate, convert, bench, doctor, config)
INTERRUPTED = 130

app = typer.Typer(
    name="undertow",
    help="Plan, pretrain, improve by reinforcement learning and serve DeepSeek-V4-family models.",
    epilog="Exit codes: 0 success, 1 the work failed, 2 bad input, 3 does not fit, 130 interrupted.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"undertow {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options that come before the verb."""


for verb in VERBS:
    verb.register(app)


def _report(message: str, code: int) -> int:
    if sys.stderr is not None:  # closed by the shell
        print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return its exit code: 0, 1, 2, 3 or 130 (interrupted).

    `arguments` are the words after `undertow`; by default those of the process. Any exception that is not an
    `UndertowError`, a usage error, a want of memory or a refusal of the operating system is a fault of the program and
    leaves with its traceback.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        prepare_output()
        code = app(args=words or ["--help"], prog_name="undertow", standalone_mode=False)
        sys.stdout.flush()
    except UndertowError as error:
        return _report(str(error), error.exit_code)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "undertow"
        said = error.format_message().replace("Value error, ", "").rstrip(".")
        return _report(f"{said} (see '{command} --help')", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        drop_output()  # the reader (`| head`) has what it wanted
        return 0
    except OSError as error:
        drop_output()
        place = f"{error.filename}: " if error.filename else "writing or reading failed: "
        return _report(f"{place}{error.strerror or error}", UndertowError.exit_code)
    except (MemoryError, RuntimeError) as error:
        said = out_of_memory(error)
        if said is None:
            raise
        return _report(said, DoesNotFit.exit_code)
    return code if isinstance(code, int) else 0
