"""`Drafter`: proposes drafts from several sources, and learns from the tokens drawn.

Drafts change no bit of any sample. Their choice may therefore depend on the clock, on other
requests and on chance.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Container
from collections.abc import Sequence as Listed
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from nano_inference.config import SchedulerConfig
from nano_inference.core.sequence import Sequence, Sequences
from nano_inference.drafts.costs import StepCosts
from nano_inference.drafts.source import (
    NO_GUESS,
    BadSource,
    DraftSource,
    Guess,
    TimedSource,
)
from nano_inference.sampling.drafted import Drafts
from nano_inference.types import SpeculationStats

logger = logging.getLogger("nano_inference")

# The chance of a kind of draft is its mean over about this many drafts.
MEMORY = 200.0
# Each mean starts as if CAUTION drafts had been seen, and a share PRIOR of them drawn.
CAUTION = 4.0
PRIOR = 0.3
CERTAIN = 0.97  # upper limit of a draft's chance
NEVER = (0.0, 0.0)  # counts of a new kind: drafts that were reached, and drawn
MODEL_PRIOR = 0.8  # chance of a model's drafts before any was seen
# In a step without a model's drafts, their counts shrink to this share.
FORGETTING = 0.99
# Drafts with a lower chance are not proposed: even a free row costs work on the host.
HOPELESS = 0.05


class _Asked(NamedTuple):
    """A guess whose tokens are not drawn yet."""

    seq: Sequence
    num_known: int
    source: str
    guess: Guess
    chances: Listed[float]  # probabilities that each draft and all before it are drawn


class Drafter:
    """Proposes the drafts of one engine's steps.

    Args:
        sources: Sources of guesses. An earlier source wins if two are equally sure.
        costs: Costs of a step. None to use as many drafts as possible.
        most: Maximum number of drafts of one sequence in a step.
        model: Source that takes time for each draft, or None. It guesses only as many tokens as may
            pay off, for sequences that the other sources are less sure of.
    """

    def __init__(
        self,
        sources: Listed[DraftSource],
        costs: StepCosts | None = None,
        most: int = 8,
        model: TimedSource | None = None,
    ) -> None:
        self.sources = list(sources)
        self.costs, self.most, self.model = costs, most, model
        self._of_model = [0.0, 0.0]  # the model's drafts that were reached, and drawn
        self._asked: dict[int, _Asked] = {}
        # drafts that were reached, and drawn, by source and kind
        self._seen: dict[tuple[str, int], list[float]] = {}
        self._drafted: defaultdict[str, list[int]] = defaultdict(list[int])  # by source and index
        self._accepted: defaultdict[str, list[int]] = defaultdict(list[int])

    def propose(self, live: Sequences, pending: Container[int], config: SchedulerConfig) -> Drafts:
        """Return drafts for the next step by sequence id.

        Args:
            live: Live sequences.
            pending: Ids of sequences with a token in flight.
            config: Limits of a step.
        """
        free = [seq for seq in live.running if seq.seq_id not in pending]
        # drop guesses of sequences that have ended
        self._asked = {key: each for key, each in self._asked.items() if key in pending}
        seqs = [seq for seq in free if may_draft(seq)]
        if not (self.sources or self.model) or not seqs:
            return {}
        # estimate of the step's rows without drafts
        wants = sum(seq.num_to_compute - seq.num_computed_tokens for seq in free)
        wants += sum(seq.num_to_compute for seq in live.waiting)
        num_rows = min(wants, config.max_tokens_per_batch)
        room = min(config.max_draws - len(seqs), config.max_tokens_per_batch - num_rows)
        most = min(self.most, room)
        if most <= 0 or not self._may_pay(num_rows, len(seqs)):
            return {}
        asked = self._best(seqs, most)
        if self.model is not None:
            asked = self._with_model(self.model, asked, seqs, num_rows, most)
        self._asked |= {each.seq.seq_id: each for each in asked}
        drafts: dict[int, tuple[int, ...]] = {}
        for guessed, length in self._share(asked, num_rows, len(seqs), room):
            token_ids = allowed(guessed.seq, guessed.guess.token_ids[:length])
            if token_ids:
                drafts[guessed.seq.seq_id] = tuple(token_ids)
        return drafts

    def _best(self, seqs: Listed[Sequence], most: int) -> list[_Asked]:
        """Return the most promising guess for each sequence that has any."""
        best: dict[int, _Asked] = {}
        for source in list(self.sources):
            for seq, guess in zip(seqs, self._ask(source, seqs, most), strict=True):
                if not guess.token_ids:
                    continue
                chances = self._chances(source.name, guess)
                before = best.get(seq.seq_id)
                if before is None or sum(chances) > sum(before.chances):
                    best[seq.seq_id] = _Asked(seq, len(seq.token_ids), source.name, guess, chances)
        return list(best.values())

    def _with_model(
        self,
        model: TimedSource,
        asked: list[_Asked],
        seqs: Listed[Sequence],
        num_rows: int,
        most: int,
    ) -> list[_Asked]:
        """Replace guesses that promise less than the model's first draft by the model's guesses."""
        seen, drawn = self._of_model
        chance = min((drawn + CAUTION * MODEL_PRIOR) / (seen + CAUTION), CERTAIN)
        sure = {each.seq.seq_id for each in asked if sum(each.chances) >= chance}
        unsure = [seq for seq in seqs if seq.seq_id not in sure]
        length = self._worth(model, chance, len(unsure), num_rows, len(seqs), most)
        if not unsure or not length:
            self._of_model = [each * FORGETTING for each in self._of_model]
            return asked
        guesses = self._ask(model, unsure, length)
        best = {each.seq.seq_id: each for each in asked}
        for seq, guess in zip(unsure, guesses, strict=True):
            if guess.token_ids:
                chances = self._chances(model.name, guess)
                known = len(seq.token_ids)
                best[seq.seq_id] = _Asked(seq, known, model.name, guess, chances)
        return list(best.values())

    def _worth(
        self,
        model: TimedSource,
        chance: float,
        num_unsure: int,
        num_rows: int,
        num_seqs: int,
        most: int,
    ) -> int:
        """Return the draft length with the most tokens per second, including the model's time."""
        if self.costs is None or not num_unsure:
            return most
        lengths = np.arange(most + 1)
        tokens = num_seqs + num_unsure * np.concatenate(([0.0], np.cumsum(chance ** lengths[1:])))
        seconds = self.costs.of(num_rows + num_unsure * lengths)
        return int(np.argmax(tokens / (seconds + lengths * model.seconds(num_unsure))))

    def _share(
        self, asked: Listed[_Asked], num_rows: int, num_seqs: int, room: int
    ) -> list[tuple[_Asked, int]]:
        """Return how many drafts of each guess to compute, choosing the most likely of all."""
        likeliest = sorted(
            (
                (chance, -number)
                for number, each in enumerate(asked)
                for chance in each.chances
                if chance > HOPELESS
            ),
            reverse=True,
        )[:room]
        if self.costs is not None:
            chances = [chance for chance, _ in likeliest]
            likeliest = likeliest[: self.costs.most_paying(num_rows, num_seqs, chances)]
        # chances within a guess descend, so these are its first drafts
        lengths = Counter(-number for _, number in likeliest)
        return [(asked[number], length) for number, length in lengths.items()]

    def learn(self, seqs: Listed[Sequence], drafts: Drafts) -> int:
        """Learn from newly known tokens of these sequences.

        Return how many tokens the accepted drafts added: those beyond one for each sequence.

        Args:
            seqs: Sequences, each once.
            drafts: Drafts that the step computed, by sequence id.
        """
        num_more = 0
        for seq in seqs:
            asked = self._asked.pop(seq.seq_id, None)
            if asked is None:
                continue
            _, num_known, source, guess, _ = asked
            drawn = seq.token_ids[num_known:]
            pairs = zip(guess.token_ids, drawn, strict=False)
            num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            for index, kind in enumerate(guess.kinds[: min(num_right + 1, len(drawn))]):
                if self.model is not None and source == self.model.name:
                    self._count(self._of_model, index < num_right)
                self._count(self._seen.setdefault((source, kind), [0.0, 0.0]), index < num_right)
            self._tell(source, len(drafts.get(seq.seq_id, ())), num_right)
            num_more += max(len(drawn) - 1, 0)
        return num_more

    def _count(self, seen: list[float], was_right: bool) -> None:
        if seen[0] >= MEMORY:
            seen[:] = seen[0] / 2, seen[1] / 2
        seen[0] += 1
        seen[1] += was_right

    def _tell(self, source: str, num_drafted: int, num_right: int) -> None:
        drafted, accepted = self._drafted[source], self._accepted[source]
        more = [0] * (num_drafted - len(drafted))
        drafted += more
        accepted += more
        for index in range(num_drafted):
            drafted[index] += 1
            accepted[index] += index < num_right

    def stats(self) -> SpeculationStats:
        """Return the numbers of drafted and accepted tokens so far. Callable from any thread."""
        # Copy the items, because the stepping thread may add a source. Read `accepted` first, so
        # that it never exceeds `drafted`.
        accepted = {name: tuple(each) for name, each in list(self._accepted.items())}
        drafted = {name: tuple(each) for name, each in list(self._drafted.items())}
        return SpeculationStats(
            drafted=drafted,
            accepted={name: accepted.get(name, ()) for name in drafted},
            step_rows=self.costs.rows if self.costs else (),
            step_seconds=self.costs.seconds if self.costs else (),
            sources=tuple(
                source.name for source in (*self.sources, self.model) if source is not None
            ),
        )

    def _may_pay(self, num_rows: int, num_seqs: int) -> bool:
        if self.costs is None:
            return True
        return self.costs.threshold(num_rows, num_seqs, self.most) < CERTAIN

    def _ask(self, source: DraftSource, seqs: Listed[Sequence], most: int) -> Listed[Guess]:
        try:
            return source.propose(seqs, most)
        except Exception as problem:
            reason = problem if isinstance(problem, BadSource) else f"raised {problem!r}"
            logger.error("disabled draft source %r: %s", source.name, reason)
            if source is self.model:
                self.model = None
            else:
                self.sources.remove(source)
            return [NO_GUESS] * len(seqs)

    def _chances(self, source: str, guess: Guess) -> list[float]:
        """Return the probabilities that each draft and all before it are drawn."""
        chances: list[float] = []
        whole = 1.0
        for kind in guess.kinds:
            seen, drawn = self._seen.get((source, kind), NEVER)
            whole *= min((drawn + CAUTION * PRIOR) / (seen + CAUTION), CERTAIN)
            chances.append(whole)
        return chances


def allowed(seq: Sequence, drafts: Listed[int]) -> Listed[int]:
    """Return the drafts before the first one that ends the sample or violates its masks."""
    stop_ids = seq.request.stop_ids
    for index, token_id in enumerate(drafts):
        if token_id in stop_ids:
            drafts = drafts[:index]
            break
    if seq.rules is not None and drafts:
        drafts = drafts[: seq.rules.num_allowed(seq.token_ids, drafts)]
    if seq.grammar is not None and drafts:
        return drafts[: seq.grammar.look_ahead(drafts)]
    return drafts


def may_draft(seq: Sequence) -> bool:
    """Return True if drafts may follow a sequence's known tokens in the next step."""
    return (
        seq.num_samples == 1
        and seq.num_computed_tokens == len(seq.token_ids) - 1
        and len(seq.token_ids) + 1 < seq.most_tokens
    )
