"""`FleetRequest`: a request that another replica can resume with the same results, bit for bit."""

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
    LogprobMatrix,
    SamplingParams,
    TopLogprobs,
    TrainingSample,
    VersionSpan,
)

# per-token fields of a delta and of `SampleSoFar`
_PER_TOKEN = ("token_ids", "logprobs", "log_kept_mass", "raw_logprobs", "top_logprobs")
_MATRICES = ("token_id_logprobs", "raw_token_id_logprobs")  # also per token


@dataclass(slots=True)
class SampleSoFar:
    """Received part of one sample."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    log_kept_mass: list[float] = field(default_factory=list[float])
    raw_logprobs: list[float] = field(default_factory=list[float])
    top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    token_id_logprobs: list[LogprobMatrix] = field(default_factory=list[LogprobMatrix])
    raw_token_id_logprobs: list[LogprobMatrix] = field(default_factory=list[LogprobMatrix])
    contexts: list[Context] = field(default_factory=list[Context])
    # (version of the adapter, first token)
    adapter_starts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    text_length: int = 0  # length of the text that the client has
    cached_tokens: int = 0
    to_skip: int = 0  # repeated tokens that are still to come
    text_to_skip: int = 0
    ended: bool = False

    def take(self, delta: Delta) -> None:
        """Add a delta's tokens."""
        by = delta.past_versions, delta.weight_version
        if delta.token_ids and (not self.contexts or self.contexts[-1][1:] != by):
            self.contexts.append(Context(len(self.token_ids), *by))
        adapter = delta.adapter_version
        if adapter and (not self.adapter_starts or self.adapter_starts[-1][0] != adapter):
            self.adapter_starts.append((adapter, len(self.token_ids)))
        for name in _PER_TOKEN:
            getattr(self, name).extend(getattr(delta, name) or ())
        for name in _MATRICES:
            if (matrix := getattr(delta, name)) is not None:
                getattr(self, name).append(matrix)
        self.cached_tokens = delta.cached_tokens

    def matrices(self) -> dict[str, Any]:
        """Return the logprobs of named ids, by field of a sample."""
        parts = {name: getattr(self, name) for name in _MATRICES}
        return {name: LogprobMatrix.joined(each) for name, each in parts.items() if each}

    def is_begun_by(
        self, token_ids: tuple[int, ...], logprobs: tuple[float, ...], at: int = 0
    ) -> bool:
        """Return True if these repeat the sample's tokens and logprobs from position `at` on."""
        end = min(len(self.token_ids), at + len(token_ids))
        count = end - at
        return (
            tuple(self.token_ids[at:end]) == token_ids[:count]
            and tuple(self.logprobs[at:end]) == logprobs[:count]
        )


