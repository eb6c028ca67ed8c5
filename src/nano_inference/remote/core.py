"""`EngineCore`: the step loop of an engine, controlled by messages and answering by messages."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import signature
from operator import attrgetter

import msgspec

from nano_inference.checkpoints.generation_defaults import generation_defaults
from nano_inference.checkpoints.loading import resolve_model
from nano_inference.core.deltas import deltas_since
from nano_inference.engine.embedding import embed
from nano_inference.engine.engine import InferenceEngine
from nano_inference.errors import EngineDead, InvalidRequest, NanoInferenceError
from nano_inference.remote import time_limits
from nano_inference.remote.block_link import BlockLink
from nano_inference.remote.engine_weights import EngineWeights
from nano_inference.remote.messages import (
    Abort,
    Call,
    CommonParts,
    Dead,
    EngineInfo,
    Failed,
    FromEngine,
    Generate,
    Heartbeat,
    Outputs,
    Refused,
    Resume,
    Returned,
    Stop,
    ToEngine,
    messages_of,
)
from nano_inference.remote.operations import operation_named
from nano_inference.text.tokenizer import has_tokenizer
from nano_inference.types import Delta, PauseMode, RequestStatus

log = logging.getLogger("nano_inference.server")

MAX_CALLS = 32  # concurrent calls, one thread each


@dataclass(slots=True, eq=False)
class _Request:
    """An open request, with the client's id and the number of unfinished samples."""

    request_id: int
    samples_left: int
    name: str | None = None
    wanted: bool = True  # False: aborted, nothing more of it is sent
    # number of tokens sent, by sample index; None: it streams, or `tell` is off
    sent: dict[int, int] | None = None
    common: CommonParts = field(default_factory=CommonParts)


