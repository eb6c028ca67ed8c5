"""`SharedLoop`: the loop for several threads. It handles stepping, waiting, pauses and failures."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from typing import NoReturn, get_args
from weakref import ref

from nano_inference.config import EngineConfig
from nano_inference.core.failures import is_device_failure, is_out_of_memory
from nano_inference.core.lifecycle import (
    AskSleep,
    Caller,
    Die,
    Drain,
    Event,
    FallAsleep,
    Lifecycle,
    Pause,
    Phase,
    Resume,
    Settle,
    Stop,
    UndoPause,
    WakeUp,
    Why,
    WithdrawSleep,
)
from nano_inference.core.loop import Abort, Add, EngineLoop, GrammarReady, Message
from nano_inference.core.sequence import POLICY, Sequence, ServedAdapter
from nano_inference.device.sleep import Sleep
from nano_inference.engine.delivery import Delivery, Sink
from nano_inference.errors import (
    EngineDead,
    InvalidRequest,
    LacksMemoryToWake,
    NanoInferenceError,
    RankLost,
    one_line,
)
from nano_inference.features import CALL_LIMITS, Setting, require
from nano_inference.ranks.lockstep import Member, not_together
from nano_inference.system.locks import FairLock, HeldInterrupts
from nano_inference.types import KvPolicy, Memory, PauseMode, TrainingSample

logger = logging.getLogger("nano_inference")

GRAMMAR_SECONDS = 0.5  # seconds that a step waits for a grammar if there is no other work
LOOK_SECONDS = 0.5  # seconds between checks of a caller that waits for a paused engine


# Pauses made in this context that have not ended. Each call of `asyncio.to_thread` runs in a copy
# of its task's context, so additions to this variable end with the call.
_made_here: ContextVar[tuple["ref[Pauser]", ...]] = ContextVar("pauses made here", default=())


class Pauser:
    """Caller that creates this object: a thread or, in a thread pool of asyncio, a single call.

    A thread is not enough to identify a caller: `asyncio.to_thread` runs the next call of any task
    on the same idle thread, while another task may resume the engine. A context is not enough
    either: a call in a pool inherits the context of the task that made it.
    """

    def __init__(self) -> None:
        self._thread = threading.current_thread()  # not its ident, which may be reused
        others = (each for each in _made_here.get() if each() is not None)
        _made_here.set((*others, ref(self)))

    def is_calling(self) -> bool:
        """Return True if the current code is this caller, so that it would wait for itself
        forever.
        """
        if threading.current_thread() is not self._thread:
            return False
        # no other task runs while this code blocks the thread of their event loop
        return _runs_event_loop() or any(each() is self for each in _made_here.get())


def _runs_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def why_dead(problem: Exception, config: EngineConfig, loop: EngineLoop | None = None) -> Why:
    """Return the reason why an engine has died of an exception in a step. For a lost rank it names
    the lost requests, for lack of memory the settings to lower.
    """
    if isinstance(problem, RankLost) and loop is not None:
        added = [message.sequence.request_id for message in loop.inbox if isinstance(message, Add)]
        lost = sorted({*added, *(seq.request_id for seq in loop.sequences.by_id.values())})
        losses = f"requests lost: {', '.join(map(str, lost))}" if lost else "no request was lost"
        return Why(f"{problem}; {losses}", f"lost a rank of the engine; {losses}")
    if is_out_of_memory(problem):
        share, tokens = config.gpu_memory_utilization, config.max_tokens_per_batch
        advice = [f"gpu_memory_utilization from {share:g} to {max(share - 0.05, share / 2):.2f}"]
        if tokens > 1:
            advice.append(f"max_tokens_per_batch from {tokens} to {tokens // 2}")
        public = f"a step ran out of the device's memory; lower {' or '.join(advice)}"
        return Why(f"{public} ({one_line(problem)})", public)
    if is_device_failure(problem):  # its text comes from the driver or from us
        text = (
            "a step failed on the device, which this process can no longer use: "
            f"{one_line(problem)}"
        )
        return Why(text, text)
    return failed("a step failed", problem)


def failed(what: str, problem: BaseException) -> Why:
    """Return a reason that names the failed action and its exception."""
    name = type(problem).__name__
    return Why(f"{what}: {name}: {problem}", f"{what}: {name}")


class SharedLoop:
    """Loop that several threads share. One thread steps at a time. Any thread may add, abort, pause
    or announce an update.

    Args:
        loop: Loop that is stepped.
        explain: Function that returns why the engine has failed, given the exception of a step.
        when_dead: Function called once, with the reason, when the engine is shut down or fails.
        lock: Lock held by the thread that runs the loop.
        work_arrived: Event set when a message arrives. A thread that waits for work clears it.
    """

    def __init__(
        self,
        loop: EngineLoop,
        explain: Callable[[Exception], Why],
        when_dead: Callable[[str], None],
        lock: FairLock,
        work_arrived: threading.Event,
    ) -> None:
        self.loop = loop
        self._explain, self._when_dead = explain, when_dead
        self.lock, self.work_arrived = lock, work_arrived
        self._grammar_arrived = threading.Event()
        self.delivery = Delivery()
        self._unclaimed: list[TrainingSample] = []  # samples for the next `step`
        self._runs = threading.Event()  # set while the loop launches steps, or is dead
        self._runs.set()
        self._given_back: dict[Memory, Sleep] = {}  # saved state of each sleeping part

    def member(self) -> Member:
        """Return the state of this engine for the other engines in lockstep."""
        loop, life = self.loop, self.life
        busy = life.launching and loop.is_busy()
        update = loop.ready_update()
        ready = None if update is None else update.version
        return Member(busy, loop.sequences.versions[POLICY], ready, life.wants_sleep)

    @property
    def life(self) -> Lifecycle:
        """Current lifecycle state. It changes only under the lock."""
        return self.loop.life

    def _become(self, event: Event) -> None:
        """Change the state and wake the threads that wait for a change. Call it with the lock."""
        before = self.life
        self.loop.become(event)
        if self.life.launching or self.life.dead is not None:
            self._runs.set()
        else:
            self._runs.clear()
        if self.life != before:
            self.work_arrived.set()

    # -- stepping ----------------------------------------------------------------------------------

    def step(self) -> list[TrainingSample]:
        """Run one step. Return the samples that ended since the last call and that no thread waits
        for.
        """
        if not self.has_work():
            self._await_grammar(GRAMMAR_SECONDS)
        try:
            self.advance()
        except EngineDead as problem:
            problem.samples = (*problem.samples, *self._take_unclaimed())
            raise
        return self._take_unclaimed()

    def _take_unclaimed(self) -> list[TrainingSample]:
        with self.lock:
            taken, self._unclaimed = self._unclaimed, []
        return taken

    def advance(self) -> None:
        """Run one step and deliver its samples to the threads that wait for them. `step` returns
        the others.
        """
        with HeldInterrupts(), self.lock:
            self._deliver(self._guarded(self.loop.step))

    def advance_or_wait(self) -> bool:
        """Run a step, or wait for at most `LOOK_SECONDS` while the engine is paused or a request
        waits for its grammar. Return False if there was no work.
        """
        self.require_alive()
        if self.has_work():
            self.advance()
            return True
        if self._await_grammar(LOOK_SECONDS):
            return True
        if self.life.phase is Phase.RUNNING:  # otherwise another thread has paused or is about to
            return False
        self._runs.wait(LOOK_SECONDS)
        return True

    def handle(self) -> None:
        """Process the messages without a step."""
        with HeldInterrupts(), self.lock:
            self._deliver(self._guarded(self.loop.handle))

    def between_steps(self, weight_set: str, change: Callable[[], int | None]) -> None:
        """Call `change` with no step in flight. It returns the weight set's new version, or None if
        the version did not change.

        Raises `InvalidRequest` while the weights are asleep.
        """
        with self.lock:
            self.require_weights()
            change_of = Setting(
                beside_policy="an update of weights other than the policy's",
                lockstep=not self.loop.gate.alone,
            )
            require(CALL_LIMITS, change_of)
            self.handle()
            self._deliver(self._guarded(lambda: self.loop.change_now(weight_set, change)))

    def change_adapter(self, adapter: ServedAdapter, kv_policy: KvPolicy) -> None:
        """Use an adapter, or a new version of it, for the requests that name it."""
        with self.lock:
            self.handle()
            self._deliver(self._guarded(lambda: self.loop.change_adapter(adapter, kv_policy)))

    def has_pending(self) -> bool:
        """Return True if a step would do or return anything."""
        if self.life.dead is not None:
            return False
        # `_unclaimed` is checked again because `has_work` may have waited for a step of another
        # thread, which may have added samples.
        return (
            bool(self._unclaimed)
            or self.has_work()
            or self._is_compiling()
            or bool(self._unclaimed)
        )

    def _is_compiling(self) -> bool:
        with self.lock:
            return self.loop.is_compiling()

    def _await_grammar(self, patience: float) -> bool:
        """Wait for a message for at most `patience` seconds if a request waits for its grammar.
        Return False if none does.
        """
        if not self._is_compiling():
            return False
        self._grammar_arrived.clear()
        if not self.loop.has_pending():  # otherwise it arrived before the clear
            self._grammar_arrived.wait(patience)
        return True

    def has_work(self) -> bool:
        """Return True if a step would do anything.

        A negative answer is only valid between steps, so it is confirmed under the lock. During a
        step, work that moves between lists is in none of them.
        """
        if self.loop.has_pending():
            return True
        with self.lock:
            return self.life.dead is None and self.loop.has_pending()

    # -- requests ----------------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """Queue a message for the next step."""
        self.loop.inbox.append(message)
        self.work_arrived.set()
        if isinstance(message, GrammarReady):
            self._grammar_arrived.set()

    def enqueue_first(self, sequence: Sequence) -> int:
        """Queue a checked request before all messages that have arrived since the last `handle`
        under the lock. Return its id.
        """
        self.loop.inbox.appendleft(Add(sequence))
        self.work_arrived.set()
        return sequence.request_id

    def enqueue(self, sequence: Sequence) -> int:
        """Queue a checked request. Return its id."""
        self.post(Add(sequence))
        return sequence.request_id

    def open(self, requests: Iterable[Sequence], sink: Sink) -> None:
        """Send the deltas of these requests to `sink`. Raises `InvalidRequest` for an id in use."""
        self.require_alive()
        for request in requests:
            self.delivery.open(request.request_id, request.width, sink)

    def abandon(self, request_ids: Iterable[int]) -> None:
        """Stop waiting for these requests. Unfinished ones are aborted and their samples
        are lost.
        """
        unfinished = self.delivery.abandon(request_ids)
        if unfinished and self.life.dead is None:
            self.abort(frozenset(unfinished))

    def abort(self, request_ids: frozenset[int] | None) -> list[TrainingSample]:
        """End requests (None: all) now. Return their partial samples, which are also delivered to
        the callers that wait for them.
        """
        self.require_alive()
        with self.lock:
            self.handle()
            self.loop.inbox.append(Abort(request_ids))
            ended = self._guarded(self.loop.handle)
            before = len(self._unclaimed)
            self._deliver(ended)
            if request_ids is None:
                del self._unclaimed[before:]
                return ended
            # An update that waited for these requests may now be applied and end others.
            others = [
                sample
                for sample in self._unclaimed[before:]
                if sample.request_id not in request_ids
            ]
            self._unclaimed[before:] = others
            return [sample for sample in ended if sample.request_id in request_ids]

    # -- pauses ------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, patience: float = math.inf) -> list[TrainingSample] | None:
        """Pause as `InferenceEngine.pause` documents. Return None, with nothing paused, if requests
        did not end within `patience` seconds or if another thread has resumed meanwhile.
        """
        self.require_alive()
        if mode not in get_args(PauseMode):
            raise InvalidRequest(f"mode={mode!r} must be one of {', '.join(get_args(PauseMode))}.")
        pauser, before = Pauser(), None
        try:
            if mode == "wait" and not self._finish_requests(time.monotonic() + patience):
                return None
            with self.lock, HeldInterrupts():
                if mode == "wait" and self.life.admitting:
                    return None
                before = self.life.paused_by
                self._stop(Pause(pauser))
                return self.abort(None) if mode == "abort" else []
        except BaseException:  # Ctrl-C: undo the pause
            with self.lock:
                self._become(UndoPause(pauser, before))
                self._settle()
            raise

    def _finish_requests(self, deadline: float) -> bool:
        """Hold new requests and step until all others have ended. Return False, with new requests
        admitted again, if some are left at the deadline.
        """
        with self.lock:
            self.handle()
            self._become(Drain())
        # other threads may step, add and abort meanwhile
        while self._is_busy() and self.life.phase is Phase.DRAINING:
            if time.monotonic() > deadline:
                with self.lock:
                    self._settle()
                return False
            self.advance()
        return True

    def resume(self) -> None:
        """Resume after a pause, once nothing is asleep. Raises `InvalidRequest` if the engine is
        only asleep.
        """
        self.require_alive()
        with self.lock:
            if self.life.asleep and self.life.paused_by is None:
                raise InvalidRequest("the engine is asleep, not paused; call wake().")
            self.end_pause()

    def end_pause(self) -> None:
        """End a pause. Unlike `resume`, it does nothing if the engine is only asleep."""
        self.require_alive()
        with self.lock:
            self._become(Resume())
            self._settle()

    def is_paused_by_me(self) -> bool:
        """Return True if the caller paused the engine or put it to sleep, so that waiting would
        never end.
        """
        life = self.life
        return _is_calling(life.paused_by) or _is_calling(life.asleep_by)

    def require_not_paused_by_me(self) -> None:
        """Raise `InvalidRequest` if the caller paused the engine or put it to sleep. Calls that
        wait for samples check this first.
        """
        life = self.life
        for caller, did, cure in (
            (life.asleep_by, "put the engine to sleep", "wake()"),
            (life.paused_by, "paused the engine", "resume()"),
        ):
            if _is_calling(caller):
                raise InvalidRequest(
                    f"this thread {did} and would wait for itself; call {cure} first, or use "
                    "add_request()."
                )

    def asleep(self) -> tuple[Memory, ...]:
        """Return the parts of the memory that are released, the weights first."""
        parts: tuple[Memory, ...] = get_args(Memory)
        return tuple(part for part in parts if part in self.life.asleep)

    def sleep(self, memory: Collection[Memory], give_back: Callable[[Memory], Sleep]) -> None:
        """Stop the loop and release these parts of the memory, unless they are already asleep.

        Releasing the KV cache takes all blocks away from the sequences, which recompute their
        context after `wake`. Raises `NanoInferenceError`, with nothing changed.
        """
        self.require_alive()
        if unknown := sorted(set(memory) - set(get_args(Memory))):
            raise InvalidRequest(
                f"memory={unknown[0]!r} does not exist; choose from {', '.join(get_args(Memory))}."
            )
        sleeper = Pauser()
        self._wait_for_others(memory)
        with self.lock:
            parts: list[Memory] = [
                each for each in get_args(Memory) if each in memory and each not in self.life.asleep
            ]
            if not parts:
                return
            try:
                self._stop(Stop())
                self._require_together(parts)
                with HeldInterrupts():
                    self._give_back(parts, give_back, sleeper)
            finally:
                if "weights" in parts:
                    self._become(WithdrawSleep())
                self._settle()

    def _give_back(
        self, parts: Iterable[Memory], give_back: Callable[[Memory], Sleep], sleeper: Caller
    ) -> None:
        try:
            for part in parts:
                if part == "kv_cache":
                    self.loop.vacate()
                self._given_back[part] = give_back(part)  # weights first: saving may fail
                self._become(FallAsleep(part, sleeper))
        except OSError as problem:
            raise NanoInferenceError(f"saving the weights failed: {problem}.") from problem
        except Exception as problem:  # a device failure: only some memory may be released
            self._fail(failed("the memory could not be released", problem), problem)
        except BaseException as problem:  # a second Ctrl-C: likewise
            self._interrupted("releasing memory", problem)
            raise

    def wake(self, memory: Collection[Memory] | None = None) -> None:
        """Reallocate these parts of the memory. Resume once all is awake and no pause is requested.

        None wakes all parts and, if any was asleep, also ends a pause. Awake parts stay unchanged.
        """
        self.require_alive()
        with self.lock, HeldInterrupts():
            parts: list[Memory] = [
                part for part in self.asleep() if memory is None or part in memory
            ]
            if not parts and not (self.life.sleep_asked or self.loop.gate.asleep):
                return
            if memory is None:
                self._become(Resume())
            for part in parts:
                self._wake(part)
            if self.life.has_weights:
                self._become(WithdrawSleep())
            self._settle()
        if self.loop.gate.asleep and self.life.has_weights:
            self.loop.gate.await_wake(self)
            with self.lock:
                self._settle()

    def _wake(self, part: Memory) -> None:
        try:
            self._given_back[part].end()
        except Exception as problem:
            if is_out_of_memory(problem):
                # other processes on a shared GPU may free memory in a moment
                raise LacksMemoryToWake(
                    f"not enough memory to wake {part}, so the engine stays asleep; free some and "
                    f"call wake() again: {problem}",
                    getattr(problem, "missing", 0),
                ) from problem
            self._fail(
                failed(f"the released memory ({part}) could not be restored", problem), problem
            )
        except BaseException as problem:  # a second Ctrl-C: only some of it was restored
            self._interrupted("waking", problem)
            raise
        del self._given_back[part]
        self._become(WakeUp(part))

    def _wait_for_others(self, memory: Collection[Memory]) -> None:
        """Stop, and serve the engines in lockstep until the weights of all of them may sleep. The
        wait has a timeout.
        """
        gate = self.loop.gate
        if not gate.alone and "weights" in memory and self.life.has_weights:
            with self.lock:
                self._stop(AskSleep())
            try:
                gate.await_sleep(self)
            except BaseException:  # Ctrl-C: the weights stay awake
                with self.lock:
                    self._become(WithdrawSleep())
                    self._settle()
                raise

    def _require_together(self, parts: Collection[Memory]) -> None:
        """Raise `NanoInferenceError` if engines in lockstep still need the weights. Call it with
        the lock.
        """
        gate = self.loop.gate
        if "weights" in parts and not (gate.alone or (gate.asleep and self.life.sleep_asked)):
            raise not_together()

    def _stop(self, event: Pause | Stop | AskSleep) -> None:
        """Launch no more steps, and retire the steps in flight. Call it with the lock."""
        self._become(event)
        self.advance()

    def _settle(self) -> None:
        """Run again if nothing keeps the loop stopped. Call it with the lock."""
        self._become(Settle(self.loop.gate.asleep))

    # -- the end -----------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """Reject all later calls with this reason. The first reason is kept."""
        with self.lock:
            if self.life.dead is None:
                self._die(Why(why, why))

    def lose(self, problem: Exception) -> None:
        """End the engine for a failure outside of a step. It waits for the running step."""
        with self.lock:
            if self.life.dead is None:
                self._die(self._explain(problem))

    def require_alive(self) -> None:
        """Raise `EngineDead` if the engine has ended."""
        if (dead := self.life.dead) is not None:
            raise EngineDead(f"{dead.text}; build a new one.", dead.public)

    def require_weights(self) -> None:
        """Raise `InvalidRequest` while the weights are asleep, because they can then be neither
        read nor written.
        """
        if not self.life.has_weights:
            raise InvalidRequest("the weights are asleep; call wake() first.")

    def _die(self, why: Why) -> None:
        self._become(Die(why))
        self.loop.gate.close()
        for part in self._given_back.values():
            part.forget()
        self._given_back.clear()
        self._when_dead(why.text)

    def _fail(self, why: Why, problem: Exception) -> NoReturn:
        self._die(why)
        raise EngineDead(why.text, why.public) from problem

    def _is_busy(self) -> bool:
        with self.lock:  # see `has_work`
            return self.loop.is_busy()

    def _deliver(self, samples: list[TrainingSample]) -> None:
        """Deliver deltas and samples to the callers that wait for them. `step` returns the other
        samples.

        A request whose sink raises is aborted at the next step boundary.
        """
        self.loop.audit()
        self._hand_out(samples)
        if self.delivery.broken:
            self.post(Abort(frozenset(self.delivery.broken)))
            self.delivery.broken.clear()

    def _hand_out(self, samples: list[TrainingSample]) -> None:
        streamed, self.loop.streamed = self.loop.streamed, []
        queue_times, self.loop.queue_times = self.loop.queue_times, []
        self.delivery.note(queue_times)
        self._unclaimed += self.delivery.hand_out(streamed, samples)

    def _guarded(self, run: Callable[[], list[TrainingSample]]) -> list[TrainingSample]:
        """Run part of the loop. An exception leaves sequences and cache in an unknown state, so the
        engine ends. Samples that ended before are complete, and are delivered first.
        """
        self.require_alive()
        try:
            return run()
        except Exception as problem:
            self._hand_out(self.loop.take())
            self._fail(self._explain(problem), problem)
        except BaseException as problem:  # Ctrl-C: published blocks may never be computed
            self._hand_out(self.loop.take())
            self._interrupted("a step", problem)
            raise

    def _interrupted(self, what: str, problem: BaseException) -> None:
        text = f"{what} was interrupted: {type(problem).__name__}"
        self._die(Why(text, text))


def _is_calling(caller: Caller | None) -> bool:
    return caller is not None and caller.is_calling()
