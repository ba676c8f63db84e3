"""Pages whose code is said to run as it stands: it is run, and gives what its comments say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from undertow.data.chat import Message, render, text_of

PAGES = Path(__file__).parent.parent / "docs" / "how-to"


def names_after(page: str) -> dict[str, Any]:
    """The variables that the Python blocks of a page leave, run one after the other."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", (PAGES / page).read_text("utf-8"), re.DOTALL | re.MULTILINE):
        exec(block, names)
    return names


@pytest.fixture(scope="module")
def chat() -> dict[str, Any]:
    return names_after("chat.md")


def test_the_chat_page_runs_from_messages_to_a_message(chat: dict[str, Any]) -> None:
    assert text_of(render(chat["messages"], "high")) == (
        "<｜begin▁of▁sentence｜><｜User｜>Who's there?<｜Assistant｜><think>"
    )
    completion, message = chat["completion"], chat["message_of"](chat["events"])
    assert completion.prompt_token_ids == chat["encoded"].ids.tolist() and not chat["encoded"].learned.any()
    assert (len(completion.token_ids), completion.finish_reason) == (16, "length")
    assert message == Message("assistant", reasoning=completion.text) and message.reasoning.startswith(" comp alone")
    assert not chat["events"][-1].whole


def test_the_page_on_quantising_gives_what_it_says() -> None:
    names = names_after("quantise.md")
    assert names["product"].shape == (8, 256)
    assert torch.equal(names["product"], names["rows"] @ names["numbers"].t())
    weight, packed, moved, direct = (names[name] for name in ("weight", "packed", "moved", "direct"))
    assert (packed.payload.dtype, list(packed.scales.shape)) == (torch.float8_e4m3fn, [2, 3])
    assert (packed.nbytes, weight.nbytes) == (98310, 393216)
    assert names["native_dialect"]("gfx942") == "fnuz"
    assert torch.equal(names["numbers"].float(), packed.dequantise())
    assert float((names["numbers"].float() - weight).abs().max()) < weight.abs().max() / 16
    for other, by in ((moved, 2), (direct, 2), (names["again"], 1)):
        assert torch.equal(other.payload.view(torch.uint8), packed.payload.view(torch.uint8))
        assert torch.equal(other.scales.float(), by * packed.scales.float())
        assert torch.equal(other.dequantise(), packed.dequantise())