class EngineCore:
    """Step loop of an engine, on the thread that calls `run`. One other thread calls `handle`,
    which never waits for a step.

    Args:
        engine: Engine to run.
        emit: Sends a message to the client. Called by any thread.
    """

    def __init__(self, engine: InferenceEngine, emit: Callable[[FromEngine], None]) -> None:
        self.engine = engine
        engine.intake.checks_grammars = False  # the client checks them: no step waits for it
        self.weights = EngineWeights(engine)
        self.block_link = BlockLink(engine.blocks)
        self._emit = emit
        self._stopping = False
        self._busy = False
        self._calls_left = threading.Semaphore(MAX_CALLS)
        self._outputs_lock = threading.Lock()  # guards the next fields and the order of messages
        self._deltas: list[Delta] = []
        self._delta_ids: list[int] = []
        # client's request id -> engine's request id and the request
        self._requests: dict[int, tuple[int, _Request]] = {}
        # client's ids of requests not yet submitted -> None, or `answered` of an abort that arrived
        self._coming: dict[int, bool | None] = {}
        # engine's request id -> request whose tokens are reported periodically
        self._telling: dict[int, _Request] = {}
        self._told_at = time.monotonic()
        self._stats = engine.stats()
        self._stats_from = time.monotonic()

    def info(self) -> EngineInfo:
        """Return the engine's properties for the client."""
        engine = self.engine
        return EngineInfo(
            model_path=engine.config.model_path,
            tokenizer_folder=_tokenizer_folder(engine),
            max_model_len=engine.max_model_len,
            vocab_size=engine.spec.vocab_size,
            eos_token_ids=tuple(engine.spec.eos_token_ids),
            max_batch_size=engine.config.max_batch_size,
            numerics=engine.numerics.fingerprint,
            weight_version=engine.get_weight_version(),
            pid=os.getpid(),
            block_size=engine.config.block_size,
            max_request_entries=engine.config.max_request_entries,
            sampling_defaults=generation_defaults(engine.model_folder, engine.config.model_path),
            grammar_backend=engine.config.grammar_backend,
            adapters=tuple(engine.adapters()),
            experts_per_token=engine.intake.checks.experts_per_token,
            enable_prefix_caching=engine.config.enable_prefix_caching,
            dtype=engine.numerics.dtype,
            quantization=engine.numerics.quantization,
            memory=engine.memory_budget.sum,
        )

    def prepare(self) -> None:
        """Load the tokenizer now, so that the first stop string or grammar does not delay other
        requests.
        """
        try:
            _ = self.engine.tokenizer
            self.engine.intake.grammars.prepare()
        except NanoInferenceError as problem:
            log.info("stop strings will be rejected: %s", problem)

    @property
    def has_requests(self) -> bool:
        """True if a client is waiting for a request."""
        return bool(self._requests)

    # -- stepping ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Step while there is work and sleep otherwise, until `Stop` arrives or the engine dies.

        Raises `EngineDead` after reporting it to the client.
        """
        try:
            self._run()
        except Exception as problem:
            self._flush()
            name = type(problem).__name__
            known = isinstance(problem, EngineDead)
            self._emit(
                Dead(str(problem), problem.public) if known else Dead(f"{name}: {problem}", name)
            )
            raise
        finally:
            self.weights.close()

    def stop(self) -> None:
        """Make `run` return after the current step. Callable from any thread."""
        self._stopping = True
        self.engine.shared.work_arrived.set()

    def heartbeat(self) -> Heartbeat:
        """Return the current progress. Never waits, so that it works during a step."""
        shared = self.engine.shared
        # if a step holds the lock, its thread collects the statistics
        if shared.lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                shared.lock.release()
        return Heartbeat(self._stats, self.engine.loop.num_steps, self._busy)

    def _run(self) -> None:
        shared = self.engine.shared
        while not self._stopping:
            shared.work_arrived.wait()
            shared.work_arrived.clear()
            shared.require_alive()
            self._busy = True
            while shared.has_work() and not self._stopping:
                shared.advance()
                self._flush()
                self._collect()
                self._tell()
            self._busy = False

    def _collect(self) -> None:
        """Refresh the statistics if they are old. Call it with the engine's lock, or on the
        stepping thread.
        """
        if time.monotonic() - self._stats_from > time_limits.STATS_AGE:
            self._stats, self._stats_from = self.engine.stats(), time.monotonic()

    # -- messages ----------------------------------------------------------------------------------

    def handle(self, message: ToEngine) -> None:
        """Handle a message. Errors are reported to the client and affect nothing else."""
        match message:
            case Generate():
                self._generate(message)
            case Resume(version=None):
                self._resume(message)
            case Resume():  # waits for a step
                with self._outputs_lock:
                    self._coming[message.request_id] = None
                threading.Thread(
                    target=self._resume, args=(message,), name="resume", daemon=True
                ).start()
            case Abort(request_ids, answered):
                for request_id in request_ids:
                    self._abort(request_id, answered)
            case Call():
                self._call(message)
            case Stop():
                self.stop()

    def _generate(self, message: Generate) -> None:
        tell = message.tell and not message.stream
        sent = {} if tell else None
        request = _Request(message.request_id, message.num_samples, message.name, sent=sent)

        def begin() -> int:
            return self.engine.submit(
                message.prompt,
                message.params,
                message.num_samples,
                lambda delta: self._take(request, delta),
                stream=message.stream,
                num_wanted=message.num_wanted,
                min_version=message.min_version,
                max_staleness=message.max_staleness,
                exact_version=message.exact_version,
                max_entries=message.max_entries,
                turn_of=message.turn_of,
            )

        self._begin(request, begin, "cannot start a request")

    def _resume(self, message: Resume) -> None:
        sent = {sample.sample_index: len(sample.completion_tokens) for sample in message.samples}
        tell = message.tell and not message.stream
        sent = sent if tell else None
        request = _Request(message.request_id, len(message.samples), message.name, sent=sent)

        def begin() -> int:
            inner = self.engine.intake.new_request_id()
            self.engine.resume_many(
                message.samples,
                lambda delta: self._take(request, delta),
                stream=message.stream,
                request_id=inner,
                num_wanted=message.num_wanted,
                max_staleness=message.max_staleness,
                version=message.version,
            )
            return inner

        self._begin(request, begin, "cannot resume a request")

    def _begin(self, request: _Request, begin: Callable[[], int], failure: str) -> None:
        """Submit a request with `begin`, which returns the engine's id. Report a failure to the
        client.
        """
        try:
            inner = begin()
        except Exception as problem:
            with self._outputs_lock:
                self._coming.pop(request.request_id, None)
            self._emit(Refused(request.request_id, *_described(problem, failure)))
            return
        self._note(inner, request)

    def _note(self, inner: int, request: _Request) -> None:
        """Register a request that the engine has accepted."""
        with self._outputs_lock:
            is_answered = self._coming.pop(request.request_id, None)
            if request.samples_left:  # 0: the stepping thread has finished it already
                self._requests[request.request_id] = (inner, request)
                if request.sent is not None:
                    self._telling[inner] = request
        if is_answered is not None:  # the abort arrived first
            self._abort(request.request_id, is_answered)

    def _tell(self) -> None:
        """Report new tokens of requests that do not stream, periodically. Runs on the stepping
        thread.
        """
        if not self._telling or time.monotonic() - self._told_at < time_limits.TELL:
            return
        self._told_at = time.monotonic()
        shared = self.engine.shared
        with shared.lock, self._outputs_lock:  # so that finished samples are reported after this
            for seq in shared.loop.sequences.by_id.values():
                request = self._telling.get(seq.request_id)
                if (
                    request is None
                    or request.sent is None
                    or not request.wanted
                    or seq.request.scored_sample is not None
                ):
                    continue
                num_sent = request.sent.get(seq.sample_index, 0)
                for delta in deltas_since(seq, num_sent):
                    self._deltas.append(delta)
                    self._delta_ids.append(request.request_id)
                request.sent[seq.sample_index] = seq.num_completion_tokens
        self._flush()

    def _abort(self, request_id: int, answered: bool) -> None:
        with self._outputs_lock:
            inner, request = self._requests.get(request_id, (0, None))
            if request_id in self._coming:
                self._coming[request_id] = answered
        if request is not None:
            request.wanted = answered
            self.engine.abort_soon(inner)

    def _take(self, request: _Request, delta: Delta) -> None:
        """Queue a delta for the client. Called by the stepping thread."""
        with self._outputs_lock:
            if delta.finished is not None:
                request.samples_left -= 1
                if not request.samples_left:
                    inner, _ = self._requests.pop(request.request_id, (None, None))
                    if inner is not None:
                        self._telling.pop(inner, None)
            if request.wanted:
                if delta.finished is not None:
                    delta = replace(delta, finished=request.common.leave_out(delta.finished))
                self._deltas.append(delta)
                self._delta_ids.append(request.request_id)

    def _flush(self) -> None:
        with self._outputs_lock:
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                ids, self._delta_ids = self._delta_ids, []
                for portion in messages_of(deltas, ids):
                    self._emit(Outputs(*portion))

    # -- calls -------------------------------------------------------------------------------------

    def _call(self, message: Call) -> None:
        """Run a call on its own thread: it may wait for a step, or minutes for a pause."""
        if not self._calls_left.acquire(blocking=False):
            error = InvalidRequest(f"{MAX_CALLS} calls are running; wait for one to finish.")
            self._emit(Failed(message.call_id, type(error).__name__, str(error)))
            return
        threading.Thread(
            target=self._run_call, args=(message,), name=f"call {message.name}", daemon=True
        ).start()

    def _run_call(self, message: Call) -> None:
        try:
            answer = Returned(message.call_id, self._called(message))
        except Exception as problem:
            answer = Failed(
                message.call_id, *_described(problem, f"the call {message.name!r} failed")
            )
        finally:
            self._calls_left.release()
        self._flush()  # samples that the call has ended precede its answer
        self._emit(answer)

    def _called(self, message: Call) -> object:
        operation = operation_named(message.name)
        if not operation.function:
            raise InvalidRequest(f"operation {message.name!r} cannot be called by a message.")
        function = attrgetter(operation.function)(self)
        try:
            signature(function).bind(**message.arguments)
            arguments = {
                name: msgspec.convert(value, operation.arguments[name])
                for name, value in message.arguments.items()
            }
        except (TypeError, msgspec.ValidationError) as problem:
            raise InvalidRequest(f"{message.name}: {problem}.") from problem
        return function(**arguments)

    def request_statuses(self) -> list[RequestStatus]:
        """Return the status of every open request, with the client's id and name."""
        statuses = self.engine.request_statuses()
        with self._outputs_lock:
            theirs = dict(self._requests.values())
        ids = {inner: request.request_id for inner, request in theirs.items()}
        return [
            replace(
                each,
                request_id=ids[each.request_id],
                name=theirs[each.request_id].name,
                behind=None if each.behind is None else ids.get(each.behind),
            )
            for each in statuses
            if each.request_id in ids
        ]

    def embed(self, prompts: list[list[int]], adapter: str | None = None) -> list[bytes]:
        """Compute embeddings (`InferenceEngine.embed`) as little-endian float32."""
        engine = self.engine
        rows = embed(engine.shared, engine.intake, engine.runner, prompts, adapter)
        return [row.astype("<f4").tobytes() for row in rows]

    def pause(self, mode: PauseMode = "keep", seconds: float = math.inf) -> bool:
        """Pause the engine (`InferenceEngine.pause`). Return False if requests did not end within
        `seconds`, or if another caller resumed meanwhile. Nothing is paused then.
        """
        return self.engine.shared.pause(mode, seconds) is not None


def _tokenizer_folder(engine: InferenceEngine) -> str | None:
    """Return the tokenizer's folder, or None if the model has none. A configured tokenizer must
    exist; it is checked when it is loaded.
    """
    other = engine.config.tokenizer_path
    if other is not None:
        return str(resolve_model(other))
    return str(engine.model_folder) if has_tokenizer(engine.model_folder) else None


def _described(problem: Exception, what: str) -> tuple[str, str]:
    """Return class and text of an error for the client. Log an error that is not ours, since it is
    a bug.
    """
    if isinstance(problem, NanoInferenceError):
        return type(problem).__name__, str(problem)
    log.error("%s", what, exc_info=problem)
    return NanoInferenceError.__name__, f"{what}: {type(problem).__name__}: {problem}"
