"""`undertow config show` and `undertow config diff`: the resolved configuration, each value with its source."""

from __future__ import annotations

import os
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Values that win over the recipe, such as train.steps=100.", show_default=False
    ),
]


def register(app: typer.Typer) -> None:
    """Attach the verb to the command line."""
    group = typer.Typer(help="Show or compare resolved configurations.")
    group.command("show")(show)
    group.command("diff")(diff)
    app.add_typer(group, name="config")


def show(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Recipe file, or a name such as pretrain/quickstart.")
    ],
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object: key to value and source.")] = False,
) -> None:
    """Print the resolved configuration as YAML; the comment behind each value names its source.

    A variable such as UNDERTOW__TRAIN__STEPS=100 sets train.steps, above the recipe and below KEY=VALUE.
    """
    from undertow.config.dump import to_json, to_yaml
    from undertow.config.resolve import resolve

    resolved = resolve(recipe, overrides or [], os.environ)
    print(to_json(resolved) if json else to_yaml(resolved), end="")


def diff(
    left: Annotated[str, typer.Argument(metavar="LEFT", help="Recipe file or name.")],
    right: Annotated[str, typer.Argument(metavar="RIGHT", help="Recipe file or name to compare it with.")],
    overrides: Overrides = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: key to both values and sources.")
    ] = False,
) -> None:
    """Print the keys whose values differ between two recipes; KEY=VALUE changes apply to the second."""
    from undertow.config.dump import diff_json, diff_text
    from undertow.config.resolve import resolve

    a, b = resolve(left, [], os.environ), resolve(right, overrides or [], os.environ)
    print(diff_json(a, b) if json else diff_text(a, b), end="")
