"""`FleetRequest`: a request that can be resumed by another replica, with the same bits."""

import itertools
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from nano_inference.core.sequence import Context
from nano_inference.fleet.errors import WeightsChanged
from nano_inference.fleet.router import Ticket
from nano_inference.remote.client import EngineClient
from nano_inference.remote.messages import Generate, Resume
from nano_inference.remote.open_requests import Receiver
from nano_inference.types import (
    ContextVersions,
    Delta,
    SamplingParams,
    TopLogprobs,
    TrainingSample,
    VersionSpan,
)

# What a delta, and a sample so far, have for each token.
_PER_TOKEN = ("token_ids", "logprobs", "log_kept_mass", "raw_logprobs", "top_logprobs")


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
    """A request of a fleet, and how far each of its samples has come. It knows the client of its
    replica, and nothing of the fleet.

    `hand_to` another replica resumes in one of three ways: from the beginning, where nothing has
    come; from the tokens so far, which are one prefill; or, where those cannot be resumed
    (`sampling_mask`: masks come in the end only), from the beginning, and what the client has is
    skipped. The same seed, position and weights draw the same tokens in each.

    Args:
        message: the request, with a seed.
        session: of the client.
        asked: the parameters without the seed, if the client gave none.
        numerics: fingerprint of all replicas.

    Attributes:
        samples: how far each has come.
        left: of them, how many have not ended.
        ticket: its place; None: it waits for one.
        client: of its replica.
        receiver: gets its deltas there.
        inner: its id there.
        handed_at: when that replica got it, in seconds of the monotonic clock.
        heard_at: when something last came.
        moves: how often it changed its replica.
        deaths: of engines that had it.
        computes_prompt: its replica is to do no more than that.
    """

    def __init__(
        self, message: Generate, session: str | None, asked: SamplingParams | None, numerics: str
    ) -> None:
        self.message = message
        self.session = session
        self.samples = [SampleSoFar() for _ in range(message.num_samples)]
        self.left = message.num_samples
        self.ticket: Ticket | None = None
        self.client: EngineClient | None = None
        self.receiver: Receiver | None = None
        self.inner = 0
        self.handed_at = 0.0
        self.heard_at = time.monotonic()
        self.moves = 0
        self.deaths = 0
        self.computes_prompt = False
        self._asked = asked
        self._numerics = numerics
        self._way: Literal["begin", "resume", "resume old", "repeat"] = "begin"
        self._has_come = False  # something, since it was handed over
        self._is_ending = False  # it was asked to end with the tokens that it has

    @property
    def request_id(self) -> int:
        """The fleet's."""
        return self.message.request_id

    @property
    def has_begun(self) -> bool:
        """Whether any sample has a token, or has ended."""
        return any(sample.ended or sample.token_ids for sample in self.samples)

    # -- from the replica --------------------------------------------------------------------------

    def hear(self, delta: Delta) -> bool:
        """Note that a delta has come; whether it is the first since the request was handed over."""
        self.heard_at = time.monotonic()
        if self._has_come:
            return False
        self._has_come = True
        self.samples[delta.sample_index].cached_tokens = delta.cached_tokens
        return True

    def take(self, delta: Delta) -> Delta | None:
        """Add a delta to its sample; returns what of it is for the client. Raises `WeightsChanged`
        where a replica repeats a sample with other tokens.
        """
        sample = self.samples[delta.sample_index]
        if delta.finished is not None:
            return self._finished(sample, delta, delta.finished)
        rest = self._rest_of(sample, delta) if sample.to_skip else delta
        if rest is None:
            return None
        sample.take(rest)
        if self._is_ending:  # a repetition may have come to where it was
            self._ask_to_end()
        if not self.message.stream:
            return None
        sample.text_length += len(rest.text or "")
        return rest

    @property
    def has_computed_prompt(self) -> bool:
        """Whether its replica was to compute the prompt only, and has."""
        return self.computes_prompt and all(each.ended or each.token_ids for each in self.samples)

    def lost(self) -> None:
        """Count a death, if its engine has died, and is not just about to."""
        if self.client is not None and self.client.why_dead is not None:
            self.deaths += 1

    def try_otherwise(self) -> bool:
        """Begin again at the same replica in the next way if it rejects a resumption. Returns
        whether there is a next way.
        """
        if self.client is None or self._way not in ("resume", "resume old"):
            return False
        if self._way == "resume old":  # those weights are gone: those that serve will do
            self._resume(self.client, None)
        else:  # why it cannot be resumed is not the client's business
            self._repeat(self.client)
        return True

    # -- to a replica ------------------------------------------------------------------------------

    def hand_to(
        self,
        client: EngineClient,
        ticket: Ticket,
        receiver: Receiver,
        version: int | None = None,
    ) -> None:
        """Let a replica begin it, or resume it.

        Args:
            client: of the replica.
            ticket: its place there.
            receiver: gets its deltas.
            version: that serves, where samples of the version before finish on that one
                (`kv_policy="finish_old"`); else None.

        Raises as `EngineClient.begin` does.
        """
        self.client, self.ticket, self.receiver = client, ticket, receiver
        self.handed_at = time.monotonic()
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
        self._ask_to_end()

    # -- inside ------------------------------------------------------------------------------------

    def _begin(self, client: EngineClient, message: Generate | Resume, num_samples: int) -> None:
        assert self.receiver is not None
        self.inner = client.begin(self.receiver, message, num_samples)
        if self._is_ending:
            self._ask_to_end()

    def _ask_to_end(self) -> None:
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

    def _finished(self, sample: SampleSoFar, delta: Delta, finished: TrainingSample) -> Delta:
        if self.moves and not sample.is_begun_by(finished.completion_tokens, finished.logprobs):
            raise WeightsChanged
        sample.ended = True
        self.left -= 1
        if not self.left and self._way == "repeat":
            self.let_go()
        if self._asked is None:
            return delta
        return replace(delta, finished=replace(finished, sampling_params=self._asked))

    def _rest_of(self, sample: SampleSoFar, delta: Delta) -> Delta | None:
        """Return the new part of a delta of a repetition; None if nothing is new."""
        at, count = len(sample.token_ids) - sample.to_skip, len(delta.token_ids)
        if not sample.is_begun_by(delta.token_ids, delta.logprobs, at):
            raise WeightsChanged
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
