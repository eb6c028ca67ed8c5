"""`EngineHost`: an engine controlled by encoded messages, in `engine_process` or in a Ray actor. It
also handles messages that cannot be encoded or decoded.
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
    """Builder and step loop of an engine. Invalid messages are logged and do not end the process.

    Args:
        emit: Sends a message to the client. Called by any thread.

    Attributes:
        core: Core of the engine. None: it is not built yet, or cannot be built.
    """

    def __init__(self, emit: Callable[[FromEngine], None]) -> None:
        self.core: EngineCore | None = None
        self._emit = emit
        self._decoder, self._rarely = msgspec.msgpack.Decoder(ToEngine), Rarely()
        self._last: Heartbeat | None = None
        self._sent = self._due = 0.0

    def run(self, build: Callable[[], "InferenceEngine"]) -> bool:
        """Build the engine, report the result, and step it until the end. Return True if it was
        stopped normally.
        """
        try:
            from nano_inference.remote.core import EngineCore  # takes a while

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
            log.exception("the engine has failed")  # `core.run` has reported it
            return False
        core.engine.shutdown()
        return True

    def take(self, data: bytes) -> None:
        """Handle an encoded message. Ignored until the engine is built: no client sends one."""
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
            log.exception("cannot handle a message of %d bytes", len(data))

    def beat(self) -> Heartbeat | None:
        """Return the heartbeat if one is due."""
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
    """Encode a message. If that fails, return an error for its receiver instead."""
    try:
        return [encoder.encode(message)]
    except Exception as problem:
        log.exception("cannot send an answer")
        error, text = (
            NanoInferenceError.__name__,
            f"cannot send an answer: {type(problem).__name__}: {problem}",
        )
        match message:
            case Returned(call_id):
                return [encoder.encode(Failed(call_id, error, text))]
            case Outputs([_], [request_id]):
                return [encoder.encode(Refused(request_id, error, text))]
            case Outputs(deltas, request_ids):  # retry each delta, to fail only the bad one
                single = [
                    Outputs([delta], [request_id])
                    for delta, request_id in zip(deltas, request_ids, strict=True)
                ]
                return [data for one in single for data in encoded(encoder, one)]
            case _:
                return []


def refusal(data: bytes, problem: Exception) -> FromEngine | None:
    """Return the answer to an undecodable message, if its sender's request or call is known."""
    text = f"the engine cannot decode this request: {problem}"
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
