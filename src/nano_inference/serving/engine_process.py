"""The engine process: `python -m nano_inference.serving.engine_process`, started by `EngineChild`.

An input thread takes messages in, the main thread steps, an output thread tells what came of it.
The process ends when it is told to, when a step fails, and with the process that started it,
however that ends.
"""

import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from nano_inference.child_process import be_child
from nano_inference.config import EngineConfig
from nano_inference.errors import NanoInferenceError
from nano_inference.serving.encoding import encoded, refusal
from nano_inference.serving.log_lines import Rarely, send_to_stderr
from nano_inference.serving.messages import (
    NOT_UNDERSTOOD,
    Begin,
    CannotStart,
    FromEngine,
    Ready,
    ToEngine,
)

if TYPE_CHECKING:
    from nano_inference.serving.core import EngineCore

log = logging.getLogger("nano_inference.serving")

# seconds between heartbeats while there are requests, also such as wait for the end of a pause
BEAT = 1.0
IDLE_BEAT = 10.0  # and while nothing changes
LAST_WORDS = 1.0  # seconds that messages get to leave before the process ends


def main() -> None:
    """Run until the end; never returns."""
    begin = be_child(Begin, lambda begin: _leave(_folder_of(begin.inbox)))
    _set_up_logs(begin)
    outbox = Outbox(begin.outbox)
    try:
        failed = _serve(begin, outbox)
    except Exception as problem:
        if not isinstance(problem, NanoInferenceError):
            log.exception("the engine cannot be built")
            problem = NanoInferenceError(f"{type(problem).__name__}: {problem}")
        outbox.put(CannotStart(type(problem).__name__, str(problem)))
        failed = True
    outbox.close()
    logging.shutdown()
    os._exit(int(failed))  # at once: threads may wait for a step, or in a call


def _serve(begin: Begin, outbox: "Outbox") -> bool:
    """Build the engine and step it until the end; returns whether it failed. Raises what keeps it
    from being built.
    """
    # seconds, for torch; whoever starts us may end meanwhile
    from nano_inference.engine.engine import InferenceEngine
    from nano_inference.serving.core import EngineCore

    config = _on_its_device(begin.config, begin.number)
    lockstep = None
    if begin.meeting:
        from nano_inference.engine.backends import choose_device
        from nano_inference.engine.lockstep import process_in_lockstep

        device = choose_device(config.device)
        lockstep = process_in_lockstep(begin.meeting, begin.number, config.expert_parallel, device)
    core = EngineCore(InferenceEngine(config, lockstep=lockstep), outbox.put)
    core.prepare()
    inbox = zmq.Context().socket(zmq.PULL)
    inbox.bind(begin.inbox)
    threading.Thread(
        target=_take_in, args=(inbox, core, outbox.put), name="input", daemon=True
    ).start()
    outbox.put(Ready(core.info()))
    outbox.watch(core, begin.parent)
    try:
        core.run()
    except Exception:
        log.exception("the engine has failed")
        return True
    core.engine.shutdown()
    return False


def _on_its_device(config: EngineConfig, number: int) -> EngineConfig:
    """Several engines of one machine take its cards in turn."""
    import torch

    count = torch.cuda.device_count() if number and config.device in ("auto", "cuda") else 0
    return replace(config, device=f"cuda:{number % count}") if count else config


def _set_up_logs(begin: Begin) -> None:
    """Lines like the other process's, with `engine` in them; of libraries, and of Python's
    warnings, what matters.
    """
    send_to_stderr(logging.getLogger(), begin.log_format, "engine")
    logging.captureWarnings(True)
    logging.getLogger("nano_inference").setLevel(begin.log_level)


def _folder_of(address: str) -> Path:
    """In which the sockets are."""
    return Path(address.removeprefix("ipc://")).parent


def _leave(folder: Path) -> None:
    """End now, with nothing left behind."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _take_in(
    inbox: "zmq.Socket[bytes]", core: "EngineCore", tell: Callable[[FromEngine], None]
) -> None:
    """The input thread. Nothing that arrives ends it."""
    decoder, rarely = msgspec.msgpack.Decoder(ToEngine), Rarely()
    while True:
        data = inbox.recv()
        try:
            message = decoder.decode(data)
        except Exception as problem:
            if (more := rarely.due()) is not None:
                log.warning(NOT_UNDERSTOOD, len(data), str(problem), more)
            if answer := refusal(data, problem):
                tell(answer)
            continue
        try:
            core.handle(message)
        except Exception:
            log.exception("a message of %d bytes could not be handled", len(data))


class Outbox:
    """The output thread: what there is to tell goes into a queue, and from there to the API
    process.
    """

    def __init__(self, address: str) -> None:
        self._queue: queue.SimpleQueue[FromEngine | None] = queue.SimpleQueue()
        self._address = address
        self._folder = _folder_of(address)
        self._watched: tuple[EngineCore, int] | None = None
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def put(self, message: FromEngine) -> None:
        """Tell it, without waiting. For any thread."""
        self._queue.put(message)

    def watch(self, core: "EngineCore", parent: int) -> None:
        """From now on tell heartbeats as well, and look after the process that started this one."""
        self._watched = core, parent

    def close(self) -> None:
        """Let what was told leave; returns when it has, or after a second."""
        self._queue.put(None)
        self._thread.join(LAST_WORDS)

    def _run(self) -> None:
        context = zmq.Context()
        outbox = context.socket(zmq.PUSH)
        # sending never waits: what may be on its way is bounded where requests are taken in
        outbox.set_hwm(0)
        outbox.connect(self._address)
        encoder = msgspec.msgpack.Encoder()
        last, sent, due = None, 0.0, 0.0
        while True:
            try:
                message = self._queue.get(timeout=BEAT)
                if message is None:
                    break
                for data in encoded(encoder, message):
                    outbox.send(data)
            except queue.Empty:
                pass
            if (now := time.monotonic()) >= due and self._watched is not None:
                due = now + BEAT
                core, parent = self._watched
                # the other end of stdin is open only in a process that was forked from it
                if os.getppid() != parent:
                    _leave(self._folder)
                beat = core.heartbeat()
                if core.has_requests or beat != last or now >= sent + IDLE_BEAT:
                    outbox.send(encoder.encode(beat))
                    last, sent = beat, now
        outbox.close(linger=int(LAST_WORDS * 1000))
        context.term()


if __name__ == "__main__":
    main()
