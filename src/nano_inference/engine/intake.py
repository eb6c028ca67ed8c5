"""From what callers hand in to checked sequences: new ones, and such as go on with a sample."""

import itertools
import random
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Unpack

from nano_inference.engine.requests import (
    Params,
    RequestChecks,
    checked_ids,
    is_text,
    many_prompts,
    params_for,
)
from nano_inference.errors import InvalidRequest, VersionGone
from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys
from nano_inference.options import is_whole
from nano_inference.scheduling.growing_mask import GrowingMask
from nano_inference.scheduling.sequence import POLICY, Group, Sequence, Sequences
from nano_inference.text.output_text import OutputText
from nano_inference.types import Limits, SamplingParams, TopLogprobs, TrainingSample


class Intake:
    """Makes sequences. Nothing of the engine's state changes if a request is refused.

    Args:
        checks: the engine's limits.
        sequences: where sequence ids come from.
        numerics: fingerprint of the engine; a sample of another one is not gone on with.
        seed: source of fresh request seeds; None: entropy.
    """

    def __init__(
        self, checks: RequestChecks, sequences: Sequences, numerics: str, seed: int | None
    ) -> None:
        self.checks = checks
        self._sequences = sequences
        self._numerics = numerics
        self._num_requests = 0
        self._counting = threading.Lock()
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()

    def new_request_id(self) -> int:
        """An id that was never used."""
        with self._counting:
            self._num_requests += 1
            return self._num_requests - 1

    def request_ids(self, given: int | Iterable[int] | None) -> frozenset[int] | None:
        """Ids of requests, live or ended; None: all. Raises `InvalidRequest` for one that was never
        given out.
        """
        if given is None:
            return None
        ids = frozenset([given] if isinstance(given, int) else given)
        for each in ids:
            if not isinstance(each, int) or not 0 <= each < self._num_requests:
                raise InvalidRequest(
                    f"{each!r} is not the id of a request; {self._num_requests} were made, from 0 "
                    "on."
                )
        return ids

    def sequences(
        self,
        prompts: Any,
        sampling_params: Params,
        num_samples: int,
        stream: bool,
        num_wanted: int | None = None,
    ) -> list[Sequence]:
        """One request a prompt; raises as `sequence` does."""
        many, one = many_prompts(prompts), self.sequence
        pairs = zip(many, params_for(sampling_params, len(many)), strict=True)
        return [
            one(prompt, each, num_samples, stream=stream, num_wanted=num_wanted)
            for prompt, each in pairs
        ]

    def sequence(
        self,
        prompt: Any,
        params: SamplingParams,
        num_samples: int,
        *,
        stream: bool,
        request_id: int | None = None,
        **limits: Unpack[Limits],
    ) -> Sequence:
        """A new request. Raises `InvalidRequest` (`VersionGone` for an `exact_version`) or
        `RequestTooLarge`.
        """
        checks = self.checks
        self.request_ids(request_id)
        token_ids = checks.token_ids(prompt)
        most_mask_ids = checks.require(
            len(token_ids), params, num_samples, limits.get("max_entries")
        )
        for name in ("min_version", "max_staleness", "exact_version"):
            _require_version(name, limits.get(name))
        self._require_not_gone(limits.get("exact_version"))
        num_wanted = limits.get("num_wanted")
        _require_wanted(num_wanted, num_samples)
        stop_ids = checks.stop_ids(params)
        text = None
        if params.stop or is_text(prompt):
            text = OutputText(checks.need_tokenizer("a stop string"), params.stop)
        return Sequence(
            seq_id=self._sequences.new_id(),
            request_id=self.new_request_id() if request_id is None else request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            params=params,
            stop_ids=stop_ids,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            prefix=PrefixKeys(Namespace()),
            num_samples=num_samples,
            scored=range(len(token_ids) - 1) if params.prompt_logprobs else range(0),
            num_best=params.prompt_top_logprobs,
            output_text=text,
            streaming=stream,
            min_version=limits.get("min_version"),
            exact_version=limits.get("exact_version"),
            max_staleness=limits.get("max_staleness"),
            group=Group(num_wanted) if num_wanted is not None else None,
            mask=GrowingMask(most_mask_ids),
        )

    def resumed(
        self,
        sample: TrainingSample,
        append: Iterable[int],
        max_new_tokens: int | None,
        *,
        stream: bool,
    ) -> Sequence:
        """A request that goes on where a sample stopped. Raises `InvalidRequest` or
        `RequestTooLarge`.
        """
        appended = checked_ids(append, self.checks.spec.vocab_size)
        params = self._params_to_go_on(sample, len(appended), max_new_tokens)
        prompt_len, drawn = len(sample.prompt_tokens), len(sample.completion_tokens)
        most_mask_ids = self.checks.require(prompt_len, params, 1)
        seq = Sequence(
            seq_id=self._sequences.new_id(),
            request_id=self.new_request_id(),
            token_ids=[*sample.prompt_tokens, *sample.completion_tokens, *appended],
            num_prompt_tokens=prompt_len,
            params=params,
            stop_ids=self.checks.stop_ids(params),
            seed=sample.seed,
            prefix=PrefixKeys(Namespace()),
            sample_index=sample.sample_index,
            cached_tokens=sample.cached_tokens,
            version_starts=[(span.version, span.start) for span in sample.weight_versions],
            past_contexts=sample.kv_versions,
            appended=_appended_before(sample)
            + ((range(drawn, drawn + len(appended)),) if appended else ()),
            scored=range(prompt_len - 1) if params.prompt_logprobs else range(0),
            # Of a prompt that was not computed to its end they may be another version's.
            scores=list((sample.prompt_logprobs or ())[1:]) if drawn else [],
            num_best=params.prompt_top_logprobs,
            score_best=list((sample.prompt_top_logprobs or ())[1:]) if drawn else [],
            streaming=stream,
            mask=GrowingMask(most_mask_ids),
        )
        if appended and not seq.version_starts:
            seq.version_starts = [(sample.weight_version, 0)]
        _fill(seq, sample, len(appended))
        if sample.text is not None or params.stop:
            text = OutputText(self.checks.need_tokenizer("the text of a sample"), params.stop)
            for token_id in seq.token_ids[prompt_len:]:
                text.append(token_id, may_stop=False)
            text.take()  # whoever streams has it
            seq.output_text = text
        return seq

    def _require_not_gone(self, version: int | None) -> None:
        serving = self._sequences.versions[POLICY]
        if version is not None and version < serving:
            raise VersionGone(f"exact_version={version} is gone; this engine serves {serving}.")

    def _params_to_go_on(
        self, sample: TrainingSample, num_appended: int, max_new_tokens: int | None
    ) -> SamplingParams:
        params = sample.sampling_params
        if params is None:
            raise InvalidRequest("the sample has no sampling_params, so nobody knows how to go on.")
        if sample.numerics != self._numerics:
            raise InvalidRequest(
                f"the sample was made by {sample.numerics!r} and this engine computes with "
                f"{self._numerics!r}; other "
                "bits would follow. Add its tokens as a prompt instead."
            )
        known = len(sample.completion_tokens) + num_appended
        if sample.finish_reason == "stop" and not num_appended:
            raise InvalidRequest(
                "the sample ended by itself (finish_reason 'stop'); append tokens to go on with it."
            )
        if max_new_tokens is not None:
            if not is_whole(max_new_tokens, 1):
                raise InvalidRequest(
                    f"max_new_tokens={max_new_tokens!r} must be a positive integer."
                )
            return replace(params, max_tokens=known + max_new_tokens)
        if known >= params.max_tokens:
            raise InvalidRequest(
                f"the sample has {known} of max_tokens={params.max_tokens} completion tokens; say "
                "max_new_tokens."
            )
        return params


