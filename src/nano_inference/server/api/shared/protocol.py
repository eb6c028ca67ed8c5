"""A request that generates, whatever its protocol: an `ApiProtocol` makes a `Builder` of its body,
whose `Ask`s hold the engine's work and its cost.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from nano_inference.checkpoints.generation_defaults import (
    AUTO,
    NONE,
    defaults_for_people,
    generation_defaults,
)
from nano_inference.core.budget import Demand, Names, demand_of, require_affordable
from nano_inference.errors import RequestTooLarge
from nano_inference.remote.messages import EngineInfo
from nano_inference.server.api.openai.kept_responses import KeptResponses
from nano_inference.server.api.parsing import ChatFormat, OutputParser
from nano_inference.server.api.shared.answers import DONE, data_event
from nano_inference.server.api.shared.choices import (
    PLAIN,
    Choice,
    ChoiceDelta,
    TextStyle,
)
from nano_inference.server.api.shared.fields import Strict, read_body
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import (
    ApiError,
    bad_request,
    openai_error,
)
from nano_inference.text.chat import warm_up
from nano_inference.text.detokenizer import Detokenizer
from nano_inference.text.token_texts import TokenTexts
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import (
    AdapterInfo,
    Limits,
    SamplingParams,
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt for the engine; its choices follow those of the asks before it.

    Attributes:
        stream: False: its samples come whole, also where the answer is a stream.
        client_id: by which `Control.pauses.abort` finds it; None: the id of the HTTP request
            (`x-request-id`).
        unique: refused, 400, while another request has its `client_id`.
        limits: what it asks of its group, of weight versions (the engine's integers) and of the
            cost (see `affordable`), as in `InferenceEngine.add_request`. An `exact_version` that is
            gone is answered with 409.
        detokenize: False: its choices have no text but what the engine makes for stop strings.
        text: what the text shows.
        repeats_prompt: the answer tells of the prompt with each sample, not once.
        experts_by_default: `routed_experts` were not asked for, so that they are left out where
            they cost too much.
    """

    prompt: list[int]
    params: SamplingParams
    num_samples: int = 1
    stream: bool = True
    client_id: str | None = None
    unique: bool = False
    detokenize: bool = True
    text: TextStyle = PLAIN
    limits: Limits = field(default_factory=Limits)
    repeats_prompt: bool = False
    experts_by_default: bool = False


@dataclass(frozen=True)
class Served:
    """What is served, as builders need to know it.

    Attributes:
        name: the `model` that clients name.
        engine: its limits.
        tokenizer: None where the model has none; only token ids can be served then.
        chat_format: how it writes reasoning and tool calls.
        config: the server's limits.
        other_names: that clients may name as well; answers name the first.
        version_name: what trainers call a version of the weights.
        version_number: the version of this name, which may still be to come; None: there can be
            none.
        adapters: those that are loaded, by name.
        responses: those that later requests may go on from.
    """

    name: str
    engine: EngineInfo
    tokenizer: Tokenizer | None
    chat_format: ChatFormat
    config: ServerConfig
    other_names: tuple[str, ...] = ()
    version_name: Callable[[int], str] = str
    version_number: Callable[[str], int | None] = lambda name: (
        int(name) if name.isdecimal() else None
    )
    adapters: Callable[[], Mapping[str, AdapterInfo]] = dict[str, AdapterInfo]
    responses: KeptResponses = field(default_factory=lambda: KeptResponses(0))

    def __post_init__(self) -> None:
        # What takes a while at its first use has it here, where no request waits for it.
        if self.tokenizer is None:
            return
        _ = self.token_texts
        Detokenizer(self.tokenizer)
        warm_up(self.tokenizer)

    @property
    def all_names(self) -> tuple[str, ...]:
        """Of the model, without adapters."""
        return (self.name, *self.other_names)

    @cached_property
    def token_texts(self) -> TokenTexts | None:
        """What single tokens say; None: there is no tokenizer."""
        return None if self.tokenizer is None else TokenTexts(self.tokenizer)

    @cached_property
    def sampling_defaults(self) -> Mapping[str, float]:
        """What holds where a request of the usual protocols leaves a sampling parameter out."""
        use = self.config.generation_config or AUTO
        if use == AUTO:
            return self.engine.sampling_defaults
        return {} if use == NONE else generation_defaults(Path(use))

    @property
    def defaults_for_people(self) -> Mapping[str, float]:
        """What the page samples with, unless a person says otherwise."""
        return defaults_for_people(self.config.generation_config or AUTO, self.sampling_defaults)

    @cached_property
    def longest_token(self) -> int | None:
        """Characters of text that a token stands for at most; None: there is no such bound."""
        return None if self.token_texts is None else self.token_texts.longest


