"""Requests that generate, in any protocol. An `ApiProtocol` turns a body into a `Builder`, whose
`Ask`s describe the engine's work and its cost.
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
from nano_inference.server.api.openai.responses_reasoning import Seal
from nano_inference.server.api.parsing import ChatFormat, OutputParser
from nano_inference.server.api.shared.answers import DONE, data_event
from nano_inference.server.api.shared.choices import (
    PLAIN,
    Choice,
    ChoiceDelta,
    TextStyle,
)
from nano_inference.server.api.shared.detached import Detached
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
    """One prompt for the engine. Its choices follow those of the asks before it.

    Attributes:
        prompt: Token ids.
        params: Sampling parameters.
        num_samples: Number of samples of the prompt.
        stream: False: report samples when they are complete, even if the answer is a stream.
        client_id: Name under which `Control.pauses.abort` finds it. None: the id of the HTTP
            request (`x-request-id`).
        unique: Reject with 400 if another open request has this `client_id`.
        detokenize: False: choices have only the text that the engine makes for stop strings.
        text: Additional parts of the text.
        limits: Limits on groups, weight versions (as the engine's integers) and cost (see
            `affordable`), as in `InferenceEngine.add_request`. An `exact_version` that is gone is
            answered with 409.
        repeats_prompt: True if the answer describes the prompt once per sample instead of once.
        experts_by_default: True if the client did not ask for `routed_experts`, so that they are
            omitted if they cost too much.
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
    """The served model and the server's settings, as builders need them.

    Attributes:
        name: `model` in requests and answers.
        engine: Engine info, with its limits.
        tokenizer: Tokenizer. None: the model has none, so only token ids can be served.
        chat_format: Notation of reasoning and tool calls.
        config: Server settings, with their limits.
        other_names: Other names that requests may use. Answers use `name`.
        version_name: Returns the trainer's name of a weight version.
        version_number: Returns the weight version of a name, which may still be to come. None: no
            version can have the name.
        adapters: Returns the loaded adapters, by name.
        responses: Stored responses that later requests may continue.
        seal: Signature of reasoning that clients send back.
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
    seal: Seal = field(default_factory=Seal)

    def __post_init__(self) -> None:
        # slow on first use, so run before any request waits for it
        if self.tokenizer is None:
            return
        _ = self.token_texts
        Detokenizer(self.tokenizer)
        warm_up(self.tokenizer)

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names of the model, without adapters."""
        return (self.name, *self.other_names)

    @cached_property
    def token_texts(self) -> TokenTexts | None:
        """Texts of single tokens, or None without a tokenizer."""
        return None if self.tokenizer is None else TokenTexts(self.tokenizer)

    @cached_property
    def sampling_defaults(self) -> Mapping[str, float]:
        """Values of sampling parameters that requests of the usual protocols omit."""
        use = self.config.generation_config or AUTO
        if use == AUTO:
            return self.engine.sampling_defaults
        return {} if use == NONE else generation_defaults(Path(use))

    @property
    def defaults_for_people(self) -> Mapping[str, float]:
        """Sampling parameters that the page uses by default."""
        return defaults_for_people(self.config.generation_config or AUTO, self.sampling_defaults)

    @cached_property
    def longest_token(self) -> int | None:
        """Maximum number of characters of a token's text. None: there is no such bound."""
        return None if self.token_texts is None else self.token_texts.longest


