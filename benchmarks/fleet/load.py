"""What a simulated fleet is asked: conversations of several turns on common stems, open
arrivals.
"""

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class Load:
    """Lengths are tokens, times seconds; means of the distributions that `Arrivals` draws from.

    Attributes:
        stems: different system prompts, drawn with weight 1 / rank.
        stem_length: log-normal.
        message_length: what a turn adds to a prompt, log-normal.
        completion_length: log-normal, at most `longest`.
        longest: see there.
        turns: of a conversation, geometric.
        think_time: from the end of a turn to the next one, exponential.
        rate: requests a second and replica, on average.
    """

    stems: int = 2000
    stem_length: float = 1000.0
    message_length: float = 150.0
    completion_length: float = 300.0
    longest: int = 3000
    turns: float = 4.0
    think_time: float = 6.0
    rate: float = 5.0


class Prompt:
    """A prompt as the router reads it: slices. A piece is named by whose it is and where, not by
    its 128 token ids.

    Pieces of two prompts are equal exactly where their tokens would be.
    """

    __slots__ = ("_length", "_owner", "_stem", "_stem_length")

    def __init__(self, stem: int, stem_length: int, owner: int, length: int) -> None:
        self._stem, self._stem_length, self._owner, self._length = stem, stem_length, owner, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, piece: slice) -> tuple[int, int]:
        whose = -1 - self._stem if piece.stop <= self._stem_length else self._owner
        return whose, piece.start


@dataclass(slots=True, eq=False)
class Conversation:
    """`length`: tokens so far, prompts and completions."""

    number: int
    stem: int
    stem_length: int
    length: int
    is_first: bool = True


@dataclass(slots=True, eq=False)
class Turn:
    """One request, and what became of it."""

    number: int
    arrival: float
    conversation: Conversation
    prompt_length: int
    completion_length: int
    ideal: int = 0  # tokens of the prompt that a cache that forgets nothing would have
    ticket: Any = None
    first_token: float = -1.0
    ended: float = -1.0
    hit: int = -1  # tokens of the prompt that were cached where it was computed first
    # tokens that are computed before the next one is drawn: grows when it is continued elsewhere
    known: int = 0
    done: int = 0  # completion tokens among them
    cached: int = 0  # of the known ones, where it is now
    ends_at: float = 0.0  # step of its replica in which it ends
    moved_at: float = -1.0  # when its replica died
    had_begun: bool = False  # then
    pause: float = -1.0  # from that to its next token


class Arrivals:
    """Draws conversations and turns; every draw comes from one generator, so a seed names a run."""

    def __init__(self, load: Load, seed: int) -> None:
        self.load = load
        self.rng = random.Random(seed)
        self._weights = list(accumulate(1 / (rank + 1) for rank in range(load.stems)))
        self._stem_lengths = [self._normal(load.stem_length) for _ in range(load.stems)]
        self._stems = range(load.stems)
        self.num_conversations = self.num_turns = 0
        self.seen: set[int] = set()  # stems that somebody was sent

    def conversation(self) -> Conversation:
        """A new one."""
        stem = self.rng.choices(self._stems, cum_weights=self._weights)[0]
        self.num_conversations += 1
        length = self._stem_lengths[stem]
        return Conversation(self.num_conversations, stem, length, length)

    def turn(self, conversation: Conversation, now: float) -> Turn:
        """The next turn of a conversation."""
        known = conversation.length if not conversation.is_first else 0
        if conversation.is_first and conversation.stem in self.seen:
            known = conversation.stem_length
        self.seen.add(conversation.stem)
        conversation.is_first = False
        conversation.length += self._normal(self.load.message_length)
        prompt = conversation.length
        completion = min(self._normal(self.load.completion_length), self.load.longest)
        conversation.length += completion
        self.num_turns += 1
        return Turn(
            self.num_turns, now, conversation, prompt, completion, ideal=known, known=prompt
        )

    def goes_on(self) -> bool:
        """Whether a conversation has another turn: without memory, so a fleet can begin in its
        middle.
        """
        return self.rng.random() < 1 - 1 / self.load.turns

    def gap(self, mean: float) -> float:
        """Exponential."""
        return self.rng.expovariate(1 / mean)

    def _normal(self, mean: float) -> int:
        # log-normal with sigma 0.8, whose mean is exp(mu + sigma^2 / 2)
        return max(1, int(mean * self.rng.lognormvariate(-0.32, 0.8)))


def prompt_of(turn: Turn) -> Prompt:
    """What the router is shown."""
    conversation = turn.conversation
    return Prompt(conversation.stem, conversation.stem_length, conversation.number, turn.known)
