"""The markers of DeepSeek-V4's chat format. The released tokenizer has each as one token."""

from __future__ import annotations

import re
from types import MappingProxyType

from undertow.data.tokenizer import BOS, EOS, Tokenizer

USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK, ANSWER = "<think>", "</think>"
"""`<think>` opens reasoning. `</think>` ends it, and opens an answer that is given without any."""
DSML = "｜DSML｜"
"""Stands in each tag of a tool call, behind `<` or `</`."""
TASKS = MappingProxyType(
    {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}
)
"""Quick tasks, by name: what the marker asks for is answered in a few tokens."""
MARKERS = (BOS, EOS, USER, ASSISTANT, REMINDER, THINK, ANSWER, DSML, *TASKS.values())

SPELLED = re.compile("|".join(map(re.escape, MARKERS)))
"""Any marker as it is spelled."""


def marker_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The id of each marker that `tokenizer` has as a token; BOS and EOS, whatever their names there, always."""
    found = {marker: id for marker in MARKERS if (id := tokenizer.added_id(marker)) is not None}
    return found | {BOS: tokenizer.bos_id, EOS: tokenizer.eos_id}
