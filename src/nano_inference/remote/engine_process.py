"""Engine process, started by `ProcessClient`: `python -m nano_inference.remote.engine_process`.

An input thread receives messages, the main thread steps, and an output thread sends results. The
process ends on a `Stop`, when a step fails, and with the process that started it, however that
ends.
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
    """Run the engine process. Never returns."""
    begin = be_child(Begin, lambda begin: _leave(_folder_of(begin.inbox)))
    _set_up_logs(begin)
    outbox = Outbox(begin)
    threading.Thread(target=_take_in, args=(begin.inbox, outbox.host), daemon=True).start()
    ended_well = outbox.host.run(lambda: _build_aloud(begin, outbox))
    outbox.close()
    logging.shutdown()
    os._exit(int(not ended_well))  # skip the threads: they may wait for a step or a call


def _build_aloud(begin: Begin, outbox: "Outbox") -> "InferenceEngine":
    """Build the engine and report the progress to the API process. The first of several engines
    also shows it on the terminal.
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
    """Return the configuration with a device. Several engines on one machine take its cards in
    turn.
    """
    from nano_inference.device.backends import device_of

    if not number or config.device not in ("auto", "cuda") or device_of(config).type != "cuda":
        return config
    from nano_inference.device.backends import device_of

    if device_of(config).type != "cuda":
        return config
    import torch

    return replace(config, device=f"cuda:{number % torch.cuda.device_count()}")


def _set_up_logs(begin: Begin) -> None:
    """Log like the API process, with `engine` in each line, and include libraries and Python's
    warnings.
    """
    send_to_stderr(logging.getLogger(), begin.log_format, "engine")
    logging.captureWarnings(True)
    logging.getLogger("nano_inference").setLevel(begin.log_level)


def _folder_of(address: str) -> Path:
    """Return the folder of a socket."""
    return Path(address.removeprefix("ipc://")).parent


def _leave(folder: Path) -> None:
    """Exit now and remove the sockets' folder."""
    for _ in range(2):  # the input thread may create its socket during the first pass
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _take_in(address: str, host: EngineHost) -> None:
    """Receive messages on the input thread."""
    inbox = zmq.Context().socket(zmq.PULL)
    inbox.bind(address)
    while True:
        host.take(inbox.recv())


class Outbox:
    """Output thread: sends queued messages and heartbeats to the API process. It also exits when
    the process that started this one is gone.

    Attributes:
        host: Host of the engine, which sends through this outbox.
    """

    def __init__(self, begin: Begin) -> None:
        self._queue: queue.SimpleQueue[FromEngine | None] = queue.SimpleQueue()
        self._begin = begin
        self.host = EngineHost(self._queue.put)
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def tell(self, message: FromEngine) -> None:
        """Queue a message and return immediately."""
        self._queue.put(message)

    def close(self) -> None:
        """Wait until queued messages are sent, at most a second."""
        self._queue.put(None)
        self._thread.join(time_limits.LAST_WORDS)

    def _run(self) -> None:
        context = zmq.Context()
        outbox = context.socket(zmq.PUSH)
        # sending never waits: the admission of requests bounds the queue
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
            # stdin would not signal this if a fork of the parent still holds its other end
            if os.getppid() != self._begin.parent:
                _leave(_folder_of(self._begin.outbox))
            if (beat := self.host.beat()) is not None:
                outbox.send(encoder.encode(beat))
        outbox.close(linger=int(time_limits.LAST_WORDS * 1000))
        context.term()


if __name__ == "__main__":
    main()
