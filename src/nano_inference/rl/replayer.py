"""`replay`: compute a sample again, bit for bit, from its prompt, its seed and its weights.

Bits do not depend on the schedule, so a replay needs no scheduler: it runs the decoder on its own
KV tensors, in fewer steps than the sample has tokens. The sample's tokens serve as a draft, in
whole chunks of rows, and each of them is drawn again from its row. As long as the draws equal the
draft, the later rows read the right tokens. After the first draw that differs, the replay continues
with its own tokens, one row at a time.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from nano_inference.arrays import without_gradients
from nano_inference.core.named_ids import prompt_matrix, prompt_scoring
from nano_inference.core.sequence import REFERENCE
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.runner import Sampled
from nano_inference.drafts.model import draw_request
from nano_inference.engine.engine import InferenceEngine
from nano_inference.errors import InvalidRequest
from nano_inference.models.decoder import Decoder
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ranks.parts import require_one_rank
from nano_inference.rl.history import Stretch, stretches, versions_of, was_sampled
from nano_inference.rl.versions import VersionedDecoders, Weights
from nano_inference.sampling.tensors import DrawRequest, sampling_batch
from nano_inference.sampling.token_rules import TokenRules
from nano_inference.structured.matching import GrammarState
from nano_inference.types import (
    LogprobMatrix,
    SamplingMask,
    SamplingParams,
    TopLogprobs,
    TrainingSample,
    VersionSpan,
)

MOST_ROWS = 128  # rows of a forward pass: limits the memory for logits


def replay(
    engine: InferenceEngine, sample: TrainingSample, *, weights: Weights | None = None
) -> TrainingSample:
    """Compute a sample again from its prompt, sampling parameters, seed, sample index and versions.

    The engine's requests and cache are not affected, but its loop pauses meanwhile. Appended tokens
    (`loss_mask`) are taken from the sample. The replay of an aborted sample, or of one that a stop
    string ended, has the same length. Compare the two with `differences`.

    Args:
        engine: Engine with the numerics of the one that made the sample.
        sample: Sample with `sampling_params`, as engines return it.
        weights: Weights of every version in the sample that the engine does not serve now, as a
            mapping by version or a function of the version. Each is a whole state dict or a
            model's folder. Weights passed here take precedence over the engine's. At most two
            versions are in memory simultaneously.

    Returns:
        The sample with replayed `completion_tokens`, `logprobs`, `raw_logprobs`, `log_kept_mass`,
        `sampling_mask`, `top_logprobs`, `prompt_logprobs`, `prompt_top_logprobs`,
        `token_id_logprobs`, `raw_token_id_logprobs`, `prompt_token_id_logprobs`,
        `weight_versions`, `weight_version`, `finish_reason` and `stop_reason`, and
        `ref_logprobs` if the engine has a reference model. Other fields are copied.

    Raises:
        InvalidRequest: Numerics differ, weight versions are missing (the message names them), the
            sample lacks information, or the engine's weights are asleep.
        WeightUpdateError, ModelLoadError: The passed weights do not fit the model.
        EngineDead: The engine was shut down.
    """
    return Replayer(engine, weights).replay(sample)


class Replayer:
    """`replay` for many samples, which share weights and KV tensors."""

    def __init__(self, engine: InferenceEngine, weights: Weights | None = None) -> None:
        require_one_rank(engine.runner, "replay")
        self.engine = engine
        self.decoders = VersionedDecoders(engine, weights)
        self._checks = engine.intake.checks
        self._storages: dict[int, KVStorage] = {}  # by the model's identity

    def check(self, sample: TrainingSample, *, versions: bool = True) -> SamplingParams:
        """Return a sample's parameters, or raise `InvalidRequest` if it cannot be replayed.

        Missing weights are ignored if `versions` is False.
        """
        engine, params = self.engine, sample.sampling_params
        if params is None:
            raise InvalidRequest(
                "the sample has no sampling_params; a replay needs them to repeat its draws."
            )
        if params.logits_processors:
            raise InvalidRequest(
                f"the sample was drawn with the logits processor {params.logits_processors[0]!r}, "
                "which replay does not support; draw it again with its seed."
            )
        if params.adapter is not None:
            raise InvalidRequest(
                f"the sample was drawn with the adapter {params.adapter!r}, which replay does not "
                "support; compare its logprobs with `score(adapter=...)`."
            )
        if not engine.model.part.is_whole:
            raise InvalidRequest(
                "this engine holds only a part of its model; replay on an engine with one rank "
                "that holds all of it."
            )
        fingerprint = engine.numerics.fingerprint
        if sample.numerics != fingerprint:
            raise InvalidRequest(
                f"the sample's numerics are {sample.numerics!r}, this engine's are "
                f"{fingerprint!r}; replay on an engine with the sample's numerics."
            )
        if not engine.numerics.schedule_invariant:
            raise InvalidRequest(
                f"numerics {fingerprint!r} do not guarantee the same bits under another schedule; "
                "replay on an engine whose numerics do."
            )
        self._checks.token_ids(sample.prompt_tokens)
        self._checks.token_ids(sample.completion_tokens or (0,))
        length = len(sample.completion_tokens)
        drawn = replace(
            params, max_tokens=max(length, 1), min_tokens=min(params.min_tokens, length)
        )
        self._checks.require(len(sample.prompt_tokens), drawn, 1)
        needed = versions_of(sample)
        if versions:
            self.decoders.require(needed)
        return params

    def draws(self, sample: TrainingSample, params: SamplingParams) -> "Draws":
        """Return the rules for a sample's draws.

        Raises `InvalidRequest` if its grammar cannot be compiled.
        """
        stop_ids, grammar = self._checks.stop_ids(params), params.grammar
        rules = self.engine.intake.rules_of(params, len(sample.prompt_tokens))
        if grammar is None:
            return Draws(sample, params, stop_ids, rules=rules)
        first = GrammarState(grammar, allowed=params.allowed_token_ids)
        self.engine.intake.grammars.wait(first)
        prompt, sampled = len(sample.prompt_tokens), was_sampled(sample)
        after = [prompt + index + 1 for index, own in enumerate(sampled) if not own]
        return Draws(sample, params, stop_ids, DraftGrammar(first.fork, [prompt, *after]), rules)

    @without_gradients
    def replay(self, sample: TrainingSample) -> TrainingSample:
        """Replay one sample, as the function `replay` does."""
        engine = self.engine
        engine.shared.require_alive()
        params = self.check(sample)
        draws = self.draws(sample, params)
        # the lock keeps weights unchanged and operations free of the engine's steps
        with engine.shared.lock:
            engine.shared.require_weights()
            self.decoders.renew()
            run = _Run(self, draws)
            for stretch in stretches(sample):
                run.go(stretch)
            again = run.result()
            if (
                sample.ref_logprobs is not None
                and REFERENCE in engine.runner.models
                and sample.completion_tokens
            ):
                again = replace(again, ref_logprobs=self._reference_logprobs(again))
        return again

    def storage(self, model: Decoder, num_rows: int) -> tuple[KVStorage, list[int]]:
        """Return KV tensors for `num_rows` rows of a model, and their block table.

        Requests of the engine do not use these tensors.
        """
        size = self.engine.config.block_size
        num_blocks = -(-num_rows // size)
        key = id(model.spec)
        held = self._storages.get(key)
        if held is None or held.num_blocks < num_blocks:
            held = KVStorage(
                model.spec,
                2 ** (num_blocks - 1).bit_length(),
                size,
                model.dtype,
                model.device,
                kv_cache_dtype=self.engine.config.kv_cache_dtype,
            )
            self._storages[key] = held
            self.decoders.renew()  # a decoder keeps recordings of each storage that it has used
        return held, list(range(num_blocks))

    def _reference_logprobs(self, sample: TrainingSample) -> tuple[float, ...]:
        model = self.engine.runner.models[REFERENCE].twin()
        tokens, first = (
            [*sample.prompt_tokens, *sample.completion_tokens],
            len(sample.prompt_tokens) - 1,
        )
        storage, table = self.storage(model, len(tokens) - 1)
        logprobs: list[float] = []
        for start in range(0, len(tokens) - 1, MOST_ROWS):
            end = min(start + MOST_ROWS, len(tokens) - 1)
            scores = [(row - start, tokens[row + 1]) for row in range(max(start, first), end)]
            batch = batch_of_rows(
                [Rows(tokens[start:end], start, table)],
                storage.block_size,
                scores=scores,
                device=model.device,
            )
            logprobs += model.forward(batch, storage).scores.tolist()
        return tuple(logprobs)


class Draws(NamedTuple):
    """Rules for drawing a sample's tokens."""

    sample: TrainingSample
    params: SamplingParams
    stop_ids: frozenset[int]
    grammar: "DraftGrammar | None" = None
    rules: TokenRules | None = None

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


