"""The one exception of bad input: a sentence that names the thing, the value, what is allowed and the mend."""

from undertow.config.spelling import printable


class UndertowError(Exception):
    """A user's mistake or an impossible request, told in one line. The command line prints it without a traceback.

    `exit_code` follows the documented table: 1 the work failed, 2 bad input, 3 does not fit.
    """

    exit_code = 1

    def __str__(self) -> str:
        """The line; characters of a file's names that would steer a terminal are escaped."""
        return printable(" ".join(super().__str__().split("\n")))


class InputError(UndertowError):
    """Bad input: a file, key, value, token or tensor that cannot be used as given."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration that cannot be resolved: names the file and line, the key, what was given and what is allowed."""


class DoesNotFit(UndertowError):
    """The request needs more memory, disk or GPUs than there are."""

    exit_code = 3
