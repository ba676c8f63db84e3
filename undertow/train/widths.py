"""What of a run's parallelism this version trains with: one GPU."""

from __future__ import annotations

from undertow.config.errors import ConfigError
from undertow.config.scalars import told
from undertow.config.schema import RunConfig

WIDTHS = ("tensor", "pipeline", "expert", "context")


def refuse_wider(config: RunConfig) -> None:
    """Refuse keys that can be planned but not run. Raises `ConfigError` naming the first, and its value."""
    parallel = config.parallel
    for name in WIDTHS:
        if (width := getattr(parallel, name)) != 1:
            raise _planned(f"parallel.{name} is {width}", f"trains on one GPU; set parallel.{name}=1")
    if (gpus := parallel.gpus) and int(gpus.lower().partition("x")[0]) > 1:
        raise _planned(f"parallel.gpus is {gpus}", "trains on one GPU; set parallel.gpus=null")
    if parallel.schedule != "1f1b":
        raise _planned(f"parallel.schedule is {parallel.schedule}", "has no pipeline; set parallel.schedule=1f1b")
    layout = parallel.layout
    if layout is not None and (len(layout) > 1 if isinstance(layout, list) else "|" in layout):
        raise _planned(f"parallel.layout is {told(layout)}", "trains in one stage; set parallel.layout=null")


def _planned(given: str, why: str) -> ConfigError:
    return ConfigError(f"{given}: it can be planned (undertow plan), but this version {why}")
