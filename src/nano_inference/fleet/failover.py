"""Failover: requests go on with another replica when theirs dies or is drained, with the same
bits.
"""

import bisect
import itertools
import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from nano_inference.core.sequence import Context
from nano_inference.errors import EngineDead
from nano_inference.fleet.errors import EnginesDied, NoReplica, WeightsChanged
from nano_inference.fleet.router import Ticket
from nano_inference.remote.client import EngineClient
from nano_inference.remote.messages import Generate, Resume
from nano_inference.types import (
    ContextVersions,
    Delta,
    SamplingParams,
    TopLogprobs,
    TrainingSample,
    VersionSpan,
)

if TYPE_CHECKING:
    from nano_inference.fleet.fleet_client import FleetClient

log = logging.getLogger("nano_inference.server")

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MOST_MOVES = 2  # of one request, away from engines that died
# What a delta, and a sample so far, have for each token.
_PER_TOKEN = ("token_ids", "logprobs", "log_kept_mass", "raw_logprobs", "top_logprobs")


class Failover:
    """Moves requests, and keeps one that kills engines from killing all of them.

    A request that two engines have died with is a suspect, and so are those that were with it both
    times by chance. A replica has one suspect at a time; the others wait for a replica that has
    none. So when a third engine dies, it is known which suspect it had: that one ends with an
    error, and moves no more. Nothing else does: those beside it have lost fewer engines.

    Attributes:
        deaths: replicas that died.
        moved: requests that were moved, also by draining.
        counts: pauses that clients saw, by `BUCKETS` and beyond them.
        seconds: of all pauses.
        longest: of them.
        waiting: requests of which nothing has come since they were moved.
    """

    def __init__(self, fleet: "FleetClient") -> None:
        self.deaths = 0
        self.moved = 0
        self.counts = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0
        self.longest = 0.0
        self.waiting: set[FleetRequest] = set()
        self._fleet = fleet

    def move(self, request: "FleetRequest") -> None:
        """Its replica is gone: place it on another one."""
        fleet = self._fleet
        if not fleet.has(request):
            return
        if request.ticket is not None:
            fleet.router.finished(request.ticket)
        if request.deaths > MOST_MOVES:
            fleet.ended(request, _given_up(request))
            return
        request.computes_prompt = False
        request.moves += 1
        self.waiting.add(request)
        self.moved += 1
        self.place_again(request)

    def place_again(self, request: "FleetRequest") -> None:
        """Choose a replica for a request that has none; where there is none, it ends."""
        try:
            self._fleet.place(request, at_any=True)
        except NoReplica:
            self._fleet.ended(request, EngineDead("no replica is left.", "no replica is left"))
        except Exception as problem:
            log.exception("a request could not be handed on")
            self._fleet.ended(request, problem)

    def place_suspect(self, request: "FleetRequest") -> Ticket | None:
        """A place for a suspect; None: it waits until there is one."""
        request.client = request.ticket = None
        free, router = self._without_suspects(), self._fleet.router
        return router.place_at(min(free, key=router.score), request.left) if free else None

    def place_waiting(self) -> None:
        """Place suspects that wait, as far as there are replicas without one."""
        for request in self._suspects():
            is_waiting = request.ticket is None and self._fleet.has(request)
            if is_waiting and self._without_suspects():
                self.place_again(request)

    def went_on(self, request: "FleetRequest", seconds: float) -> None:
        """Something has come of a moved request, so long after the last delta."""
        self.waiting.discard(request)
        self.paused(seconds)
        log.debug("request %d goes on, after %.3f s.", request.request_id, seconds)
        if not self.waiting:
            log.info("all requests that were handed on go on; the last one after %.3f s.", seconds)

    def paused(self, seconds: float) -> None:
        """A client has waited so long."""
        self.counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)

    def _suspects(self) -> "list[FleetRequest]":
        return [each for each in self._fleet.requests.values() if each.deaths >= MOST_MOVES]

    def _without_suspects(self) -> list[str]:
        """Replicas without a suspect; draining ones only if there are no others."""
        fleet = self._fleet
        taken = {each.ticket.replica for each in self._suspects() if each.ticket is not None}
        living = fleet.supervisor.living()
        staying = [name for name in living if not fleet.router.is_draining(name)]
        return [name for name in staying or living if name not in taken]


