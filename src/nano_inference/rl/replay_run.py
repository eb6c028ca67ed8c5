"""Replay of one sample: its tokens as a draft, drawn again from rows that a `Replayer` computes
together with those of other samples.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from nano_inference.core.named_ids import prompt_matrix, prompt_scoring
from nano_inference.drafts.model import draw_request
from nano_inference.ops.lora import Adapter
from nano_inference.rl.history import Stretch, stretches, was_sampled
from nano_inference.sampling.tensors import DrawRequest
from nano_inference.sampling.token_rules import TokenRules
from nano_inference.structured.matching import GrammarState
from nano_inference.text.detokenizer import OutputText
from nano_inference.types import (
    LogprobMatrix,
    SamplingMask,
    SamplingParams,
    TopLogprobs,
    TrainingSample,
    VersionSpan,
)

NOTHING = TopLogprobs((), ())


class Draws(NamedTuple):
    """Rules for drawing a sample's tokens, and its adapter.

    `text` returns an empty text of the sample. It is None if the sample has no text.
    """

    sample: TrainingSample
    params: SamplingParams
    stop_ids: frozenset[int]
    grammar: "DraftGrammar | None" = None
    rules: TokenRules | None = None
    adapter: Adapter | None = None
    text: Callable[[], OutputText] | None = None

    def request(self, tokens: Sequence[int], row: int, position: int) -> DrawRequest:
        """Return the request to draw the token at `position`, after `tokens[:position]`.

        `row` is the row of the logits to draw from.
        """
        sample = self.sample
        words = None if self.grammar is None else self.grammar.mask(tokens, position)
        if self.rules is not None:
            words = self.rules.mask(tokens, (), words, position)
        return draw_request(
            *(self.params, self.stop_ids, len(sample.prompt_tokens), tokens, row),
            (sample.seed, sample.sample_index, position),
            words,
        )


class DraftGrammar:
    """Masks of a draft's tokens, which follow from the previous tokens.

    Args:
        begin: Function that returns the grammar's initial state.
        starts: Positions, ascending, at which the grammar starts: after the prompt, and again
            after each appended token.
    """

    def __init__(self, begin: Callable[[], GrammarState], starts: Sequence[int]) -> None:
        self._begin, self._starts = begin, starts
        self._state, self._at = begin(), starts[0]

    def mask(self, tokens: Sequence[int], position: int) -> np.ndarray:
        """Return the mask of the token at a position, int32 [W].

        Tokens before the last requested position must be unchanged, unless `position` is earlier.
        """
        self._go(tokens, position)
        return self._state.words

    def ends_at(self, tokens: Sequence[int], position: int) -> bool:
        """Return True if the tokens before a position end the text."""
        self._go(tokens, position)
        return self._state.is_ended

    def _go(self, tokens: Sequence[int], position: int) -> None:
        start = max(each for each in self._starts if each <= position)
        if not start <= self._at <= position:
            self._state, self._at = self._begin(), start
        for token_id in tokens[self._at : position]:
            self._state.accept(token_id)
        if position > self._at:
            self._state.fill()
        self._at = position


class Drawn(NamedTuple):
    """One token and the results of its draw. Appended tokens have the defaults."""

    token_id: int = -1
    logprob: float = 0.0
    raw_logprob: float = 0.0
    log_kept_mass: float = 0.0
    mask: tuple[int, ...] = ()
    top: TopLogprobs = NOTHING
    named: bytes = b""
    raw_named: bytes = b""


class Chunk(NamedTuple):
    """Rows [start, end) of one run, all of one weight version.

    Attributes:
        drawing: Rows to draw from.
        scored: Rows of the prompt whose scores are requested.
    """

    run: "Run"
    start: int
    end: int
    drawing: list[int]
    scored: range

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the rows."""
        return self.run.tokens[self.start : self.end]

    def requests(self) -> list[DrawRequest]:
        """Return the draws, whose rows count from the first one."""
        how, tokens = self.run.how, self.run.tokens
        return [how.request(tokens, index, row + 1) for index, row in enumerate(self.drawing)]


class Computed(NamedTuple):
    """Results of a chunk: its draws, scores, and most probable tokens of the scored rows."""

    drawn: Sequence[Drawn]
    scores: Sequence[float]
    best: Sequence[TopLogprobs]


