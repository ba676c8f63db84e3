"""The schema's refusals as one line: place, key, what was given, what is allowed and the nearest existing key."""

from __future__ import annotations

import difflib

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from undertow.config.errors import ConfigError
from undertow.config.layer import SECTION, Layer
from undertow.config.scalars import told
from undertow.config.schema import RunConfig

_ALLOWED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text (quote it)",
    "model_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "tuple_type": "a list",
    "string_pattern_mismatch": "a lower-case name",
    "string_too_short": "text that is not empty",
}


def explain(error: ValidationError, merged: Layer) -> ConfigError:
    """The first mistake of a validation as a `ConfigError`, and how many more there are."""
    problems = error.errors(include_url=False, include_context=False)
    first = min(problems, key=lambda problem: problem["type"] == "missing")  # a misspelt key also leaves one missing
    key, told_whole = _key(first, merged)
    if first["type"] == "extra_forbidden":
        text = _unknown(key, merged)
    elif first["type"] == "missing":
        text = f"{_source(key, merged)}'{key}' is required: {_about(key)}"
    elif first["type"] == "json_invalid":  # its input is the whole configuration
        text = f"the configuration cannot be read: {first['msg']}"
    elif first["type"] == "value_error":
        text = _inconsistent(key, first["msg"].removeprefix("Value error, "), merged)
    elif told_whole:
        text = f"{_source(key, merged)}{key} is {merged[key].told()}; allowed: {_about(key)}"
    else:
        allowed = _ALLOWED.get(first["type"]) or first["msg"].removeprefix("Input should be ")
        key = key.removesuffix(".[key]")
        about = f" ({_about(key)})" if _about(key) else ""
        text = f"{_source(key, merged)}{key} is {told(first['input'])}; allowed: {allowed}{about}"
    more = len({_key(problem, merged)[0] for problem in problems}) - 1
    return ConfigError(text + (f"; and {more} more mistake{'s' * (more > 1)}" if more else ""))


def _key(problem: ErrorDetails, merged: Layer) -> tuple[str, bool]:
    """The dotted key of a problem, and whether its value has to be told whole: where a key takes values of several
    kinds, the place goes on with the names of those kinds, which are no keys."""
    place = [str(part) for part in problem["loc"]]
    known = next((n for n in range(len(place), 0, -1) if ".".join(place[:n]) in merged), 0)
    kinds = known and any(isinstance(part, str) and part != "[key]" for part in problem["loc"][known:])
    if kinds and problem["type"] != "missing":
        return ".".join(place[:known]), merged[".".join(place[:known])].value is not SECTION
    return ".".join(place), False


def _keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key below a section, sections included."""
    keys = ["model.preset"] if section is RunConfig else []
    for name, field in section.model_fields.items():
        keys.append(f"{prefix}{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _keys(field.annotation, f"{prefix}{name}.")
    return keys


def _unknown(key: str, merged: Layer) -> str:
    above, _, name = key.rpartition(".")
    known = _keys(RunConfig)
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == above}
    elsewhere = [k for k in known if k.rpartition(".")[2] == name]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    near = siblings[close[0]] if close else next(iter(elsewhere or difflib.get_close_matches(key, known, n=1)), None)
    entry = merged[key]
    given = "" if entry.value is SECTION else f" (given {entry.told()})"
    hint = f"; did you mean '{near}'?" if near else ";"
    allowed = f"allowed keys of {above or 'a run'}: {', '.join(sorted(siblings))}"
    return f"{entry.source}: unknown key {told(key)}{given}{hint} {allowed}"


def _inconsistent(key: str, message: str, merged: Layer) -> str:
    """Name the place of the first key that the message speaks of and that somebody set; failing that, the section's."""
    prefix = f"{key}." if key else ""
    words = {word.strip(",.:;") for word in message.split()}
    inside = [k for k, e in merged.items() if k.startswith(prefix) and e.value is not SECTION]
    spoken = [k for k in inside if k.removeprefix(prefix) in words]
    spoken.sort(key=lambda k: merged[k].rank, reverse=True)
    place = merged[spoken[0]].source + ": " if spoken else _source(key, merged)
    return f"{place}{f'{key}: ' if key else ''}{message}"


def _source(key: str, merged: Layer) -> str:
    """`place: ` of a key or of the nearest section above it; empty where nobody wrote any."""
    while key and key not in merged:
        key = key.rpartition(".")[0]
    return f"{merged[key].source}: " if key else ""


def _about(key: str) -> str:
    """The description of a key, or of the value that contains it."""
    section, description = RunConfig, ""
    for part in key.split("."):
        field = getattr(section, "model_fields", {}).get(part)
        if field is None:
            break
        section, description = field.annotation, field.description or ""
    return description
