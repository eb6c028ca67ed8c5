"""What a protocol gives the server: a `Builder` of one request, its `Ask`s of the engine, and what
these may cost.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from nano_inference.budget import Demand, Names, demand_of, require_affordable
from nano_inference.errors import RequestTooLarge
from nano_inference.serving.choices import PLAIN, Choice, ChoiceDelta, TextStyle
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.errors import ApiError, bad_request, openai_error
from nano_inference.serving.messages import EngineInfo
from nano_inference.serving.parsing import ChatFormat, OutputParser
from nano_inference.serving.protocols.answers import DONE, data_event
from nano_inference.text.chat import warm_up
from nano_inference.text.detokenizer import Detokenizer
from nano_inference.text.token_texts import TokenTexts
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import Limits, SamplingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt for the engine; its choices follow those of the asks before it.

    Attributes:
        stream: False: its samples come whole, also where the answer is a stream.
        client_id: by which `Control.abort` finds it; None: the id of the HTTP request
            (`x-request-id`).
        unique: refused, 400, while another request has its `client_id`.
        num_wanted, min_version, max_staleness, exact_version: as in `InferenceEngine.add_request`;
            versions are the engine's integers. An `exact_version` that is gone is answered with
            409.
        detokenize: False: its choices have no text but what the engine makes for stop strings.
        text: what the text shows.
        repeats_prompt: the answer tells of the prompt with each sample, not once.
        max_entries: what it may cost; None: all that any request may. See `affordable`.
    """

    prompt: list[int]
    params: SamplingParams
    num_samples: int = 1
    stream: bool = True
    client_id: str | None = None
    unique: bool = False
    detokenize: bool = True
    text: TextStyle = PLAIN
    num_wanted: int | None = None
    min_version: int | None = None
    max_staleness: int | None = None
    exact_version: int | None = None
    repeats_prompt: bool = False
    max_entries: int | None = None

    @property
    def limits(self) -> Limits:
        """What it asks of its group, of weight versions and of the cost."""
        return Limits(
            num_wanted=self.num_wanted,
            min_version=self.min_version,
            max_staleness=self.max_staleness,
            exact_version=self.exact_version,
            max_entries=self.max_entries,
        )


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

    def __post_init__(self) -> None:
        # What takes a while at its first use has it here, where no request waits for it.
        if self.tokenizer is None:
            return
        _ = self.token_texts
        Detokenizer(self.tokenizer)
        warm_up(self.tokenizer)

    @cached_property
    def token_texts(self) -> TokenTexts | None:
        """What single tokens say; None: there is no tokenizer."""
        return None if self.tokenizer is None else TokenTexts(self.tokenizer)

    @cached_property
    def sampling_defaults(self) -> Mapping[str, float]:
        """What holds where a request of the usual protocols leaves a sampling parameter out."""
        return self.engine.sampling_defaults if self.config.generation_config == "auto" else {}

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
