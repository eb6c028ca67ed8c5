"""Mooncake's traces: one request per line, with the extensions of aiperf."""

from collections.abc import Sequence
from dataclasses import replace

from nano_bench.traces.model import (
    Blocks,
    Conversation,
    Literal,
    Trace,
    TraceError,
    Turn,
    Words,
)
from nano_bench.traces.records import Record

BLOCK_SIZE = 512  # tokens, of Mooncake's published traces
_KNOWN = (
    *("timestamp", "delay", "input_length", "output_length", "hash_ids", "session_id"),
    *("messages", "message_mode", "tools", "extra", "group_id", "is_restart", "type"),
)


def mooncake_trace(records: Sequence[Record]) -> Trace:
    """Return the trace. Rows of a `session_id` are turns of one conversation, and every other row
    is a conversation. Raises `TraceError`.
    """
    sessions: dict[str, list[Record]] = {}
    for record in records:
        record.known(*_KNOWN)
        name = record.text("session_id") if "session_id" in record.fields else f"#{record.line}"
        sessions.setdefault(name, []).append(record)
    conversations = {name: _conversation(name, rows) for name, rows in sessions.items()}
    roots = sorted(conversations, key=lambda name: conversations[name].start)
    return Trace("mooncake", conversations, tuple(roots))


def _conversation(name: str, rows: Sequence[Record]) -> Conversation:
    first = rows[0].maybe_time("timestamp")
    start, before = (first or 0.0) / 1e3, 0.0
    turns: list[Turn] = []
    for index, row in enumerate(rows):
        turn = _turn(row, in_session="session_id" in row.fields)
        stamp = row.maybe_time("timestamp")
        at = None if stamp is None else stamp / 1e3 - start
        if at is not None and at < before:
            raise row.error(
                f"timestamp is {row.fields['timestamp']!r}, before the previous turn of session "
                f"{name!r}; order its turns by time."
            )
        before = before if at is None else at
        wait = (row.maybe_time("delay") or 0.0) / 1e3
        turns.append(replace(turn, wait=wait if index else 0.0, at=at))
    if len({turn.appends for turn in turns}) > 1:
        raise TraceError(
            turns[-1].line, f"session {name!r} mixes turns with a whole history and new messages."
        )
    return Conversation(name, tuple(turns), start)


def _turn(row: Record, *, in_session: bool) -> Turn:
    output = row.count("output_length", least=1)
    if "messages" in row.fields:
        return _with_messages(row, output)
    if "tools" in row.fields or "message_mode" in row.fields:
        raise row.error("tools and message_mode require messages.")
    length = row.count("input_length", least=1)
    blocks: Blocks = row.blocks("", length, BLOCK_SIZE, exact=True)
    message = Words("user", blocks, 0, length)
    extra = row.mapping("extra")
    return Turn(row.line, (message,), output, in_session, fields=extra)


def _with_messages(row: Record, output: int) -> Turn:
    for name in ("input_length", "hash_ids"):
        if name in row.fields:
            raise row.error(f"messages and {name} exclude each other.")
    mode = row.fields.get("message_mode", "history")
    if mode not in ("history", "delta"):
        raise row.error(f"message_mode is {mode!r}; write history or delta.")
    tools = {"tools": row.fields["tools"]} if "tools" in row.fields else {}
    return Turn(
        row.line,
        tuple(Literal(each) for each in row.messages()),
        output,
        mode == "delta",
        fields=tools | dict(row.mapping("extra")),
    )
