"""`score`: logprobs of existing tokens, bit for bit as the engine reports them for its samples."""

import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nano_inference.arrays import as_torch
from nano_inference.core.sequence import POLICY, ServedAdapter
from nano_inference.engine.engine import InferenceEngine
from nano_inference.engine.scoring import ScoreRequest, checked_sequence, score_tokens
from nano_inference.errors import InvalidRequest
from nano_inference.fields.checks import real, whole
from nano_inference.ranks.parts import require_one_rank
from nano_inference.rl.param_masks import masks_of_params, masks_only
from nano_inference.structured.grammar import Grammar
from nano_inference.structured.token_masks import NotInGrammar
from nano_inference.types import RoutedExperts, SamplingParams

TokenIds = Listed[int] | Tensor
# masks of a sequence's tokens: those of a grammar, or all masks of a sample's parameters
Masking = Grammar | SamplingParams
Grammars = Masking | Iterable[Masking | None] | None
Routed = Iterable[RoutedExperts | None] | None
Targets = Iterable[Tensor | np.ndarray | Listed[Any] | None] | None


def score(
    engine: InferenceEngine,
    sequences: Iterable[TokenIds],
    *,
    from_position: int | Iterable[int] = 0,
    temperature: float = 1.0,
    grammar: Grammars = None,
    adapter: str | None = None,
    targets: Targets = None,
) -> list[Tensor]:
    """Compute the logprob of each token given the previous ones, under the policy.

    The logprobs are bit for bit those that the engine reports for tokens that it draws at this
    temperature, under this grammar and without filters. A common prefix of several sequences is
    computed once, with the prefix cache, and scored once.

    Args:
        engine: Engine that scores the sequences, among its other requests. You may call `score`
            from any thread.
        sequences: Token ids of each sequence.
        from_position: First position to score: one for all sequences, or one for each. Rows before
            it may come from the prefix cache.
        temperature: Divisor of the logits. 0: the unmodified model's logprobs, as for a sample at
            temperature 0.
        grammar: Grammar under which the tokens from `from_position` on were drawn, as in a sample's
            `sampling_params.grammar`: one for all sequences, or one (or None) for each. Their
            logprobs are those among the allowed tokens. A sample's `sampling_params` stand for all
            masks of the sample: grammar, `allowed_token_ids`, `min_tokens`, `bad_words` and
            `thinking_token_budget`.
        adapter: Name of a loaded adapter to apply to the policy's weights.
        targets: Tokens to score instead of the sequence's own, one tensor (or None) for each
            sequence: int64 [len(sequence) - from_position], or [len(sequence) - from_position, k]
            for k tokens at each position. The sequence's own tokens remain the context, so its
            last token has no effect.

    Returns:
        float32 [len(sequence) - from_position] for each sequence, or the shape of its targets, on
        the CPU. The entry of a sequence's first token is nan, because nothing precedes it.

    Raises:
        InvalidRequest: A sequence is empty, a token id, position or temperature is out of range,
            or targets have another shape. A grammar cannot be compiled or does not allow a token
            (the message names its position). Grammars or targets are used with several ranks.
        RequestTooLarge: A sequence does not fit into the engine.
        RequestAborted: A sequence was aborted.
        EngineDead: The engine was shut down or failed.
    """
    batch = check_batch(engine, sequences, from_position, temperature, grammar, targets=targets)
    return score_batch(engine, batch, POLICY, engine.intake.adapter_of(adapter)).logprobs


class TopTokens(NamedTuple):
    """Most probable tokens at each position of a sequence, best first, ties by lower id.

    Attributes:
        token_ids: int64 [positions, k].
        logprobs: float32 [positions, k].
    """

    token_ids: Tensor
    logprobs: Tensor


