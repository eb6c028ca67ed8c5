"""Cost of a request in entries, computed before any work on it begins.

An entry is one number that the engine holds or a response carries: the logprob of a token, an id
that a filter kept, a bias. Other limits bound each count separately (samples, tokens, logprobs per
token, ids of a bias). The budget bounds their product.
"""

from typing import NamedTuple

from nano_inference.errors import RequestTooLarge
from nano_inference.types import SamplingParams

IDS_OF_AN_ENTRY = 16  # routed experts per entry: an id takes 1 or 2 bytes
RL_ENTRIES = 40_000_000  # a server's default budget for trainers


class Demand(NamedTuple):
    """Counts that determine the cost of a request.

    Attributes:
        prompt: Number of prompt tokens.
        num_samples, max_tokens, top_logprobs, prompt_top_logprobs: Values of the request.
        numbers: Entries of each completion token in addition to its `top_logprobs`: the logprob, a
            raw logprob, one id of a sampling mask, a count for penalties. Further ids of a mask are
            counted as they arrive.
        parameters: Number of ids in `logit_bias`, `allowed_token_ids` and `stop_token_ids`, plus
            the characters of `stop` and `bad_words`.
        scores_prompt: True if `prompt_logprobs` are requested.
        counts_prompt: True if each sample counts the prompt's tokens (`repetition_penalty`).
        repeats_prompt: True if the response repeats the prompt's data with each sample.
        routed: Entries of `routed_experts` for each token, prompt tokens included. Expert ids are
            small, so one entry covers `IDS_OF_AN_ENTRY` ids.
        named: Number of `logprob_token_ids`.
        prompt_named: Number of `prompt_logprob_token_ids` at a position.
        raw: True if raw logprobs of `logprob_token_ids` are returned too.
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
    named: int = 0
    prompt_named: int = 0
    raw: bool = False

    def entries(self) -> int:
        """Return the cost of the request.

        Samples share the prompt, so it counts once unless the response repeats it.
        """
        return sum(_parts(self).values())


def demand_of(
    prompt_len: int,
    params: SamplingParams,
    num_samples: int,
    *,
    repeats_prompt: bool = False,
    experts: int = 0,
) -> Demand:
    """Return the counts of a request.

    Args:
        prompt_len: Number of prompt tokens.
        params: Sampling parameters, which also select the values to return.
        num_samples: Number of samples.
        repeats_prompt: True if the response repeats the prompt's data with each sample.
        experts: Routed expert ids for each token of a sample. Counted only if `params` request
            them.
    """
    ids = len(params.logit_bias) + len(params.allowed_token_ids or ()) + len(params.stop_token_ids)
    rows = params.prompt_logprob_token_ids
    ids += len(params.logprob_token_ids) + sum(map(len, rows))
    return Demand(
        prompt=prompt_len,
        num_samples=num_samples,
        max_tokens=params.max_tokens,
        top_logprobs=params.top_logprobs,
        prompt_top_logprobs=params.prompt_top_logprobs,
        numbers=1 + params.raw_logprobs + params.sampling_mask + params.penalizes,
        parameters=ids + sum(map(len, (*params.stop, *params.bad_words))),
        scores_prompt=params.prompt_logprobs,
        counts_prompt=params.repetition_penalty != 1,
        repeats_prompt=repeats_prompt,
        routed=-(-experts // IDS_OF_AN_ENTRY) if params.routed_experts else 0,
        named=len(params.logprob_token_ids),
        prompt_named=max(map(len, rows), default=0),
        raw=params.raw_logprobs,
    )


def require_affordable(demand: Demand, budget: int, names: "Names | None" = None) -> int:
    """Return the entries of a request.

    Raise `RequestTooLarge` if they exceed `budget`. The message names the values to lower. `names`
    maps fields of `Demand` to the client's names. Without it, the message uses the names in
    `SamplingParams` and `add_request`.
    """
    cost = demand.entries()
    if cost <= budget:
        return cost
    changes = _remedy(demand, budget)
    words = [
        f"{(names or {}).get(field, _NAMES[field])} from {getattr(demand, field)} to {value}"
        for field, value in changes.items()
    ]
    remedy = f"lower {' and '.join(words)}" if words else "raise max_request_entries"
    raise RequestTooLarge(
        f"the request needs up to {cost} entries, but max_request_entries={budget}; {remedy}."
    )


def most_mask_ids(demand: Demand, budget: int) -> int:
    """Return the maximum number of ids in the sampling mask of one sample.

    Samples share equally the entries that the rest of the request leaves.
    """
    return demand.max_tokens + (budget - demand.entries()) // demand.num_samples


Names = dict[str, str]  # field of `Demand` -> the client's name for it
_NAMES: Names = {
    "prompt": "the number of prompt tokens",
    "num_samples": "num_samples",
    "max_tokens": "max_tokens",
    "top_logprobs": "top_logprobs",
    "prompt_top_logprobs": "prompt_top_logprobs",
    "parameters": "the total size of logit_bias, allowed_token_ids, stop_token_ids, stop, "
    "bad_words, logprob_token_ids and prompt_logprob_token_ids",
    "named": "the number of logprob_token_ids",
    "prompt_named": "the number of prompt_logprob_token_ids per position",
}
# Fields that lower each part of the cost, in order of preference.
_LEVERS = {
    "prompt": ("prompt_top_logprobs", "prompt_named", "num_samples", "prompt"),
    "completions": ("top_logprobs", "named", "max_tokens", "num_samples"),
    "parameters": ("num_samples", "parameters"),
    "routed": ("num_samples", "max_tokens", "prompt"),
}


def _parts(demand: Demand) -> dict[str, int]:
    scores = demand.scores_prompt + demand.prompt_top_logprobs + demand.prompt_named
    prompt = demand.prompt * (1 + scores)
    return {
        "prompt": prompt * (demand.num_samples if demand.repeats_prompt else 1),
        "completions": demand.num_samples
        * demand.max_tokens
        * (demand.numbers + demand.top_logprobs + demand.named * (1 + demand.raw)),
        "parameters": demand.num_samples
        * (demand.parameters + demand.counts_prompt * demand.prompt),
        "routed": demand.num_samples * (demand.prompt + demand.max_tokens) * demand.routed,
    }


def _remedy(demand: Demand, budget: int) -> dict[str, int]:
    """Return the fields to lower, with values that make the request fit.

    One field suffices if possible. Empty if no values fit.
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
    """Return the parts of the cost, largest first."""
    parts = _parts(demand)
    return sorted(parts, key=parts.__getitem__, reverse=True)


def _least(field: str) -> int:
    return 1 if field in ("prompt", "num_samples", "max_tokens") else 0


def _largest(demand: Demand, field: str, budget: int) -> int | None:
    """Return the largest value of a field with which the request fits, None if there is none.

    The cost grows linearly with each field.
    """
    least = _least(field)
    low, high = (demand._replace(**{field: each}).entries() for each in (least, least + 1))
    if low > budget or high == low:
        return None
    value = least + (budget - low) // (high - low)
    return value if value < getattr(demand, field) else None
