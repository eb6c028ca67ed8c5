"""Weka's traces of coding agents (kv-cache-tester, AgentX): one JSON object per session, with
nested subagents.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from nano_bench.traces.model import Blocks, Conversation, Trace, Turn, conversation_turns
from nano_bench.traces.records import Record

_SESSION = (
    *("id", "models", "block_size", "hash_id_scope", "tool_tokens", "system_tokens"),
    *("requests", "totals"),
)
_REQUEST = (
    *("t", "type", "model", "in", "out", "hash_ids", "input_types", "output_types", "stop"),
    *("api_time", "think_time", "ttft"),
)
_SUBAGENT = (
    *("t", "type", "agent_id", "subagent_type", "duration_ms", "total_tokens"),
    *("tool_use_count", "status", "requests", "models", "tool_tokens", "system_tokens"),
)
_BACKGROUND = "async_launched"


@dataclass
class _Reader:
    """Reader of one session.

    Attributes:
        scope: Namespace of its blocks.
        relative: True if a subagent's times count from its start.
    """

    scope: str
    block_size: int
    relative: bool
    conversations: dict[str, Conversation] = field(default_factory=dict[str, Conversation])

    def read(self, name: str, holder: Record, base: float, began: float) -> float:
        """Add a conversation and its subagents, and return the time of its end.

        Args:
            base: Time from which its own times count.
            began: Time of its start.
        """
        turns: list[Turn] = []
        prompts: list[tuple[Blocks, int]] = []
        before: tuple[str, ...] = ()
        pending: dict[str, float] = {}
        ended = last = began
        for record in holder.records("requests"):
            now = self._time(record, base, last)
            last = now
            if record.fields.get("type") == "subagent":
                child, child_end = self._subagent(name, record, now, ended)
                if turns:
                    turns[-1] = replace(turns[-1], spawns=(*turns[-1].spawns, child))
                else:
                    before = (*before, child)
                if turns and record.fields.get("status") != _BACKGROUND:
                    pending[child] = child_end
                continue
            think = record.maybe_time("think_time")
            free = max([ended, *pending.values()])
            wait = think if think is not None and not pending else max(now - free, 0.0)
            prompts.append((self._blocks(record), record.count("out")))
            turns.append(
                Turn(
                    record.line,
                    (),
                    max(prompts[-1][1], 1),
                    wait=wait if turns else 0.0,
                    joins=tuple(pending),
                )
            )
            pending = {}
            ended = now + (record.maybe_time("api_time") or 0.0)
        if not turns:
            raise holder.error("it has no requests besides subagents.")
        system = holder.count("tool_tokens", default=0) + holder.count("system_tokens", default=0)
        messages = conversation_turns(prompts, system)
        whole = tuple(
            replace(turn, messages=parts) for turn, parts in zip(turns, messages, strict=True)
        )
        self.conversations[name] = Conversation(name, whole, spawns=before)
        return ended

    def _subagent(self, parent: str, record: Record, now: float, ended: float) -> tuple[str, float]:
        record.known(*_SUBAGENT)
        name = f"{parent}/{record.text('agent_id')}"
        while name in self.conversations:
            name += "'"
        end = self.read(name, record, now if self.relative else 0.0, now)
        self.conversations[name] = replace(self.conversations[name], start=max(now - ended, 0.0))
        return name, end

    def _time(self, record: Record, base: float, last: float) -> float:
        now = record.time("t") + (base if self.relative else 0.0)
        if now < last:
            raise record.error(
                f"t is {record.fields['t']!r}, before the request or the parent that precedes it; "
                "order the requests by time."
            )
        return now

    def _blocks(self, record: Record) -> Blocks:
        record.known(*_REQUEST)
        if record.fields.get("type") not in ("n", "s"):
            raise record.error(f"type is {record.fields.get('type')!r}; write n, s or subagent.")
        length = record.count("in", least=1)
        return record.blocks(self.scope, length, self.block_size, exact=False)


def weka_trace(records: Sequence[Record]) -> Trace:
    """Return the trace. Subagents follow the turn before them, and the turn after them waits for
    their end. Raises `TraceError`.
    """
    relative = _is_relative(records)
    conversations: dict[str, Conversation] = {}
    roots: list[str] = []
    for record in records:
        record.known(*_SESSION)
        name = record.text("id")
        if name in conversations:
            raise record.error(f"the id {name!r} occurs twice.")
        scope = record.fields.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise record.error(f"hash_id_scope is {scope!r}; write local or global.")
        size = record.count("block_size", least=1)
        reader = _Reader(name if scope == "local" else "", size, relative)
        reader.read(name, record, 0.0, 0.0)
        conversations |= reader.conversations
        roots.append(name)
    return Trace("weka", conversations, tuple(roots))


def _is_relative(records: Sequence[Record]) -> bool:
    """Return True if the times of any subagent begin before its own start, and therefore count
    from it.
    """
    return any(
        _first_time(marker) < marker.time("t")
        for record in records
        for marker in _subagents(record)
    )


def _subagents(holder: Record) -> Iterator[Record]:
    for record in holder.records("requests"):
        if record.fields.get("type") == "subagent":
            yield record
            yield from _subagents(record)


def _first_time(marker: Record) -> float:
    return marker.records("requests")[0].time("t")
