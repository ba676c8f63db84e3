"""The shell of a report: one HTML file that holds all it shows and asks nothing of any network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from string import Template

from undertow.config.errors import InputError

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --line: #2f6f8f; --other: #7a8f2f; --dot: #b4552d; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td { padding: .15rem 1rem .15rem 0; } td + td { text-align: right; }
svg { width: 100%; } svg text { font-size: 13px; fill: currentColor; }
svg .axes { fill: none; stroke: currentColor; } svg polyline { fill: none; stroke: var(--line); stroke-width: 1.5; }
svg .line1 { stroke: var(--other); } svg .line2 { stroke: var(--dot); }
svg circle { fill: var(--dot); } pre { white-space: pre-wrap; border-left: 3px solid var(--line); padding-left: 1rem; }
</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
""")


def page(title: str, sections: Mapping[str, str], lead: str = "") -> str:
    """A page of `sections`, HTML by heading, after a paragraph of plain text; empty sections are left out."""
    body = [f"<p>{escape(lead)}</p>"] if lead else []
    body += [f"<h2>{escape(heading)}</h2>\n{content}" for heading, content in sections.items() if content]
    return _PAGE.substitute(title=escape(title), body="\n".join(body))


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Two columns of plain text, the second to the right."""
    cells = (f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{''.join(cells)}</table>"


def write_page(path: Path, content: str) -> None:
    """Replace the file in one step. Raises `InputError` where it cannot be written."""
    fresh = path.with_name(f".{path.name}.writing")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another with --out FILE") from None
