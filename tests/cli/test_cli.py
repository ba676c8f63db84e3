"""The command line: exit codes, one-line errors, help, and no torch before it is needed."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import typer

import undertow
from undertow import cli
from undertow.config.errors import ConfigError, DoesNotFit, UndertowError


@pytest.fixture
def failing(monkeypatch):
    """Replace the app by one whose only verb, `fail`, raises the given exception."""

    def _failing(exception: BaseException) -> None:
        app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

        @app.command()
        def fail() -> None:
            raise exception

        @app.command()
        def other() -> None: ...

        monkeypatch.setattr(cli, "app", app)

    return _failing


def process(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "undertow", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("exception", "code"),
    [(UndertowError("it broke"), 1), (ConfigError("it broke"), 2), (DoesNotFit("it broke"), 3)],
)
def test_expected_errors_are_one_line_and_their_exit_code(failing, capsys, exception, code):
    failing(exception)
    assert cli.main(["fail"]) == code
    assert capsys.readouterr() == ("", "error: it broke\n")


def test_message_of_several_lines_becomes_one(failing, capsys):
    failing(ConfigError("first\n  second"))
    assert cli.main(["fail"]) == 2
    assert capsys.readouterr().err == "error: first second\n"


def test_interruption(failing):
    failing(KeyboardInterrupt())
    assert cli.main(["fail"]) == 130


@pytest.mark.parametrize("code", [0, 1, 7])
def test_verb_may_end_with_a_code(failing, code):
    failing(typer.Exit(code))
    assert cli.main(["fail"]) == code


def test_fault_of_the_program_keeps_its_traceback(failing):
    failing(ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError, match="bug"):
        cli.main(["fail"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "error: No such command 'nope' (see 'undertow --help')\n"),
        (["--nope"], "error: No such option: --nope (see 'undertow --help')\n"),
        (["config"], "error: Missing command (see 'undertow config --help')\n"),
        (["config", "show"], "error: Missing argument 'RECIPE' (see 'undertow config show --help')\n"),
    ],
)
def test_usage_errors(capsys, words, message):
    assert cli.main(words) == 2
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_names_every_verb_and_the_exit_codes(capsys, words):
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    verbs = [info.name for info in [*cli.app.registered_commands, *cli.app.registered_groups]]
    assert "config" in verbs
    assert all(f"\n  {verb} " in text for verb in verbs)
    assert "0 success, 1 the work failed, 2 bad input, 3 does not fit, 130" in " ".join(text.split())


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"undertow {undertow.__version__}\n"


def test_module_runs_as_the_command_without_traceback():
    result = process("config", "show", "pretrain/quikstart")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "error: no recipe file or name 'pretrain/quikstart'; did you mean 'pretrain/quickst"
    )
    assert result.stderr.count("\n") == 1


def test_help_is_quick_and_loads_no_torch():
    probe = "import sys; from undertow.cli import main; main(['--help']); print('torch' in sys.modules)"
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    assert result.stdout.splitlines()[-1] == "False"
    assert seconds < 5  # usually 0.2; a loaded machine may take longer


def test_public_names_are_lazy_and_complete():
    probe = "import sys, undertow as u; u.ModelConfig; print('torch' in sys.modules, set(u.__all__) <= set(dir(u)))"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False True"
    with pytest.raises(AttributeError, match="module 'undertow' has no attribute 'nothing'"):
        undertow.nothing  # type: ignore[attr-defined]  # noqa: B018
