"""Golden exchanges: files of requests and replies, replayed in order on a server of a tiny model.

`golden/<dialect>.json` is a list of `{"name", "method", "path", "body", "status", "reply"}`. A null
body is not sent. `"beside"` names a context that runs during the request, such as a trainer that
broadcasts. `pytest tests/server/trainers/test_golden.py --update-golden` rewrites statuses and
replies.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import httpx

FOLDER = Path(__file__).with_name("golden")
# Fields that vary by run or by machine.
_VARYING = frozenset(
    (
        "id",
        "request_id",
        "created",
        "seed",
        "system_fingerprint",
        "e2e_latency",
        "numerics",
        "timestamp",
    )
)
_CLOSE = 2e-3  # tolerance between logprobs of two machines

Beside = Mapping[str, Callable[[], AbstractContextManager[object]]]


def replay(
    url: str,
    dialect: str,
    words: Mapping[str, str],
    *,
    update: bool = False,
    beside: Beside | None = None,
) -> None:
    """Send the requests of a file, and compare or rewrite the replies.

    Args:
        url: URL of a fresh server.
        dialect: Name of the file.
        words: Maps a placeholder of the file to its value in this run: `{"<model>": "/tmp/…"}`.
        update: Write the replies into the file.
        beside: Maps a name to a function that returns the context of a request.
    """
    path = FOLDER / f"{dialect}.json"
    exchanges: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    with httpx.Client(base_url=url, timeout=60) as client:
        for exchange in exchanges:
            around = (beside or {})[exchange["beside"]]() if "beside" in exchange else nullcontext()
            with around:
                status, reply = _sent(client, exchange, words)
            if update:
                exchange |= {"status": status, "reply": reply}
                continue
            assert status == exchange["status"], f"{exchange['name']}: {status}, {reply}"
            difference = differs(reply, masked(exchange["reply"], words))
            assert difference is None, f"{exchange['name']}: {difference}\n{json.dumps(reply)}"
    if update:
        path.write_text("[\n" + ",\n".join(map(_line, exchanges)) + "\n]\n", encoding="utf-8")


def masked(value: Any, words: Mapping[str, str]) -> Any:
    """Return a reply without varying fields."""
    if isinstance(value, dict):
        return {
            key: f"<{key}>" if key in _VARYING else masked(each, words)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [masked(each, words) for each in value]
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, str):
        for word, meaning in words.items():
            value = value.replace(meaning, word)
    return value


def differs(value: Any, expected: Any, where: str = "reply") -> str | None:
    """Return the first difference between two masked replies. Floats may differ slightly."""
    if isinstance(value, dict) and isinstance(expected, dict):
        if value.keys() != expected.keys():
            return f"{where} has other keys: {sorted(value.keys() ^ expected.keys())}"
        pairs = [(value[key], expected[key], f"{where}.{key}") for key in value]
    elif isinstance(value, list) and isinstance(expected, list):
        if len(value) != len(expected):
            return f"{where} has {len(value)} items, not {len(expected)}"
        pairs = [
            (*both, f"{where}.{place}")
            for place, both in enumerate(zip(value, expected, strict=True))
        ]
    else:
        close = (
            isinstance(value, float)
            and isinstance(expected, float)
            and math.isclose(value, expected, abs_tol=_CLOSE)
        )
        return (
            None
            if close or (type(value) is type(expected) and value == expected)
            else f"{where} is {value!r}"
        )
    return next((found for pair in pairs if (found := differs(*pair)) is not None), None)


def _sent(
    client: httpx.Client, exchange: Mapping[str, Any], words: Mapping[str, str]
) -> tuple[int, Any]:
    body = None
    if exchange["body"] is not None:
        text = json.dumps(exchange["body"])
        for word, meaning in words.items():
            text = text.replace(word, meaning)
        body = text.encode()
    headers = {"content-type": "application/json"}
    reply = client.request(exchange["method"], exchange["path"], content=body, headers=headers)
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        events = [block.removeprefix("data: ") for block in reply.text.split("\n\n")[:-1]]
        said: Any = [each if each == "[DONE]" else json.loads(each) for each in events]
    else:
        said = (
            reply.json() if reply.headers.get("content-type") == "application/json" else reply.text
        )
    return reply.status_code, masked(said, words)


def _line(exchange: Mapping[str, Any]) -> str:
    """Format an exchange with one key per line, for readable diffs."""
    keys = ",\n".join(
        f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in exchange.items()
    )
    return "  {\n" + keys + "\n  }"