@dataclass(slots=True)
class SampleSoFar:
    """What has come of one sample."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    log_kept_mass: list[float] = field(default_factory=list[float])
    raw_logprobs: list[float] = field(default_factory=list[float])
    top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    contexts: list[Context] = field(default_factory=list[Context])
    # (version of the adapter, first token)
    adapter_starts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    text_length: int = 0  # of what the client has
    cached_tokens: int = 0
    to_skip: int = 0  # tokens that come again
    text_to_skip: int = 0
    ended: bool = False

    def take(self, delta: Delta) -> None:
        """Add a delta's tokens."""
        by = delta.past_versions, delta.weight_version
        if delta.token_ids and (not self.contexts or self.contexts[-1][1:] != by):
            self.contexts.append(Context(len(self.token_ids), *by))
        own = delta.adapter_version
        if own and (not self.adapter_starts or self.adapter_starts[-1][0] != own):
            self.adapter_starts.append((own, len(self.token_ids)))
        for name in _PER_TOKEN:
            getattr(self, name).extend(getattr(delta, name) or ())
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


class FleetRequest:
    """A request of a fleet and how far each of its samples has come. It receives the deltas of the
    client of its replica.

    `hand_to` another replica goes on in one of three ways: from the beginning, where nothing has
    come; from the tokens so far, which are one prefill; or, where those cannot be gone on with
    (`sampling_mask`: masks come in the end alone), from the beginning, and what the client has is
    skipped. The same seed, position and weights draw the same tokens in each.

    Args:
        fleet: whose request it is.
        message: the request, with a seed.
        session: of the client.
        asked: the parameters without the seed, if the client gave none.
        numerics: fingerprint of all replicas.
    """

    name: str | None = None  # a replica does not know it; see `Receiver`

    def __init__(
        self,
        fleet: "FleetClient",
        message: Generate,
        session: str | None,
        asked: SamplingParams | None,
        numerics: str,
    ) -> None:
        self._fleet = fleet
        self.message = message
        self.session = session
        self.samples = [SampleSoFar() for _ in range(message.num_samples)]
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
        self._way: Literal["begin", "resume", "resume old", "repeat"] = "begin"
        self._has_come = False  # something, since it was handed over
        self._heard = time.monotonic()  # when something last came
        self._is_ending = False  # it was told to end with what it has

    @property
    def request_id(self) -> int:
        """The fleet's."""
        return self.message.request_id

    @property
    def has_begun(self) -> bool:
        """Whether any sample has a token, or has ended."""
        return any(sample.ended or sample.token_ids for sample in self.samples)

    # -- from the replica --------------------------------------------------------------------------

    def put(self, delta: Delta) -> None:
        """A delta has come."""
        sample = self.samples[delta.sample_index]
        if sample.ended:  # it was done already, and a repetition does it again
            return
        now = time.monotonic()
        if self in self._fleet.failover.waiting:
            self._fleet.failover.went_on(self, now - self._heard)
        self._heard = now
        if not self._has_come:
            self._has_come = True
            sample.cached_tokens = delta.cached_tokens
            self._fleet.began(self)
        if delta.finished is not None:
            self._finish(sample, delta, delta.finished)
            return
        if sample.to_skip:
            rest = self._rest_of(sample, delta)
            if rest is None:
                return
            delta = rest
        sample.take(delta)
        if self.message.stream:
            sample.text_length += len(delta.text or "")
            self._fleet.arrived(self, delta)
        if self._is_ending:  # a repetition may have come to where it was
            self._tell_to_end()
        if self.computes_prompt and all(each.ended or each.token_ids for each in self.samples):
            self.computes_prompt = False
            self._fleet.prefill.computed(self)

    def fail(self, problem: Exception) -> None:
        """Its replica is gone, or has refused it."""
        if isinstance(problem, EngineDead):
            # else it is about to hear of it
            if self.client is not None and self.client.why_dead is not None:
                self.deaths += 1
            self._fleet.failover.move(self)
        elif self._way == "resume old" and self.client is not None:
            # the replica has not kept the old weights: those that serve will do
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
            version: that serves, where samples of the version before finish on that one
                (`kv_policy="finish_old"`); else None.

        Raises as `EngineClient.begin` does.
        """
        self.client, self.ticket, self.handed_at = client, ticket, time.monotonic()
        self._has_come = False
        if not self.has_begun:
            self._way = "begin"
            message = self.message
            if self.computes_prompt:  # to hear of the first token at once
                message = msgspec.structs.replace(message, stream=True)
            self._begin(client, message, message.num_samples)
        elif self.message.params.sampling_mask:
            self._repeat(client)
        else:
            running = [each for each in self.samples if each.contexts and not each.ended]
            drawn = max((each.contexts[-1].version for each in running), default=None)
            is_old = drawn is not None and version is not None and drawn < version
            self._resume(client, drawn if is_old else None)

    def let_go(self) -> None:
        """Take it away from its replica."""
        if self.client is not None:
            self.client.give_up(self.inner)

    def end_soon(self) -> None:
        """Let it end with what it has, also where another replica goes on with it."""
        self._is_ending = True
        self._tell_to_end()

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
            sample.to_skip and not sample.ended for sample in self.samples
        ):
            self.client.end_soon([self.inner])

    def _resume(self, client: EngineClient, version: int | None) -> None:
        self._way = "resume" if version is None else "resume old"
        for sample in self.samples:
            sample.to_skip = sample.text_to_skip = 0
        partial = [
            self._partial(index) for index, sample in enumerate(self.samples) if not sample.ended
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
        message = self.message
        if not message.stream and message.exact_version is None:
            # its client has nothing yet: begin anew
            self.samples = [sample if sample.ended else SampleSoFar() for sample in self.samples]
        else:
            for sample in self.samples:
                sample.to_skip, sample.text_to_skip = len(sample.token_ids), sample.text_length
            # It has begun: no weight version may keep it from beginning again.
            message = msgspec.structs.replace(message, min_version=None, exact_version=None)
        self._begin(client, message, message.num_samples)

    def _finish(self, sample: SampleSoFar, delta: Delta, finished: TrainingSample) -> None:
        if self.moves and not sample.is_begun_by(finished.completion_tokens, finished.logprobs):
            self._lose()
            return
        sample.ended = True
        self.left -= 1
        if self._asked is not None:
            delta = replace(delta, finished=replace(finished, sampling_params=self._asked))
        if not self.left and self._way == "repeat":
            self.let_go()
        self._fleet.arrived(self, delta)

    def _rest_of(self, sample: SampleSoFar, delta: Delta) -> Delta | None:
        """What is new in a delta of a repetition; None: nothing, or it is not what came before."""
        at, count = len(sample.token_ids) - sample.to_skip, len(delta.token_ids)
        if not sample.is_begun_by(delta.token_ids, delta.logprobs, at):
            self._lose()
            return None
        skip = min(count, sample.to_skip)
        sample.to_skip -= skip
        text = delta.text
        if text is not None:
            skip_text = min(len(text), sample.text_to_skip)
            sample.text_to_skip -= skip_text
            text = text[skip_text:]
        if skip == count and not text:
            return None
        columns: dict[str, Any] = {name: getattr(delta, name) for name in _PER_TOKEN}
        new = {name: column and column[skip:] for name, column in columns.items()}
        return replace(delta, text=text, **new)

    def _lose(self) -> None:
        self.let_go()
        self._fleet.ended(self, WeightsChanged())

    def _still_wanted(self) -> int | None:
        if self.message.num_wanted is None:
            return None
        return max(1, self.message.num_wanted - sum(sample.ended for sample in self.samples))

    def _partial(self, index: int) -> TrainingSample:
        """A sample as `resume_from` takes it."""
        sample, params = self.samples[index], self.message.params
        count, prompt = len(sample.token_ids), tuple(self.message.prompt)
        spans, contexts = list[VersionSpan](), list[ContextVersions]()
        ends = [context.token_start for context in sample.contexts[1:]] + [count]
        for (start, past, version), end in zip(sample.contexts, ends, strict=False):  # maybe none
            last = VersionSpan(version, past[-1].end if past else 0, len(prompt) + end - 1)
            contexts.append(ContextVersions(start, end, (*past, last)))
            if spans and spans[-1].version == version:
                start = spans.pop().start
            spans.append(VersionSpan(version, start, end))
        starts = [*sample.adapter_starts, (0, count)]
        return TrainingSample(
            prompt_tokens=prompt,
            completion_tokens=tuple(sample.token_ids),
            logprobs=tuple(sample.logprobs),
            ref_logprobs=None,
            weight_version=spans[-1].version if spans else 0,
            finish_reason="abort",
            weight_versions=tuple(spans),
            raw_logprobs=tuple(sample.raw_logprobs) if params.raw_logprobs else None,
            log_kept_mass=tuple(sample.log_kept_mass) if params.cuts else (0.0,) * count,
            top_logprobs=tuple(sample.top_logprobs) if params.top_logprobs else None,
            numerics=self._numerics,
            seed=params.seed or 0,
            sample_index=index,
            cached_tokens=sample.cached_tokens,
            kv_versions=tuple(contexts),
            loss_mask=(True,) * count,
            sampling_params=params,
            adapter_versions=tuple(
                VersionSpan(version, start, end)
                for (version, start), (_, end) in itertools.pairwise(starts)
            ),
        )


def _given_up(request: FleetRequest) -> EnginesDied:
    """Why a suspect ends that another engine has died with."""
    log.error(
        "request %d was with %d engines that died, and is not tried again.",
        request.request_id,
        request.deaths,
    )
    return EnginesDied(request.deaths)
