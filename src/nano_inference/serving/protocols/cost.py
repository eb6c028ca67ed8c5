"""What one HTTP request may cost, its prompts and their samples together, before any of it is sent
to the engine.
"""

from collections.abc import Iterable
from dataclasses import replace

from nano_inference.budget import Demand, Names, demand_of, require_affordable
from nano_inference.errors import RequestTooLarge
from nano_inference.serving.errors import bad_request
from nano_inference.serving.protocols.interface import Ask, Served

CODE = "request_too_large"


def affordable(asks: Iterable[Ask], served: Served, names: Names) -> list[Ask]:
    """The asks of one request, each with its part of what they may have together
    (`Ask.max_entries`).

    Those of many prompts may be made one by one: none is made after the first that does not fit.

    Args:
        asks: of the request.
        served: has the limit.
        names: what the client calls the numbers of `Demand`.

    Raises:
        ApiError: 400; it says which number to lower, and to what.
    """
    budget = served.engine.max_request_entries
    taken, demands, left = list[Ask](), list[Demand](), budget
    for ask in asks:
        demand = demand_of(
            len(ask.prompt), ask.params, ask.num_samples, repeats_prompt=ask.repeats_prompt
        )
        try:
            require_affordable(demand, budget, names)
        except RequestTooLarge as problem:
            raise bad_request(str(problem), code=CODE) from None
        left -= demand.entries()
        if left < 0:
            raise bad_request(
                "the prompts of the request ask for more entries than "
                f"max_request_entries={budget}; send the first "
                f"{len(taken)} by themselves, or ask for less with each.",
                code=CODE,
            )
        taken.append(ask)
        demands.append(demand)
    share = left // max(1, sum(demand.num_samples for demand in demands))
    return [
        _with_share(ask, demand, share) if ask.params.sampling_mask else ask
        for ask, demand in zip(taken, demands, strict=True)
    ]


def _with_share(ask: Ask, demand: Demand, share: int) -> Ask:
    """The engine repeats no prompt: what the answer needs for that is not for masks."""
    needed = demand._replace(repeats_prompt=False).entries()
    return replace(ask, max_entries=needed + share * demand.num_samples)
