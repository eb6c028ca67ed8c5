"""The child's side of `compile_process`: `python -m nano_inference.structured.compile_child`."""

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

IDLE = 600.0  # seconds without a grammar, after which it ends
NICENESS = 10  # steps go first


def main() -> None:
    """Compile grammars until the parent ends, or asks for nothing any more."""
    begin = be_child(Begin, lambda _: os._exit(1))
    channel = Connection(begin.channel)
    words = msgspec.msgpack.decode(channel.recv_bytes(), type=Words)
    try:
        compile_one = import_module(begin.module).make_compiler(words.tokens, words.ends)
    except Exception as problem:
        channel.send_bytes(msgspec.msgpack.encode(Answer(problem=repr(problem))))
        return
    _limit(begin.memory)
    os.nice(NICENESS)  # not before: on a busy machine its imports would take minutes
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
        except BaseException as problem:  # a panic of Rust is no `Exception`
            if "bad_alloc" in str(problem):
                os._exit(OUT_OF_MEMORY)
            answer = Answer(problem=str(problem) or repr(problem))
        channel.send_bytes(msgspec.msgpack.encode(answer))


def _within(result: bytes) -> Answer:
    if len(result) > MOST_RESULT:
        return Answer(
            problem=f"it takes {len(result)} bytes when compiled; {MOST_RESULT} are possible"
        )
    return Answer(result)


def _limit(memory: int) -> None:
    """Take no more than so many bytes beyond what is taken now. Where the system does not count
    them there is the limit of time alone.
    """
    taken = getattr(psutil.Process().memory_info(), "data", None)
    if taken is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (taken + memory, hard))


if __name__ == "__main__":
    main()
