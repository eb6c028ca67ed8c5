"""What rank 0 and the others tell each other: msgspec structs, in one ordered stream each way."""

from typing import Any

import msgspec
import torch

import nano_inference.errors as errors
from nano_inference.config import EngineConfig
from nano_inference.errors import NanoInferenceError
from nano_inference.ranks.replay import Draw, Forward
from nano_inference.ranks.samples import Samples


class Begin(msgspec.Struct, frozen=True):
    """What a worker must know to find rank 0 and to prove that it is meant. A launcher brings it to
    its process.

    Attributes:
        rank, world_size: whose it is.
        address: where rank 0 listens, as `Listener` says it.
        token: the engine's secret; it must not stand on a command line, in an environment or in a
            log.
        log_level: of the package's logger.
        parent: process id of rank 0 if it starts this one itself: it ends with it. 0: another
            program does.
        local_rank: which of the cards of its machine is its own.
        host: the address of its machine that the others reach; empty: all are on one.
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


# What `Build` is answered with, in turn: the rank has found the model and goes to meet the others;
# how large its KV cache can be (and then it is told how large it is); steps can come. Or, at any
# time, why it cannot be built.
PLANNED, SIZED, BUILT, REFUSED = -1, -2, -3, -4


class Build(msgspec.Struct, tag="build", frozen=True):
    """Build your part of the model. Answered by `PLANNED`, `SIZED` and `BUILT`, or by `REFUSED`.

    Attributes:
        config: of the engine.
        model: digest of what the models' configurations say on rank 0.
        numerics: its fingerprint: every rank's must be the same.
        meeting: where the process group meets: "file:PATH" or "tcp:HOST:PORT".
        ranks_here: ranks of this engine that share a machine, which share its memory and cores.
        timeout: seconds that a rank waits for another one.
    """

    config: EngineConfig
    model: str
    numerics: str
    meeting: str
    ranks_here: int
    timeout: float


class Size(msgspec.Struct, tag="size", frozen=True):
    """How large the KV cache is on every rank."""

    num_blocks: int
    num_units: int
    max_model_len: int


class Call(msgspec.Struct, tag="call", frozen=True):
    """Do this, between two steps. `call_id` 0: no answer is awaited."""

    name: str
    arguments: dict[str, Any] = {}
    call_id: int = 0


class Piece(msgspec.Struct, tag="piece", frozen=True):
    """Bytes of a tensor of a weight update, from place `offset` on; the first one makes memory for
    all of it.

    Attributes:
        update: number of the update.
        name: checkpoint name.
        dtype, shape: of the part of it that is this rank's.
        patch: it is no tensor but numbers of one: int64 places in the part that is this rank's, and
            then values.
    """

    update: int
    name: str
    dtype: str
    shape: list[int]
    offset: int
    data: bytes
    patch: bool = False


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End."""


ToWorker = Forward | Draw | Build | Size | Call | Piece | Stop


# -- from a worker ---------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Which process this is, for errors and for those who watch it."""

    pid: int
    host: str


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """This process lives, and has handled so many messages; nanoseconds of `RankClock`."""

    handled: int
    busy: int = 0
    waiting: int = 0


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """To a call: what came of it, or the class (of `nano_inference.errors`) and the text of what it
    raised.
    """

    call_id: int
    value: Any = None
    error: str = ""
    text: str = ""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """A step failed here, and this process ends."""

    text: str


FromWorker = Hello | Beat | Answer | Samples | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


def as_error(name: str, text: str) -> Exception:
    """What another process raised, by the name of its class: one of ours, out of memory, or
    `NanoInferenceError`.
    """
    if name == torch.OutOfMemoryError.__name__:
        return torch.OutOfMemoryError(text)
    kind = getattr(errors, name, None)
    return (
        kind(text)
        if isinstance(kind, type) and issubclass(kind, Exception)
        else NanoInferenceError(text)
    )
