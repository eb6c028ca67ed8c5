"""`EngineHost`: an engine in a process that is told by messages as bytes: `engine_process`, or a
Ray actor. And messages that cannot be said or understood.
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from nano_inference.errors import NO_MEMORY, ConfigError, InvalidRequest, NanoInferenceError
from nano_inference.remote import time_limits
from nano_inference.remote.log_lines import Rarely
from nano_inference.remote.messages import (
    NOT_UNDERSTOOD,
    CannotStart,
    Failed,
    FromEngine,
    Heartbeat,
    Outputs,
    Ready,
    Refused,
    Returned,
    ToEngine,
)

if TYPE_CHECKING:
    from nano_inference.engine.engine import InferenceEngine
    from nano_inference.remote.core import EngineCore

log = logging.getLogger("nano_inference.server")


class EngineHost:
    """Builds an engine and steps it. Nothing that arrives ends it.

    Args:
        emit: takes what there is to tell. Called by any thread.

    Attributes:
        core: the engine behind messages; None: it is not built yet, or cannot be.
    """

    def __init__(self, emit: Callable[[FromEngine], None]) -> None:
        self.core: EngineCore | None = None
        self._emit = emit
        self._decoder, self._rarely = msgspec.msgpack.Decoder(ToEngine), Rarely()
        self._last: Heartbeat | None = None
        self._sent = self._due = 0.0

    def run(self, build: Callable[[], "InferenceEngine"]) -> bool:
        """Build the engine, tell what came of it, and step it until the end; whether it ended as it
        was told to.
        """
        try:
            from nano_inference.remote.core import EngineCore  # seconds, for torch

            core = EngineCore(build(), self._emit)
            core.prepare()
        except Exception as problem:
            if isinstance(problem, MemoryError):
                problem = ConfigError(NO_MEMORY)
            elif not isinstance(problem, NanoInferenceError):
                log.exception("the engine cannot be built")
                problem = NanoInferenceError(f"{type(problem).__name__}: {problem}")
            self._emit(CannotStart(type(problem).__name__, str(problem)))
            return False
        self.core = core
        self._emit(Ready(core.info()))
        try:
            core.run()
        except Exception:
            log.exception("the engine has failed")  # and has said so
            return False
        core.engine.shutdown()
        return True

    def take(self, data: bytes) -> None:
        """A message has come. Before the engine is built there can be none."""
        if self.core is None:
            return
        try:
            message = self._decoder.decode(data)
        except Exception as problem:
            if (more := self._rarely.due()) is not None:
                log.warning(NOT_UNDERSTOOD, len(data), str(problem), more)
            if answer := refusal(data, problem):
                self._emit(answer)
            return
        try:
            self.core.handle(message)
        except Exception:
            log.exception("a message of %d bytes could not be handled", len(data))

    def beat(self) -> Heartbeat | None:
        """The heartbeat, if one is due."""
        now, core = time.monotonic(), self.core
        if now < self._due or core is None:
            return None
        self._due = now + time_limits.BEAT
        beat = core.heartbeat()
        if (
            not core.has_requests
            and beat == self._last
            and now < self._sent + time_limits.IDLE_BEAT
        ):
            return None
        self._last, self._sent = beat, now
        return beat


def encoded(encoder: msgspec.msgpack.Encoder, message: FromEngine) -> list[bytes]:
    """A message on the wire. One that cannot be said fails those who wait for it."""
    try:
        return [encoder.encode(message)]
    except Exception as problem:
        log.exception("an answer could not be told")
        error, text = (
            NanoInferenceError.__name__,
            f"an answer could not be told: {type(problem).__name__}: {problem}",
        )
        match message:
            case Returned(call_id):
                return [encoder.encode(Failed(call_id, error, text))]
            case Outputs([_], [request_id]):
                return [encoder.encode(Refused(request_id, error, text))]
            case Outputs(deltas, request_ids):  # it is one request's
                each = [
                    Outputs([delta], [request_id])
                    for delta, request_id in zip(deltas, request_ids, strict=True)
                ]
                return [data for one in each for data in encoded(encoder, one)]
            case _:
                return []


def refusal(data: bytes, problem: Exception) -> FromEngine | None:
    """The answer to a message that was not understood, where it can be known who waits for one."""
    text = f"the engine does not understand this request: {problem}"
    try:
        match msgspec.msgpack.decode(data):
            case {"type": "Generate" | "Resume", "request_id": int(request_id)}:
                return Refused(request_id, InvalidRequest.__name__, text)
            case {"type": "Call", "call_id": int(call_id)}:
                return Failed(call_id, InvalidRequest.__name__, text)
            case _:
                return None
    except Exception:
        return None