@dataclass(slots=True)
class RequestUsage:
    """Tokens of a request so far: of its distinct prompts, how many of these were cached, and of
    its completions.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Builder:
    """One request. Made by `ApiProtocol.prepare`, which has checked all that can be checked without
    the engine.

    Attributes:
        asks: what the engine is to do.
        stream: whether the answer is a stream of events.
        names: what its clients call the numbers that its cost follows from.
        make_parser: of each choice's text; None: it is all content.
    """

    asks: Sequence[Ask] = ()
    stream = False
    names: ClassVar[Names] = {}
    make_parser: Callable[[], OutputParser] | None = None

    def start(self, usage: RequestUsage) -> bytes:
        """What a stream begins with. The engine has taken the request, and its first tokens are
        there.
        """
        return b""

    def chunk(self, piece: ChoiceDelta, usage: RequestUsage) -> bytes:
        """A piece of a choice as events; its last piece says why it ended."""
        raise NotImplementedError

    def end(self, choices: Sequence[Choice], usage: RequestUsage) -> bytes:
        """What a stream ends with."""
        return DONE

    def failure(self, problem: ApiError) -> bytes:
        """What a stream ends with that cannot go on: SDKs raise what this event says."""
        return data_event(openai_error(problem))

    def response(
        self, choices: Sequence[Choice], usage: RequestUsage
    ) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        """The answer as a whole."""
        raise NotImplementedError


CODE = "request_too_large"


def affordable(asks: Iterable[Ask], served: Served, names: Names) -> list[Ask]:
    """Return the asks of one request, which share `Limits.max_entries`. Records of experts that the
    client did not ask for are left out if they do not fit.

    `asks` is read one by one, and no further than the first that does not fit.

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
            len(ask.prompt),
            ask.params,
            ask.num_samples,
            repeats_prompt=ask.repeats_prompt,
            experts=served.engine.experts_per_token,
        )
        least = _without_experts(demand) if ask.experts_by_default else demand
        try:
            require_affordable(least, budget, names)
        except RequestTooLarge as problem:
            raise bad_request(str(problem), code=CODE) from None
        left -= least.entries()
        if left < 0:
            raise bad_request(
                "the prompts of the request ask for more entries than "
                f"max_request_entries={budget}; send the first "
                f"{len(taken)} by themselves, or ask for less with each.",
                code=CODE,
            )
        taken.append(ask)
        demands.append(demand)
    if sum(demand.entries() for demand in demands) > budget:
        demands = [
            _without_experts(demand) if ask.experts_by_default else demand
            for ask, demand in zip(taken, demands, strict=True)
        ]
        taken = [
            replace(ask, params=replace(ask.params, routed_experts=False))
            if ask.experts_by_default
            else ask
            for ask in taken
        ]
    left = budget - sum(demand.entries() for demand in demands)
    share = left // max(1, sum(demand.num_samples for demand in demands))
    return [
        _with_share(ask, demand, share) if ask.params.sampling_mask else ask
        for ask, demand in zip(taken, demands, strict=True)
    ]


def _without_experts(demand: Demand) -> Demand:
    return demand._replace(routed=0)


def _with_share(ask: Ask, demand: Demand, share: int) -> Ask:
    """The engine repeats no prompt: what the answer needs for that is not for masks."""
    needed = demand._replace(repeats_prompt=False).entries()
    limits: Limits = {**ask.limits, "max_entries": needed + share * demand.num_samples}
    return replace(ask, limits=limits)


@dataclass(frozen=True)
class ApiProtocol:
    """How a protocol reads requests that generate.

    Attributes:
        request: the body.
        builder: makes a builder of the body, what is served and the request's id. It raises
            `ApiError`, `InvalidRequest` and the like, and may take a while (templates, tokenising).
        openapi: what `/openapi.json` says of its route; see `openapi.py`.
    """

    request: type[Strict]
    builder: Callable[[Any, Served, str], Builder]
    openapi: Mapping[str, Any]

    def prepare(self, body: bytes, served: Served, request_id: str) -> Builder:
        """Read a request; in a thread where the body is large."""
        return self.builder(read_body(body, self.request, served.config), served, request_id)
