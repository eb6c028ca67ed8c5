"""`score`: logprobs of given tokens, as the engine itself would have reported them."""

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

from nano_inference.core.sequence import POLICY, ServedAdapter
from nano_inference.engine.engine import InferenceEngine
from nano_inference.engine.scoring import ScoreRequest, checked_sequence, score_tokens
from nano_inference.errors import InvalidRequest
from nano_inference.fields.checks import real
from nano_inference.ranks.parts import require_one_rank
from nano_inference.structured.grammar import Grammar
from nano_inference.structured.token_masks import NotInGrammar
from nano_inference.types import RoutedExperts

TokenIds = Listed[int] | Tensor
Grammars = Grammar | Iterable[Grammar | None] | None
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
    """Log-probability of each token given those before it, under the policy.

    To the bit what the engine reports for tokens that it draws itself at this temperature, under
    this grammar and without filters. A common beginning of several sequences is
    computed once, with the prefix cache, and scored once.

    Args:
        engine: scores them in its loop, among the requests that it serves. Any thread may call
            this.
        sequences: token ids.
        from_position: the first position wanted; one for all, or one a sequence. Rows before it may
            come from the prefix cache.
        temperature: logits are divided by it; 0: the model's own logprobs, as a sample at
            temperature 0 has them.
        grammar: that the tokens from `from_position` on were drawn under, as a sample's
            `sampling_params.grammar` says; one for all, or one (or None) a sequence. Their logprobs
            are those among the tokens that it allows.
        adapter: name of a loaded adapter that scores them, on top of the policy's weights.
        targets: tokens to score in the place of the sequence's own, one tensor (or None) a
            sequence: int64 [len(sequence) - from_position], or [len(sequence) - from_position, k]
            for k tokens in each place. The sequence's tokens stay the context, so its last token
            is read by nothing.

    Returns:
        float32 [len(sequence) - from_position] a sequence, or the shape of its targets, on the CPU.
        The first token of a sequence has nothing before it: its entry is nan.

    Raises:
        InvalidRequest: a sequence is empty or holds a bad id, a position is outside it, the
            temperature is negative, a grammar cannot be compiled or does not allow a token (its
            position is named), targets have another shape or hold a bad id, or there are grammars
            or targets and several ranks.
        RequestTooLarge: a sequence does not fit into the engine.
        RequestAborted: a sequence was aborted.
        EngineDead: the engine was shut down or failed.
    """
    batch = check_batch(engine, sequences, from_position, temperature, grammar, targets=targets)
    return score_batch(engine, batch, POLICY, engine.intake.adapter_of(adapter)).logprobs


class SequenceMasks(NamedTuple):
    """The masks of a sequence's tokens, int32 [W] each, from the first one that is scored on. Equal
    ones of a batch are one array.
    """

    grammar: Grammar
    words: list[np.ndarray]


class SequenceTargets(NamedTuple):
    """The tokens that are scored in the place of a sequence's own, from the first place that is
    scored on, as many in each; `in_columns`: they were given as a matrix.
    """

    rows: list[list[int]]
    width: int
    in_columns: bool


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """Checked arguments: tokens of each sequence from its position on, at one temperature (above
    0), some under masks, some with other targets than their own tokens.
    """

    token_ids: list[list[int]]
    positions: list[int]
    temperature: float
    masks: list[SequenceMasks | None]
    routed: list[RoutedExperts | None]
    targets: list[SequenceTargets | None]

    def width(self, index: int) -> int:
        """Logprobs of each place of a sequence."""
        targets = self.targets[index]
        return 1 if targets is None else targets.width

    def num_logprobs(self, index: int) -> int:
        """Of a sequence, all places together."""
        return (len(self.token_ids[index]) - self.positions[index]) * self.width(index)

    def shaped(self, index: int, logprobs: Tensor) -> Tensor:
        """The logprobs of a sequence in the shape of its targets."""
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
    """Check what `score` is called with, and the experts that sequences went through before. Raises
    as it says there.
    """
    token_ids = [
        checked_sequence(engine, sequence, place) for place, sequence in enumerate(sequences)
    ]
    positions, above_0 = _positions(from_position, token_ids), _temperature(temperature)
    masks: list[SequenceMasks | None]
    masks = _masks(engine, token_ids, positions, _grammars(grammar, len(token_ids)))
    if temperature == 0:  # logprobs are the model's own
        masks = [None] * len(token_ids)
    routed = _routed(engine, token_ids, routed_experts)
    others = _targets(engine, token_ids, positions, targets)
    for place, (own, masked) in enumerate(zip(others, masks, strict=True)):
        if own is not None and masked is not None:
            raise InvalidRequest(
                f"sequence {place} has a grammar and targets; leave one out, as a grammar is of "
                "the sequence's own tokens."
            )
    return ScoreBatch(token_ids, positions, above_0, masks, routed, others)


