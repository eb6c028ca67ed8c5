"""`Flight`: one request of a fleet, with all that another replica needs to go on with it."""

import time
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import msgspec

from nano_inference.errors import EngineDead
from nano_inference.scheduling.sequence import Context
from nano_inference.serving.client import EngineClient
from nano_inference.serving.errors import ApiError
from nano_inference.serving.fleet.router import Ticket
from nano_inference.serving.messages import Generate, Resume
from nano_inference.types import (
    ContextVersions,
    Delta,
    SamplingParams,
    TopLogprobs,
    TrainingSample,
    VersionSpan,
)

CHANGED = ApiError(
    503,
    "its engine has died, and another one cannot go on with this request: the weights have "
    "changed meanwhile.",
)


@dataclass(slots=True)
class Known:
    """What has come of one sample."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    kept: list[float] = field(default_factory=list[float])
    raw: list[float] = field(default_factory=list[float])
    top: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    starts: list[Context] = field(default_factory=list[Context])  # what its tokens were computed by
    text_length: int = 0  # of what was handed on
    cached_tokens: int = 0
    to_skip: int = 0  # tokens that come again
    text_to_skip: int = 0
    ended: bool = False

    def take(self, delta: Delta) -> None:
        """Note a delta's tokens."""
        by = delta.past_versions, delta.weight_version
        if delta.token_ids and (not self.starts or self.starts[-1][1:] != by):
            self.starts.append(Context(len(self.token_ids), *by))
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.log_kept_mass is not None:
            self.kept += delta.log_kept_mass
        if delta.raw_logprobs is not None:
            self.raw += delta.raw_logprobs
        if delta.top_logprobs is not None:
            self.top += delta.top_logprobs
        self.cached_tokens = delta.cached_tokens

    def is_begun_by(
        self, token_ids: tuple[int, ...], logprobs: tuple[float, ...], at: int = 0
    ) -> bool:
        """Whether these come again, from place `at` on, as they were."""
        end = min(len(self.token_ids), at + len(token_ids))
        count = end - at
        return (
            tuple(self.token_ids[at:end]) == token_ids[:count]
            and tuple(self.logprobs[at:end]) == logprobs[:count]
        )


class Fleet(Protocol):
    """What a flight needs of its fleet."""

    def arrived(self, flight: "Flight", delta: Delta) -> None:
        """A delta is for the client."""
        ...

    def ended(self, flight: "Flight", problem: Exception) -> None:
        """It has failed."""
        ...

    def began(self, flight: "Flight") -> None:
        """Its first tokens have come."""
        ...

    def prompt_computed(self, flight: "Flight") -> None:
        """Every sample of a flight that `computes_prompt` has a token, or has ended."""
        ...

    def orphaned(self, flight: "Flight") -> None:
        """Its replica is gone."""
        ...

    def went_on(self, flight: "Flight", seconds: float) -> None:
        """It goes on, after a pause of so long."""
        ...