def _require_version(name: str, value: int | None) -> None:
    if value is not None and not is_whole(value, 0):
        raise InvalidRequest(f"{name}={value!r} must be a whole number, or None.")


def _require_wanted(num_wanted: Any, num_samples: int) -> None:
    if num_wanted is not None and not (is_whole(num_wanted, 1) and num_wanted <= num_samples):
        raise InvalidRequest(
            f"num_wanted={num_wanted!r} must be a whole number from 1 to num_samples={num_samples}."
        )


def _appended_before(sample: TrainingSample) -> tuple[range, ...]:
    """The runs of a sample's tokens that were not sampled."""
    runs = itertools.groupby(range(len(sample.loss_mask)), key=sample.loss_mask.__getitem__)
    groups = [(sampled, list(places)) for sampled, places in runs]
    return tuple(range(places[0], places[-1] + 1) for sampled, places in groups if not sampled)


def _fill(seq: Sequence, sample: TrainingSample, num_appended: int) -> None:
    """What a sample has a number of for every token; an appended token has nothing to say."""
    zeros = [0.0] * num_appended
    seq.output_logprobs = [*sample.logprobs, *zeros]
    seq.output_log_kept_mass = [*(sample.log_kept_mass or ()), *zeros]
    if sample.raw_logprobs is not None:
        seq.output_raw_logprobs = [*sample.raw_logprobs, *zeros]
    if sample.sampling_mask is not None:
        seq.mask = GrowingMask(seq.mask.most, sample.sampling_mask.rows() + [()] * num_appended)
    if sample.top_logprobs is not None:
        seq.output_top = [*sample.top_logprobs, *[TopLogprobs((), ())] * num_appended]
