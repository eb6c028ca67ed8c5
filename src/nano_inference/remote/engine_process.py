"""The engine process: `python -m nano_inference.remote.engine_process`. `ProcessClient` starts it.

An input thread takes messages in, the main thread steps, an output thread tells what came of it.
The process ends when it is told to, when a step fails, and with the process that started it,
however that ends.
"""

import logging
import os
import queue
import shutil
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from nano_inference.config import EngineConfig
from nano_inference.remote import time_limits
from nano_inference.remote.engine_host import EngineHost, encoded
from nano_inference.remote.loading_line import loading_line
from nano_inference.remote.log_lines import send_to_stderr
from nano_inference.remote.messages import Begin, FromEngine, Loading
from nano_inference.system.child_process import be_child
from nano_inference.system.progress import heard_by

if TYPE_CHECKING:
    from nano_inference.engine.engine import InferenceEngine


def main() -> None:
    """Run until the end; never returns."""
    begin = be_child(Begin, lambda begin: _leave(_folder_of(begin.inbox)))
    _set_up_logs(begin)
    outbox = Outbox(begin)
    threading.Thread(target=_take_in, args=(begin.inbox, outbox.host), daemon=True).start()
    ended_well = outbox.host.run(lambda: _build_aloud(begin, outbox))
    outbox.close()
    logging.shutdown()
    os._exit(int(not ended_well))  # at once: threads may wait for a step, or in a call


def _build_aloud(begin: Begin, outbox: "Outbox") -> "InferenceEngine":
    """Build the engine. The API process hears how far that has come, and a person at a terminal
    sees it; one of several engines says so.
    """
    line = nullcontext() if begin.number else loading_line(begin.config.model_path)
    with line, heard_by(lambda state: outbox.tell(Loading(state))):
        return _build(begin)


def _build(begin: Begin) -> "InferenceEngine":
    from nano_inference.engine.engine import InferenceEngine

    config = _on_its_device(begin.config, begin.number)
    if not begin.meeting:
        return InferenceEngine(config)
    from nano_inference.device.backends import choose_device
    from nano_inference.ranks.lockstep import process_in_lockstep

    device = choose_device(config.device)
    lockstep = process_in_lockstep(begin.meeting, begin.number, config.expert_parallel, device)
    return InferenceEngine(config, lockstep=lockstep)


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
    for _ in range(2):  # the input thread may make its socket while the first one looks
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _take_in(address: str, host: EngineHost) -> None:
    """The input thread."""
    inbox = zmq.Context().socket(zmq.PULL)
    inbox.bind(address)
    while True:
        host.take(inbox.recv())


class Outbox:
    """The output thread: what there is to tell goes into a queue, and from there to the API
    process; heartbeats too. It also looks after the process that started this one.

    Attributes:
        host: of the engine, which tells through it.
    """

    def __init__(self, begin: Begin) -> None:
        self._queue: queue.SimpleQueue[FromEngine | None] = queue.SimpleQueue()
        self._begin = begin
        self.host = EngineHost(self._queue.put)
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def tell(self, message: FromEngine) -> None:
        """Send a message; returns at once."""
        self._queue.put(message)

    def close(self) -> None:
        """Let what was told leave; returns when it has, or after a second."""
        self._queue.put(None)
        self._thread.join(time_limits.LAST_WORDS)

    def _run(self) -> None:
        context = zmq.Context()
        outbox = context.socket(zmq.PUSH)
        # sending never waits: what may be on its way is bounded where requests are taken in
        outbox.set_hwm(0)
        outbox.connect(self._begin.outbox)
        encoder = msgspec.msgpack.Encoder()
        while True:
            try:
                message = self._queue.get(timeout=time_limits.BEAT)
                if message is None:
                    break
                for data in encoded(encoder, message):
                    outbox.send(data)
            except queue.Empty:
                pass
            # the other end of stdin is open only in a process that was forked from it
            if os.getppid() != self._begin.parent:
                _leave(_folder_of(self._begin.outbox))
            if (beat := self.host.beat()) is not None:
                outbox.send(encoder.encode(beat))
        outbox.close(linger=int(time_limits.LAST_WORDS * 1000))
        context.term()


if __name__ == "__main__":
    main()