class _Drawn(NamedTuple):
    """One token and the results of its draw."""

    token_id: int
    logprob: float
    raw_logprob: float
    log_kept_mass: float
    mask: tuple[int, ...]
    top: TopLogprobs
    named: bytes = b""
    raw_named: bytes = b""


class _Run:
    """State of one replay: its tokens, the version of each stored row, and its draws."""

    def __init__(self, replayer: Replayer, draws: "Draws") -> None:
        self.how = draws
        sample, self.params, self.stop_ids, *_ = draws
        self.sample = sample
        self.prompt_len = len(sample.prompt_tokens)
        # a draft until drawn again
        self.tokens = [*sample.prompt_tokens, *sample.completion_tokens]
        self.sampled = was_sampled(sample)
        self.context: tuple[int, ...] = ()  # version of each stored row
        self.drawn: dict[int, _Drawn] = {}  # by index in the completion
        self.version_starts: list[tuple[int, int]] = []
        fields = prompt_scoring(self.params, sample.prompt_tokens)
        self.scored, self.targets = fields["scored"], fields["score_targets"]
        self.score_width = len(self.targets[0]) if len(self.targets) else 1
        self.prompt_scores: list[float] = []
        self.prompt_best: list[TopLogprobs] = []
        # the sample's tokens after the latest draw are no longer a valid draft
        self.diverged = False
        self.decoders = replayer.decoders
        self.storage, self.table = replayer.storage(
            replayer.engine.model, max(len(self.tokens) - 1, 1)
        )

    def go(self, stretch: Stretch) -> None:
        """Draw the tokens of a stretch, after recomputing context rows of other versions."""
        pairs = zip(self.context, stretch.row_versions, strict=False)
        same = next(
            (row for row, (mine, wanted) in enumerate(pairs) if mine != wanted), len(self.context)
        )
        row, end = min(same, self.prompt_len + stretch.start - 1), len(stretch.row_versions)
        while row < end:
            row = self._advance(row, stretch)
            self.context = stretch.row_versions[:row]

    def _advance(self, start: int, stretch: Stretch) -> int:
        """Compute rows from `start` on and draw from them; return the number of valid rows."""
        versions = stretch.row_versions
        end = min(start + MOST_ROWS, len(versions))
        end = next((row for row in range(start, end) if versions[row] != versions[start]), end)
        drawing = [row for row in range(start, end) if self._draws_from(row, stretch)]
        if self.diverged and drawing:
            end, drawing = drawing[0] + 1, drawing[:1]
        for row, drawn in zip(
            drawing, self._compute(start, end, drawing, versions[start]), strict=True
        ):
            index = row + 1 - self.prompt_len
            self.drawn[index] = drawn
            if not self.version_starts or self.version_starts[-1][0] != versions[row]:
                self.version_starts.append((versions[row], index))
            if drawn.token_id != self.tokens[row + 1]:
                self.tokens[row + 1] = drawn.token_id
                self.diverged = True
                return row + 1
        return end

    def _draws_from(self, row: int, stretch: Stretch) -> bool:
        index = row + 1 - self.prompt_len
        return stretch.start <= index < stretch.end and self.sampled[index]

    def _compute(self, start: int, end: int, drawing: Sequence[int], version: int) -> list[_Drawn]:
        """Run one forward pass over rows [start, end), and draw from some of them."""
        model = self.decoders.get(version)
        known = self.scored.start + len(self.prompt_scores) // self.score_width
        to_score = range(max(start, known), min(end, self.scored.stop))
        batch = batch_of_rows(
            [Rows(self.tokens[start:end], start, self.table[: -(-end // self.storage.block_size)])],
            self.storage.block_size,
            draws=[row - start for row in drawing],
            scores=[(row - start, token) for row in to_score for token in self._targets(row)],
            num_best=self.params.prompt_top_logprobs if to_score else 0,
            device=model.device,
        )
        result = model.forward(batch, self.storage)
        self.prompt_scores += result.scores.tolist()
        if result.best is not None:
            self.prompt_best += itertools.starmap(
                _best, zip(*(each.tolist() for each in result.best), strict=True)
            )
        if not drawing:
            return []
        requests = [
            self.how.request(self.tokens, index, row + 1) for index, row in enumerate(drawing)
        ]
        sampled = Sampled(
            model.draw(result.hidden, sampling_batch(requests, model.device)),
            result.scores,
        ).wait()
        rows = range(len(drawing))
        named = [each or b"" for each in sampled.named or (None, None)]
        size = 4 * len(self.params.logprob_token_ids)
        return [
            _Drawn(
                sampled.token_ids[i],
                sampled.logprobs[i],
                sampled.raw_logprobs[i],
                sampled.log_kept_mass[i],
                tuple(sampled.masks[i]) if sampled.masks is not None else (),
                _best(*sampled.top[i]) if sampled.top is not None else TopLogprobs((), ()),
                *(each[i * size : (i + 1) * size] for each in named),
            )
            for i in rows
        ]

    def _targets(self, row: int) -> Sequence[int]:
        if not len(self.targets):
            return (self.tokens[row + 1],)
        return self.targets[row - self.scored.start]

    def result(self) -> TrainingSample:
        """Return the replayed sample. Values at appended tokens are copied from the sample."""
        sample, params, drawn = self.sample, self.params, self.drawn
        length = len(sample.completion_tokens)
        if not length:
            return sample

        def column(field: str, recorded: Sequence[Any] | None) -> tuple[Any, ...]:
            return tuple(
                getattr(drawn[i], field)
                if i in drawn
                else recorded[i]
                if recorded and i < len(recorded)
                else None
                for i in range(length)
            )

        spans = [*self.version_starts, (0, length)]
        versions = tuple(
            VersionSpan(v, start, end) for (v, start), (_, end) in itertools.pairwise(spans)
        )
        masks = sample.sampling_mask.rows() if sample.sampling_mask is not None else None
        again = replace(
            sample,
            completion_tokens=tuple(self.tokens[self.prompt_len :]),
            logprobs=column("logprob", sample.logprobs),
            log_kept_mass=column("log_kept_mass", sample.log_kept_mass),
            raw_logprobs=column("raw_logprob", sample.raw_logprobs)
            if params.raw_logprobs
            else None,
            sampling_mask=SamplingMask.of([mask or () for mask in column("mask", masks)])
            if params.sampling_mask
            else None,
            top_logprobs=column("top", sample.top_logprobs) if params.top_logprobs else None,
            prompt_logprobs=(math.nan, *self.prompt_scores[:: self.score_width])
            if params.prompt_logprobs
            else None,
            prompt_top_logprobs=(TopLogprobs((), ()), *self.prompt_best)
            if params.prompt_top_logprobs
            else None,
            **self._named(length),
            weight_versions=versions,
            weight_version=versions[-1].version if versions else sample.weight_version,
        )
        return self._finished(again)

    def _named(self, length: int) -> dict[str, LogprobMatrix]:
        """Return the logprobs of named ids. Those of appended tokens are the sample's."""
        params, sample, width = self.params, self.sample, len(self.params.logprob_token_ids)
        matrices: dict[str, LogprobMatrix] = {}
        for name, field in (
            ("token_id_logprobs", "named"),
            ("raw_token_id_logprobs", "raw_named"),
        ):
            recorded = getattr(sample, name)
            if recorded is not None:
                rows = (
                    getattr(self.drawn[i], field)
                    if i in self.drawn
                    else recorded.rows(i, i + 1).data
                    for i in range(length)
                )
                matrices[name] = LogprobMatrix((length, width), b"".join(rows))
        if params.prompt_logprob_token_ids:
            matrices["prompt_token_id_logprobs"] = prompt_matrix(
                params, self.scored.start, self.score_width, self.prompt_scores
            )
        return matrices

    def _finished(self, sample: TrainingSample) -> TrainingSample:
        """Return the sample with the finish reason of its replay.

        A replay cannot repeat aborts, stop strings and appended tokens, so their finish reasons are
        copied.
        """
        length, last = len(sample.completion_tokens), sample.completion_tokens[-1]
        if not all(self.sampled) or sample.finish_reason == "abort":
            return sample
        if last in self.stop_ids and length > self.params.min_tokens:
            return replace(sample, finish_reason="stop", stop_reason=last)
        if sample.finish_reason == "stop" and isinstance(sample.stop_reason, str):
            return sample
        if length >= self.params.max_tokens:
            return replace(sample, finish_reason="length", stop_reason=None)
        grammar = self.how.grammar
        if grammar is None or not grammar.ends_at(self.tokens, len(self.tokens)):
            return replace(sample, finish_reason="abort", stop_reason=None)
        stop_reason = last if last in self.stop_ids else None
        return replace(sample, finish_reason="stop", stop_reason=stop_reason)


def _best(token_ids: Sequence[int], logprobs: Sequence[float]) -> TopLogprobs:
    best = [pair for pair in zip(token_ids, logprobs, strict=True) if pair[1] > -math.inf]
    return TopLogprobs(
        tuple(token_id for token_id, _ in best), tuple(logprob for _, logprob in best)
    )
