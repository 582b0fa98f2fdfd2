"""Items of a reply to OpenAI's responses: reasoning, messages and calls, whole and as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl.agents.dialects.reply_reader import ReplyEvent
from rl.agents.dialects.writing import write_arguments
from rl.agents.types import ReplyCall, ToolForm, ToolSpec

TEXT_ARGUMENT = "input"
"""Argument of a tool that takes one text."""


class ItemBuilder:
    """Items of a reply, with the events that tell of them."""

    def __init__(self, reply_id: str, *, tools: Sequence[ToolSpec]) -> None:
        self.reply_id = reply_id
        self._forms = {tool.name: tool.form for tool in tools if tool.form is not None}
        self.output: list[dict[str, Any]] = []
        """Complete items."""
        self.has_calls = False
        self._open: dict[str, Any] | None = None
        """Item whose text goes on."""
        self._texts: list[str] = []
        self._has_message = False

    def add(self, part: ReplyEvent) -> list[dict[str, Any]]:
        """Return the events of a part."""
        if isinstance(part, ReplyCall):
            return self.finish_item() + self._add_call(part)
        kind = "message" if part.kind == "content" else "reasoning"
        events = []
        # A text goes on for as long as its kind does.
        if self._open is None or self._open["type"] != kind:
            events = self.finish_item() + self._open_item(kind)
        assert self._open is not None
        self._texts.append(part.text)
        delta = {
            "type": f"response.{self._part_type}.delta",
            **self._place_text(),
            "delta": part.text,
        }
        if kind == "message":
            delta["logprobs"] = []
        return [*events, delta]

    def finish(self) -> list[dict[str, Any]]:
        """Return the events of the end.

        A reply without content and calls gets an empty message: a client that sends back neither
        would lose the turn.
        """
        events = self.finish_item()
        if not self.has_calls and not self._has_message:
            events += self._open_item("message") + self.finish_item()
        return events

    def finish_item(self) -> list[dict[str, Any]]:
        """Return the events that end the open item."""
        if self._open is None:
            return []
        text, part = "".join(self._texts), self._make_part("".join(self._texts))
        done: dict[str, Any] = {
            "type": f"response.{self._part_type}.done",
            **self._place_text(),
            "text": text,
        }
        # Fields that the client's types require.
        if self._open["type"] == "message":
            done["logprobs"] = []
        ended = {"type": "response.content_part.done", **self._place_text(), "part": part}
        item = {**self._open, "status": "completed", "content": [part]}
        self._open, self._texts = None, []
        return [done, ended, self._end_item(item)]

    @property
    def _part_type(self) -> str:
        assert self._open is not None
        return "output_text" if self._open["type"] == "message" else "reasoning_text"

    def _make_part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._part_type, "text": text}
        return part | ({"annotations": [], "logprobs": []} if "output" in part["type"] else {})

    def _place_text(self) -> dict[str, Any]:
        assert self._open is not None
        return {
            "item_id": self._open["id"],
            "output_index": len(self.output),
            "content_index": 0,
        }

    def _open_item(self, kind: str) -> list[dict[str, Any]]:
        prefix = "msg" if kind == "message" else "rs"
        item: dict[str, Any] = {"id": f"{prefix}_{self.reply_id}_{len(self.output)}", "type": kind}
        if kind == "message":
            self._has_message = True
            item["role"] = "assistant"
        else:
            item["summary"] = []
        self._open = item
        added = {**item, "status": "in_progress", "content": []}
        part = {
            "type": "response.content_part.added",
            **self._place_text(),
            "part": self._make_part(""),
        }
        return [self._announce(added), part]

    def _add_call(self, part: ReplyCall) -> list[dict[str, Any]]:
        self.has_calls = True
        form = self._forms.get(part.call.name) or ToolForm(name=part.call.name)
        arguments = part.call.arguments
        text = arguments.get(TEXT_ARGUMENT) if len(arguments) == 1 else None
        # Without its one text a call is told as it is, so that the client can say what is wrong.
        is_text = form.is_text and isinstance(text, str)
        key, value = (TEXT_ARGUMENT, text) if is_text else ("arguments", write_arguments(part.call))
        prefix, kind = ("ctc", "custom_tool_call") if is_text else ("fc", "function_call")
        item = {
            "id": f"{prefix}_{self.reply_id}_{len(self.output)}",
            "type": kind,
            "call_id": part.id,
            "name": form.name,
        }
        if form.namespace:
            item["namespace"] = form.namespace
        place = {"item_id": item["id"], "output_index": len(self.output)}
        event = f"response.{kind}_{key}"
        done = {"type": f"{event}.done", **place, key: value}
        # A call is known once it is complete, so that its arguments are one piece.
        return [
            self._announce({**item, key: "", "status": "in_progress"}),
            {"type": f"{event}.delta", **place, "delta": value},
            done if is_text else {**done, "name": form.name},
            self._end_item({**item, key: value, "status": "completed"}),
        ]

    def _announce(self, item: dict[str, Any]) -> dict[str, Any]:
        index = len(self.output)
        return {"type": "response.output_item.added", "output_index": index, "item": item}

    def _end_item(self, item: dict[str, Any]) -> dict[str, Any]:
        index = len(self.output)
        self.output.append(item)
        return {"type": "response.output_item.done", "output_index": index, "item": item}