@dataclass(slots=True)
class RequestUsage:
    """Tokens of a request so far: of its distinct prompts, of their cached part, and of its
    completions.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerParsers:
    """Maker of the parsers of a request's choices.

    Attributes:
        make: Makes a parser.
        marked: True if it needs special tokens after `SPECIAL_MARK`.
        shown: Special tokens whose text it needs.
    """

    make: Callable[[], OutputParser]
    marked: bool = False
    shown: frozenset[str] = frozenset()

    def __call__(self) -> OutputParser:
        """Return a parser for one choice."""
        return self.make()


class Builder:
    """One request, made by `ApiProtocol.prepare`, which checks everything that does not need the
    engine.

    Attributes:
        asks: Work for the engine.
        stream: True if the answer is a stream of events.
        names: Names that clients use for the numbers that determine the cost.
        make_parser: Makes the parser of each choice's text. None: all text is content.
        media_type: Content type of a stream.
        keeps_alive: True if a stream may hold comments, which tell the client that it is alive.
        keep_alive: Seconds for which the model stays loaded afterwards. None: as before.
        load_seconds: Seconds that the request waited for its model.
        detached: Events of an answer that is made without the client. None: the client waits.
        shows_stream: True if the client of a detached answer reads its events.
        num_truncated: Number of prompt tokens that `truncate_prompt_tokens` removed.
    """

    num_truncated = 0
    asks: Sequence[Ask] = ()
    stream = False
    media_type = "text/event-stream; charset=utf-8"
    keeps_alive = True
    keep_alive: float | None = None
    load_seconds = 0.0
    names: ClassVar[Names] = {}
    make_parser: AnswerParsers | None = None
    detached: Detached | None = None
    shows_stream = False

    def queued(self) -> bytes:
        """Return the events of a detached answer before its first token."""
        return b""

    def start(self, usage: RequestUsage) -> bytes:
        """Return the beginning of a stream. Called when the first tokens have come."""
        return b""

    def chunk(self, piece: ChoiceDelta, usage: RequestUsage) -> bytes:
        """Return a piece of a choice as events. The last piece reports why the choice ended."""
        raise NotImplementedError

    def end(self, choices: Sequence[Choice], usage: RequestUsage) -> bytes:
        """Return the end of a stream."""
        return DONE

    def failure(self, problem: ApiError) -> bytes:
        """Return the end of a stream that has failed. SDKs raise the error in this event."""
        return data_event(openai_error(problem))

    def response(
        self, choices: Sequence[Choice], usage: RequestUsage
    ) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        """Return the whole answer."""
        raise NotImplementedError

    def ended(self) -> None:
        """Let go of everything that the request holds. Called once the request has ended."""


CODE = "request_too_large"


def affordable(asks: Iterable[Ask], served: Served, names: Names) -> list[Ask]:
    """Return the asks of one request, with their shares of `Limits.max_entries`. Records of experts
    that the client did not ask for are omitted if they do not fit.

    `asks` is read one by one, up to the first that does not fit.

    Args:
        asks: Asks of the request.
        served: Served model, with the limit.
        names: Names that the client uses for the numbers of `Demand`.

    Raises:
        ApiError: 400, naming the number to lower, and the value to lower it to.
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
                f"max_request_entries={budget}; send the first {len(taken)} in a separate request, "
                "or ask for less per prompt.",
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
    """Set the limit of entries for the engine, without the entries that only the answer needs: the
    engine does not repeat the prompt.
    """
    needed = demand._replace(repeats_prompt=False).entries()
    limits: Limits = {**ask.limits, "max_entries": needed + share * demand.num_samples}
    return replace(ask, limits=limits)


@dataclass(frozen=True)
class ApiProtocol:
    """Reader of a protocol's requests that generate.

    Attributes:
        request: Model of the body.
        builder: Makes a builder from the body, the served model and the request's id. Raises
            `ApiError`, `InvalidRequest` and other errors of the package. May be slow (templates,
            tokenization).
        openapi: Description of the route in `/openapi.json`, from `openapi.py`.
        failure: Returns the end of a stream that failed before its builder was made.
        keeps_alive: True if a stream may hold comments, as in `Builder`.
        name: Returns the served name for the name in a request.
        unloading: Returns the whole reply to a body that only asks to unload its model. None: it
            asks for more.
    """

    request: type[Strict]
    builder: Callable[[Any, Served, str], Builder]
    openapi: Mapping[str, Any]
    failure: Callable[[ApiError], bytes] = lambda problem: data_event(openai_error(problem))
    keeps_alive: bool = True
    name: Callable[[str], str] = str
    unloading: Callable[[bytes], Mapping[str, Any] | None] = lambda _: None

    def prepare(self, body: bytes, served: Served, request_id: str, owner: str = "") -> Builder:
        """Read a request of the client `owner`. Call it in a thread if the body is large."""
        return self.builder(read_body(body, self.request, served.config), served, request_id)