class Run:
    """State of one sample's replay: its tokens, the version of each stored row, and its draws.

    Args:
        draws: Sample, and rules for its draws.
        table: Blocks of its rows.
        shared: Number of rows, from 0 on, whose blocks `leader` computes.
        leader: Run of another sample with the same prompt, or None.
        stops: End after the first draw that differs, instead of continuing with its own tokens.
    """

    def __init__(
        self,
        draws: Draws,
        table: list[int],
        *,
        shared: int = 0,
        leader: "Run | None" = None,
        stops: bool = False,
    ) -> None:
        self.how = draws
        self.sample, self.params, self.stop_ids = draws.sample, draws.params, draws.stop_ids
        sample = self.sample
        self.prompt_len = len(sample.prompt_tokens)
        # a draft until drawn again
        self.tokens = [*sample.prompt_tokens, *sample.completion_tokens]
        self.sampled = was_sampled(sample)
        self.table, self._leader, self._shared, self._stops = table, leader, shared, stops
        self._stretches = stretches(sample)
        # version of each stored row
        self._context = self._stretches[0].row_versions[:shared] if shared else ()
        self.drawn: dict[int, Drawn] = {}  # by index in the completion
        self.version_starts: list[tuple[int, int]] = []
        fields = prompt_scoring(self.params, sample.prompt_tokens)
        self._scored, self._targets = fields["scored"], fields["score_targets"]
        self._score_width = len(self._targets[0]) if len(self._targets) else 1
        self._prompt_scores: list[float] = []
        self._prompt_best: list[TopLogprobs] = []
        # the sample's tokens after the latest draw are no longer a valid draft
        self.diverged = False
        self._row = 0
        self._enter()

    @property
    def is_done(self) -> bool:
        """True if no row is left to compute."""
        return not self._stretches or (self._stops and self.diverged)

    @property
    def is_ready(self) -> bool:
        """True if the rows before the next one are computed."""
        leader = self._leader
        return not self.is_done and (
            leader is None or leader.is_done or leader.num_valid >= self._shared
        )

    @property
    def num_valid(self) -> int:
        """Number of valid rows, from 0 on."""
        return len(self._context)

    @property
    def version(self) -> int:
        """Weight version of the next row."""
        return self._stretches[0].row_versions[self._row]

    def _enter(self) -> None:
        """Begin the next stretch at the first row that it needs from another version."""
        if not self._stretches:
            return
        stretch = self._stretches[0]
        pairs = zip(self._context, stretch.row_versions, strict=False)
        same = next(
            (row for row, (mine, wanted) in enumerate(pairs) if mine != wanted), len(self._context)
        )
        self._row = min(same, self.prompt_len + stretch.start - 1)

    def next_chunk(self, most: int) -> Chunk:
        """Return the next rows, at most `most`."""
        start, stretch = self._row, self._stretches[0]
        versions = stretch.row_versions
        end = min(start + most, len(versions))
        end = next((row for row in range(start, end) if versions[row] != versions[start]), end)
        drawing = [row for row in range(start, end) if self._draws_from(row, stretch)]
        if self.diverged and drawing:
            end, drawing = drawing[0] + 1, drawing[:1]
        known = self._scored.start + len(self._prompt_scores) // self._score_width
        scored = range(max(start, known), min(end, self._scored.stop))
        return Chunk(self, start, end, drawing, scored)

    def accept(self, chunk: Chunk, computed: Computed) -> None:
        """Take the results of a chunk. Rows after the first draw that differs are not valid."""
        self._prompt_scores += computed.scores
        self._prompt_best += computed.best
        versions = self._stretches[0].row_versions
        self._row = self._after_draws(chunk, computed.drawn, versions)
        self._context = versions[: self._row]
        if self._row >= len(versions):
            self._stretches.pop(0)
            self._enter()

    def _after_draws(self, chunk: Chunk, draws: Sequence[Drawn], versions: Sequence[int]) -> int:
        for row, drawn in zip(chunk.drawing, draws, strict=True):
            index = row + 1 - self.prompt_len
            self.drawn[index] = drawn
            if not self.version_starts or self.version_starts[-1][0] != versions[row]:
                self.version_starts.append((versions[row], index))
            if drawn.token_id != self.tokens[row + 1]:
                self.tokens[row + 1] = drawn.token_id
                self.diverged = True
                return row + 1
        return chunk.end

    def _draws_from(self, row: int, stretch: Stretch) -> bool:
        index = row + 1 - self.prompt_len
        return stretch.start <= index < stretch.end and self.sampled[index]

    def targets(self, row: int) -> Sequence[int]:
        """Return the tokens to score after a scored row of the prompt."""
        if not len(self._targets):
            return (self.tokens[row + 1],)
        return self._targets[row - self._scored.start]

    def result(self) -> TrainingSample:
        """Return the replayed sample, with the values that engines give to appended tokens."""
        sample, params, drawn = self.sample, self.params, self.drawn
        length = len(sample.completion_tokens)
        if not length:
            return sample
        if not (self._stops and self.diverged):
            # otherwise a token without a draw would equal the sample's
            assert len(drawn) == sum(self.sampled), "a token was not drawn"
        width = 4 * len(params.logprob_token_ids)
        unknown = np.full(len(params.logprob_token_ids), math.nan, "<f4").tobytes()
        appended = Drawn(named=unknown, raw_named=unknown)

        def column(field: str, recorded: Sequence[Any] | LogprobMatrix | None) -> list[Any]:
            """Return the values of all tokens. Those that were not reached are the sample's."""
            values: list[Any] = []
            for index in range(length):
                if index in drawn or not self.sampled[index]:
                    values.append(getattr(drawn.get(index, appended), field))
                elif isinstance(recorded, LogprobMatrix):
                    values.append(recorded.data[index * width : (index + 1) * width])
                else:
                    values.append(recorded[index] if recorded and index < len(recorded) else None)
            return values

        def matrix(field: str, recorded: LogprobMatrix | None) -> LogprobMatrix:
            return LogprobMatrix(
                (length, len(params.logprob_token_ids)), b"".join(column(field, recorded))
            )

        named, raw = bool(params.logprob_token_ids), params.raw_logprobs
        spans = [*self.version_starts, (0, length)]
        versions = tuple(
            VersionSpan(v, start, end) for (v, start), (_, end) in itertools.pairwise(spans)
        )
        masks = sample.sampling_mask.rows() if sample.sampling_mask is not None else None
        again = replace(
            sample,
            completion_tokens=tuple(self.tokens[self.prompt_len :]),
            logprobs=tuple(column("logprob", sample.logprobs)),
            log_kept_mass=tuple(column("log_kept_mass", sample.log_kept_mass)),
            raw_logprobs=tuple(column("raw_logprob", sample.raw_logprobs)) if raw else None,
            sampling_mask=SamplingMask.of([mask or () for mask in column("mask", masks)])
            if params.sampling_mask
            else None,
            top_logprobs=tuple(column("top", sample.top_logprobs)) if params.top_logprobs else None,
            prompt_logprobs=(math.nan, *self._prompt_scores[:: self._score_width])
            if params.prompt_logprobs
            else None,
            prompt_top_logprobs=(NOTHING, *self._prompt_best)
            if params.prompt_top_logprobs
            else None,
            token_id_logprobs=matrix("named", sample.token_id_logprobs) if named else None,
            raw_token_id_logprobs=matrix("raw_named", sample.raw_token_id_logprobs)
            if named and raw
            else None,
            prompt_token_id_logprobs=prompt_matrix(
                params, self._scored.start, self._score_width, self._prompt_scores
            )
            if params.prompt_logprob_token_ids
            else None,
            weight_versions=versions,
            weight_version=versions[-1].version if versions else sample.weight_version,
        )
        return self._finished(again)

    def _finished(self, sample: TrainingSample) -> TrainingSample:
        """Return the sample with the text and the finish reason of its replay.

        A replay cannot repeat aborts and appended tokens, so their finish reasons are copied.
        """
        text, stop = self._text()
        if text is not None and sample.text is not None:
            sample = replace(sample, text=text)
        if not all(self.sampled) or sample.finish_reason == "abort":
            return sample
        length, last = len(sample.completion_tokens), sample.completion_tokens[-1]
        if last in self.stop_ids and length > self.params.min_tokens:
            return replace(sample, finish_reason="stop", stop_reason=last)
        if stop is not None and stop[0] == length - 1:
            return replace(sample, finish_reason="stop", stop_reason=stop[1])
        grammar = self.how.grammar
        ended = grammar is not None and grammar.ends_at(self.tokens, len(self.tokens))
        if ended:
            stop_reason = last if last in self.stop_ids else None
            return replace(sample, finish_reason="stop", stop_reason=stop_reason)
        if length >= self.params.max_tokens:
            return replace(sample, finish_reason="length", stop_reason=None)
        return replace(sample, finish_reason="abort", stop_reason=None)

    def _text(self) -> tuple[str | None, tuple[int, str] | None]:
        """Return the text, and the index and the string of a stop string that a sampled token
        completes.
        """
        if self.how.text is None:
            return None, None
        text, least = self.how.text(), self.params.min_tokens
        # stop strings count after the last appended token
        known = max((i for i, own in enumerate(self.sampled) if not own), default=-1)
        stop: tuple[int, str] | None = None
        for index, token_id in enumerate(self.tokens[self.prompt_len :]):
            may_stop = index > known and index >= least
            if may_stop and token_id in self.stop_ids:
                break  # the text ends before a stop id
            completed = text.append(token_id, may_stop)
            if completed is not None:
                stop = index, completed
        text.finish()
        return text.text, stop


def best_of(token_ids: Sequence[int], logprobs: Sequence[float], k: int) -> TopLogprobs:
    """Return the k most probable tokens of a row without those that are cut."""
    best = zip(token_ids[:k], logprobs[:k], strict=True)
    kept = [pair for pair in best if pair[1] > -math.inf]
    return TopLogprobs(
        tuple(token_id for token_id, _ in kept), tuple(logprob for _, logprob in kept)
    )
