"""Exit codes of several processes."""

import pytest

from undertow.cli.processes import code_of


@pytest.mark.parametrize(
    ("codes", "expected", "told"),
    [
        ({0: 2}, 2, ""),
        ({0: -15, 1: 3}, 3, ""),
        ({0: 130, 1: 1}, 1, ""),
        ({0: 130, 1: -9}, 1, "error: rank 1 was ended by SIGKILL\n"),
        ({0: -11, 1: 2}, 2, "error: rank 0 was ended by SIGSEGV\n"),
        ({0: 130, 1: 130}, 130, ""),
        ({0: -15}, 1, ""),
    ],
)
def test_code_of_ranks(capsys, codes, expected, told):
    assert code_of(codes) == expected
    assert capsys.readouterr().err == told
