"""Text to typed values and back: the YAML 1.2 rules that files, variables and the command line share."""

from __future__ import annotations

import json
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

_BARE = re.compile(r"[\w.+~-]+")
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
_RESERVED = {"null", "true", "false", "on", "off", "yes", "no", "y", "n"}


def typed(text: str) -> Any:
    """`null`, booleans, numbers, [lists] and "quoted text" as YAML reads them; any other text as it stands."""
    text = text.strip()
    quoted = text[:1] in ("[", '"', "'")
    if not (quoted or _BARE.fullmatch(text)):
        return text
    try:
        value = YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        return text
    return value if quoted or value is None or isinstance(value, (bool, int, float)) else text


def shown(value: Any) -> str:
    """A value as one line of YAML (and nearly JSON), for messages and dumps."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else _escape(ord(char)) for char in text)


def told(value: Any) -> str:
    """A value as a message quotes it: text in single quotes, a mapping by that word, the rest as YAML."""
    if isinstance(value, str):
        return f"'{value}'"
    return "a mapping of keys" if isinstance(value, dict) else shown(value)


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