class Flight:
    """A request and how far each of its samples has come. The replica's client puts deltas in.

    A replica that dies leaves it to `hand_to` another one, which goes on in one of three ways: from
    the beginning, where nothing has come; from the tokens so far, which are one prefill; or, where
    those cannot be gone on with (`sampling_mask`: masks are told in the end alone), from the
    beginning with what has come passed over. The same seed, position and weights draw the same
    tokens in each.

    Args:
        fleet: it.
        message: the request, with a seed.
        session: of the client.
        asked: what it asked for, where that had no seed.
        numerics: fingerprint of all replicas.
    """

    def __init__(
        self,
        fleet: Fleet,
        message: Generate,
        session: str | None,
        asked: SamplingParams | None,
        numerics: str,
    ) -> None:
        self._fleet = fleet
        self.message = message
        self.session = session
        self.name: str | None = None
        self.samples = [Known() for _ in range(message.num_samples)]
        self.left = message.num_samples
        self.ticket: Ticket | None = None
        self.client: EngineClient | None = None
        self.inner = 0  # its id there
        self.handed_at = 0.0
        self.moves = 0
        self.deaths = 0  # of engines that had it
        self.computes_prompt = False  # its replica is to do no more than that
        self._asked = asked
        self._numerics = numerics
        self._way = "begin"
        self._begun = False
        self._heard = time.monotonic()  # when something last came
        self._paused = False  # nothing has come since it was handed on
        self._is_ending = False  # it was told to end with what it has

    @property
    def request_id(self) -> int:
        """The fleet's."""
        return self.message.request_id

    @property
    def has_begun(self) -> bool:
        """Whether anything has come."""
        return any(known.ended or known.token_ids for known in self.samples)

    # -- from the replica --------------------------------------------------------------------------

    def put(self, delta: Delta) -> None:
        """A delta has come."""
        known = self.samples[delta.sample_index]
        if known.ended:  # it was done already, and a repetition does it again
            return
        now = time.monotonic()
        if self._paused:
            self._paused = False
            self._fleet.went_on(self, now - self._heard)
        self._heard = now
        if not self._begun:
            self._begun = True
            known.cached_tokens = delta.cached_tokens
            self._fleet.began(self)
        if delta.finished is not None:
            self._finish(known, delta, delta.finished)
            return
        if known.to_skip:
            rest = self._rest_of(known, delta)
            if rest is None:
                return
            delta = rest
        known.take(delta)
        if self.message.stream:
            known.text_length += len(delta.text or "")
            self._fleet.arrived(self, delta)
        if self._is_ending:  # a repetition may have come to where it was
            self._tell_to_end()
        if self.computes_prompt and all(each.ended or each.token_ids for each in self.samples):
            self.computes_prompt = False
            self._fleet.prompt_computed(self)

    def fail(self, problem: Exception) -> None:
        """Its replica is gone, or has refused it."""
        if isinstance(problem, EngineDead):
            # else it is about to hear of it
            if self.client is not None and self.client.why_dead is not None:
                self.deaths += 1
            self._fleet.orphaned(self)
        elif self._way == "resume old" and self.client is not None:
            # it has not kept the old weights: those that serve will do
            self._resume(self.client, None)
        elif self._way == "resume" and self.client is not None:
            # it cannot be gone on with, and why is not the client's business
            self._repeat(self.client)
        else:
            self._fleet.ended(self, problem)

    # -- to a replica ------------------------------------------------------------------------------

    def hand_to(self, client: EngineClient, ticket: Ticket, version: int | None = None) -> None:
        """Let a replica take it, or go on with it.

        Args:
            client: of the replica.
            ticket: its place there.
            version: of the weights that those samples finish on which an update left behind; None:
                no update does.

        Raises as `EngineClient.begin` does.
        """
        self.client, self.ticket, self.handed_at = client, ticket, time.monotonic()
        self._begun = False
        if not self.has_begun:
            self._way = "begin"
            message = self.message
            if self.computes_prompt:  # to hear of the first token at once
                message = msgspec.structs.replace(message, stream=True)
            self._begin(client, message, message.num_samples)
        elif self.message.params.sampling_mask:
            self._repeat(client)
        else:
            drawn = [
                known.starts[-1].version
                for known in self.samples
                if known.starts and not known.ended
            ]
            old = max(drawn, default=None)
            self._resume(
                client, old if version is not None and old is not None and old < version else None
            )

    def let_go(self) -> None:
        """Take it away from its replica."""
        if self.client is not None:
            self.client.give_up(self.inner)

    def end_soon(self) -> None:
        """Let it end with what it has, also where another replica goes on with it."""
        self._is_ending = True
        self._tell_to_end()

    def moved(self) -> None:
        """It is handed on, and its client waits."""
        self.computes_prompt = False
        self.moves += 1
        self._paused = True

    # -- inside ------------------------------------------------------------------------------------

    def _begin(self, client: EngineClient, message: Generate | Resume, num_samples: int) -> None:
        self.inner = client.begin(self, message, num_samples)
        if self._is_ending:
            self._tell_to_end()

    def _tell_to_end(self) -> None:
        """Not before what has come has come again: a sample must not end before the tokens that its
        client has.
        """
        if self.client is not None and not any(
            known.to_skip and not known.ended for known in self.samples
        ):
            self.client.end_soon([self.inner])

    def _resume(self, client: EngineClient, version: int | None) -> None:
        self._way = "resume" if version is None else "resume old"
        for known in self.samples:
            known.to_skip = known.text_to_skip = 0
        partial = [
            self._partial(index) for index, known in enumerate(self.samples) if not known.ended
        ]
        message = Resume(
            request_id=0,
            samples=partial,
            stream=self.message.stream,
            num_wanted=self._still_wanted(),
            max_staleness=self.message.max_staleness,
            version=version,
            tell=self.message.tell,
        )
        self._begin(client, message, len(partial))

    def _repeat(self, client: EngineClient) -> None:
        self._way = "repeat"
        # its client has heard nothing: begin anew
        if not self.message.stream and self.message.exact_version is None:
            self.samples = [known if known.ended else Known() for known in self.samples]
            self._begin(client, self.message, self.message.num_samples)
            return
        for known in self.samples:
            known.to_skip, known.text_to_skip = len(known.token_ids), known.text_length
        # It has begun: no weight version may keep it from beginning again.
        again = msgspec.structs.replace(self.message, min_version=None, exact_version=None)
        self._begin(client, again, self.message.num_samples)

    def _finish(self, known: Known, delta: Delta, sample: TrainingSample) -> None:
        if self.moves and not known.is_begun_by(sample.completion_tokens, sample.logprobs):
            self._lose()
            return
        known.ended = True
        self.left -= 1
        if self._asked is not None:
            delta = replace(delta, finished=replace(sample, sampling_params=self._asked))
        if not self.left and self._way == "repeat":
            self.let_go()
        self._fleet.arrived(self, delta)

    def _rest_of(self, known: Known, delta: Delta) -> Delta | None:
        """What is new in a delta of a repetition; None: nothing, or it is not what came before."""
        at, count = len(known.token_ids) - known.to_skip, len(delta.token_ids)
        if not known.is_begun_by(delta.token_ids, delta.logprobs, at):
            self._lose()
            return None
        skip = min(count, known.to_skip)
        known.to_skip -= skip
        text = delta.text
        if text is not None:
            skip_text = min(len(text), known.text_to_skip)
            known.text_to_skip -= skip_text
            text = text[skip_text:]
        if skip == count and not text:
            return None
        return replace(
            delta,
            token_ids=delta.token_ids[skip:],
            logprobs=delta.logprobs[skip:],
            text=text,
            top_logprobs=_cut(delta.top_logprobs, skip),
            raw_logprobs=_cut(delta.raw_logprobs, skip),
            log_kept_mass=_cut(delta.log_kept_mass, skip),
        )

    def _lose(self) -> None:
        self.let_go()
        self._fleet.ended(self, CHANGED)

    def _still_wanted(self) -> int | None:
        if self.message.num_wanted is None:
            return None
        return max(1, self.message.num_wanted - sum(known.ended for known in self.samples))

    def _partial(self, index: int) -> TrainingSample:
        """A sample as `resume_from` takes it."""
        known, params = self.samples[index], self.message.params
        count, prompt = len(known.token_ids), tuple(self.message.prompt)
        spans, contexts = list[VersionSpan](), list[ContextVersions]()
        ends = [by.token_start for by in known.starts[1:]] + [count]
        for by, end in zip(known.starts, ends, strict=False):  # it may have none
            start = by.token_start
            if spans and spans[-1].version == by.version:
                start = spans.pop().start
            spans.append(VersionSpan(by.version, start, end))
            last = VersionSpan(by.version, by.past[-1].end if by.past else 0, len(prompt) + end - 1)
            contexts.append(ContextVersions(by.token_start, end, (*by.past, last)))
        return TrainingSample(
            prompt_tokens=prompt,
            completion_tokens=tuple(known.token_ids),
            logprobs=tuple(known.logprobs),
            ref_logprobs=None,
            weight_version=spans[-1].version if spans else 0,
            finish_reason="abort",
            weight_versions=tuple(spans),
            raw_logprobs=tuple(known.raw) if params.raw_logprobs else None,
            log_kept_mass=tuple(known.kept) if params.cuts else (0.0,) * count,
            top_logprobs=tuple(known.top) if params.top_logprobs else None,
            numerics=self._numerics,
            seed=params.seed or 0,
            sample_index=index,
            cached_tokens=known.cached_tokens,
            kv_versions=tuple(contexts),
            loss_mask=(True,) * count,
            sampling_params=params,
        )


Items = TypeVar("Items")


def _cut(values: tuple[Items, ...] | None, skip: int) -> tuple[Items, ...] | None:
    return None if values is None else values[skip:]
