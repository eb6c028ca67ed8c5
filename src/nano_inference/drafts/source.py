"""`DraftSource`: a source of guesses. `Watched`: a guard around a source that may misbehave."""

import threading
from collections.abc import Sequence as Listed
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from nano_inference.core.sequence import Sequence


class Guess(NamedTuple):
    """Drafts of one sequence.

    Attributes:
        token_ids: Tokens that may follow the known ones.
        kinds: Class of each draft, numbered by the source as it likes. The engine counts how often
            drafts of each class are drawn.
    """

    token_ids: Listed[int]
    kinds: Listed[int]


NO_GUESS = Guess((), ())
KINDS = 256  # limit for a third-party source, because statistics are kept for each kind


class DraftSource(Protocol):
    """Guesses the next tokens of sequences from their known tokens on the host.

    A wrong guess costs a row of a step and changes nothing. A source only reads sequences.
    """

    name: str

    def propose(self, seqs: Listed[Sequence], most: int) -> Listed[Guess]:
        """Return a guess of at most `most` tokens for each of these sequences."""
        ...


class TimedSource(DraftSource, Protocol):
    """A source that takes time for every draft, such as a model."""

    def seconds(self, num_seqs: int) -> float:
        """Return the seconds for one draft of each of `num_seqs` sequences, or 0 if unknown."""
        ...


class BadSource(Exception):
    """Violation of the `DraftSource` protocol by a source."""


class Watched:
    """A third-party source, run on its own thread so that a hang cannot block steps.

    Args:
        inner: Source to run.
        vocab_size: Upper limit of its token ids, exclusive.
        time_limit: Seconds that one call may take.
    """

    def __init__(self, inner: DraftSource, vocab_size: int, time_limit: float = 1.0) -> None:
        self.name = inner.name
        self._inner, self._vocab_size, self._time_limit = inner, vocab_size, time_limit
        self._asked: SimpleQueue[tuple[Listed[Sequence], int]] = SimpleQueue()
        self._answers: SimpleQueue[Listed[Guess] | Exception] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def propose(self, seqs: Listed[Sequence], most: int) -> Listed[Guess]:
        """Return the guesses of the source. Raise `BadSource` if it fails or misbehaves."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="drafts", daemon=True)
            self._thread.start()
        self._asked.put((seqs, most))
        try:
            answer = self._answers.get(timeout=self._time_limit)
        except Empty:
            raise BadSource(f"no answer within {self._time_limit:g} s") from None
        if isinstance(answer, Exception):
            raise BadSource(f"raised {answer!r}") from answer
        return self._checked(answer, len(seqs), most)

    def _work(self) -> None:
        while True:
            seqs, most = self._asked.get()
            try:
                self._answers.put(self._inner.propose(seqs, most))
            except Exception as problem:
                self._answers.put(problem)

    def _checked(self, answer: Listed[Guess], num_seqs: int, most: int) -> list[Guess]:
        try:
            if len(answer) != num_seqs:
                raise BadSource(f"returned {len(answer)} guesses for {num_seqs} sequences")
            cut = [
                Guess([int(each) for each in ids[:most]], [int(k) % KINDS for k in kinds[:most]])
                for ids, kinds in answer
            ]
        except (TypeError, ValueError) as problem:
            raise BadSource(f"returned invalid guesses: {problem}") from problem
        for token_ids, kinds in cut:
            wrong = [each for each in token_ids if not 0 <= each < self._vocab_size]
            if wrong:
                raise BadSource(f"token {wrong[0]} is outside the vocabulary of {self._vocab_size}")
            if len(kinds) != len(token_ids):
                raise BadSource(f"returned {len(kinds)} kinds for {len(token_ids)} tokens")
        return cut
