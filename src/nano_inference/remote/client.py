"""`EngineClient`: the API's side of an engine, local or remote. All of its code runs on one event
loop.
"""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Unpack

import msgspec

import nano_inference.errors as errors
from nano_inference.errors import EngineDead, InvalidRequest, NanoInferenceError
from nano_inference.remote import time_limits
from nano_inference.remote.errors import EngineReplaced, EngineRestarting, ReaderTooSlow
from nano_inference.remote.log_lines import Rarely
from nano_inference.remote.messages import (
    NOT_UNDERSTOOD,
    Abort,
    AskedParts,
    Call,
    CannotStart,
    Dead,
    EngineInfo,
    Failed,
    FromEngine,
    Generate,
    Heartbeat,
    Loading,
    Outputs,
    Ready,
    Refused,
    Resume,
    Returned,
    ToEngine,
)
from nano_inference.remote.open_requests import OpenRequests, Receiver
from nano_inference.remote.operations import Operation, operation_named
from nano_inference.remote.status import FleetReport, ManagedReplicas
from nano_inference.types import Delta, EngineStats, Limits, SamplingParams

log = logging.getLogger("nano_inference.server")

STOPPING = "the server is stopping."

_DECODER = msgspec.msgpack.Decoder(FromEngine)
_ENCODER = msgspec.msgpack.Encoder()


