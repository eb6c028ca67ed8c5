"""A simulated replica: steps of a continuous batch, chunked prefill, and a prefix cache that
forgets.
"""

import heapq
import itertools
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from benchmarks.fleet.load import Turn

BLOCK = 16


@dataclass(frozen=True)
class Machine:
    """What a step takes. The defaults are an 8B model in bfloat16 on one H100, as `arithmetic.py`
    has it, rounded.

    Attributes:
        step: seconds of a step of one sequence: the weights are read.
        per_sequence: more for each sequence in it: its keys and values are read.
        prefill_rate: tokens a second.
        chunk: tokens of a prompt in one step.
        max_batch: sequences in a step.
        cache: tokens that the prefix cache holds beside what runs.
    """

    step: float = 0.008
    per_sequence: float = 0.0001
    prefill_rate: float = 25_000.0
    chunk: int = 512
    max_batch: int = 64
    cache: int = 250_000


class Replica:
    """Time is kept in steps: all that runs gets one token a step, so who ends next is the head of
    one heap.
    """

    def __init__(self, machine: Machine, slowness: float = 1.0) -> None:
        self.machine, self.slowness = machine, slowness
        self.steps, self.time = 0.0, 0.0  # steps done at `time`
        # (step in which it ends, order, turn): a heap
        self.running: list[tuple[float, int, Turn]] = []
        self.waiting: deque[Turn] = deque()
        self.prefilling: tuple[float, Turn] | None = None
        self.computed = 0  # prompt tokens
        self.dead = False
        self._order = itertools.count()
        # conversation, or -1 - stem -> its own tokens
        self._cache: OrderedDict[int, int] = OrderedDict()
        self._cached = 0
        self._per_step = 0.0
        self._set_speed()

    @property
    def size(self) -> int:
        """Sequences that run or wait."""
        return len(self.running) + len(self.waiting) + (self.prefilling is not None)

    def advance(self, now: float) -> None:
        """Let it compute until now; nothing may end before."""
        if not self.dead:
            self.steps += (now - self.time) / self._per_step
        self.time = now

    def next_end(self) -> float:
        """When a prompt or a sequence ends next; infinity: it is idle."""
        if self.dead:
            return float("inf")
        ends = self.running[0][0] if self.running else float("inf")
        if self.prefilling is not None:
            ends = min(ends, self.prefilling[0])
        return self.time + max(0.0, ends - self.steps) * self._per_step

    def add(self, turn: Turn) -> None:
        """A request has come. Call `advance` first."""
        self.waiting.append(turn)
        self._admit()

    def ended(self) -> tuple[list[Turn], list[Turn]]:
        """Whose prompt is computed now, and who has all tokens. Call `advance` first."""
        now, first, done = self.steps + 1e-6, [], []
        if self.prefilling is not None and self.prefilling[0] <= now:
            turn, self.prefilling = self.prefilling[1], None
            first.append(turn)
            left = turn.completion_length - turn.done - 1
            if left > 0:
                turn.ends_at = self.steps + left
                heapq.heappush(self.running, (turn.ends_at, next(self._order), turn))
            else:
                done.append(turn)
        while self.running and self.running[0][0] <= now:
            done.append(heapq.heappop(self.running)[2])
        for turn in done:
            self._hold(turn, turn.known + turn.completion_length - turn.done)
        self._admit()
        return first, done

    def everything(self) -> list[Turn]:
        """What it had when it died, with the tokens that were told so far."""
        turns = [turn for _, _, turn in self.running]
        for turn in turns:
            told = (
                turn.completion_length
                - max(1, math.ceil(turn.ends_at - self.steps - 1e-6))
                - turn.done
            )
            turn.done += told
            turn.known += told
            turn.had_begun = True
        if self.prefilling is not None:
            turns.append(self.prefilling[1])
        turns += self.waiting
        self.running, self.prefilling = [], None
        self.waiting.clear()
        return turns

    def _admit(self) -> None:
        if (
            self.prefilling is None
            and self.waiting
            and not self.dead
            and len(self.running) < self.machine.max_batch
        ):
            turn = self.waiting.popleft()
            turn.cached = min(self._found(turn), turn.known - 1) // BLOCK * BLOCK
            turn.hit = turn.cached if turn.hit < 0 else turn.hit
            left = turn.known - turn.cached
            self.computed += left
            self.prefilling = (self.steps + -(-left // self.machine.chunk), turn)
            self._hold(turn, turn.known)
        self._set_speed()

    def _set_speed(self) -> None:
        machine = self.machine
        seconds = machine.step + machine.per_sequence * len(self.running)
        if self.prefilling is not None:
            turn = self.prefilling[1]
            left = turn.known - turn.cached
            seconds += left / -(-left // machine.chunk) / machine.prefill_rate
        self._per_step = seconds * self.slowness

    def _found(self, turn: Turn) -> int:
        conversation, cache = turn.conversation, self._cache
        stem = -1 - conversation.stem
        if stem not in cache:
            return 0
        return conversation.stem_length + cache.get(conversation.number, 0)

    def _hold(self, turn: Turn, length: int) -> None:
        conversation, cache = turn.conversation, self._cache
        own = max(0, length - conversation.stem_length)
        self._cached += own - cache.get(conversation.number, 0)
        cache[conversation.number] = own
        cache.move_to_end(conversation.number)
        stem = -1 - conversation.stem  # used after what hangs below it, so it goes after it
        if stem not in cache:
            self._cached += conversation.stem_length
            cache[stem] = conversation.stem_length
        cache.move_to_end(stem)
        while self._cached > self.machine.cache:
            self._cached -= cache.popitem(last=False)[1]