def top_tokens(
    engine: InferenceEngine,
    sequences: Iterable[TokenIds],
    k: int,
    *,
    from_position: int | Iterable[int] = 1,
    temperature: float = 1.0,
) -> list[TopTokens]:
    """Compute the k most probable tokens at each position, given the tokens before it.

    A teacher names them for a student, whose logprobs of the same ids `PolicyModel.logprobs`
    returns: pass them as `targets`. Arguments and errors are those of `score`, but positions begin
    at 1, because no distribution precedes the first token.
    """
    whole("k", k, 1, engine.spec.vocab_size + 1)
    batch = check_batch(engine, sequences, from_position, temperature)
    if 0 in batch.positions:
        raise InvalidRequest(
            "from_position=0 has no distribution, because nothing precedes the first token; use 1."
        )
    pairs = zip(batch.token_ids, batch.positions, strict=True)
    requests = [ScoreRequest(ids, position, num_best=k) for ids, position in pairs]
    best = [scores.best for scores in score_tokens(engine, requests)]
    ids = [_matrix([each.token_ids for each in rows], k, torch.int64) for rows in best]
    logprobs = [_matrix([each.logprobs for each in rows], k, torch.float32) for rows in best]
    if batch.temperature != 1:  # the same tokens, with other logprobs
        again = check_batch(engine, batch.token_ids, batch.positions, temperature, targets=ids)
        logprobs = score_batch(engine, again, POLICY).logprobs
    return [TopTokens(*pair) for pair in zip(ids, logprobs, strict=True)]