class RequestStream:
    """Stream of one request's deltas for the route that answers it.

    Args:
        num_samples: Number of samples of the request.
        max_backlog: Maximum number of unread tokens.
        abort: Aborts the request in the engine.
        name: Id that the client gave the request.
        on_overflow: Called when the backlog has ended the request.
    """

    def __init__(
        self,
        num_samples: int,
        max_backlog: int,
        abort: Callable[[], None],
        name: str | None = None,
        on_overflow: Callable[[], None] | None = None,
    ) -> None:
        self.samples_left = num_samples
        self.name = name
        self._max_backlog = max_backlog
        self._abort = abort
        self._deltas: list[Delta] = []
        self._num_tokens = 0  # in `_deltas`
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_overflow = on_overflow

    async def next(self) -> list[Delta]:
        """Return all deltas since the last call, at least one. Raises the error that ended the
        request.
        """
        while not self._deltas:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas, self._deltas, self._num_tokens = self._deltas, [], 0
        self.samples_left -= sum(delta.finished is not None for delta in deltas)
        return deltas

    def close(self) -> None:
        """Stop reading: abort the samples that have not ended."""
        self.end(errors.RequestAborted("the request was closed."))

    def end(self, problem: Exception) -> None:
        """Abort the samples that have not ended. A waiting reader gets `problem`."""
        if self.samples_left and self._failure is None:
            self.fail(problem)
            self._abort()

    def put(self, delta: Delta) -> None:
        """Take in a delta. Too many unread tokens end the request."""
        if self._failure is not None:
            return
        self._deltas.append(delta)
        self._num_tokens += len(delta.token_ids)
        if self._num_tokens > self._max_backlog:
            self._deltas.clear()
            self.fail(ReaderTooSlow(self._num_tokens))
            self._abort()
            if self._on_overflow is not None:
                self._on_overflow()
        self._wake()

    def fail(self, problem: Exception) -> None:
        """End the stream with an error."""
        if self._failure is None:
            self._failure = problem
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient(ABC):
    """A client of one engine, or of a fleet. Subclasses carry messages to it (`_send`) and back
    (`_receive`).

    Attributes:
        stats: Statistics of the last heartbeat.
        restarting: True while a replacement for a dead engine is being built.
        loading: Progress of building the engine. Empty: unknown.
        num_restarts: Number of engines started to replace dead ones.
    """

    def __init__(self, max_backlog: int, *, restart: bool = False) -> None:
        self.stats: EngineStats | None = None
        self.restarting = False
        self.loading = ""
        self.num_restarts = 0
        self._watcher: Callable[[], None] | None = None
        self._busy = False  # from the last heartbeat
        self._num_steps = 0  # from the last heartbeat
        self._progress = time.monotonic()  # time of the last progress
        self._heard: float | None = None  # time of the last heartbeat
        self._info: EngineInfo | None = None
        self._max_backlog = max_backlog
        self._restart = restart  # True: a dead engine is replaced
        self._ids = itertools.count()
        self._open = OpenRequests()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_aborts = self._num_taken_in = 0  # aborts sent, aborts that the engine has handled
        self._taking_in = asyncio.Lock()
        self._dead: str | None = None
        self._public = ""

    @property
    def info(self) -> EngineInfo:
        """Properties of the engine. Raises `EngineDead` before it is ready."""
        if self._info is None:
            raise EngineDead("the engine is not ready yet.")
        return self._info

    @property
    def why_dead(self) -> str | None:
        """Reason why the engine does not serve. None: it does."""
        return (
            self._dead
            if self._dead is not None or self._info is not None
            else "the engine is not ready yet."
        )

    @property
    def public_reason(self) -> str:
        """`why_dead` in a form that any client may see. Empty: there is none."""
        return "" if self._dead is None else self._public

    @property
    def num_engines(self) -> int:
        """Number of engines to which a trainer sends weights."""
        return 1

    def replica_report(self) -> FleetReport | None:
        """Return the state of the replicas. None: there is a single engine."""
        return None

    @property
    def managed(self) -> ManagedReplicas | None:
        """Interface to add and remove replicas. None: the engines are fixed."""
        return None

    @property
    def num_samples(self) -> int:
        """Number of running and waiting samples."""
        return self._open.num_samples

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        num_samples: int = 1,
        *,
        stream: bool,
        name: str | None = None,
        session: str | None = None,
        on_overflow: Callable[[], None] | None = None,
        **limits: Unpack[Limits],
    ) -> RequestStream:
        """Queue a request. If the engine rejects it, the stream's first `next` raises the error.

        `name` identifies the request for `abort` and need not be unique. With several engines,
        requests of one `session` go to the same engine. `on_overflow` is described in
        `RequestStream`, the limits in `InferenceEngine.add_request`.

        Raises `InvalidRequest` if the request cannot be encoded, `EngineDead`, and
        `EngineRestarting` while a replacement is being built.
        """
        self._require_alive()
        request_id = next(self._ids)
        backlog = self._max_backlog * num_samples
        request = RequestStream(
            num_samples, backlog, lambda: self.give_up(request_id), name, on_overflow
        )
        message = Generate(request_id, prompt, params, num_samples, stream, **limits, name=name)
        self._hand_over(request, message, num_samples, lambda: self._begin(message, session))
        return request

    def is_live(self, name: str | None) -> bool:
        """Return True if a request with this name is open."""
        return self._open.has_name(name)

    def begin(self, receiver: Receiver, message: Generate | Resume, num_samples: int) -> int:
        """Queue a request whose deltas go to `receiver`, and return its new id. The id in `message`
        is ignored. Used by clients of several engines. Raises like `submit`.
        """
        self._require_alive()
        request_id = next(self._ids)
        named = msgspec.structs.replace(message, request_id=request_id, name=receiver.name)
        self._hand_over(receiver, named, num_samples, lambda: self._send(named))
        return request_id

    def give_up(self, request_id: int) -> None:
        """Abort a request without an answer."""
        if self._open.remove(request_id) is not None and self._dead is None:
            self._send(Abort([request_id]))

    def end_soon(self, request_ids: list[int]) -> None:
        """End requests as `"abort"`. Their receivers get the partial samples."""
        self._send(Abort(request_ids, answered=True))

    def kill(self) -> None:
        """Kill the engine immediately. Its work fails as if the engine had died."""
        self._die("the engine was killed.", "the engine was killed")

    def stalled(self, seconds: float) -> bool:
        """Return True if the engine has work but has begun no step and sent no token for `seconds`,
        or if it has been silent even longer. It may hang, or its process may be stopped.
        """
        if self.why_dead is not None:
            return False
        now = time.monotonic()
        if self._heard is not None and now - self._heard >= time_limits.SILENCE + seconds:
            return True
        return bool(len(self._open) or self._busy) and now - self._progress >= seconds

    @property
    def is_silent(self) -> bool:
        """True if so many heartbeats are missing that the process or machine must have stopped."""
        if self._heard is None or self.why_dead is not None:
            return False
        now = time.monotonic()
        if self._open and now - max(self._heard, self._progress) >= time_limits.BUSY_SILENCE:
            return True  # not for a request that just arrived: idle engines send few heartbeats
        return now - self._heard >= time_limits.SILENCE

    async def abort(
        self, names: Collection[str] | None, *, timeout: float = time_limits.SOON
    ) -> int:
        """End the requests with these names (None: all). Their streams get partial samples that end
        as `"abort"`.

        Returns the number of requests once the engine has ended them. Raises like `call`.
        """
        self._require_alive()
        request_ids = self._open.named(names)
        if request_ids:
            self._send(Abort(request_ids, answered=True))
            self._num_aborts += 1
            await self._take_in(self._num_aborts, timeout)
        return len(request_ids)

    async def _take_in(self, abort: int, timeout: float) -> None:
        """Wait until the engine has handled all aborts up to this number. Waiters share one call:
        it takes a step, and an engine runs few calls at a time.
        """
        async with asyncio.timeout(timeout), self._taking_in:
            if self._num_taken_in < abort:
                sent = self._num_aborts
                await self.call("take_in", timeout=timeout)
                self._num_taken_in = sent

    async def call(
        self, name: str, /, *, timeout: float = time_limits.SOON, **arguments: Any
    ) -> Any:
        """Run an engine operation. Raises its error, `TimeoutError`, and the errors of `submit`.

        Args:
            name: Name of the operation in `operations`.
            timeout: Seconds. The engine enforces this deadline itself if the operation says so.
            arguments: Arguments of the operation.
        """
        operation = operation_named(name)
        self._require_alive()
        call_id = next(self._ids)
        self._calls[call_id] = future = asyncio.get_running_loop().create_future()
        try:
            timeout_s = self._ask(call_id, operation, timeout, arguments)
            value = await asyncio.wait_for(future, timeout_s)
        finally:
            self._calls.pop(call_id, None)
        return msgspec.convert(value, operation.returns)

    def end_calls(self, problem: Exception) -> None:
        """Fail all pending calls with `problem`. The engine may continue to run them."""
        for call_id in list(self._calls):
            self._answer(call_id, lambda future: future.set_exception(problem))

    def watch(self, died: Callable[[], None], *, replaced: bool = False) -> None:
        """Call `died` once when the engine dies, before waiting callers learn of it. Used by a
        supervisor, which also logs the death. With `replaced`, callers learn that another engine
        will serve them.
        """
        self._watcher = died
        self._restart = self._restart or replaced

    @abstractmethod
    async def start(self) -> None:
        """Build the engine and return when it is ready. Raises the error that prevented it."""

    @abstractmethod
    async def close(self) -> None:
        """Shut the engine down and wait until it has ended."""

    @abstractmethod
    def _send(self, message: ToEngine) -> None:
        """Send a message to the engine without waiting."""

    def _ask(
        self, call_id: int, operation: Operation, seconds: float, arguments: dict[str, Any]
    ) -> float:
        """Send a call without waiting, and return the seconds to wait for its answer."""
        timeout_s, arguments = operation.timed(seconds, arguments)
        self._send(Call(call_id, operation.name, arguments))
        return timeout_s

    def _begin(self, message: Generate, session: str | None) -> None:
        """Send a new request."""
        self._send(message)

    def _hand_over(
        self,
        receiver: Receiver,
        message: Generate | Resume,
        num_samples: int,
        hand_over: Callable[[], None],
    ) -> None:
        if not self._open:
            self._progress = time.monotonic()
        self._open.add(message.request_id, receiver, num_samples, AskedParts(message))
        try:
            hand_over()
        except Exception:
            self._open.remove(message.request_id)
            raise

    def _receive(self, message: FromEngine) -> None:
        """Handle a message from the engine."""
        match message:
            case Outputs(deltas, request_ids):
                self._progress = time.monotonic()
                for request_id, delta in zip(request_ids, deltas, strict=True):
                    self._take(request_id, delta)
            case Refused(request_id, error, text):
                self._end(request_id, error_named(error, text))
            case Returned(call_id, value):
                self._answer(call_id, lambda future: future.set_result(value))
            case Failed(call_id, error, text):
                self._answer(call_id, lambda future: future.set_exception(error_named(error, text)))
            case Heartbeat():
                self._beat(message)
            case Loading() | Ready() | CannotStart():
                self._receive_of_start(message)
            case Dead(reason, public):
                self._die(reason, public)

    def _receive_of_start(self, message: Loading | Ready | CannotStart) -> None:
        match message:
            case Loading(state):
                self.loading = state
            case Ready(info):
                self._info, self._dead, self.restarting = info, None, False
                self._heard, self.loading = None, ""
            case CannotStart(error, text):
                self._dead = None  # the new engine's error replaces the old one's
                self._die(
                    f"the engine cannot be built: {error}: {text}",
                    f"the engine cannot be built: {error}",
                )

    def _beat(self, beat: Heartbeat) -> None:
        if beat.num_steps != self._num_steps or not beat.busy:  # not busy: nothing to do, or paused
            self._progress = time.monotonic()
        self._heard = time.monotonic()
        self.stats, self._num_steps, self._busy = beat.stats, beat.num_steps, beat.busy

    def _die(self, reason: str, public: str = "") -> None:
        """Mark the engine as dead, and fail all of its requests and calls."""
        if self._dead is None:
            self._dead, self._public = reason, public
            if self._watcher is not None:
                self._watcher()
        self._busy = False
        lost = EngineReplaced if self._restart else EngineDead
        for request_id in list(self._open):
            self._end(request_id, lost(reason, public))
        for call_id in list(self._calls):
            self._answer(call_id, lambda future: future.set_exception(lost(reason, public)))

    def _require_alive(self) -> None:
        if self.restarting:
            raise EngineRestarting
        if self.why_dead is not None:
            raise EngineDead(self.why_dead, self._public)

    def _take(self, request_id: int, delta: Delta) -> None:
        request = self._open.get(request_id)
        if request is None:
            return
        if delta.finished is not None:
            delta = request.asked.complete(delta)
            self._open.end_sample(request_id)
        request.receiver.put(delta)

    def _end(self, request_id: int, problem: Exception) -> None:
        request = self._open.remove(request_id)
        if request is not None:
            request.receiver.fail(problem)

    def _answer(self, call_id: int, settle: Callable[["asyncio.Future[Any]"], None]) -> None:
        future = self._calls.pop(call_id, None)
        if future is not None and not future.done():
            settle(future)


