"""The engine operations: all that the API process asks of an engine beside requests, a row each.

`EngineClient.call` says one by its name, `EngineCore` runs it, a fleet does it on its replicas, and
Ray and the trainers' routes ask for it through those. A new operation is a row here and a function
in the engine process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import msgspec

from nano_inference.errors import InvalidRequest, NanoInferenceError
from nano_inference.remote import time_limits
from nano_inference.types import AdapterInfo, EngineStats, KvPolicy, Memory, PauseMode

# Who keeps the deadline. caller: it stops waiting, and the engine goes on. engine: it is told the
# seconds, gives up in time and undoes what it began.
Deadline = Literal["caller", "engine"]
# What a fleet does with an operation; `FleetOperations` has a method for each.
FleetPolicy = Literal[
    "one",  # ask one replica, by turns, and the next one if it dies
    "first",  # ask all; return the answer of the first
    "same",  # all must give the same answer
    "any",  # whether one says yes
    "joined",  # `Operation.join` makes one answer of all
    "undone",  # if one fails, the others run `Operation.undo` with the arguments that it takes
    "replica",  # never of a fleet, but of one replica by another
    # The following change what the replicas have in common:
    "stats",
    "flush",
    "pause",
    "resume",
    "sleep",
    "wake",
    "join",  # a process group, each replica with its own rank
    "leave",
    "joined all",  # whether all members of a group are still in it
    "begin",  # a weight update
    "receive",  # by the replicas that take part in the open update; a failure ends it on all
    "finish",
    "cancel",
    "load",  # an adapter
    "unload",
]


class Checks(TypedDict, total=False):
    """What a weight update is checked for; see `EngineWeights.begin_update`."""

    complete: bool
    check_finite: bool


class Received(msgspec.Struct, frozen=True):
    """What an engine answers when weights have come.

    Attributes:
        version: that the weights say they are; None: they say nothing.
        paused: whether the engine was paused, and computes nothing until `resume`. Memory that
            sleeps is no pause.
    """

    version: int | None = None
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """One row.

    Attributes:
        name: by which it is called.
        function: of the engine process, as a path from its `EngineCore`.
        fleet: what a fleet does with it.
        arguments: name -> type; a value of another type is refused. Which of them may be left out
            the function says.
        returns: type of the answer, where it is more than numbers, strings, lists and dicts.
        deadline: who keeps it; the engine is told it as `seconds`.
        undo: the operation that undoes it.
        join: what a fleet makes of the answers by replica, where `fleet` is "joined".
        rounds: calls, one after the other, that a fleet may need; each of them has the deadline.
    """

    name: str
    function: str
    fleet: FleetPolicy
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    returns: Any = Any
    deadline: Deadline = "caller"
    undo: str = ""
    join: Callable[[Mapping[str, Any]], Any] | None = None
    rounds: int = 2

    def timed(self, seconds: float, arguments: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """How long the caller waits, and what the engine is told, for a deadline of `seconds`."""
        if self.deadline == "caller":
            return seconds, arguments
        return seconds + time_limits.MARGIN, {"seconds": seconds} | arguments


def _of_the_first(found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {**next(iter(found.values())), "replicas": len(found)}


def _joined_checksums(found: Mapping[str, dict[str, str]]) -> dict[str, str]:
    (first, expected), *others = found.items()
    for replica, checksums in others:
        differ = sorted(
            name for name in expected.keys() & checksums if expected[name] != checksums[name]
        )
        if differ:
            raise NanoInferenceError(
                f"replicas {first} and {replica} do not have the same weights: {differ[0]!r} "
                f"differs, one of {len(differ)}."
            )
        expected = checksums | expected  # of engines in lockstep each has some of the experts
    return expected


_SESSION = {"session": int}
_IN_TIME = {"seconds": float}
_RECEIVE = _SESSION | _IN_TIME
_NAMES = {"names": bytes}
_TENSORS = Sequence[tuple[str, str, Sequence[int]]]  # name, dtype, shape

_ROWS = (
    # -- questions
    Operation("stats", "engine.stats", "stats", returns=EngineStats),
    Operation("describe", "weights.describe", "joined", join=_of_the_first),
    Operation("get_weight_version", "engine.get_weight_version", "same"),
    Operation("weights_checksum", "engine.weights_checksum", "joined", join=_joined_checksums),
    Operation("weight_rows", "weights.weight_rows", "first", {"tensor": str, "count": int}),
    # -- embeddings: little-endian float32
    Operation("embed", "embed", "one", {"prompts": list[list[int]], "adapter": str | None}),
    # -- pauses and memory
    Operation(
        "pause",
        "pause",
        "pause",
        {"mode": PauseMode} | _IN_TIME,
        deadline="engine",
    ),
    Operation("resume", "engine.shared.end_pause", "resume"),
    Operation("is_paused", "engine.is_paused", "any"),
    Operation("flush_cache", "engine.flush_cache", "flush"),
    Operation("sleep", "engine.sleep", "sleep", {"memory": Sequence[Memory]}, undo="wake"),
    Operation("wake", "engine.wake", "wake", {"memory": Sequence[Memory] | None}, undo="sleep"),
    Operation("sleeping", "engine.sleeping", "first", returns=tuple[Memory, ...]),
    # what was said before it has happened when it returns
    Operation("take_in", "engine.shared.handle", "first"),
    # -- process groups with a trainer
    Operation(
        "join_group",
        "weights.join_group",
        "join",
        {
            "group": str,
            "named": bool,
            "host": str,
            "port": int,
            "rank": int,
            "world_size": int,
            "backend": str | None,
        }
        | _IN_TIME,
        deadline="engine",
        undo="leave_group",
    ),
    Operation("leave_group", "weights.leave_group", "leave", {"group": str}),
    Operation("has_group", "weights.has_group", "joined all", {"group": str}),
    # -- weight updates
    Operation(
        "begin_update",
        "weights.begin_update",
        "begin",
        _SESSION | {"known": int | None, "complete": bool, "check_finite": bool},
        undo="cancel_update",
    ),
    Operation(
        "receive_broadcast",
        "weights.receive_broadcast",
        "receive",
        _RECEIVE | {"group": str, "tensors": _TENSORS, "packed_bytes": int | None},
        returns=Received,
        deadline="engine",
    ),
    Operation(
        "receive_stream",
        "weights.receive_stream",
        "receive",
        _RECEIVE | {"group": str},
        returns=Received,
        deadline="engine",
    ),
    Operation(
        "receive_file",
        "weights.receive_file",
        "receive",
        _RECEIVE | {"size": int, "content": memoryview},
        returns=Received,
        deadline="engine",
    ),
    Operation(
        "receive_folder",
        "weights.receive_folder",
        "receive",
        _RECEIVE | {"path": str},
        returns=Received,
        deadline="engine",
    ),
    # on Ray, whose object store brings the bytes (`RayClient`)
    Operation("receive_bucket", "", "receive", _SESSION | {"bucket": Any}),
    Operation(
        "prepare_update",
        "weights.prepare_update",
        "replica",
        _SESSION | {"version": int, "kv_policy": KvPolicy} | _IN_TIME,
        deadline="engine",
    ),
    Operation(
        "finish_update",
        "weights.finish_update",
        "finish",
        _SESSION | {"version": int, "kv_policy": KvPolicy} | _IN_TIME,
        deadline="engine",
        rounds=4,
    ),
    Operation("cancel_update", "weights.cancel_update", "cancel", _SESSION | {"reason": str}),
    Operation("save_weights", "weights.save_weights", "replica", {"path": str, "version": int}),
    # -- adapters
    Operation("adapters", "engine.adapters", "first", returns=tuple[AdapterInfo, ...]),
    # `source`: a folder that the engine's process reads
    Operation(
        "load_adapter",
        "engine.load_adapter",
        "load",
        {"name": str, "source": str, "version": int | None, "kv_policy": KvPolicy},
        returns=AdapterInfo,
    ),
    # `path`: of a safetensors file, which the API process has written and removes
    Operation(
        "load_adapter_file",
        "engine.adapter_table.load_file",
        "load",
        {
            "name": str,
            "path": str,
            "config": dict[str, Any],
            "version": int | None,
            "kv_policy": KvPolicy,
        },
        returns=AdapterInfo,
    ),
    Operation("unload_adapter", "engine.unload_adapter", "unload", {"name": str}),
    Operation(
        "save_adapter", "engine.adapter_table.copy_to", "replica", {"name": str, "path": str}
    ),
    Operation(
        "receive_adapter",
        "engine.adapter_table.copy_from",
        "replica",
        {"path": str, "kv_policy": KvPolicy},
        returns=AdapterInfo,
    ),
    # -- blocks that move between replicas
    Operation("count_blocks", "block_link.count_blocks", "replica", _NAMES),
    Operation(
        "export_blocks",
        "block_link.export_blocks",
        "replica",
        _NAMES | {"first": int, "max_bytes": int},
    ),
    Operation("import_blocks", "block_link.import_blocks", "replica", {"data": bytes}),
    Operation("report_blocks", "block_link.report_blocks", "replica", {"lost": bool}),
    Operation("describe_blocks", "block_link.describe_blocks", "replica"),
)
OPERATIONS: Mapping[str, Operation] = {each.name: each for each in _ROWS}


def operation_named(name: str) -> Operation:
    """The row of this name. Raises `InvalidRequest`."""
    if name not in OPERATIONS:
        raise InvalidRequest(
            f"{name!r} is not an engine operation; these are {', '.join(OPERATIONS)}."
        )
    return OPERATIONS[name]
