"""Engine operations: all calls from the API process to an engine except requests, one row each.

`EngineClient.call` sends an operation by name, and `EngineCore` runs it. A fleet runs it on its
replicas. Ray and the trainers' routes use these clients. A new operation needs a row here and a
function in the engine process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import msgspec

from nano_inference.errors import InvalidRequest, NanoInferenceError
from nano_inference.parallel.shared_tensors import Offer
from nano_inference.remote import time_limits
from nano_inference.types import (
    AdapterInfo,
    EngineStats,
    KvPolicy,
    Memory,
    PauseMode,
    RequestStatus,
)

# Side that enforces the deadline. caller: it stops waiting, and the engine continues. engine: it
# receives the seconds, gives up in time and undoes its partial work.
Deadline = Literal["caller", "engine"]
# How a fleet runs an operation. `FleetOperations` has a method for each policy.
FleetPolicy = Literal[
    "one",  # call one replica (round-robin), and the next one if it dies
    "first",  # call all, return the answer of the first
    "same",  # call all: their answers must be equal
    "any",  # call all: True if any answer is True
    "joined",  # call all: `Operation.join` combines the answers
    "undone",  # call all: if one fails, the others run `Operation.undo` with matching arguments
    "replica",  # not for a fleet: one replica calls another
    # The following change state that the replicas share:
    "stats",
    "flush",
    "pause",
    "resume",
    "sleep",
    "wake",
    "join",  # a process group, with a rank for each replica
    "leave",
    "joined all",  # True if all members of a group are still in it
    "begin",  # a weight update
    "receive",  # by replicas in the open update: a failure ends the update on all
    "finish",
    "cancel",
    "load",  # an adapter
    "unload",
]


class Checks(TypedDict, total=False):
    """Optional checks of a weight update, as in `EngineWeights.begin_update`."""

    complete: bool
    check_finite: bool


class Received(msgspec.Struct, frozen=True):
    """Reply to received weights.

    Attributes:
        version: Version that the weights carry, if any.
        paused: True if the engine is paused and computes nothing until `resume`. Sleeping memory
            does not count.
    """

    version: int | None = None
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """Row of the table of operations.

    Attributes:
        name: Name to call it by.
        function: Function of the engine process, as an attribute path from its `EngineCore`.
        fleet: How a fleet runs it.
        arguments: Type of each argument by name; other types are rejected. The function's signature
            decides which are optional.
        returns: Type of the answer, if it is more than numbers, strings, lists and dicts.
        deadline: Side that enforces the deadline. The engine receives it as `seconds`.
        undo: Name of the operation that undoes this one.
        join: Combines the replicas' answers if `fleet` is "joined".
        rounds: Maximum number of consecutive calls by a fleet. Each has the deadline.
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
        """Return the caller's timeout and the engine's arguments for a deadline of `seconds`."""
        if self.deadline == "caller":
            return seconds, arguments
        return seconds + time_limits.MARGIN, {"seconds": seconds} | arguments


def _of_the_first(answers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {**next(iter(answers.values())), "replicas": len(answers)}


def _joined_checksums(answers: Mapping[str, dict[str, str]]) -> dict[str, str]:
    (first, expected), *others = answers.items()
    for replica, checksums in others:
        differ = sorted(
            name for name in expected.keys() & checksums if expected[name] != checksums[name]
        )
        if differ:
            raise NanoInferenceError(
                f"replicas {first} and {replica} have different weights: {len(differ)} tensor(s) "
                f"differ, such as {differ[0]!r}."
            )
        expected = checksums | expected  # engines in lockstep each hold some of the experts
    return expected


def _all_of_them(answers: Mapping[str, Sequence[RequestStatus]]) -> tuple[RequestStatus, ...]:
    return tuple(status for statuses in answers.values() for status in statuses)


def _most(answers: Mapping[str, int]) -> int:
    return max(answers.values())


def _sum(answers: Mapping[str, int]) -> int:
    return sum(answers.values())


_PROMPT = {"prompt": list[int], "adapter": str | None, "cache_salt": str | None}
_SESSION = {"session": int}
_IN_TIME = {"seconds": float}
_RECEIVE = _SESSION | _IN_TIME
_NAMES = {"names": bytes}
_TENSORS = Sequence[tuple[str, str, Sequence[int]]]  # name, dtype, shape

_ROWS = (
    # -- queries
    Operation("stats", "engine.stats", "stats", returns=EngineStats),
    Operation("describe", "weights.describe", "joined", join=_of_the_first),
    Operation("get_weight_version", "engine.get_weight_version", "same"),
    Operation("weights_checksum", "engine.weights_checksum", "joined", join=_joined_checksums),
    Operation("weight_rows", "weights.weight_rows", "first", {"tensor": str, "count": int}),
    # -- embeddings: little-endian float32
    Operation("embed", "embed", "one", {"prompts": list[list[int]], "adapter": str | None}),
    # -- open requests and kept prompts
    Operation(
        "request_statuses",
        "request_statuses",
        "joined",
        returns=tuple[RequestStatus, ...],
        join=_all_of_them,
    ),
    Operation("prefetch", "engine.kept_prompts.prefetch", "joined", _PROMPT, join=_most),
    Operation(
        "release", "engine.kept_prompts.release", "joined", _PROMPT | {"start": int}, join=_sum
    ),
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
    # returns once earlier messages have taken effect
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
            "pynccl": bool,
            "unique_id": bytes | None,
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
    Operation(
        "receive_lent",
        "weights.receive_lent",
        "receive",
        _SESSION | {"offers": list[Offer]},
        returns=Received,
    ),
    # only on Ray, whose object store transfers the bytes (`RayClient`)
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
    # `source`: folder that the engine's process reads
    Operation(
        "load_adapter",
        "engine.load_adapter",
        "load",
        {"name": str, "source": str, "version": int | None, "kv_policy": KvPolicy},
        returns=AdapterInfo,
    ),
    # `path`: safetensors file that the API process has written and will remove
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
    # -- blocks exchanged by replicas
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
    """Return the operation with this name. Raises `InvalidRequest`."""
    if name not in OPERATIONS:
        raise InvalidRequest(
            f"{name!r} is not an engine operation; use one of {', '.join(OPERATIONS)}."
        )
    return OPERATIONS[name]
