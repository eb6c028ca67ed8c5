"""A trace: conversations of turns, with their waits, subagents and shared prefixes."""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from nano_bench.shape import WORDS
from nano_inference.errors import ConfigError

_WORDS = WORDS.split()
AT_ONCE = 32  # sessions in progress if the trace has no start times
FILLER = "go"  # text of a message that a small length scale left without a word


class TraceError(ConfigError):
    """An invalid trace.

    Attributes:
        line: Line of the file, from 1.
        what: Problem.
    """

    def __init__(self, line: int, what: str, file: str = "") -> None:
        super().__init__(f"{file}, line {line}: {what}" if file else f"line {line}: {what}")
        self.line, self.what = line, what


@lru_cache(maxsize=1 << 16)
def block_words(scope: str, block: int | str, size: int) -> tuple[str, ...]:
    """Return the words of a block. Equal names give equal words."""
    return tuple(random.Random(f"{scope}/{block}").choices(_WORDS, k=size))


@dataclass(frozen=True)
class Blocks:
    """The tokens of a prompt as names of blocks. A token is one word of about one token.

    Attributes:
        scope: Namespace of the names.
        ids: Names of the blocks in order. The last one may be incomplete.
        length: Number of tokens.
        block_size: Tokens per block.
        scale: Factor of all lengths.
    """

    scope: str
    ids: tuple[int | str, ...]
    length: int
    block_size: int
    scale: float = 1.0

    @property
    def words_per_block(self) -> int:
        return max(1, round(self.block_size * self.scale))

    def position(self, token: int) -> int:
        """Return the number of words before a token, so that blocks stay aligned."""
        block, rest = divmod(token, self.block_size)
        return block * self.words_per_block + min(round(rest * self.scale), self.words_per_block)

    def text(self, start: int, end: int) -> str:
        """Return the words from token `start` to token `end`."""
        first, last, size = self.position(start), self.position(end), self.words_per_block
        words: list[str] = []
        for index in range(first // size, -(-last // size)):
            block = block_words(self.scope, self.ids[index], size)
            words += block[max(first - index * size, 0) : last - index * size]
        return " ".join(words) or FILLER

    def prefixes(self) -> Iterator[int]:
        """Yield a hash per prefix of whole blocks."""
        name = hash((self.scope, self.block_size))
        for block in self.ids[: self.length // self.block_size]:
            name = hash((name, block))
            yield name


@dataclass(frozen=True)
class Words:
    """A message whose text is a part of a prompt's blocks."""

    role: str
    blocks: Blocks
    start: int
    end: int

    def message(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.blocks.text(self.start, self.end)}


@dataclass(frozen=True)
class Literal:
    """A message given in the trace."""

    content: Mapping[str, Any]

    def message(self) -> dict[str, Any]:
        return dict(self.content)


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        line: Line of the file.
        messages: Messages of the whole prompt, or new ones if `appends`.
        output: Tokens to generate. None: the server's default.
        appends: True if the messages follow those of earlier turns and the server's real answers.
        wait: Seconds from the end of the previous turn and of joined conversations to this turn.
        at: Earliest start in seconds after the start of the conversation, or None.
        joins: Conversations that end before this turn.
        spawns: Conversations that start after this turn.
        fields: More fields of the request, such as `tools`.
    """

    line: int
    messages: tuple[Words | Literal, ...]
    output: int | None
    appends: bool = False
    wait: float = 0.0
    at: float | None = None
    joins: tuple[str, ...] = ()
    spawns: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def blocks(self) -> Blocks | None:
        """Blocks of the whole prompt, or None if the trace does not name them."""
        last = self.messages[-1]
        return last.blocks if isinstance(last, Words) and not self.appends else None

    def scaled(self, scale: float) -> "Turn":
        """Scale prompt and output. Raises `TraceError` for messages with their own text."""
        messages: list[Words | Literal] = []
        for message in self.messages:
            if isinstance(message, Literal):
                raise TraceError(
                    self.line, "its messages have a text, whose length cannot be scaled."
                )
            messages.append(replace(message, blocks=replace(message.blocks, scale=scale)))
        output = None if self.output is None else max(1, round(self.output * scale))
        return replace(self, messages=tuple(messages), output=output)


@dataclass(frozen=True)
class Conversation:
    """Turns of one agent.

    Attributes:
        name: Name in the trace.
        turns: At least one turn.
        start: Seconds after the start of the trace, or of the spawn if it has a parent.
        forks: True if it continues its parent's messages.
        spawns: Conversations that start together with it, before its first turn.
    """

    name: str
    turns: tuple[Turn, ...]
    start: float = 0.0
    forks: bool = False
    spawns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trace:
    """A whole trace. `roots` are the conversations without a parent, by start."""

    form: str
    conversations: Mapping[str, Conversation]
    roots: tuple[str, ...]

    def limited(
        self,
        *,
        max_sessions: int | None = None,
        max_turns: int | None = None,
        length_scale: float = 1.0,
        time_scale: float = 1.0,
    ) -> "Trace":
        """Return the first sessions, with the first turns of each conversation, scaled. Raises
        `TraceError`.
        """
        roots = self.roots[:max_sessions]
        reached: dict[str, Conversation] = {}
        waiting = [*roots]
        while waiting:
            name = waiting.pop()
            if name in reached:
                continue
            one = self.conversations[name]
            turns = [_at_pace(turn, time_scale) for turn in one.turns[:max_turns]]
            if length_scale != 1.0:
                turns = [turn.scaled(length_scale) for turn in turns]
            reached[name] = replace(one, turns=tuple(turns), start=one.start * time_scale)
            waiting += [*one.spawns, *(child for turn in turns for child in turn.spawns)]
        ordered = {name: reached[name] for name in self.conversations if name in reached}
        return Trace(self.form, ordered, roots)

    @property
    def at_once(self) -> int | None:
        """Default limit on sessions in progress. None: they start at their own times."""
        return None if any(self.conversations[name].start for name in self.roots) else AT_ONCE

    @property
    def turns(self) -> int:
        return sum(len(each.turns) for each in self.conversations.values())

    def __str__(self) -> str:
        children = len(self.conversations) - len(self.roots)
        kind = f"{self.form} trace, {len(self.roots)} sessions, {self.turns} turns"
        return kind + f", {children} subagents" * bool(children)


def _at_pace(turn: Turn, scale: float) -> Turn:
    at = None if turn.at is None else turn.at * scale
    return replace(turn, wait=turn.wait * scale, at=at)


def conversation_turns(
    blocks: list[tuple[Blocks, int]], system: int = 0
) -> Iterator[tuple[Words, ...]]:
    """Yield the messages of each turn of a conversation, whose whole prompts are blocks.

    The tokens that a prompt adds to the previous one are the previous answer and then a message of
    the user. A prompt that keeps only a part of the previous one, as after a compaction, keeps the
    messages inside that part.

    Args:
        blocks: Each turn's prompt and the tokens of its answer.
        system: Tokens of the system message.
    """
    ends: list[tuple[str, int]] = []
    before: Blocks | None = None
    answer = 0
    for prompt, output in blocks:
        shared = _shared_tokens(before, prompt)
        if before is None:
            ends = [("system", system)] if 0 < system < prompt.length else []
        elif shared < before.length // before.block_size * before.block_size or (
            prompt.length <= before.length
        ):
            ends = [(role, end) for role, end in ends if end <= min(shared, prompt.length - 1)]
        else:
            ends.append(("assistant", min(before.length + answer, prompt.length - 1)))
            ends = [each for each in ends if each[1] > 0]
        if ends and ends[-1][0] == "user":
            ends.pop()  # the rest belongs to the same message
        ends.append(("user", prompt.length))
        starts = [0, *(end for _, end in ends)]
        yield tuple(
            Words(role, prompt, start, end)
            for (role, end), start in zip(ends, starts, strict=False)
        )
        before, answer = prompt, output


def _shared_tokens(before: Blocks | None, prompt: Blocks) -> int:
    if before is None or before.scope != prompt.scope:
        return 0
    shared = 0
    for mine, other in zip(before.ids, prompt.ids, strict=False):
        if mine != other:
            break
        shared += 1
    return min(shared * prompt.block_size, before.length, prompt.length)


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
