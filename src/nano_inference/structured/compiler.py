"""`GrammarCompiler`: compiles in other threads, so that no step waits for a grammar."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue

import numpy as np

from nano_inference.errors import EngineDead, InvalidRequest
from nano_inference.structured.backend import (
    COMPILER_STACK,
    CompilationStopped,
    GrammarError,
    Matcher,
    Vocabulary,
    backend_named,
)
from nano_inference.structured.clocks import Spent, thread_clock
from nano_inference.structured.grammar import REFUSED, BackendName, Grammar
from nano_inference.structured.mask_bits import cut_to, num_words
from nano_inference.structured.matching import GrammarState
from nano_inference.structured.thought import Thought, Thoughts
from nano_inference.system.machine import usable_cpus

logger = logging.getLogger("nano_inference")

MOST_CACHED = 128  # compiled grammars that are cached
TIME_LIMIT = 30.0  # seconds of CPU that a compilation may take
WAIT_LIMIT = 300.0  # seconds that a caller waits for a grammar, including those before it
LEAST_WAIT = 0.01  # seconds between two checks of a compilation's clock
MOST_STUCK = 4  # threads over their time limit that are replaced


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled grammar: a matcher at the beginning, to be copied, its first mask, and the thought
    that may precede the grammar.
    """

    template: Matcher
    first: np.ndarray
    thought: Thought | None


