"""`DraftSource`: what guesses the next tokens of sequences; and how one that misbehaves is told."""

import threading
from collections.abc import Sequence as Listed
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from nano_inference.core.sequence import Sequence


class Guess(NamedTuple):
    """Drafts of one sequence.

    Attributes:
        token_ids: that may follow its known tokens.
        kinds: of each, how sure the source is, in classes of its own. How often drafts of a class
            are drawn is counted; the source need not know.
    """

    token_ids: Listed[int]
    kinds: Listed[int]


NO_GUESS = Guess((), ())
KINDS = 256  # of a source that is not ours: what is learned of each is kept


class DraftSource(Protocol):
    """Guesses the next tokens of sequences, from what is known of them on the host.

    A wrong guess costs a row of a step, and changes nothing. It reads sequences, and writes none.
    """

    name: str

    def propose(self, seqs: Listed[Sequence], most: int) -> Listed[Guess]:
        """A guess for each of these sequences, of at most `most` tokens."""
        ...


class TimedSource(DraftSource, Protocol):
    """One that takes time for every draft: a model."""

    def seconds(self, num_seqs: int) -> float:
        """What one draft of each of so many sequences takes; 0: not known yet."""
        ...


class BadSource(Exception):
    """A source did what no source may."""


class Watched:
    """A source that is not ours. It guesses on a thread of its own, so that one which hangs keeps
    no step waiting for longer than its time limit.

    Args:
        inner: the source.
        vocab_size: its ids are below.
        time_limit: seconds that one call may take.
    """

    def __init__(self, inner: DraftSource, vocab_size: int, time_limit: float = 1.0) -> None:
        self.name = inner.name
        self._inner, self._vocab_size, self._time_limit = inner, vocab_size, time_limit
        self._asked: SimpleQueue[tuple[Listed[Sequence], int]] = SimpleQueue()
        self._answers: SimpleQueue[Listed[Guess] | Exception] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def propose(self, seqs: Listed[Sequence], most: int) -> Listed[Guess]:
        """See `DraftSource`. Raises `BadSource`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="drafts", daemon=True)
            self._thread.start()
        self._asked.put((seqs, most))
        try:
            answer = self._answers.get(timeout=self._time_limit)
        except Empty:
            raise BadSource(f"it took longer than {self._time_limit:g} s") from None
        if isinstance(answer, Exception):
            raise BadSource(f"it raised {answer!r}") from answer
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
                raise BadSource(f"it made {len(answer)} guesses for {num_seqs} sequences")
            cut = [
                Guess([int(each) for each in ids[:most]], [int(k) % KINDS for k in kinds[:most]])
                for ids, kinds in answer
            ]
        except (TypeError, ValueError) as problem:
            raise BadSource(f"it made no guesses: {problem}") from problem
        for token_ids, kinds in cut:
            wrong = [each for each in token_ids if not 0 <= each < self._vocab_size]
            if wrong:
                raise BadSource(f"it guessed token {wrong[0]} of {self._vocab_size}")
            if len(kinds) != len(token_ids):
                raise BadSource(f"it told {len(kinds)} kinds of {len(token_ids)} tokens")
        return cut
