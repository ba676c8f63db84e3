"""Whether the processes of a run were given the same recipe: what differs in one of them might show nowhere."""

from __future__ import annotations

import json

from undertow.config.dump import values_of
from undertow.config.errors import ConfigError
from undertow.config.resolve import Resolved
from undertow.config.scalars import told
from undertow.parallel.start import tell

_PLACES = ("out", "init_from", "data.corpus", "data.tokenizer")
"""Paths, which machines may call by different names."""


def refuse_other(resolved: Resolved) -> None:
    """Compare this rank's values with those of rank 0; every rank of the default process group must call it.

    Raises `ConfigError` on a rank that has others, naming the first key. Places of files may differ.
    """
    ours = values_of(resolved)
    theirs = json.loads(tell(json.dumps(ours)) or "{}")
    for key in [key for key in {**ours, **theirs} if key not in _PLACES]:
        if (here := ours.get(key)) != (there := theirs.get(key)):
            raise ConfigError(
                f"{key} is {told(here)}, and {told(there)} on rank 0: the processes of a run learn by one recipe; "
                "start all with the same words and variables"
            )