def _targets(
    engine: InferenceEngine,
    token_ids: list[list[int]],
    positions: list[int],
    targets: Targets,
) -> list[SequenceTargets | None]:
    """The targets of each sequence; None: its own tokens. Raises `InvalidRequest`."""
    if targets is None:
        return [None] * len(token_ids)
    given = list(targets)
    if len(given) != len(token_ids):
        raise InvalidRequest(
            f"{len(given)} targets for {len(token_ids)} sequences; give one, or None, for each."
        )
    found = [
        None if each is None else _of_targets(engine, ids, position, each, place)
        for place, (each, ids, position) in enumerate(zip(given, token_ids, positions, strict=True))
    ]
    if any(each is not None for each in found):
        require_one_rank(engine.runner, "scoring of targets")
    return found


def _of_targets(
    engine: InferenceEngine, token_ids: list[int], position: int, targets: Any, place: int
) -> SequenceTargets | None:
    try:
        values = np.asarray(targets)
    except ValueError:  # rows of several lengths
        values = np.empty(0, object)
    wanted = len(token_ids) - position
    if values.dtype.kind not in "iu" or values.ndim not in (1, 2) or len(values) != wanted:
        raise InvalidRequest(
            f"the targets of sequence {place} are {values.dtype} of shape {list(values.shape)}; "
            f"give integers of shape [{wanted}] or [{wanted}, k], one row for each token from "
            f"from_position={position} on."
        )
    if values.size == 0 and wanted:
        raise InvalidRequest(f"the targets of sequence {place} have no columns; give at least one.")
    if values.size and not 0 <= values.min() <= values.max() < engine.spec.vocab_size:
        raise InvalidRequest(
            f"the targets of sequence {place} hold a token that is not in "
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
    """The experts of each sequence, if they are given. Raises `InvalidRequest` where they are not
    those of such a sequence.
    """
    if routed_experts is None:
        return [None] * len(token_ids)
    given, moe = list(routed_experts), engine.spec.moe
    if len(given) != len(token_ids):
        raise InvalidRequest(
            f"{len(given)} routed_experts for {len(token_ids)} sequences; give one, or None, for "
            "each."
        )
    if moe is None:
        raise InvalidRequest(
            f"routed_experts are given, and {engine.spec.architecture} has none; leave them out."
        )
    for place, (each, ids) in enumerate(zip(given, token_ids, strict=True)):
        wanted = (len(ids) - 1, len(moe.layers), moe.experts_per_token)
        if each is not None and each.shape != wanted:
            raise InvalidRequest(
                f"sequence {place}: routed_experts have the shape {each.shape}, and this model "
                f"has {wanted} for {len(ids)} tokens; give those of the same tokens."
            )
    return given


def require_same_experts(
    batch: ScoreBatch, routes: Listed[Tensor | None], layers: Listed[bool]
) -> None:
    """Raise `InvalidRequest` where a sequence goes through other experts than it is said to have
    gone through; a sequence that was not computed is passed over.

    Args:
        batch: with the experts that are given.
        routes: of the forward pass, as in `BatchScores`.
        layers: which layers of the model have experts.
    """
    of_experts = np.array(layers).nonzero()[0]
    for place, (given, own) in enumerate(zip(batch.routed, routes, strict=True)):
        if given is None or own is None:
            continue
        theirs, ours = np.asarray(given)[:, of_experts], own.numpy()
        differing = (theirs != ours).any(axis=2).nonzero()
        if len(differing[0]):
            token, layer = (int(each[0]) for each in differing)
            raise InvalidRequest(
                f"sequence {place}, token {token}, layer {of_experts[layer]}: the sample went "
                f"through experts {theirs[token, layer].tolist()}, and this model chooses "
                f"{ours[token, layer].tolist()}; score it under the weights and numerics that "
                "computed it, or leave routed_experts out."
            )


class BatchScores(NamedTuple):
    """What scoring a batch gave, one entry a sequence.

    Attributes:
        logprobs: the results of `score`.
        routes: the experts of all rows but the last, int16 [rows, layers of experts, K]; None where
            no logprob was wanted, or the weight set's decoder keeps no record.
    """

    logprobs: list[Tensor]
    routes: list[Tensor | None]


def score_batch(
    engine: InferenceEngine,
    batch: ScoreBatch,
    weight_set: str,
    adapter: ServedAdapter | None = None,
) -> BatchScores:
    """Score a batch under a weight set, and an adapter of the policy."""
    starts = [max(position, 1) for position in batch.positions]
    plan = _share(_keys(batch, starts), starts, _kinds(batch))
    requests = [_request(batch, own.index, own.start, starts[own.index]) for own in plan]
    known: dict[int, list[float]] = {}  # logprobs from `starts` on
    routes: dict[int, Tensor | None] = {}
    for own, (scores, routed) in zip(
        plan, score_tokens(engine, requests, weight_set, adapter), strict=True
    ):
        first, width = starts[own.index], batch.width(own.index)
        copied = (
            known[own.source][
                (first - starts[own.source]) * width : (own.start - starts[own.source]) * width
            ]
            if own.shared
            else []
        )
        known[own.index] = copied + scores
        if routed is None and own.shared:  # the whole sequence is a beginning of the source
            source = routes[own.source]
            routed = None if source is None else source[: len(batch.token_ids[own.index]) - 1]
        routes[own.index] = routed
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
    """A sequence scored from `start` on; its masks and targets begin at `first`."""
    masks, targets = batch.masks[index], batch.targets[index]
    return ScoreRequest(
        batch.token_ids[index],
        start,
        batch.temperature,
        masks.words[start - first :] if masks is not None else (),
        targets.rows[start - first :] if targets is not None else (),
    )


def _keys(batch: ScoreBatch, starts: list[int]) -> list[list[int]]:
    """Of each sequence one number a token. Two sequences have the same scores as far as their
    numbers are the same, if they are of one kind.
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
    """What is scored in the place of each token of a sequence; before `start` nothing is."""
    ids, targets = batch.token_ids[index], batch.targets[index]
    own = [[token] for token in ids]
    return itertools.chain(own[:start], own[start:] if targets is None else targets.rows)


@dataclass(frozen=True, slots=True)
class _Own:
    """The part of a sequence that is scored for it, [start, end); what stands before is copied from
    `source`.
    """

    index: int
    start: int
    source: int = -1
    shared: bool = False


def _kinds(batch: ScoreBatch) -> list[int]:
    """A number for each sequence; those of one number have the same masks as far as their tokens
    are the same.
    """
    numbers: dict[tuple[Grammar, int] | None, int] = {None: 0}
    keys = [
        None if masks is None else (masks.grammar, start)
        for masks, start in zip(batch.masks, batch.positions, strict=True)
    ]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _share(token_ids: list[list[int]], starts: list[int], kinds: list[int]) -> list[_Own]:
    """Who scores what, so that common beginnings are scored once where they are of one kind.

    In the order of token ids a sequence has no more in common with any earlier one of its kind than
    with the one just before it.
    """
    order = sorted(
        range(len(token_ids)), key=lambda index: (kinds[index], token_ids[index], starts[index])
    )
    plan: list[_Own] = []
    for place, index in enumerate(order):
        start, source = starts[index], order[place - 1]
        if place and kinds[source] == kinds[index] and starts[source] <= start:
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


def _grammars(grammar: Grammars, num_sequences: int) -> list[Grammar | None]:
    given: Any = [grammar] * num_sequences
    if grammar is not None and not isinstance(grammar, Grammar):
        given = list(grammar) if isinstance(grammar, Iterable) else [grammar]
    if not all(isinstance(each, Grammar | None) for each in given):
        raise InvalidRequest(f"grammar={grammar!r} must be a Grammar, or one (or None) a sequence.")
    if len(given) != num_sequences:
        raise InvalidRequest(
            f"{len(given)} grammars for {num_sequences} sequences; give one, or one for each."
        )
    return given


def _masks(
    engine: InferenceEngine,
    token_ids: list[list[int]],
    positions: list[int],
    grammars: list[Grammar | None],
) -> list[SequenceMasks | None]:
    """The masks of each sequence that has a grammar, which begins at its position."""
    if any(grammar is not None for grammar in grammars):
        require_one_rank(engine.runner, "scoring under a grammar")
        engine.shared.require_alive()
    under = [place for place, grammar in enumerate(grammars) if grammar is not None]
    texts = [
        (grammar, tuple(token_ids[place][positions[place] :]))
        for place, grammar in enumerate(grammars)
        if grammar is not None
    ]
    try:
        words = engine.intake.token_masks.of(texts)
    except NotInGrammar as problem:
        place = under[problem.text]
        at = positions[place] + problem.place
        raise InvalidRequest(
            f"token {token_ids[place][at]} at position {at} of sequence {place} {problem}; the "
            "grammar begins at from_position, and all tokens from there on must follow it."
        ) from None
    found: list[SequenceMasks | None] = [None] * len(token_ids)
    for place, (grammar, _), masks in zip(under, texts, words, strict=True):
        skipped = max(positions[place], 1) - positions[place]
        found[place] = SequenceMasks(grammar, masks[skipped:])
    return found


def _temperature(temperature: Any) -> float:
    real("temperature", temperature, 0.0, math.inf)
    return float(temperature) or 1.0
