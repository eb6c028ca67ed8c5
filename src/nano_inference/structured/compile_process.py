"""Compilation of grammars in a child process, with limits on time and memory.

Some compilers need too much time or memory, hold the interpreter's lock, or crash. In a child
process, that affects one grammar only: the child is killed, and the next grammar gets a new one.
"""

import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec
import psutil

from nano_inference.errors import InvalidRequest
from nano_inference.structured.backend import CompilationStopped, Vocabulary
from nano_inference.structured.clocks import Clock, Spent, process_clock
from nano_inference.structured.grammar import Grammar
from nano_inference.system.child_process import start_child

CHILD = "nano_inference.structured.compile_child"
START_LIMIT = 120.0  # seconds, for imports and the vocabulary
TIME_LIMIT = 20.0  # seconds of CPU per grammar; shorter than the limit of `GrammarCompiler`
LEAST_WAIT = 0.01  # seconds between two checks of its clock
MEMORY = 2 * 2**30  # bytes that a grammar may take
MOST_RESULT = 2**26  # bytes of a compiled grammar, since many are cached
OUT_OF_MEMORY = 77  # exit code

Way = TypeVar("Way")


class Begin(msgspec.Struct):
    """Message that starts a child.

    Attributes:
        module: Module whose `make_compiler(tokens, ends)` returns a function of kind and source.
        channel: File descriptor of the socket to the parent.
        memory: Bytes that grammars may take.
    """

    module: str
    channel: int
    memory: int


class Words(msgspec.Struct):
    """A vocabulary: the bytes of each token, and the ids that end a text."""

    tokens: list[bytes]
    ends: tuple[int, ...]


class Job(msgspec.Struct):
    """A grammar, as the backend's compiler reads it."""

    kind: str
    source: str


class Answer(msgspec.Struct):
    """Compiled grammar, or the reason why it cannot be compiled."""

    result: bytes = b""
    problem: str = ""


class CompileProcesses:
    """Child processes that compile with one backend, one per concurrent compilation. Idle children
    are reused.

    Args:
        module: Module of the backend, as in `Begin`.
        tokens_of: Returns the bytes of a vocabulary's tokens.
        time_limit: Seconds of CPU that a grammar may take. By the wall clock it may take
            `clocks.PATIENCE` times as long.
        memory: Bytes that a grammar may take.
        clock_of: Returns the clock of a process, by its id.
    """

    def __init__(
        self,
        module: str,
        tokens_of: Callable[[Vocabulary], list[bytes]],
        time_limit: float = TIME_LIMIT,
        memory: int = MEMORY,
        clock_of: Callable[[int], Clock | None] = process_clock,
    ) -> None:
        self._module, self._tokens_of = module, tokens_of
        self._clock_of = clock_of
        self.time_limit, self.memory = time_limit, memory
        self._idle: dict[str, list[_Child]] = {}  # by vocabulary
        self._lock = threading.Lock()
        weakref.finalize(self, _kill_all, self._idle)  # also when the interpreter ends

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Start a child that waits for grammars."""
        self._give_back(vocabulary, self._take(vocabulary))

    def compile(self, grammar: Grammar, vocabulary: Vocabulary, job: Job) -> bytes:
        """Return a compiled grammar. Releases the interpreter's lock.

        Args:
            grammar: Grammar to name in errors.
            vocabulary: Vocabulary of the model.
            job: The grammar, as the child reads it.

        Raises:
            CompilationStopped: A limit on time or memory was reached, or the child crashed.
            InvalidRequest: The grammar cannot be compiled.
        """
        try:
            answer = self._ask_idle(vocabulary, job)
            if answer is None:
                answer = self._ask(self._new(vocabulary), vocabulary, job)
        except _Ended as problem:
            raise CompilationStopped(
                f"the {grammar.kind} grammar cannot be enforced: {problem}."
            ) from None
        if answer.problem:
            reason = " ".join(answer.problem.split())[:500].rstrip(".")
            raise InvalidRequest(f"the {grammar.kind} grammar cannot be enforced: {reason}.")
        return answer.result

    def _ask_idle(self, vocabulary: Vocabulary, job: Job) -> Answer | None:
        """Return the answer of an idle child. None: no child is idle; or the child ended, because
        it was idle for too long or because the job crashed it (a new child will report the crash).
        Raises `_Ended`.
        """
        child = self._idle_child(vocabulary)
        with suppress(_Gone):
            return None if child is None else self._ask(child, vocabulary, job)
        return None

    def _ask(self, child: "_Child", vocabulary: Vocabulary, job: Job) -> Answer:
        """Return a child's answer. Kills the child and raises `_Ended` if it does not answer."""
        try:
            answer = child.ask(job, self.time_limit, self._clock_of)
        except BaseException:
            child.kill()
            raise
        self._give_back(vocabulary, child)
        return answer

    def _take(self, vocabulary: Vocabulary) -> "_Child":
        return self._idle_child(vocabulary) or self._new(vocabulary)

    def _idle_child(self, vocabulary: Vocabulary) -> "_Child | None":
        with self._lock:
            idle = self._idle.get(vocabulary.key, [])
            while idle:
                child = idle.pop()
                if child.runs:
                    return child
                child.kill()
        return None

    def _new(self, vocabulary: Vocabulary) -> "_Child":
        words = Words(self._tokens_of(vocabulary), vocabulary.eos_token_ids)
        return _Child(self._module, self.memory, words)

    def _give_back(self, vocabulary: Vocabulary, child: "_Child") -> None:
        with self._lock:
            self._idle.setdefault(vocabulary.key, []).append(child)


