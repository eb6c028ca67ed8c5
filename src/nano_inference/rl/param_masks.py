"""Masks of a finished sample's tokens, from its sampling parameters."""

from collections.abc import Sequence

import numpy as np

from nano_inference.engine.intake import Intake
from nano_inference.errors import InvalidRequest
from nano_inference.structured.mask_bits import (
    bans_under,
    cut_to,
    mask_of,
    may_draw,
    without,
)
from nano_inference.types import SamplingParams


def masks_only(params: SamplingParams) -> SamplingParams:
    """Return parameters that have only the masks of `params`, so that equal masks compare equal.

    Raises `InvalidRequest`.
    """
    if params.logits_processors:
        raise InvalidRequest(
            f"the sampling parameters name the logits processor {params.logits_processors[0]!r}, "
            "whose changes cannot be scored; pass parameters without it."
        )
    return SamplingParams(
        max_tokens=2**31,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        allowed_token_ids=params.allowed_token_ids,
        grammar=params.grammar,
        bad_words=params.bad_words,
        thinking_token_budget=params.thinking_token_budget,
    )


def masks_of_params(
    intake: Intake,
    params: SamplingParams,
    token_ids: Sequence[int],
    start: int,
    grammar_masks: Sequence[np.ndarray] | None,
    index: int,
) -> list[np.ndarray] | None:
    """Return the masks of a sequence's tokens from `start` on, or None if nothing is masked.

    Args:
        intake: Intake of the engine.
        params: Result of `masks_only`.
        token_ids: Prompt and completion.
        start: First token of the completion.
        grammar_masks: Masks of the grammar from `start` on, or None without a grammar.
        index: Number of the sequence, for errors.

    Raises `InvalidRequest` if a token is not allowed.
    """
    size = intake.checks.spec.vocab_size
    allowed = params.allowed_token_ids
    rules, stop_ids = intake.rules_of(params, start), intake.checks.stop_ids(params)
    if grammar_masks is None and rules is None and allowed is None and not params.min_tokens:
        return None
    free = cut_to(mask_of(range(size) if allowed is None else allowed), size)
    masks: list[np.ndarray] = []
    for position in range(start, len(token_ids)):
        words = None if grammar_masks is None else grammar_masks[position - start]
        if words is not None and allowed is not None:
            words = _both(words, free)
        if rules is not None:
            words = rules.mask(token_ids, (), words, position)
        words = free if words is None else words
        if position < start + params.min_tokens:
            words = without(words, bans_under(words, stop_ids))
        if not may_draw(words, token_ids[position]):
            raise InvalidRequest(
                f"token {token_ids[position]} at position {position} of sequence {index} is masked "
                "by the sampling parameters; pass those of the sample, and its prompt's length as "
                "from_position."
            )
        masks.append(intake.token_masks.shared(words))
    return masks


def _both(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the ids that both masks allow."""
    size = min(len(one), len(other))
    return one[:size] & other[:size]