def _matrix(rows: Listed[Listed[float]], k: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(rows, dtype=dtype).view(-1, k)


class SequenceMasks(NamedTuple):
    """Masks of a sequence's tokens, int32 [W] each, from the first scored one on.

    Equal masks of a batch are the same array object.
    """

    grammar: Masking
    words: list[np.ndarray]


class SequenceTargets(NamedTuple):
    """Tokens that are scored instead of a sequence's own, from the first scored position on.

    Every position has `width` of them. `in_columns` is True if the caller passed a matrix.
    """

    rows: list[list[int]]
    width: int
    in_columns: bool


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """Checked arguments: tokens of each sequence from its position on, at one temperature (> 0).

    Some sequences may have masks, some may have targets other than their own tokens.
    """

    token_ids: list[list[int]]
    positions: list[int]
    temperature: float
    masks: list[SequenceMasks | None]
    routed: list[RoutedExperts | None]
    targets: list[SequenceTargets | None]

    def width(self, index: int) -> int:
        """Return the number of logprobs at each position of a sequence."""
        targets = self.targets[index]
        return 1 if targets is None else targets.width

    def num_logprobs(self, index: int) -> int:
        """Return the number of logprobs of a sequence at all positions."""
        return (len(self.token_ids[index]) - self.positions[index]) * self.width(index)

    def shaped(self, index: int, logprobs: Tensor) -> Tensor:
        """Return the logprobs of a sequence in the shape of its targets."""
        targets = self.targets[index]
        wide = targets is not None and targets.in_columns
        return logprobs.view(-1, self.width(index)) if wide else logprobs


def check_batch(
    engine: InferenceEngine,
    sequences: Iterable[TokenIds],
    from_position: int | Iterable[int],
    temperature: float,
    grammar: Grammars = None,
    routed_experts: Routed = None,
    targets: Targets = None,
) -> ScoreBatch:
    """Check the arguments of `score`, and the experts that sequences were routed to before.

    Raises the errors of `score`.
    """
    token_ids = [
        checked_sequence(engine, sequence, place) for place, sequence in enumerate(sequences)
    ]
    positions, above_0 = _positions(from_position, token_ids), _temperature(temperature)
    masks: list[SequenceMasks | None]
    masks = _masks(engine, token_ids, positions, _grammars(grammar, len(token_ids)))
    if temperature == 0:  # logprobs are the unmodified model's
        masks = [None] * len(token_ids)
    routed = _routed(engine, token_ids, routed_experts)
    others = _targets(engine, token_ids, positions, targets)
    for index, (replaced, masked) in enumerate(zip(others, masks, strict=True)):
        if replaced is not None and masked is not None:
            raise InvalidRequest(
                f"sequence {index} has both a grammar and targets; pass only one of them, because "
                "a grammar applies to the sequence's own tokens."
            )
    return ScoreBatch(token_ids, positions, above_0, masks, routed, others)


def _targets(
    engine: InferenceEngine,
    token_ids: list[list[int]],
    positions: list[int],
    targets: Targets,
) -> list[SequenceTargets | None]:
    """Return each sequence's targets, or None for its own tokens. Raises `InvalidRequest`."""
    if targets is None:
        return [None] * len(token_ids)
    rows = list(targets)
    if len(rows) != len(token_ids):
        raise InvalidRequest(
            f"got {len(rows)} targets for {len(token_ids)} sequences; pass one, or None, for each."
        )
    checked = [
        None if each is None else _of_targets(engine, ids, position, each, place)
        for place, (each, ids, position) in enumerate(zip(rows, token_ids, positions, strict=True))
    ]
    if any(each is not None for each in checked):
        require_one_rank(engine.runner, "scoring of targets")
    return checked


def _of_targets(
    engine: InferenceEngine, token_ids: list[int], position: int, targets: Any, index: int
) -> SequenceTargets | None:
    try:
        values = np.asarray(targets)
    except ValueError:  # rows of several lengths
        values = np.empty(0, object)
    wanted = len(token_ids) - position
    if values.dtype.kind not in "iu" or values.ndim not in (1, 2) or len(values) != wanted:
        raise InvalidRequest(
            f"targets of sequence {index} have dtype {values.dtype} and shape "
            f"{list(values.shape)}; pass integers of shape [{wanted}] or [{wanted}, k], one row "
            f"for each token from from_position={position} on."
        )
    if values.size == 0 and wanted:
        raise InvalidRequest(f"targets of sequence {index} have no columns; pass at least one.")
    if values.size and not 0 <= values.min() <= values.max() < engine.spec.vocab_size:
        raise InvalidRequest(
            f"targets of sequence {index} hold a token that is not in "
            f"[0, {engine.spec.vocab_size})."
        )
    in_columns = values.ndim == 2
    if not in_columns and values.tolist() == token_ids[position:]:
        return None
    columns = values if in_columns else values[:, None]
    rows = columns.tolist()[max(position, 1) - position :]
    return SequenceTargets(rows, columns.shape[-1], in_columns)


def _routed(
    engine: InferenceEngine, token_ids: list[list[int]], routed_experts: Routed
) -> list[RoutedExperts | None]:
    """Return the experts of each sequence, if the caller passed them.

    Raises `InvalidRequest` if they do not fit the sequences.
    """
    if routed_experts is None:
        return [None] * len(token_ids)
    routes, moe = list(routed_experts), engine.spec.moe
    if len(routes) != len(token_ids):
        raise InvalidRequest(
            f"got {len(routes)} routed_experts for {len(token_ids)} sequences; pass one, or None, "
            "for each."
        )
    if moe is None:
        raise InvalidRequest(
            f"{engine.spec.architecture} has no experts; leave out routed_experts."
        )
    for index, (route, ids) in enumerate(zip(routes, token_ids, strict=True)):
        wanted = (len(ids) - 1, len(moe.layers), moe.experts_per_token)
        if route is not None and route.shape != wanted:
            raise InvalidRequest(
                f"routed_experts of sequence {index} have shape {route.shape}; this model needs "
                f"{wanted} for {len(ids)} tokens."
            )
    return routes


def require_same_experts(
    batch: ScoreBatch, routes: Listed[Tensor | None], layers: Listed[bool]
) -> None:
    """Raise `InvalidRequest` if a sequence is routed to other experts than the caller passed.

    Sequences that were not computed are skipped.

    Args:
        batch: Batch with the caller's experts.
        routes: Experts of the forward pass, as in `BatchScores`.
        layers: True for each layer of the model that has experts.
    """
    of_experts = np.array(layers).nonzero()[0]
    for index, (expected, actual) in enumerate(zip(batch.routed, routes, strict=True)):
        if expected is None or actual is None:
            continue
        theirs, ours = np.asarray(expected)[:, of_experts], actual.numpy()
        differing = (theirs != ours).any(axis=2).nonzero()
        if len(differing[0]):
            token, layer = (int(each[0]) for each in differing)
            raise InvalidRequest(
                f"sequence {index}, token {token}, layer {of_experts[layer]}: the sample used "
                f"experts {theirs[token, layer].tolist()}, but this model chooses "
                f"{ours[token, layer].tolist()}; score it under the weights and numerics that "
                "computed it, or leave out routed_experts."
            )


class BatchScores(NamedTuple):
    """Results of scoring a batch, one entry for each sequence.

    Attributes:
        logprobs: Results of `score`.
        routes: Experts of all rows but the last, int16 [rows, expert layers, K]. None: no logprob
            was requested, or the weight set's decoder keeps no record.
    """

    logprobs: list[Tensor]
    routes: list[Tensor | None]


def score_batch(
    engine: InferenceEngine,
    batch: ScoreBatch,
    weight_set: str,
    adapter: ServedAdapter | None = None,
) -> BatchScores:
    """Score a batch under a weight set and, optionally, an adapter of the policy."""
    starts = [max(position, 1) for position in batch.positions]
    plan = _share(_keys(batch, starts), starts, _kinds(batch))
    requests = [_request(batch, part.index, part.start, starts[part.index]) for part in plan]
    known: dict[int, list[float]] = {}  # logprobs from `starts` on
    routes: dict[int, Tensor | None] = {}
    for part, (scores, routed, _) in zip(
        plan, score_tokens(engine, requests, weight_set, adapter), strict=True
    ):
        first, width = starts[part.index], batch.width(part.index)
        copied = (
            known[part.source][
                (first - starts[part.source]) * width : (part.start - starts[part.source]) * width
            ]
            if part.shared
            else []
        )
        known[part.index] = copied + scores
        if routed is None and part.shared:  # the whole sequence is a prefix of the source
            source = routes[part.source]
            routed = None if source is None else source[: len(batch.token_ids[part.index]) - 1]
        routes[part.index] = None if routed is None else as_torch(routed)
    logprobs = [
        batch.shaped(
            index,
            torch.tensor(
                [math.nan] * ((position == 0) * batch.width(index)) + known[index],
                dtype=torch.float32,
            ),
        )
        for index, position in enumerate(batch.positions)
    ]
    return BatchScores(logprobs, [routes[index] for index in range(len(logprobs))])


def _request(batch: ScoreBatch, index: int, start: int, first: int) -> ScoreRequest:
    """Return a request to score a sequence from `start` on.

    The batch holds masks and targets of the sequence from `first` on.
    """
    masks, targets = batch.masks[index], batch.targets[index]
    return ScoreRequest(
        batch.token_ids[index],
        start,
        batch.temperature,
        masks.words[start - first :] if masks is not None else (),
        targets.rows[start - first :] if targets is not None else (),
    )


def _keys(batch: ScoreBatch, starts: list[int]) -> list[list[int]]:
    """Return one number for each token of each sequence.

    Two sequences of the same kind have the same scores as far as their numbers agree.
    """
    if not any(batch.targets):
        return batch.token_ids
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    return [
        [
            numbers.setdefault((token, tuple(target)), len(numbers))
            for token, target in zip(ids, _targets_of(batch, index, starts[index]), strict=True)
        ]
        for index, ids in enumerate(batch.token_ids)
    ]


def _targets_of(batch: ScoreBatch, index: int, start: int) -> Iterator[Listed[int]]:
    """Yield the tokens to score at each position of a sequence: its own ones before `start`."""
    ids, targets = batch.token_ids[index], batch.targets[index]
    single = [[token] for token in ids]
    return itertools.chain(single[:start], single[start:] if targets is None else targets.rows)


@dataclass(frozen=True, slots=True)
class _Own:
    """Part of a sequence that is scored rather than copied: from `start` on.

    If `shared`, the scores before `start` are copied from sequence `source`.
    """

    index: int
    start: int
    source: int = -1
    shared: bool = False


def _kinds(batch: ScoreBatch) -> list[int]:
    """Return a number for each sequence, its kind.

    Sequences of the same kind have the same masks as far as their tokens agree.
    """
    numbers: dict[tuple[Masking, int] | None, int] = {None: 0}
    keys = [
        None if masks is None else (masks.grammar, start)
        for masks, start in zip(batch.masks, batch.positions, strict=True)
    ]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _share(token_ids: list[list[int]], starts: list[int], kinds: list[int]) -> list[_Own]:
    """Assign each scored token to one sequence, so that common prefixes of a kind are scored once.

    Sorted by token ids, a sequence shares its longest prefix with the one just before it, among all
    earlier ones of its kind.
    """
    order = sorted(
        range(len(token_ids)), key=lambda index: (kinds[index], token_ids[index], starts[index])
    )
    plan: list[_Own] = []
    for rank, index in enumerate(order):
        start, source = starts[index], order[rank - 1]
        if rank and kinds[source] == kinds[index] and starts[source] <= start:
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
            f"from_position={from_position!r} must be an integer or one integer for each sequence."
        ) from None
    if len(positions) != len(token_ids):
        raise InvalidRequest(
            f"got {len(positions)} positions for {len(token_ids)} sequences; pass one for all, or "
            "one for each."
        )
    for index, (position, ids) in enumerate(zip(positions, token_ids, strict=True)):
        if not 0 <= position <= len(ids):
            raise InvalidRequest(
                f"from_position={position} is outside sequence {index}; it must be from 0 to "
                f"{len(ids)}."
            )
    return positions