class GrammarCompiler:
    """Cache of the compiled grammars of one vocabulary. Thread-safe.

    Args:
        vocabulary: Function that reads the model's vocabulary, called for the first grammar. Raises
            `InvalidRequest` if the model has none.
        backend: Backend of grammars that name none.
        num_threads: Number of concurrent compilations; None: half of the cores.
        time_limit: Seconds of CPU that a compilation may take. By the wall clock it may take
            `clocks.PATIENCE` times as long. At the limit the requests that wait for the grammar
            fail. A later request compiles it again.

    Attributes:
        time_limit: The argument of this name.
        num_compiled, num_failed: Numbers of compilations so far that succeeded and that failed.
        seconds: Wall time of all compilations so far.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        backend: BackendName = "llguidance",
        num_threads: int | None = None,
        time_limit: float = TIME_LIMIT,
    ) -> None:
        self._read = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._default: BackendName = backend
        self.time_limit = time_limit
        self._most_threads = num_threads or max(usable_cpus() // 2, 1)
        self._cache: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._replaced: set[Future[Compiled]] = set()  # compilations whose threads were replaced
        self._is_closed = False
        self.num_compiled = self.num_failed = 0
        self.seconds = 0.0

    @property
    def num_cached(self) -> int:
        """Number of grammars that are compiled or being compiled."""
        return len(self._cache)

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequest` if a grammar cannot be compiled. Runs in the calling thread."""
        with self._lock:
            known = self._cache.get(grammar)
        if known is None or not known.done() or known.exception() is not None:
            backend_named(grammar.backend or self._default).check(grammar)

    def start(self, state: GrammarState, when_ready: Callable[[], None]) -> None:
        """Get a sample's matcher. If its grammar is compiled and the sample has no token yet, the
        state is ready on return. Otherwise another thread makes it ready or fails it, and then
        calls `when_ready`.
        """
        compiled = state.compiled or self.begin(state.grammar)
        if compiled.done() and not state.num_behind:
            self._give(state, compiled)
        elif compiled.done():  # processing many tokens takes long
            self._submit(lambda: self._give_and_tell(state, compiled, when_ready))
        else:
            compiled.add_done_callback(lambda done: self._give_and_tell(state, done, when_ready))

    def prepare(self) -> None:
        """Read the tokenizer in another thread, so that no step waits for it when the first grammar
        arrives.
        """

        def read() -> None:
            with suppress(InvalidRequest):  # the first request reports it
                vocabulary = self.vocabulary()
                backend_named(self._default).prepare(vocabulary)
                for token_id in range(vocabulary.drawable):
                    vocabulary.bytes_of(token_id)  # fills its cache

        self._submit(read)

    def wait(self, state: GrammarState) -> None:
        """Get a sample's matcher in the calling thread. Raises `InvalidRequest`, also after
        `WAIT_LIMIT` seconds, and `EngineDead` once the compiler is closed.
        """
        self.check(state.grammar)
        try:
            ready = self.begin(state.grammar).result(WAIT_LIMIT)
        except TimeoutError:
            raise InvalidRequest(
                f"the {state.grammar.kind} grammar was not compiled within {WAIT_LIMIT:g} seconds, "
                "because other grammars were compiled first."
            ) from None
        self._begin(state, ready)

    def close(self) -> None:
        """Stop compiling. Waiting callers get `EngineDead`; running compilations still end."""
        with self._lock:
            self._is_closed = True
            left = [promise for promise in self._cache.values() if not promise.done()]
            for _ in range(self._num_threads):
                self._jobs.put(None)
        for promise in left:
            _end(promise)

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary of the model, read once. Raises `InvalidRequest`."""
        if self._vocabulary is None:
            self._vocabulary = self._read()
        return self._vocabulary

    @cached_property
    def _thoughts(self) -> Thoughts:
        return Thoughts(self.vocabulary())

    def begin(self, grammar: Grammar) -> Future[Compiled]:
        """Return the future of a compiled grammar, and start to compile it if needed."""
        with self._lock:
            known = self._cache.get(grammar)
            if known is not None and not _is_spent(known):
                self._cache.move_to_end(grammar)
                return known
            if self._is_closed:
                return _end(Future[Compiled]())
            promise = self._cache[grammar] = Future[Compiled]()
            done = [each for each, future in self._cache.items() if future.done()]
            for oldest in done[: max(len(self._cache) - MOST_CACHED, 0)]:
                del self._cache[oldest]
        self._submit(lambda: self._compile(grammar, promise))
        return promise

    def _submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        with self._lock:
            if self._num_threads < self._most_threads:
                self._add_thread()

    def _add_thread(self) -> None:
        self._num_threads += 1
        before = threading.stack_size(COMPILER_STACK)
        try:
            threading.Thread(target=self._work, name="grammars", daemon=True).start()
        finally:
            threading.stack_size(before)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except _Replaced:
                return
            except Exception:
                logger.exception("a grammar's job raised: a bug of the engine.")

    def _compile(self, grammar: Grammar, promise: Future[Compiled]) -> None:
        watch = _Watch(self.time_limit, lambda: self._give_up(grammar, promise))
        begun = time.perf_counter()
        try:
            vocabulary = self.vocabulary()
            backend = backend_named(grammar.backend or self._default)
            backend.prepare(vocabulary)  # before the watch: imports are not the grammar's time
            watch.start()
            matcher = backend.compile(grammar, vocabulary)
            first = np.zeros(num_words(vocabulary.size), dtype=np.int32)
            matcher.fill(first)  # backends are lazy: a first mask may take longest
            first, thought = cut_to(first, vocabulary.drawable), self._thoughts.of(grammar)
            outcome: Compiled | Exception = Compiled(matcher, first, thought)
        except GrammarError as problem:
            outcome = InvalidRequest(f"the {grammar.kind} grammar cannot be enforced: {problem}.")
        except Exception as problem:
            outcome = problem
        watch.cancel()
        with self._lock:
            self.seconds += time.perf_counter() - begun
            if _may_pass(outcome):
                self._cache.pop(grammar, None)
        self._keep(promise, outcome)

    def _give_up(self, grammar: Grammar, promise: Future[Compiled]) -> None:
        """Fail a compilation over its time limit. Up to `MOST_STUCK` such threads are replaced, and
        end with the job.
        """
        with self._lock:
            self._cache.pop(grammar, None)
            if len(self._replaced) < MOST_STUCK and not self._is_closed:
                self._replaced.add(promise)
                self._add_thread()
        problem = f"its compilation took longer than {self.time_limit:g} seconds"
        with_limit = InvalidRequest(f"the {grammar.kind} grammar cannot be enforced: {problem}.")
        try:
            promise.set_exception(with_limit)
        except InvalidStateError:  # it has just been compiled
            with self._lock:
                self._replaced.discard(promise)
        else:
            self._count(with_limit)

    def _keep(self, promise: Future[Compiled], outcome: Compiled | Exception) -> None:
        try:
            if isinstance(outcome, Compiled):
                promise.set_result(outcome)
            else:
                promise.set_exception(outcome)
        except InvalidStateError:  # given up, or closed
            pass
        else:
            self._count(outcome)
        with self._lock:
            if promise not in self._replaced:
                return
            self._replaced.remove(promise)
            self._num_threads -= 1
        raise _Replaced

    def _count(self, outcome: Compiled | Exception) -> None:
        with self._lock:
            if isinstance(outcome, Compiled):
                self.num_compiled += 1
            else:
                self.num_failed += 1

    def _give_and_tell(
        self, state: GrammarState, compiled: Future[Compiled], when_ready: Callable[[], None]
    ) -> None:
        self._give(state, compiled)
        when_ready()

    def _give(self, state: GrammarState, compiled: Future[Compiled]) -> None:
        problem = compiled.exception()
        if problem is None:
            self._begin(state, compiled.result())
        elif isinstance(problem, InvalidRequest):
            state.fail(f"{REFUSED}{problem}")
        elif isinstance(problem, EngineDead):
            state.fail(str(problem))
        else:
            logger.error("compiling a grammar failed", exc_info=problem)
            state.fail(f"compiling the grammar raised {type(problem).__name__}")

    def _begin(self, state: GrammarState, ready: Compiled) -> None:
        state.begin(ready.template.copy(), self.vocabulary(), ready.first, ready.thought)


def _may_pass(outcome: Compiled | Exception) -> bool:
    """Return True if compiling failed for a reason other than the grammar itself."""
    is_refusal = isinstance(outcome, InvalidRequest) and not isinstance(outcome, CompilationStopped)
    return isinstance(outcome, Exception) and not is_refusal


def _is_spent(known: Future[Compiled]) -> bool:
    is_compiled = known.done() and known.exception() is None
    return is_compiled and known.result().template.is_spent


def _end(promise: Future[Compiled]) -> Future[Compiled]:
    """Fail a grammar that will not be compiled any more."""
    with suppress(InvalidStateError):  # it has just been compiled
        promise.set_exception(EngineDead("the engine was shut down; build a new one."))
    return promise


class _Watch:
    """Timer that calls `late` after `limit` seconds of work of the thread that created it."""

    def __init__(self, limit: float, late: Callable[[], None]) -> None:
        self._limit, self._late = limit, late
        self._lock = threading.Lock()
        self._is_over = False
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Begin to count."""
        self._spent = Spent(self._limit, thread_clock())
        self._wait()

    def cancel(self) -> None:
        """Stop the timer permanently."""
        with self._lock:
            self._is_over = True
            if self._timer is not None:
                self._timer.cancel()

    def _wait(self) -> None:
        with self._lock:
            if not self._is_over:
                self._timer = threading.Timer(max(self._spent.left, LEAST_WAIT), self._look)
                self._timer.daemon = True
                self._timer.start()

    def _look(self) -> None:
        if self._spent.left:
            self._wait()
        elif not self._is_over:
            self._late()


class _Replaced(Exception):
    """This thread was replaced."""
