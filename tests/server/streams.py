"""HTTP requests and parsed streams."""

import json
from typing import Any

import httpx


def post(url: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    reply = httpx.post(url, json=body, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of an OpenAI stream and check its form."""
    reply = httpx.post(url, json=body | {"stream": True}, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [json.loads(block[6:]) for block in blocks[:-2]]