def way_for_whitespace(grammar: Grammar, ways: Mapping[str, Way], backend: str) -> Way:
    """Return a backend's setting for the whitespace between the tokens of JSON. Raises
    `InvalidRequest` if it has none for the grammar's `whitespace`.
    """
    if grammar.whitespace not in ways:
        raise InvalidRequest(
            f"the backend {backend} supports only the default `whitespace` and none, not "
            f"{grammar.whitespace!r}; llguidance supports any."
        )
    return ways[grammar.whitespace]


def _kill_all(idle: "dict[str, list[_Child]]") -> None:
    for children in idle.values():
        for child in children:
            child.kill()


class _Ended(Exception):
    """A child gave no answer."""


class _Gone(_Ended):
    """A child ended instead of answering."""


class _Child:
    def __init__(self, module: str, memory: int, words: Words) -> None:
        self._memory = memory
        ours, theirs = socket.socketpair()
        with ours, theirs:
            begin = Begin(module, theirs.fileno(), memory)
            self._process = start_child(CHILD, begin, keep=[theirs.fileno()])
            self._channel = Connection(ours.detach())
        try:
            # by the wall clock, since it may be waiting for the disk
            ready = self._exchange(words, START_LIMIT, lambda _: None)
        except _Ended as problem:
            self.kill()
            raise CompilationStopped(f"the grammar compiler did not start: {problem}.") from None
        if ready.problem:
            self.kill()
            raise InvalidRequest(f"the grammar compiler did not start: {ready.problem}.")

    @property
    def runs(self) -> bool:
        """True until the child ends, killed or idle for too long."""
        return self._process.poll() is None

    def ask(self, job: Job, limit: float, clock_of: Callable[[int], Clock | None]) -> Answer:
        """Return the child's answer. Raises `_Ended`."""
        return self._exchange(job, limit, clock_of)

    def kill(self) -> None:
        """Kill the child and close its channels."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._channel.close()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _exchange(
        self, message: msgspec.Struct, limit: float, clock_of: Callable[[int], Clock | None]
    ) -> Answer:
        try:
            spent = Spent(limit, clock_of(self._process.pid))
            self._channel.send_bytes(msgspec.msgpack.encode(message))
            while not self._channel.poll(max(spent.left, LEAST_WAIT)):
                if not spent.left:
                    raise _Ended(f"its compilation took longer than {limit:g} seconds")
            return msgspec.msgpack.decode(self._channel.recv_bytes(), type=Answer)
        except (EOFError, OSError, psutil.NoSuchProcess):
            raise _Gone(self._ending()) from None

    def _ending(self) -> str:
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "its compiler process does not answer"
        if code == OUT_OF_MEMORY:
            return f"its compilation took more than {self._memory / 2**30:g} GiB"
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"its compiler process ended {how}; its memory limit is {self._memory / 2**30:g} GiB"
