"""`score`: logprobs of given tokens, as the engine itself would have reported them."""

import math
import operator
from collections.abc import Iterable
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nano_inference.checked import real
from nano_inference.engine.engine import InferenceEngine
from nano_inference.engine.scoring import ScoreRequest, checked_sequence, score_tokens
from nano_inference.errors import InvalidRequest
from nano_inference.scheduling.sequence import POLICY

TokenIds = Listed[int] | Tensor


def score(
    engine: InferenceEngine,
    sequences: Iterable[TokenIds],
    *,
    from_position: int | Iterable[int] = 0,
    temperature: float = 1.0,
) -> list[Tensor]:
    """Log-probability of each token given those before it, under the policy.

    To the bit what the engine reports for tokens that it draws itself at this temperature without
    filters. What several sequences have in common at their beginning is computed once, with the
    prefix cache, and scored once.

    Args:
        engine: scores them in its loop, among the requests that it serves. Any thread may call
            this.
        sequences: token ids.
        from_position: the first position wanted; one for all, or one a sequence. Rows before it may
            come from the prefix cache.
        temperature: logits are divided by it; 0: the model's own logprobs, as a sample at
            temperature 0 has them.

    Returns:
        float32 [len(sequence) - from_position] a sequence, on the CPU. The first token of a
        sequence has nothing before
        it: its entry is nan.

    Raises:
        InvalidRequest: a sequence is empty or holds a bad id, a position is outside it, or the
            temperature is negative.
        RequestTooLarge: a sequence does not fit into the engine.
        RequestAborted: a sequence was aborted.
        EngineDead: the engine was shut down or failed.
    """
    return score_batch(
        engine, check_batch(engine, sequences, from_position, temperature), POLICY
    ).logprobs


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """Checked arguments: tokens of each sequence from its position on, at one temperature (above
    0).
    """

    token_ids: list[list[int]]
    positions: list[int]
    temperature: float


def check_batch(
    engine: InferenceEngine,
    sequences: Iterable[TokenIds],
    from_position: int | Iterable[int],
    temperature: float,
) -> ScoreBatch:
    """Check what `score` is called with. Raises as it says there."""
    token_ids = [
        checked_sequence(engine, sequence, place) for place, sequence in enumerate(sequences)
    ]
    return ScoreBatch(token_ids, _positions(from_position, token_ids), _temperature(temperature))


class BatchScores(NamedTuple):
    """What scoring a batch gave, one entry a sequence.

    Attributes:
        logprobs: the results of `score`.
        routes: the experts of all rows but the last, int16 [rows, layers of experts, K]; None where
            no logprob was wanted, or the weight set's decoder keeps no record.
    """

    logprobs: list[Tensor]
    routes: list[Tensor | None]


def score_batch(engine: InferenceEngine, batch: ScoreBatch, weight_set: str) -> BatchScores:
    """Score a batch under a weight set."""
    starts = [max(position, 1) for position in batch.positions]
    plan = _share(batch.token_ids, starts)
    requests = [
        ScoreRequest(batch.token_ids[own.index], own.start, batch.temperature) for own in plan
    ]
    known: dict[int, list[float]] = {}  # logprobs from `starts` on
    routes: dict[int, Tensor | None] = {}
    for own, (scores, routed) in zip(plan, score_tokens(engine, requests, weight_set), strict=True):
        first = starts[own.index]
        copied = (
            known[own.source][first - starts[own.source] : own.start - starts[own.source]]
            if own.shared
            else []
        )
        known[own.index] = copied + scores
        if routed is None and own.shared:  # the whole sequence is a beginning of the source
            source = routes[own.source]
            routed = None if source is None else source[: len(batch.token_ids[own.index]) - 1]
        routes[own.index] = routed
    logprobs = [
        torch.tensor([math.nan] * (position == 0) + known[index], dtype=torch.float32)
        for index, position in enumerate(batch.positions)
    ]
    return BatchScores(logprobs, [routes[index] for index in range(len(logprobs))])


@dataclass(frozen=True, slots=True)
class _Own:
    """The part of a sequence that is scored for it, [start, end); what stands before is copied from
    `source`.
    """

    index: int
    start: int
    source: int = -1
    shared: bool = False


def _share(token_ids: list[list[int]], starts: list[int]) -> list[_Own]:
    """Who scores what, so that common beginnings are scored once.

    In the order of token ids a sequence has no more in common with any earlier one than with the
    one just before it.
    """
    order = sorted(range(len(token_ids)), key=lambda index: (token_ids[index], starts[index]))
    plan: list[_Own] = []
    for place, index in enumerate(order):
        start, source = starts[index], order[place - 1]
        if place and starts[source] <= start:
            common = max(start, _common_length(token_ids[index], token_ids[source]))
            plan.append(
                _Own(index, min(common, len(token_ids[index])), source, shared=common > start)
            )
        else:
            plan.append(_Own(index, start))
    return plan


def _common_length(one: list[int], other: list[int]) -> int:
    length = min(len(one), len(other))
    differ = np.flatnonzero(np.array(one[:length]) != np.array(other[:length]))
    return int(differ[0]) if len(differ) else length


def _positions(from_position: int | Iterable[int], token_ids: list[list[int]]) -> list[int]:
    try:
        if isinstance(from_position, Iterable):
            positions = [operator.index(each) for each in from_position]
        else:
            positions = [operator.index(from_position)] * len(token_ids)
    except TypeError:
        raise InvalidRequest(
            f"from_position={from_position!r} must be an integer, or one a sequence."
        ) from None
    if len(positions) != len(token_ids):
        raise InvalidRequest(
            f"{len(positions)} positions for {len(token_ids)} sequences; give one, or one for each."
        )
    for place, (position, ids) in enumerate(zip(positions, token_ids, strict=True)):
        if not 0 <= position <= len(ids):
            raise InvalidRequest(
                f"from_position={position} is outside sequence {place}: 0 to {len(ids)}."
            )
    return positions


def _temperature(temperature: Any) -> float:
    real("temperature", temperature, 0.0, math.inf)
    return float(temperature) or 1.0