class RemoteClient(EngineClient):
    """An engine in another process. Messages travel as bytes: subclasses carry them there
    (`_send_bytes`) and back (`_hear_bytes`).
    """

    def __init__(self, max_backlog: int) -> None:
        super().__init__(max_backlog)
        self._started: asyncio.Future[None] | None = None  # awaited by `start`
        self._rarely = Rarely()

    @abstractmethod
    def _send_bytes(self, data: bytes) -> None:
        """Send a message to the engine without waiting. Do nothing if the engine has ended."""

    def _send(self, message: ToEngine) -> None:
        try:
            data = _ENCODER.encode(message)
        except (TypeError, ValueError, OverflowError) as problem:
            # for example a lone surrogate or a huge integer
            raise InvalidRequest(f"cannot send the request to the engine: {problem}.") from problem
        self._send_bytes(data)

    def _hear_bytes(self, data: bytes) -> None:
        """Handle an encoded message. No message stops the receiver."""
        try:
            message = _DECODER.decode(data)
        except Exception as problem:
            if (more := self._rarely.due()) is not None:
                log.warning(NOT_UNDERSTOOD, len(data), str(problem), more)
            return
        try:
            self._hear(message)
        except Exception:
            log.exception("cannot handle a message from the engine")

    def _hear(self, message: FromEngine) -> None:
        self._receive(message)
        match message:
            case Ready():
                self._settle(None)
            case CannotStart(error, text):
                self._settle(error_named(error, text))
            case Dead():
                self._settle(EngineDead(self._dead or ""))
            case _:
                pass

    def _settle(self, problem: Exception | None) -> None:
        """Finish a pending `start`."""
        if self._started is not None and not self._started.done():
            if problem is None:
                self._started.set_result(None)
            else:
                self._started.set_exception(problem)


def error_named(name: str, message: str) -> NanoInferenceError:
    """Return an error of this package by the name of its class."""
    kind = getattr(errors, name, NanoInferenceError)
    return (
        kind
        if isinstance(kind, type) and issubclass(kind, NanoInferenceError)
        else NanoInferenceError
    )(message)
