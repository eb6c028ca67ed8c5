"""A validator of Anthropic's event streams: it accumulates a message and rejects events that break
clients.
"""

import json
from typing import Any

_DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
}
_USAGE = {"input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"}


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a body. Each has an `event:` line with its type."""
    assert data.endswith(b"\n\n")
    events = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        assert len(lines) == 2, block
        assert lines[1].startswith("data: ")
        event = json.loads(lines[1].removeprefix("data: "))
        assert lines[0] == f"event: {event['type']}"
        events.append(event)
    return events


def accumulated(data: bytes) -> dict[str, Any]:
    """Return the message of a stream in the form of an unstreamed answer."""
    first, *events = [event for event in events_of(data) if event["type"] != "ping"]
    assert first["type"] == "message_start"
    message = first["message"]
    assert message["content"] == []
    assert message["stop_reason"] is message["stop_sequence"] is None
    assert message["usage"].keys() == _USAGE
    assert message["usage"]["input_tokens"] > 0
    *events, last, stop = events
    assert stop == {"type": "message_stop"}
    assert last["type"] == "message_delta"
    assert last["usage"].keys() == _USAGE
    blocks = _Blocks()
    for event in events:
        blocks.take(event)
    assert not blocks.is_open
    for block in blocks.closed:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("json") or "{}")
    return message | last["delta"] | {"content": blocks.closed, "usage": last["usage"]}


class _Blocks:
    """Content blocks with consecutive indices that never overlap. Only a call without arguments may
    end unchanged.
    """

    def __init__(self) -> None:
        self.closed: list[dict[str, Any]] = []
        self.is_open = False

    def take(self, event: dict[str, Any]) -> None:
        getattr(self, event["type"])(
            **{name: value for name, value in event.items() if name != "type"}
        )

    def content_block_start(self, index: int, content_block: dict[str, Any]) -> None:
        assert not self.is_open
        assert index == len(self.closed)
        self.is_open, self.signed, self.block = True, False, dict(content_block)
        match self.block["type"]:
            case "text":
                assert self.block == {"type": "text", "text": ""}
            case "thinking":
                assert self.block == {"type": "thinking", "thinking": "", "signature": ""}
            case _:
                assert self.block.keys() == {"type", "id", "name", "input"}
                assert self.block["type"] == "tool_use"
                assert self.block["input"] == {}
                self.block["json"] = ""

    def content_block_delta(self, index: int, delta: dict[str, Any]) -> None:
        assert self.is_open
        assert index == len(self.closed)
        kind, name = _DELTAS[delta["type"]]
        assert self.block["type"] == kind
        assert delta[name], "an empty delta"
        assert not self.signed, "a delta after the signature"
        self.signed = name == "signature"
        self.block["json" if kind == "tool_use" else name] += delta[name]

    def content_block_stop(self, index: int) -> None:
        assert self.is_open
        assert index == len(self.closed)
        assert self.block["type"] != "text" or self.block["text"]
        assert self.block["type"] != "thinking" or self.signed
        self.is_open = False
        self.closed.append(self.block)
