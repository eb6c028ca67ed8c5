"""Scoring of existing tokens: sequences without samples, computed in the loop with all others."""

from collections.abc import Callable
from collections.abc import Sequence as Listed
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nano_inference.arrays import Tensor
from nano_inference.core.sequence import POLICY, CheckedRequest, Sequence, ServedAdapter
from nano_inference.engine import generation
from nano_inference.engine.engine import InferenceEngine
from nano_inference.engine.requests import checked_ids, is_text
from nano_inference.errors import InvalidRequest, RequestAborted, RequestTooLarge, WeightUpdateError
from nano_inference.models.routes import RouteRecord
from nano_inference.types import SamplingParams, TopLogprobs, TrainingSample

ATTEMPTS = 8  # attempts to score under a single version of the weights


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Sequence of tokens to score from position `start` to its end, each given the tokens before
    it.

    Attributes:
        token_ids: Tokens of the sequence.
        start: Position of the first scored token, at least 1.
        temperature: Temperature above 0.
        masks: Mask of each scored token, int32 [W]. Empty without masks.
        targets: Tokens to score at each position instead of the sequence's own, equally many per
            position. Empty to score the sequence's own tokens.
        num_best: Number of most probable tokens to return at each position.
    """

    token_ids: list[int]
    start: int
    temperature: float = 1.0
    masks: Listed[np.ndarray] = ()
    targets: Listed[Listed[int]] = ()
    num_best: int = 0


class Scores(NamedTuple):
    """Result of scoring a request.

    Attributes:
        logprobs: Logprobs of its tokens from `start` on, or of its targets, position by position.
        routes: Experts of all its rows except the last, int16 [rows, layers of experts, K]. None if
            nothing was scored, or if the decoder does not record them.
        best: Most probable tokens at each of these positions, under the unmodified model.
    """

    logprobs: list[float]
    routes: Tensor | None = None
    best: tuple[TopLogprobs, ...] = ()


def checked_sequence(engine: InferenceEngine, sequence: Any, index: int) -> list[int]:
    """Return the token ids of a sequence that can be scored. Errors name it by `index`.

    Raises `InvalidRequest` or `RequestTooLarge`.
    """
    if is_text(sequence) or not hasattr(sequence, "__len__"):
        raise InvalidRequest(
            f"sequence {index} must be a list of token ids, not {type(sequence).__name__}."
        )
    if len(sequence) == 0:
        raise InvalidRequest(f"sequence {index} is empty; give at least one token id.")
    token_ids = checked_ids(sequence, engine.spec.vocab_size)
    most, config = engine.max_model_len, engine.config
    if len(token_ids) > most:
        raise RequestTooLarge(
            f"sequence {index} of {len(token_ids)} tokens exceeds max_model_len={most}."
        )
    limit = config.max_tokens_per_batch
    if not config.enable_chunked_prefill and len(token_ids) - 1 > limit:
        raise RequestTooLarge(
            f"sequence {index} of {len(token_ids)} tokens exceeds max_tokens_per_batch={limit}, "
            "which limits requests without chunked prefill; enable chunked prefill, or set "
            f"max_tokens_per_batch={len(token_ids) - 1}."
        )
    return token_ids


def score_tokens(
    engine: InferenceEngine,
    requests: Listed[ScoreRequest],
    weight_set: str = POLICY,
    adapter: ServedAdapter | None = None,
) -> list[Scores]:
    """Return the logprobs of the tokens of each request, all under one version of a weight set and
    of a policy adapter. Routed experts are included if the weight set's decoder records them.

    If the weights or the adapter change meanwhile, everything is scored again under the new
    version. Any thread may call this. Raises `RequestAborted`, `EngineDead`, and
    `WeightUpdateError` if the weights or the adapter change in every attempt.
    """
    wanted = [request for request in requests if request.start < len(request.token_ids)]
    versions = engine.loop.sequences.versions
    for _ in range(ATTEMPTS):
        version = versions[weight_set]
        results, adapters = _scores(engine, wanted, weight_set, adapter)
        if versions[weight_set] == version and len(adapters) <= 1:
            scores = iter(results)
            return [
                next(scores) if request.start < len(request.token_ids) else Scores([])
                for request in requests
            ]
    raise WeightUpdateError(
        f"the weights or the adapter changed in each of {ATTEMPTS} attempts to score; score fewer "
        "tokens per call, or update less often."
    )


def _scores(
    engine: InferenceEngine,
    requests: Listed[ScoreRequest],
    weight_set: str,
    adapter: ServedAdapter | None,
) -> tuple[list[Scores], set[ServedAdapter | None]]:
    """Return the scores, and the versions of the adapter that computed them."""
    record = engine.runner.models[weight_set].routes
    routes: dict[int, Tensor] = {}
    take = None if record is None else partial(_take_routes, record, routes)
    scorers = [_scorer(engine, request, weight_set, adapter, take) for request in requests]
    by_id: dict[int, TrainingSample] = {}
    with closing(generation.run(engine.shared, scorers, progress=False)) as deltas:
        for sample in (delta.finished for delta in deltas if delta.finished is not None):
            if sample.ref_logprobs is None:
                raise RequestAborted(
                    "a sequence was aborted before it was scored; score the sequences again."
                )
            by_id[sample.request_id] = sample
    ids = [scorer.request_id for scorer in scorers]
    scores = [
        Scores(
            list(by_id[each].ref_logprobs or ()),
            routes.get(each),
            by_id[each].prompt_top_logprobs or (),
        )
        for each in ids
    ]
    return scores, {scorer.adapter for scorer in scorers}


def _take_routes(record: RouteRecord, routes: dict[int, Tensor], seq: Sequence) -> None:
    routes[seq.request_id] = record.read(
        seq.block_ids, min(seq.num_computed_tokens, seq.num_to_compute)
    )


def _scorer(
    engine: InferenceEngine,
    request: ScoreRequest,
    weight_set: str,
    adapter: ServedAdapter | None,
    at_end: Callable[[Sequence], None] | None,
) -> Sequence:
    request_id, num_tokens = engine.intake.new_request_id(), len(request.token_ids)
    stand_in = TrainingSample(  # carries the scores back
        prompt_tokens=(),
        completion_tokens=(),
        logprobs=(),
        ref_logprobs=None,
        weight_version=engine.loop.sequences.versions[weight_set],
        finish_reason="stop",
        request_id=request_id,
    )
    checked = CheckedRequest(
        request_id,
        num_tokens,
        SamplingParams(),
        scored=range(request.start - 1, num_tokens - 1),
        score_temperature=request.temperature,
        score_masks=request.masks,
        score_targets=request.targets,
        num_best=request.num_best,
        scored_sample=stand_in,
        at_end=at_end,
    )
    return Sequence(
        engine.loop.sequences.new_id(),
        checked,
        request.token_ids,
        num_samples=0,
        weight_set=weight_set,
        adapter=adapter,
    )
