"""Text to typed values and back: the YAML 1.2 rules that files, variables and the command line share."""

from __future__ import annotations

import json
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

from undertow.config.errors import ConfigError
from undertow.config.spelling import escape, printable

_BARE = re.compile(r"[\w.+~-]+")
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)
_RESERVED = {"null", "true", "false", "on", "off", "yes", "no", "y", "n"}
_DEEPEST = 16
_LONGEST = 200
_KINDS = {"CommentedMap": "mapping", "dict": "mapping", "TaggedScalar": "tagged value"}


def typed(text: str, where: str = "value") -> Any:
    """`null`, booleans, numbers, [lists] and "quoted text" as YAML reads them; any other text as it stands.

    Raises `ConfigError`, beginning with `where`, for a list that cannot be read and as `plain` does.
    """
    text = text.strip()
    quoted = text[:1] in ("[", '"', "'")
    if not (quoted or _BARE.fullmatch(text)):
        return plain(text, where)
    try:
        value = YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        return plain(text, where)
    except RecursionError:
        raise ConfigError(f"{where}: {told(text)} is nested too deeply") from None
    except (ValueError, OverflowError, LookupError, TypeError, AttributeError):
        # The library's own failures on what looks like a number, a date or a tag and is none.
        if quoted:
            raise ConfigError(f"{where}: {told(text)} holds a value that cannot be read; quote what is text") from None
        return plain(text, where)
    keeps = quoted or value is None or isinstance(value, (bool, int, float))
    return plain(value if keeps else text, where)


def plain(value: Any, where: str) -> Any:
    """`value` free of the YAML reader's wrappers: null, a boolean, a number, text, or a list of such values.

    Raises `ConfigError`, beginning with `where`, for any other kind (a date, a set, bytes, a mapping in a list), for a
    list nested too deeply or used twice by an alias, and for text that no file name or file can hold.
    """
    return _plain(value, where, _DEEPEST, set())


def _plain(value: Any, where: str, levels: int, lists: set[int]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, ScalarBoolean):
        return bool(value)
    if isinstance(value, list):
        if id(value) in lists:
            raise ConfigError(f"{where}: a list is used twice by an alias; write it out")
        if not levels:
            raise ConfigError(f"{where}: lists are nested too deeply; allowed: {_DEEPEST} levels")
        lists.add(id(value))
        return [_plain(item, where, levels - 1, lists) for item in value]
    if isinstance(value, str):
        return _writable(str(value), where)
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    kind = _KINDS.get(type(value).__name__, type(value).__name__)
    raise ConfigError(f"{where}: a {kind} is not allowed here; quote it if text was meant")


def _writable(text: str, where: str) -> str:
    bad = next((char for char in text if char == "\0" or "\ud800" <= char <= "\udfff"), None)
    if bad is not None:
        raise ConfigError(f"{where}: text holds the character {escape(ord(bad))}, which UTF-8 files and paths cannot")
    return text


def shown(value: Any) -> str:
    """A value as one line of YAML (and nearly JSON), for messages and dumps."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return printable(text)


def told(value: Any) -> str:
    """A value as a message quotes it: text in single quotes, a mapping by that word, the rest as YAML."""
    if isinstance(value, dict):
        return "a mapping of keys"
    text = f"'{value}'" if isinstance(value, str) else shown(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
