"""Conversations drawn at random, as plain values: every role, task and kind of argument, and awkward texts."""

from __future__ import annotations

import json
import random
from typing import Any

from undertow.data.chat import MARKERS, TASKS

WORDS = [
    "",
    "a",
    "Not to be.",
    "é",
    "中文",
    "日本",
    "🙂👩‍👩‍👧",
    "\n",
    "\n\n",
    " ",
    "\t",
    "\u2028",
    '"',
    "\\",
    "</",
    "<",
    "{}",
    "12345",
    "x" * 40,
]
TEXTS = [*WORDS, "<tool_result>", "</tool_result>", "</｜DSML｜parameter>", "<｜DSML｜", "## Tools", *MARKERS]


class Talk:
    """Draws the parts of one conversation from `seed`; texts spell no marker unless `markers`."""

    def __init__(self, seed: int, markers: bool = False) -> None:
        self.random = random.Random(seed)
        self.pool = TEXTS if markers else WORDS

    def text(self, longest: int = 4) -> str:
        return "".join(self.random.choices(self.pool, k=self.random.randint(0, longest)))

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def value(self, depth: int = 3) -> Any:
        """Any JSON value."""
        kind = self.random.randrange(8 if depth else 6)
        if kind == 6:
            return [self.value(depth - 1) for _ in range(self.random.randint(0, 3))]
        if kind == 7:
            return {self.text(2): self.value(depth - 1) for _ in range(self.random.randint(0, 3))}
        return [self.text(), None, self.chance(0.5), self.random.randint(-5, 10**18), self.random.random(), 1e30][kind]

    def schema(self, depth: int = 2) -> dict[str, Any]:
        """A nested JSON schema."""
        kind = self.random.choice(["string", "integer", "boolean", "array", "object"] if depth else ["string", "null"])
        schema: dict[str, Any] = {"type": kind}
        if self.chance(0.5):
            schema["description"] = self.text()
        if kind == "array":
            schema["items"] = self.schema(depth - 1)
        if kind == "object":
            schema["properties"] = {f"p{n}é": self.schema(depth - 1) for n in range(self.random.randint(0, 3))}
            schema["required"] = list(schema["properties"])[:1]
        if kind == "string" and self.chance(0.3):
            schema["enum"] = [self.text(), self.text()]
        return schema

    def tools(self) -> list[dict[str, Any]]:
        return [
            {"type": "function", "function": {"name": f"f{n}", "description": self.text(), "parameters": self.schema()}}
            for n in range(self.random.randint(0, 3))
        ]

    def arguments(self) -> str:
        if self.chance(0.1):
            return self.random.choice(["", "no JSON", '{"a": 1', "{'a': 1}", "9" * 5000])
        names = self.random.sample(["a", "path", "", "é 中", "q<", "the name"], k=self.random.randint(0, 4))
        values = {name: self.text(8) if self.chance(0.4) else self.value() for name in names}
        return json.dumps(values, ensure_ascii=self.chance(0.5), indent=self.random.choice([None, 2]))

    def calls(self) -> list[dict[str, Any]]:
        ids = self.random.sample(["c0", "c1", "c2", "c3", "c4"], k=5)
        return [
            {
                "id": ids[n],
                "type": "function",
                "function": {"name": f"f{n}_{self.text(0)}", "arguments": self.arguments()},
            }
            for n in range(self.random.randint(1, 4))
        ]

    def message(self) -> dict[str, Any]:
        role = self.random.choices(
            ["system", "user", "assistant", "tool", "developer", "latest_reminder"], [1, 6, 6, 3, 1, 1]
        )[0]
        message: dict[str, Any] = {"role": role, "content": self.text()}
        if role == "assistant":
            if self.chance(0.6):
                message["reasoning_content"] = self.text(6)
            if self.chance(0.3):
                message["tool_calls"] = self.calls()
            if self.chance(0.05):
                message["content"] = None
        if role == "tool":
            message["tool_call_id"] = self.random.choice(["c0", "c1", "c2", "c3", "c4", "unknown"])
        if role in ("system", "developer"):
            if self.chance(0.25):
                message["tools"] = self.tools()
            if self.chance(0.2):
                message["response_format"] = self.random.choice([self.schema(), {}])
        if role == "developer":
            message["content"] += "d"
        if self.chance(0.08):
            message["task"] = self.random.choice([*TASKS])
        return message

    def messages(self) -> list[dict[str, Any]]:
        """Any messages in any order; half of them as they come in practice: the system first, then turns."""
        if self.chance(0.5):
            return [self.message() for _ in range(self.random.randint(1, 9))]
        messages: list[dict[str, Any]] = []
        if self.chance(0.7):
            messages.append({"role": "system", "content": self.text(), "tools": self.tools()})
        for _ in range(self.random.randint(1, 4)):
            messages.append({"role": "user", "content": self.text()})
            while self.chance(0.5):
                calls = self.calls()
                messages.append(
                    {"role": "assistant", "content": self.text(), "reasoning_content": self.text(), "tool_calls": calls}
                )
                order = self.random.sample(calls, k=len(calls))
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": self.text()} for call in order]
            messages.append({"role": "assistant", "content": self.text(), "reasoning_content": self.text()})
        return messages[:-1] if self.chance(0.5) else messages
