"""Plain values as JSON text, in pieces."""

import json

from undertow.cli.values import json_pieces


def test_the_text_is_that_of_the_library():
    same = {"a": [1.5, None], "b": {}}
    values = {"x": [same] * 3 + [dict(same)], "y": [], "z": [[1, 2], [True, "\u00e9\n"]], "w": {"v": {"u": -0.0}}}
    assert "".join(json_pieces(values)) == json.dumps(values, indent=2) + "\n"
    assert "".join(json_pieces([])) == "[]\n"


def test_what_is_alike_is_spelt_once():
    pieces = json_pieces([{"a": 1}] * 1_000_000)
    first, second = next(pieces), next(pieces)
    assert first.endswith(second.lstrip(",")) and first.startswith("[")