def _grammars(grammar: Grammars, num_sequences: int) -> list[Masking | None]:
    grammars: Any = [grammar] * num_sequences
    if grammar is not None and not isinstance(grammar, Masking):
        grammars = list(grammar) if isinstance(grammar, Iterable) else [grammar]
    if not all(isinstance(each, Masking | None) for each in grammars):
        raise InvalidRequest(
            f"grammar={grammar!r} must be a Grammar or SamplingParams, or one (or None) for each "
            "sequence."
        )
    if len(grammars) != num_sequences:
        raise InvalidRequest(
            f"got {len(grammars)} grammars for {num_sequences} sequences; pass one for all, or one "
            "for each."
        )
    return grammars


def _masks(
    engine: InferenceEngine,
    token_ids: list[list[int]],
    positions: list[int],
    maskings: list[Masking | None],
) -> list[SequenceMasks | None]:
    """Return the masks of each sequence that has any. They start at its position."""
    grammars = [each.grammar if isinstance(each, SamplingParams) else each for each in maskings]
    if any(masking is not None for masking in maskings):
        require_one_rank(engine.runner, "scoring under a grammar")
        engine.shared.require_alive()
    under = [index for index, grammar in enumerate(grammars) if grammar is not None]
    texts = [
        (grammar, tuple(token_ids[index][positions[index] :]))
        for index, grammar in enumerate(grammars)
        if grammar is not None
    ]
    try:
        words = engine.intake.token_masks.of(texts)
    except NotInGrammar as problem:
        index = under[problem.text]
        at = positions[index] + problem.place
        raise InvalidRequest(
            f"token {token_ids[index][at]} at position {at} of sequence {index} {problem}; the "
            "grammar starts at from_position, and all tokens from there on must follow it."
        ) from None
    by_sequence = dict(zip(under, words, strict=True))
    masks_of: list[SequenceMasks | None] = [None] * len(token_ids)
    for index, masking in enumerate(maskings):
        masks, start = by_sequence.get(index), positions[index]
        if isinstance(masking, SamplingParams):
            masking = masks_only(masking)
            masks = masks_of_params(engine.intake, masking, token_ids[index], start, masks, index)
        if masking is not None and masks is not None:
            masks_of[index] = SequenceMasks(masking, masks[max(start, 1) - start :])
    return masks_of


def _temperature(temperature: Any) -> float:
    real("temperature", temperature, 0.0, math.inf)
    return float(temperature) or 1.0
