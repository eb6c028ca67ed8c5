"""Child process of `compile_process`: `python -m nano_inference.structured.compile_child`."""

import os
import resource
from importlib import import_module
from multiprocessing.connection import Connection

import msgspec
import psutil

from nano_inference.structured.compile_process import (
    MOST_RESULT,
    OUT_OF_MEMORY,
    Answer,
    Begin,
    Job,
    Words,
)
from nano_inference.system.child_process import be_child

IDLE = 600.0  # seconds without a grammar after which the child ends
NICENESS = 10  # lower priority than the engine's steps


def main() -> None:
    """Compile grammars until the parent ends, or no grammar has come for `IDLE` seconds."""
    begin = be_child(Begin, lambda _: os._exit(1))
    channel = Connection(begin.channel)
    words = msgspec.msgpack.decode(channel.recv_bytes(), type=Words)
    try:
        compile_one = import_module(begin.module).make_compiler(words.tokens, words.ends)
    except Exception as problem:
        channel.send_bytes(msgspec.msgpack.encode(Answer(problem=repr(problem))))
        return
    _limit(begin.memory)
    os.nice(NICENESS)  # after the imports: on a busy machine they would take minutes
    channel.send_bytes(msgspec.msgpack.encode(Answer()))
    while channel.poll(IDLE):
        try:
            job = msgspec.msgpack.decode(channel.recv_bytes(), type=Job)
        except EOFError:
            return
        try:
            answer = _within(compile_one(job.kind, job.source))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException as problem:  # a panic of Rust is not an `Exception`
            if "bad_alloc" in str(problem):
                os._exit(OUT_OF_MEMORY)
            answer = Answer(problem=str(problem) or repr(problem))
        channel.send_bytes(msgspec.msgpack.encode(answer))


def _within(result: bytes) -> Answer:
    if len(result) > MOST_RESULT:
        return Answer(
            problem=f"it takes {len(result)} bytes when compiled; at most {MOST_RESULT} are allowed"
        )
    return Answer(result)


def _limit(memory: int) -> None:
    """Limit further memory to this many bytes. If the system does not report the process's data
    size, only the limit on time holds.
    """
    taken = getattr(psutil.Process().memory_info(), "data", None)
    if taken is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (taken + memory, hard))


if __name__ == "__main__":
    main()
