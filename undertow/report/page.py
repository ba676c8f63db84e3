"""The shell of a report: one HTML file that holds all it shows and asks nothing of any network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import NamedTuple

from undertow.config.writing import write_file

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --0: #1f6f9f; --1: #b4552d; --2: #5f7d1a; --3: #8a4fa3; --faint: #0000001f; }
@media (prefers-color-scheme: dark) {
  :root { --0: #6db9ea; --1: #ee9b6f; --2: #b3cf5c; --3: #d09be6; --faint: #ffffff2e; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; } tr + tr { border-top: 1px solid var(--faint); }
td { padding: .25rem 1rem .25rem 0; vertical-align: top; }
td + td { padding-right: 0; min-width: 7rem; text-align: right; overflow-wrap: anywhere; }
small { display: block; opacity: .75; }
pre { white-space: pre-wrap; border-left: 3px solid var(--0); padding-left: 1rem; }
.c0 { --c: var(--0); } .c1 { --c: var(--1); } .c2 { --c: var(--2); } .c3 { --c: var(--3); }
figure { margin: 1.5rem 0; font-size: 13px; } figcaption { margin-bottom: .75rem; }
figcaption span { margin-left: 1rem; white-space: nowrap; }
figcaption span::before { content: ""; display: inline-block; width: 1rem; height: 3px; margin-right: .4rem;
  vertical-align: middle; background: var(--c); }
.plot { position: relative; height: 14rem; margin: 0 1rem 0 4.5rem; }
.plot svg { display: block; width: 100%; height: 100%; overflow: visible; }
path { fill: none; stroke: var(--c); stroke-width: 1.5; stroke-linecap: round; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
path.grid { stroke: var(--faint); stroke-width: 1; } path.dot { stroke-width: 7; }
.plot span { position: absolute; } .y span { right: calc(100% + .5rem); transform: translateY(50%); }
.x span { top: calc(100% + .25rem); transform: translateX(-50%); } .x-name { margin: 1.6rem 1rem 0; text-align: right; }
@media (max-width: 30rem) { .x span:nth-child(even) { display: none; } }
$style</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
""")


def page(title: str, sections: Mapping[str, str], lead: str = "", *, style: str = "", last: str = "") -> str:
    """A page of `sections`, HTML by heading, after a paragraph of plain text; empty sections are left out. `style` is
    more CSS, `last` HTML at the end."""
    body = [f"<p>{escape(lead)}</p>"] if lead else []
    body += [f"<h2>{escape(heading)}</h2>\n{content}" for heading, content in sections.items() if content]
    body += [last] if last else []
    return _PAGE.substitute(title=escape(title), style=style, body="\n".join(body))


class Row(NamedTuple):
    """A line of a table: what, how much, and a sentence about it where the name does not say enough."""

    name: str
    value: str
    note: str = ""


def table(rows: Iterable[Row]) -> str:
    """Names with their notes, and values to the right, from plain text."""
    return f"<table>{''.join(map(_row, rows))}</table>"


def _row(row: Row) -> str:
    note = f"<small>{escape(row.note)}</small>" if row.note else ""
    return f"<tr><td>{escape(row.name)}{note}</td><td>{escape(row.value)}</td></tr>"


def write_page(path: Path, content: str, option: str = "--out") -> None:
    """Replace the file in one step. Raises `InputError`, with the command's `option`, where it cannot be written."""
    write_file(path, content, f"choose another with {option} FILE")
