"""aiperf's `dag_jsonl`: one conversation per line, with turns that fork or spawn others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nano_bench.traces.model import Conversation, Literal, Trace, Turn, is_count
from nano_bench.traces.records import Record

_CONVERSATION = ("session_id", "turns", "pre_session_spawns", "context_mode")
_TURN = ("messages", "model", "max_tokens", "tools", "extra", "forks", "spawns", "delay")
_MODES = {"deltas_without_responses": True, "message_array_with_responses": False}


@dataclass(frozen=True)
class _Branch:
    """Conversations that a turn starts.

    Attributes:
        join_at: Turn that waits for them, or None.
    """

    children: tuple[str, ...]
    forks: bool
    join_at: int | None


def dag_trace(records: Sequence[Record]) -> Trace:
    """Return the trace. Later turns see the server's real answers. Raises `TraceError`."""
    by_name: dict[str, Record] = {}
    for record in records:
        name = record.text("session_id")
        if record.fields.get("orchestrator") or "rounds" in record.fields:
            raise record.error("orchestrator conversations are not supported; write their turns.")
        record.known(*_CONVERSATION)
        if name in by_name:
            raise record.error(f"the session_id {name!r} occurs twice.")
        by_name[name] = record
    read = {name: _conversation(name, record) for name, record in by_name.items()}
    parents, forked = _parents(by_name, read)
    conversations = {
        name: replace(conversation, forks=name in forked)
        for name, (conversation, _) in read.items()
    }
    _require_no_cycle(by_name, conversations)
    for name, conversation in conversations.items():
        _require_system_first(by_name[name], conversation)
        if conversation.forks and len(parents[name]) > 1:
            raise by_name[name].error(
                f"{name!r} has {len(parents[name])} parents; a forked conversation has one."
            )
    roots = tuple(name for name in conversations if name not in parents)
    return Trace("dag", conversations, roots)


_Read = Mapping[str, tuple[Conversation, list[_Branch]]]


def _parents(records: Mapping[str, Record], read: _Read) -> tuple[dict[str, list[str]], set[str]]:
    """Return each child's parents, and the children that are forked."""
    parents: dict[str, list[str]] = {}
    forked: set[str] = set()
    for name, (conversation, branches) in read.items():
        first = _Branch(conversation.spawns, forks=False, join_at=None)
        for branch in (first, *branches):
            for child in branch.children:
                if child not in records:
                    raise records[name].error(f"no line has the session_id {child!r}.")
                parents.setdefault(child, []).append(name)
            forked |= set(branch.children) if branch.forks else set()
    return parents, forked


def _conversation(name: str, record: Record) -> tuple[Conversation, list[_Branch]]:
    mode = record.fields.get("context_mode", "deltas_without_responses")
    if mode not in _MODES:
        raise record.error(f"context_mode is {mode!r}; write one of {', '.join(_MODES)}.")
    entries = record.records("turns")
    turns: list[Turn] = []
    branches: list[_Branch] = []
    tools: Mapping[str, Any] = {}
    for index, entry in enumerate(entries):
        entry.known(*_TURN)
        if "tools" in entry.fields:
            tools = {"tools": entry.fields["tools"]}
        started = list(_branches(entry, index, len(entries)))
        joined = [branch for branch in branches if branch.join_at == index]
        turns.append(
            Turn(
                record.line,
                tuple(Literal(each) for each in entry.messages()),
                entry.count("max_tokens", least=1) if "max_tokens" in entry.fields else None,
                appends=_MODES[mode],
                wait=(entry.maybe_time("delay") or 0.0) / 1e3,
                joins=tuple(child for branch in joined for child in branch.children),
                spawns=tuple(child for branch in started for child in branch.children),
                fields=dict(tools) | dict(entry.mapping("extra")),
            )
        )
        branches += started
    return Conversation(name, tuple(turns), spawns=record.names("pre_session_spawns")), branches


def _branches(entry: Record, index: int, turns: int) -> Iterable[_Branch]:
    for fork in _listed(entry, "forks"):
        background = isinstance(fork, dict) and fork.get("background") is True
        child = fork.get("child") if isinstance(fork, dict) else fork
        if not isinstance(child, str):
            raise entry.error("forks must hold names or objects with a child.")
        if not background and index < turns - 1:
            raise entry.error("a fork ends its conversation; set background, or fork last.")
        yield _Branch((child,), forks=True, join_at=None)
    for spawn in _listed(entry, "spawns"):
        if isinstance(spawn, str):
            yield _Branch((spawn,), forks=False, join_at=index + 1)
            continue
        children, join_at = spawn.get("children"), spawn.get("join_at", index + 1)
        if not isinstance(children, list) or not all(isinstance(name, str) for name in children):
            raise entry.error("spawns must hold names or objects with children.")
        if not is_count(join_at) or not index < join_at < turns:
            raise entry.error(
                f"join_at is {join_at!r}; it must be a turn after this one ({index}) and below "
                f"{turns}."
            )
        yield _Branch(tuple(children), forks=False, join_at=join_at)


def _listed(entry: Record, name: str) -> list[Any]:
    value: Any = entry.fields.get(name) or []
    if not isinstance(value, list) or not all(isinstance(each, str | dict) for each in value):
        raise entry.error(f"{name} must be a list of names or objects.")
    return value


def _require_no_cycle(
    records: Mapping[str, Record], conversations: Mapping[str, Conversation]
) -> None:
    """Reject a conversation that comes before its own parent."""
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise records[name].error(f"{' > '.join((*above, name))} is a cycle.")
        if name in done:
            return
        one = conversations[name]
        children = (*one.spawns, *(child for turn in one.turns for child in turn.spawns))
        for child in children:
            visit(child, (*above, name))
        done.add(name)

    for name in conversations:
        visit(name, ())


def _require_system_first(record: Record, conversation: Conversation) -> None:
    for index, turn in enumerate(conversation.turns):
        if not turn.appends or (not index and not conversation.forks):
            continue
        for message in turn.messages:
            if isinstance(message, Literal) and message.content["role"] == "system":
                raise record.error(f"turns[{index}] has a system message, which only begins one.")
