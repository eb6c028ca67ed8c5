"""Frozen nouns of the public interface: what a caller asks for and what comes back. Standard library only."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from nano_inference.errors import InvalidRequest
from nano_inference.options import strict_options

FinishReason = Literal["stop", "length", "abort"]


@strict_options(InvalidRequest)
@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when a sample ends. Checked at construction: `InvalidRequest`.

    The distribution is made in this order: masks, temperature, top_k, top_p, min_p (`docs/design.md`).

    Attributes:
        temperature: 0 is greedy: the most likely token, the lower id where two are equal.
        max_tokens: completion tokens at most.
        stop_token_ids: ids that end the sample; the id itself is kept as its last token.
        top_p: keep the shortest prefix, by falling probability, whose mass reaches this; 1 keeps all.
        top_k: keep exactly this many tokens; 0 keeps all.
        min_p: keep tokens at least this probable relative to the most probable; 0 keeps all.
        min_tokens: completion tokens before a stop id may be drawn (until then it is masked).
        ignore_eos: do not stop at the model's own end-of-sequence ids.
        seed: with the sample index and the position this decides every draw; None: fresh entropy, returned with the
            sample.
        raw_logprobs: also return the model's own logprobs (temperature 1, nothing applied).
        sampling_mask: also return which ids the filters kept, token by token.
        cache_salt: prefixes are shared only between requests of the same salt.
        priority: lower goes first; equal ones by arrival.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    stop_token_ids: frozenset[int] = frozenset()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    raw_logprobs: bool = False
    sampling_mask: bool = False
    cache_salt: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        _real("temperature", self.temperature, 0.0, math.inf)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _whole("max_tokens", self.max_tokens, 1)
        _whole("top_k", self.top_k, 0)
        _whole("min_tokens", self.min_tokens, 0)
        _whole("priority", self.priority, -(2**31), 2**31)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**64)
        for name in ("ignore_eos", "raw_logprobs", "sampling_mask"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be True or False, not {getattr(self, name)!r}.")
        if not isinstance(self.cache_salt, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequest(f"cache_salt must be a string or None, not {self.cache_salt!r}.")
        object.__setattr__(self, "stop_token_ids", _token_id_set(self.stop_token_ids))
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}; lower it to that."
            )
        if self.sampling_mask and not self.filters:
            raise InvalidRequest(
                "sampling_mask needs temperature > 0 and a filter (top_k, top_p or min_p): without one every token is "
                "kept."
            )

    @property
    def filters(self) -> bool:
        """Whether some filter can cut the distribution. Greedy choice never does."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Completion tokens [start, end) were sampled from weights of this version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """Ids that the filters kept, in CSR form: token i was drawn among `token_ids[offsets[i]:offsets[i + 1]]`."""

    offsets: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One finished (or aborted) sample: what RL training needs of it. All per-token tuples have one entry a token.

    Attributes:
        prompt_tokens: the prompt as it was given.
        completion_tokens: sampled ids, a stop id included.
        logprobs: log-probability of each completion token under the distribution that it was drawn from (after masks,
            temperature and filters; natural log). At temperature 0 these are the raw ones.
        ref_logprobs: under a reference model; None where there is none.
        weight_version: of the weights that sampled the last token.
        finish_reason: `"stop"`, `"length"` or `"abort"`.
        stop_reason: the id that stopped it; for an abort a word on why, where there is more to say; else None.
        weight_versions: which version sampled which tokens, in order, without gaps.
        raw_logprobs: the model's own log-probabilities (temperature 1, nothing applied), if asked for.
        log_kept_mass: log of the mass that the filters kept, after temperature (0 where nothing was cut):
            `logprobs + log_kept_mass` is what a trainer over the full vocabulary computes at that temperature.
        sampling_mask: the ids that the filters kept, if asked for.
        numerics: fingerprint of the arithmetic; the same fingerprint promises the same bits.
        seed: with `sample_index` and the weights it reproduces the sample.
        sample_index: position in the request's group.
        request_id: what `add_request` returned.
        cached_tokens: prompt tokens that the prefix cache provided, as first computed for the group.
    """

    prompt_tokens: tuple[int, ...]
    completion_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ref_logprobs: tuple[float, ...] | None
    weight_version: int
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    weight_versions: tuple[VersionSpan, ...] = ()
    raw_logprobs: tuple[float, ...] | None = None
    log_kept_mass: tuple[float, ...] | None = None
    sampling_mask: SamplingMask | None = None
    numerics: str = ""
    seed: int = 0
    sample_index: int = 0
    request_id: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of one engine since it was built, and its state now."""

    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_blocks: int
    num_steps: int
    num_preemptions: int
    tokens_computed: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    completion_tokens: int


def _real(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (open_low and value == low):
        bounds = f"in {'(' if open_low else '['}{low:g}, {high:g}]" if math.isfinite(high) else f"at least {low:g}"
        raise InvalidRequest(f"{name}={value!r} must be a finite number {bounds}.")


def _whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value >= high):
        bounds = f"in [{low}, {high})" if high is not None else f"at least {low}"
        raise InvalidRequest(f"{name}={value!r} must be an integer {bounds}.")


def _token_id_set(ids: Any) -> frozenset[int]:
    try:
        kept = frozenset(ids)
    except TypeError:
        raise InvalidRequest(f"stop_token_ids must be a set of token ids, not {ids!r}.") from None
    for token_id in kept:
        _whole("stop_token_ids entry", token_id, 0)
    return kept
