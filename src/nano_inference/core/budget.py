"""What a request may cost, in entries, computed before any of it is begun.

An entry is one number that the engine has to hold or an answer has to carry: the logprob of a
token, an id that a filter kept, a bias. Other limits hold each alone (samples, tokens, logprobs a
token, ids of a bias); here they are multiplied.
"""

from typing import NamedTuple

from nano_inference.errors import RequestTooLarge
from nano_inference.types import SamplingParams

IDS_OF_AN_ENTRY = 16  # of routed experts: a byte or two each, where other numbers are text
RL_ENTRIES = 40_000_000  # the default of a server for trainers


class Demand(NamedTuple):
    """The counts of a request that its cost follows from.

    Attributes:
        prompt: tokens of the prompt.
        num_samples, max_tokens, top_logprobs, prompt_top_logprobs: of the request.
        numbers: that each completion token has beside its `top_logprobs`: its logprob, a raw
            logprob, one id of a mask (the others are counted while they come), a count for
            penalties.
        parameters: ids of `logit_bias`, `allowed_token_ids` and `stop_token_ids`, and characters of
            `stop`.
        scores_prompt: `prompt_logprobs` are asked for.
        counts_prompt: each sample counts the prompt's tokens (`repetition_penalty`).
        repeats_prompt: the answer tells of the prompt with each sample, not once.
        routed: for each token, the prompt's too: its `routed_experts`, `IDS_OF_AN_ENTRY` to an
            entry, as ids of experts are small.
    """

    prompt: int
    num_samples: int
    max_tokens: int
    top_logprobs: int = 0
    prompt_top_logprobs: int = 0
    numbers: int = 1
    parameters: int = 0
    scores_prompt: bool = False
    counts_prompt: bool = False
    repeats_prompt: bool = False
    routed: int = 0

    def entries(self) -> int:
        """The cost. Samples share the prompt, so it counts once unless the answer repeats it."""
        return sum(_parts(self).values())


def demand_of(
    prompt_len: int,
    params: SamplingParams,
    num_samples: int,
    *,
    repeats_prompt: bool = False,
    experts: int = 0,
) -> Demand:
    """The counts of a request.

    Args:
        prompt_len: tokens of the prompt.
        params: how its samples are drawn, and what is told of them.
        num_samples: how many.
        repeats_prompt: see `Demand`.
        experts: ids of routed experts that a token of a sample has, if they are asked for.
    """
    ids = len(params.logit_bias) + len(params.allowed_token_ids or ()) + len(params.stop_token_ids)
    return Demand(
        prompt=prompt_len,
        num_samples=num_samples,
        max_tokens=params.max_tokens,
        top_logprobs=params.top_logprobs,
        prompt_top_logprobs=params.prompt_top_logprobs,
        numbers=1 + params.raw_logprobs + params.sampling_mask + params.penalizes,
        parameters=ids + sum(map(len, params.stop)),
        scores_prompt=params.prompt_logprobs,
        counts_prompt=params.repetition_penalty != 1,
        repeats_prompt=repeats_prompt,
        routed=-(-experts // IDS_OF_AN_ENTRY) if params.routed_experts else 0,
    )


def require_affordable(demand: Demand, budget: int, names: "Names | None" = None) -> int:
    """The entries of a request. Raises `RequestTooLarge` beyond `budget`, and says which number to
    lower to what.

    `names`: what a client calls the numbers; None: as `SamplingParams` and `add_request` do.
    """
    cost = demand.entries()
    if cost <= budget:
        return cost
    changes = _remedy(demand, budget)
    words = [
        f"{(names or {}).get(field, _NAMES[field])} from {getattr(demand, field)} to {value}"
        for field, value in changes.items()
    ]
    remedy = f"lower {' and '.join(words)}" if words else "raise it"
    raise RequestTooLarge(
        f"the request asks for up to {cost} entries, and max_request_entries={budget}; {remedy}."
    )


def most_mask_ids(demand: Demand, budget: int) -> int:
    """Ids that the mask of one sample may have in all: its part of what the rest of the request
    leaves.
    """
    return demand.max_tokens + (budget - demand.entries()) // demand.num_samples


Names = dict[str, str]  # field of `Demand` -> what a client calls it
_NAMES: Names = {
    "prompt": "the tokens of the prompt",
    "num_samples": "num_samples",
    "max_tokens": "max_tokens",
    "top_logprobs": "top_logprobs",
    "prompt_top_logprobs": "prompt_top_logprobs",
    "parameters": "the ids of logit_bias, allowed_token_ids, stop_token_ids with the characters "
    "of stop",
}
# What each part of the cost is lowered by, the first choice first.
_LEVERS = {
    "prompt": ("prompt_top_logprobs", "num_samples", "prompt"),
    "completions": ("top_logprobs", "max_tokens", "num_samples"),
    "parameters": ("num_samples", "parameters"),
    "routed": ("num_samples", "max_tokens", "prompt"),
}


def _parts(demand: Demand) -> dict[str, int]:
    each = demand.prompt * (1 + demand.scores_prompt + demand.prompt_top_logprobs)
    return {
        "prompt": each * (demand.num_samples if demand.repeats_prompt else 1),
        "completions": demand.num_samples
        * demand.max_tokens
        * (demand.numbers + demand.top_logprobs),
        "parameters": demand.num_samples
        * (demand.parameters + demand.counts_prompt * demand.prompt),
        "routed": demand.num_samples * (demand.prompt + demand.max_tokens) * demand.routed,
    }


def _remedy(demand: Demand, budget: int) -> dict[str, int]:
    """Numbers to lower, and to what, so that a request fits: one, if one will do. Empty: nothing
    will.
    """
    fields = [field for part in _by_size(demand) for field in _LEVERS[part]]
    for field in fields:
        value = _largest(demand, field, budget)
        if value is not None:
            return {field: value}
    changes = dict[str, int]()
    while left := [
        each
        for part in _by_size(demand)
        for each in _LEVERS[part]
        if getattr(demand, each) > _least(each)
    ]:
        value = _largest(demand, left[0], budget)
        changes[left[0]] = _least(left[0]) if value is None else value
        if value is not None:
            return changes
        demand = demand._replace(**{left[0]: changes[left[0]]})
    return {}


def _by_size(demand: Demand) -> list[str]:
    """The parts of the cost, the largest first."""
    parts = _parts(demand)
    return sorted(parts, key=parts.__getitem__, reverse=True)


def _least(field: str) -> int:
    return 1 if field in ("prompt", "num_samples", "max_tokens") else 0


def _largest(demand: Demand, field: str, budget: int) -> int | None:
    """The largest value of a number with which the request fits; None: none does. The cost grows
    evenly with each.
    """
    least = _least(field)
    low, high = (demand._replace(**{field: each}).entries() for each in (least, least + 1))
    if low > budget or high == low:
        return None
    value = least + (budget - low) // (high - low)
    return value if value < getattr(demand, field) else None
