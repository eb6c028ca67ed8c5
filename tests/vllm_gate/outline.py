"""The compared parts of a reply: status, keys, types, nulls, order of logprob rows, and the first
chunk of a stream.

An outline is a list of lines, `where: what`. List indices are omitted if all items look alike.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx

# Values that are compared exactly. For other values only the type counts.
_TOLD = frozenset(("object", "role", "finish_reason", "stop_reason", "rank", "type"))
# Lists whose items are all compared: prompts and sampled tokens must be the same.
_IDS = frozenset(("token_ids", "prompt_token_ids", "tokens"))
# Objects with a key for each token: their keys are data, and their order matters to readers by
# position.
_TABLES = frozenset(("top_logprobs", "prompt_logprobs"))
# fields that clients look for in the first chunk of a stream
_FIRST = re.compile(r"\b(?:role|prompt_token_ids)\b")
_ROWS = 6  # limit on compared items


def outline(reply: httpx.Response) -> list[str]:
    """Return the outline of a reply."""
    lines = [f"status: {reply.status_code}"]
    kind = reply.headers.get("content-type", "").partition(";")[0]
    if kind == "text/event-stream":
        return lines + _events(reply.text)
    if kind != "application/json":
        return [*lines, f"body: {kind or 'nothing'}"]
    return lines + list(dict.fromkeys(_lines("", json.loads(reply.content))))


def _events(text: str) -> list[str]:
    """Outline a stream: fields only in its first chunk, merged contents of all chunks, and the end
    marker.

    Chunk boundaries depend on timing, so token ids are compared for the whole stream.
    """
    blocks = [block.removeprefix("data: ") for block in text.split("\n\n")[:-1]]
    chunks = [json.loads(block) for block in blocks if block != "[DONE]"]
    ids: dict[str, list[int]] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            ids.setdefault(f"choice {choice['index']}", []).extend(
                choice.pop("token_ids", None) or ()
            )
    first = [line for line in dict.fromkeys(_lines("", chunks[0])) if _FIRST.search(line)]
    return [
        *(f"first chunk: {line}" for line in first),
        *(
            f"chunks: {line}"
            for line in dict.fromkeys(line for chunk in chunks for line in _lines("", chunk))
        ),
        *(f"{choice} in all: {found}" for choice, found in sorted(ids.items())),
        f"ended: {blocks[-1:] == ['[DONE]']}",
    ]


def _lines(where: str, value: Any) -> Iterator[str]:
    name = where.rpartition(".")[2].removesuffix("[]")
    if isinstance(value, dict):
        yield from _object(where, value, name in _TABLES)
    elif isinstance(value, list):
        yield from _list(where, value, name)
    elif value is None or name in _TOLD:
        yield f"{where}: {json.dumps(value)}"
    else:
        yield f"{where}: {type(value).__name__}"


def _object(where: str, value: dict[str, Any], is_table: bool) -> Iterator[str]:
    if not value:
        yield f"{where}: {{}}"
    elif is_table:
        yield f"{where}: rows {list(value)}"
        for entry in value.values():
            yield from _lines(f"{where}.*", entry)
    else:
        for key in sorted(value):
            yield from _lines(f"{where}.{key}" if where else key, value[key])


def _list(where: str, value: list[Any], name: str) -> Iterator[str]:
    if not value or (name in _IDS and all(type(each) is int for each in value)):
        yield f"{where}: {value}"
        return
    for entry in value[:_ROWS] if name in _TABLES else value:
        yield from _lines(f"{where}[]", entry)