class FleetRequest:
    """Request of a fleet, with the received part of each sample. The client of its
    replica is the only part of the fleet that it knows.

    `hand_to` lets another replica resume in one of three ways. If nothing has come, the replica
    begins. Otherwise it resumes from the received tokens, with one prefill. If it rejects that, or
    with `sampling_mask`, whose masks come only at the end, it repeats the request from its
    beginning, and the part that the client has is skipped. In each way the same seed, position and
    weights draw the same tokens.

    Args:
        message: The request, with a seed.
        session: Session of the client, or None.
        asked: Sampling parameters without the seed if the client gave no seed, else None.
        numerics: Numerics fingerprint of all replicas.

    Attributes:
        samples: Received part of each sample.
        left: Number of samples that have not ended.
        ticket: Placement at a replica, or None while the request waits for one.
        client: Client of that replica.
        receiver: Receiver of the deltas from that replica.
        inner: Request id at that replica.
        handed_at: Time at which that replica got the request, in seconds of the monotonic clock.
        heard_at: Time of the last delta, on the same clock.
        moves: Number of changes of replica.
        deaths: Number of engines that died while they had the request.
        computes_prompt: True if the replica is to compute only the prompt.
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
        self._has_come = False  # a delta from the current replica
        self._is_ending = False  # the client asked for an end with the tokens so far

    @property
    def request_id(self) -> int:
        """Request id in the fleet."""
        return self.message.request_id

    @property
    def has_begun(self) -> bool:
        """True if any sample has a token or has ended."""
        return any(sample.ended or sample.token_ids for sample in self.samples)

    # -- from the replica --------------------------------------------------------------------------

    def hear(self, delta: Delta) -> bool:
        """Record a delta. Return True for the first one from the current replica."""
        self.heard_at = time.monotonic()
        if self._has_come:
            return False
        self._has_come = True
        self.samples[delta.sample_index].cached_tokens = delta.cached_tokens
        return True

    def take(self, delta: Delta) -> Delta | None:
        """Add a delta to its sample, and return the part that is for the client. Raises
        `WeightsChanged` if a replica repeats a sample with other tokens.
        """
        sample = self.samples[delta.sample_index]
        if delta.finished is not None:
            return self._finished(sample, delta, delta.finished)
        rest = self._rest_of(sample, delta) if sample.to_skip else delta
        if rest is None:
            return None
        sample.take(rest)
        if self._is_ending:  # a repetition may just have caught up
            self._ask_to_end()
        if not self.message.stream:
            return None
        sample.text_length += len(rest.text or "")
        return rest

    @property
    def has_computed_prompt(self) -> bool:
        """True if the replica was to compute only the prompt, and has."""
        return self.computes_prompt and all(each.ended or each.token_ids for each in self.samples)

    def lost(self) -> None:
        """Count a death if the engine has died. An engine about to die does not count yet."""
        if self.client is not None and self.client.why_dead is not None:
            self.deaths += 1

    def try_otherwise(self) -> bool:
        """Begin again at the same replica in the next way if the replica rejects a resumption.
        Return False if there is no next way.
        """
        if self.client is None or self._way not in ("resume", "resume old"):
            return False
        if self._way == "resume old":  # the old weights are gone, so use the current ones
            self._resume(self.client, None)
        else:  # the client need not learn why it cannot be resumed
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
        """Send the request to a replica, which begins or resumes it.

        Args:
            client: Client of the replica.
            ticket: Placement there.
            receiver: Receiver of the deltas.
            version: Live weight version if running samples finish on the previous one
                (`kv_policy="finish_old"`), else None.

        Raises as `EngineClient.begin` does.
        """
        self.client, self.ticket, self.receiver = client, ticket, receiver
        self.handed_at = time.monotonic()
        self._has_come = False
        if not self.has_begun:
            self._way = "begin"
            message = self.message
            if self.computes_prompt:  # so that the first token is reported as soon as it is drawn
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
        """Cancel the request at its replica."""
        if self.client is not None:
            self.client.give_up(self.inner)

    def end_soon(self) -> None:
        """End the request with its tokens so far, also after a move to another replica."""
        self._is_ending = True
        self._ask_to_end()

    # -- inside ------------------------------------------------------------------------------------

    def _begin(self, client: EngineClient, message: Generate | Resume, num_samples: int) -> None:
        assert self.receiver is not None
        self.inner = client.begin(self.receiver, message, num_samples)
        if self._is_ending:
            self._ask_to_end()

    def _ask_to_end(self) -> None:
        """Ask the replica to end, unless it still repeats tokens: a sample must not end before the
        tokens that the client has.
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
            # the client has nothing yet: begin again
            self.samples = [sample if sample.ended else SampleSoFar() for sample in self.samples]
        else:
            for sample in self.samples:
                sample.to_skip, sample.text_to_skip = len(sample.token_ids), sample.text_length
            # no version constraint: it has begun, and must be allowed to begin again
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
        """Return the new part of a delta of a repetition, or None."""
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
        matrices = {name: getattr(delta, name) for name in _MATRICES}
        new |= {name: each and each.rows(skip) for name, each in matrices.items()}
        return replace(delta, text=text, **new)

    def _still_wanted(self) -> int | None:
        if self.message.num_wanted is None:
            return None
        return max(1, self.message.num_wanted - sum(sample.ended for sample in self.samples))

    def _partial(self, index: int) -> TrainingSample:
        """Return a sample's received part in the form that `resume_from` takes."""
        sample, params = self.samples[index], self.message.params
        count, prompt = len(sample.token_ids), tuple(self.message.prompt)
        spans, contexts = list[VersionSpan](), list[ContextVersions]()
        ends = [context.token_start for context in sample.contexts[1:]] + [count]
        for (start, past, version), end in zip(sample.contexts, ends, strict=False):  # may be empty
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
            **sample.matrices(),
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
