"""Messages between rank 0 and the workers: msgspec structs, in one ordered stream each way."""

from typing import Any

import msgspec
import torch

import nano_inference.errors as errors
from nano_inference.config import EngineConfig
from nano_inference.errors import NanoInferenceError
from nano_inference.ranks.replay import Draw, Forward
from nano_inference.ranks.samples import Samples


class Begin(msgspec.Struct, frozen=True):
    """Data that a worker needs to find rank 0 and prove its identity. A launcher passes it to the
    process.

    Attributes:
        rank, world_size: Rank of the worker, and number of ranks.
        address: Address of rank 0, in the notation of `Listener`.
        token: Secret of the engine, which must not appear on a command line, in an environment or
            in a log.
        log_level: Level of the package's logger.
        parent: Process id of rank 0 if it starts the worker itself. The worker then ends with it. 0
            means that another program starts the worker.
        local_rank: Index of the worker's GPU on its machine.
        host: Address of the worker's machine for other ranks. Empty if all ranks share a machine.
    """

    rank: int
    world_size: int
    address: str
    token: bytes
    log_level: int = 30
    parent: int = 0
    local_rank: int = 0
    host: str = ""


# -- from rank 0 -----------------------------------------------------------------------------------


# Answers to `Build`, in this order. PLANNED: the rank has found the model and connects to the
# others. SIZED: the size of the KV cache that fits, after which it receives the agreed size. BUILT:
# it is ready for steps. REFUSED, at any time: the reason why it cannot be built.
PLANNED, SIZED, BUILT, REFUSED = -1, -2, -3, -4


class Build(msgspec.Struct, tag="build", frozen=True):
    """Request to build a part of the model. Answered by `PLANNED`, `SIZED`, `BUILT`, or by
    `REFUSED`.

    Attributes:
        config: Config of the engine.
        model: Digest of the models' configurations on rank 0.
        numerics: Numerics fingerprint, which must be equal on all ranks.
        meeting: Rendezvous address of process groups: "file:PATH" or "tcp:HOST:PORT".
        ranks_here: Number of ranks that share a machine, its memory and cores.
        timeout: Timeout of a wait for another rank in seconds.
    """

    config: EngineConfig
    model: str
    numerics: str
    meeting: str
    ranks_here: int
    timeout: float


class Size(msgspec.Struct, tag="size", frozen=True):
    """Size of the KV cache on every rank."""

    num_blocks: int
    num_units: int
    max_model_len: int


class Call(msgspec.Struct, tag="call", frozen=True):
    """Request to call a function between two steps. With `call_id` 0, no answer is expected."""

    name: str
    arguments: dict[str, Any] = {}
    call_id: int = 0


class Piece(msgspec.Struct, tag="piece", frozen=True):
    """Bytes of a tensor of a weight update, from byte `offset` on. The first piece allocates the
    tensor.

    Attributes:
        update: Number of the update.
        name: Checkpoint name.
        dtype, shape: Dtype and shape of this rank's part.
        patch: True if the bytes are single numbers of the tensor: int64 indices into this rank's
            part, followed by values.
    """

    update: int
    name: str
    dtype: str
    shape: list[int]
    offset: int
    data: bytes
    patch: bool = False


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Request to end."""


ToWorker = Forward | Draw | Build | Size | Call | Piece | Stop


# -- from a worker ---------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Identification of a worker's process, for errors and monitoring."""

    pid: int
    host: str


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """Heartbeat with the number of handled messages, and nanoseconds of `RankClock`."""

    handled: int
    busy: int = 0
    waiting: int = 0


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """Answer to a call: its result, or class (of `nano_inference.errors`) and text of its error."""

    call_id: int
    value: Any = None
    error: str = ""
    text: str = ""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Report of a failed step, after which the process ends."""

    text: str


FromWorker = Hello | Beat | Answer | Samples | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


def as_error(name: str, text: str) -> Exception:
    """Return an error of another process, given the name of its class.

    The class is one of this package, out of memory, or else `NanoInferenceError`.
    """
    if name == torch.OutOfMemoryError.__name__:
        return torch.OutOfMemoryError(text)
    kind = getattr(errors, name, None)
    return (
        kind(text)
        if isinstance(kind, type) and issubclass(kind, Exception)
        else NanoInferenceError(text)
    )
