"""Frozen nouns of the public interface: what a caller asks for and what comes back. Standard
library only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Literal, NamedTuple, TypedDict

from nano_inference.errors import InvalidRequest
from nano_inference.features import REQUEST_LIMITS, Setting, require
from nano_inference.fields.checks import PENALTIES, biases, real, stop_strings, token_id_set, whole
from nano_inference.fields.options import option, strict_options
from nano_inference.structured.grammar import Grammar

SAMPLING = "Sampling"  # group of options in `--help`

FinishReason = Literal["stop", "length", "abort"]

# What becomes of running requests when weights change. recompute: their context is computed again
# under the new ones; keep: they go on with the keys and values that they have; abort: they end with
# what they have; wait: the update waits for them; finish_old: they finish on the old weights, which
# are kept aside for them.
KvPolicy = Literal["recompute", "keep", "abort", "wait", "finish_old"]

# What becomes of them at a pause. keep: they stop where they are; wait: they finish first; abort:
# they end.
PauseMode = Literal["keep", "wait", "abort"]

# stop_reason of samples that ended because enough others had finished
GROUP_COMPLETE = "group complete"
# and of such as were to be begun by a version that serves no more
VERSION_GONE = "the weight version is gone"
# what begins the stop_reason of samples that failed
ERROR = "error: "

# that a request may ask to keep its blocks: no request can hold them for ever
MOST_KEPT_SECONDS = 86400.0

# Parts of the memory that an engine can give back while it sleeps.
Memory = Literal["weights", "kv_cache"]


class Limits(TypedDict, total=False):
    """What a request asks of its group, of weight versions and of the cost; see
    `InferenceEngine.add_request`.
    """

    num_wanted: int | None
    min_version: int | None
    max_staleness: int | None
    exact_version: int | None
    max_entries: int | None


class UpdateOptions(TypedDict, total=False):
    """How a weight update is taken; see `InferenceEngine.update_weights`."""

    kv_policy: KvPolicy | None
    version: int | None
    complete: bool
    check_finite: bool


@strict_options(InvalidRequest)
@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when a sample ends. Checked at construction: `InvalidRequest`.

    The distribution is made in this order: bias, penalties, masks (`allowed_token_ids`,
    `min_tokens`), temperature, top_k, top_p, min_p (`docs/sampling.md`).

    Attributes:
        temperature: 0 is greedy: the most likely token, the lower id where two are equal.
        max_tokens: completion tokens at most.
        stop_token_ids: ids that end the sample; the id itself is kept as its last token.
        stop: strings that end the sample. The tokens up to and including the one that completes the
            string are kept; the sample's `text` ends before it.
        top_p: keep the shortest prefix, by falling probability, whose mass reaches this; 1 keeps
            all.
        top_k: keep exactly this many tokens; 0 keeps all.
        min_p: keep tokens at least this probable relative to the most probable; 0 keeps all.
        presence_penalty: taken off the logit of every token that the completion holds; in [-2, 2].
        frequency_penalty: the same, times how often the completion holds it; in [-2, 2].
        repetition_penalty: positive logits of tokens that prompt or completion hold are divided by
            it, negative ones multiplied (arXiv:1909.05858); in [0.01, 100], and 1 changes nothing.
        logit_bias: token id -> what is added to its logit, in [-100, 100].
        allowed_token_ids: the only ids that may be drawn; None: all. Give the end-of-sequence id
            too if the sample may end by it.
        min_tokens: completion tokens before a stop id may be drawn (until then it is masked) or a
            stop string counts.
        ignore_eos: do not stop at the model's own end-of-sequence ids.
        seed: with the sample index and the position this decides every draw; None: fresh entropy,
            returned with the sample.
        top_logprobs: also return the ids and logprobs of this many most probable tokens at every
            position.
        prompt_logprobs: also return the model's own logprob of every prompt token. Such a request
            reads no cached prefix.
        raw_logprobs: also return the model's own logprobs (temperature 1, nothing applied).
        sampling_mask: also return which ids the filters kept, token by token.
        cache_salt: prefixes are shared only between requests of the same salt.
        priority: lower goes first; equal ones by arrival.
        prompt_top_logprobs: also return the ids and logprobs of this many most probable tokens at
            every token of the prompt; needs `prompt_logprobs`.
        grammar: that the completion follows (docs/structured.md). At the end of a text of it the
            sample ends, also before `min_tokens`.
        adapter: name of the adapter that samples, on top of the weights (docs/adapters.md); None:
            the weights alone.
        routed_experts: also return the experts that each token went through; needs an engine of
            `enable_return_routed_experts`.
        keep_cache_seconds: keep the sample's blocks in the cache for so long after its end: of
            blocks that nothing uses they are evicted last (docs/caches.md). At most 86400, a day;
            0: they are evicted like others.
        cache_priority: of kept blocks those of a higher one are evicted later; needs
            `keep_cache_seconds`.
    """

    temperature: float = option(
        1.0,
        SAMPLING,
        "0: always the most likely token; 1: as trained.",
        "--temperature",
        "-t",
    )
    max_tokens: int = option(256, SAMPLING, "Maximum tokens to generate.", "--max-tokens", "-m")
    stop_token_ids: frozenset[int] = option(
        frozenset(),
        SAMPLING,
        "Stop after this token. May be repeated.",
        "--stop-token-id",
        each=int,
        metavar="ID",
    )
    stop: tuple[str, ...] = option(
        (),
        SAMPLING,
        "Stop before this text. May be repeated.",
        each=str,
        metavar="TEXT",
    )
    top_p: float = option(
        1.0, SAMPLING, "Sample among the likeliest tokens of this total probability; 1: all."
    )
    top_k: int = option(0, SAMPLING, "Sample among this many likeliest tokens; 0: all.")
    min_p: float = option(
        0.0, SAMPLING, "Drop tokens less likely than this share of the likeliest; 0: none."
    )
    presence_penalty: float = option(
        0.0, SAMPLING, "Lower the logits of tokens that the completion contains."
    )
    frequency_penalty: float = option(
        0.0, SAMPLING, "Lower them once for each time that they occur."
    )
    repetition_penalty: float = option(
        1.0, SAMPLING, "Above 1: make repeating tokens of prompt and completion less likely."
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float], hash=False)
    allowed_token_ids: frozenset[int] | None = None
    min_tokens: int = option(0, SAMPLING, "Minimum tokens to generate.")
    ignore_eos: bool = option(False, SAMPLING, "Continue after the end-of-sequence token.")
    seed: int | None = option(None, SAMPLING, "Same seed, same samples. Default: random.")
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    raw_logprobs: bool = False
    sampling_mask: bool = False
    cache_salt: str | None = None
    priority: int = 0
    prompt_top_logprobs: int = 0
    grammar: Grammar | None = None
    adapter: str | None = option(
        None, SAMPLING, "Sample with the loaded LoRA adapter of this name.", metavar="NAME"
    )
    routed_experts: bool = False
    keep_cache_seconds: float = 0.0
    cache_priority: int = 0

    def __post_init__(self) -> None:
        real("temperature", self.temperature, 0.0, math.inf)
        real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        real("min_p", self.min_p, 0.0, 1.0)
        real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        real("repetition_penalty", self.repetition_penalty, *PENALTIES)
        whole("max_tokens", self.max_tokens, 1)
        whole("top_logprobs", self.top_logprobs, 0)
        whole("prompt_top_logprobs", self.prompt_top_logprobs, 0)
        whole("top_k", self.top_k, 0)
        whole("min_tokens", self.min_tokens, 0)
        whole("priority", self.priority, -(2**31), 2**31)
        if self.seed is not None:
            whole("seed", self.seed, 0, 2**64)
        _require_name(self.adapter)
        _require_keeping(self.keep_cache_seconds, self.cache_priority)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be True or False, not {getattr(self, name)!r}.")
        if not isinstance(self.cache_salt, str | None):  # pyright: ignore
            raise InvalidRequest(f"cache_salt must be a string or None, not {self.cache_salt!r}.")
        if not isinstance(self.grammar, Grammar | None):  # pyright: ignore
            raise InvalidRequest(f"grammar must be a Grammar or None, not {self.grammar!r}.")
        require(REQUEST_LIMITS, Setting(self))
        object.__setattr__(
            self, "stop_token_ids", token_id_set("stop_token_ids", self.stop_token_ids)
        )
        object.__setattr__(self, "stop", stop_strings(self.stop))
        object.__setattr__(self, "logit_bias", biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            object.__setattr__(
                self, "allowed_token_ids", token_id_set("allowed_token_ids", self.allowed_token_ids)
            )
            self._check_allowed(self.allowed_token_ids)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}; lower "
                "it to that."
            )
        if self.sampling_mask and not self.filters:
            raise InvalidRequest(
                "sampling_mask needs temperature > 0 and a filter (top_k, top_p or min_p): "
                "without one every token is "
                "kept."
            )

    def _check_allowed(self, allowed: frozenset[int]) -> None:
        if not allowed:
            raise InvalidRequest(
                "allowed_token_ids is empty, so nothing could be drawn; leave it out to allow all."
            )
        if unreachable := self.stop_token_ids - allowed:
            raise InvalidRequest(
                f"stop token id {min(unreachable)} is not among allowed_token_ids and could never "
                "be drawn; add it "
                "there, or take it out of stop_token_ids."
            )
        if self.min_tokens and allowed <= self.stop_token_ids:
            raise InvalidRequest(
                f"every one of the {len(allowed)} allowed_token_ids stops the sample, so "
                "min_tokens="
                f"{self.min_tokens} leaves nothing to draw."
            )

    @property
    def penalizes(self) -> bool:
        """Whether tokens that are there already change the distribution."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def filters(self) -> bool:
        """Whether some filter can cut the distribution. Greedy choice never does."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def cuts(self) -> bool:
        """Whether a mask or a filter can cut the distribution, so that `log_kept_mass` can be below
        0. At temperature 0 that is 0 whatever is cut, as logprobs are the raw ones.
        """
        masks = (
            self.allowed_token_ids is not None or self.min_tokens > 0 or self.grammar is not None
        )
        return self.filters or (masks and self.temperature > 0)


_FLAGS = ("ignore_eos", "prompt_logprobs", "raw_logprobs", "sampling_mask", "routed_experts")


def _require_name(adapter: object) -> None:
    if adapter is not None and not (isinstance(adapter, str) and adapter):
        raise InvalidRequest(f"adapter={adapter!r} must be a name, or None.")


def _require_keeping(seconds: float, priority: int) -> None:
    real("keep_cache_seconds", seconds, 0.0, MOST_KEPT_SECONDS)
    whole("cache_priority", priority, -(2**31), 2**31)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) belong to weights of this version: tokens of a completion that were
    sampled from them, or positions of a context that were computed by them.
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """Ids that the filters kept, in CSR form: token i was drawn among
    `token_ids[offsets[i]:offsets[i + 1]]`.
    """

    offsets: tuple[int, ...]
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]]) -> "SamplingMask":
        """The mask of these ids, token by token."""
        return cls((0, *accumulate(map(len, rows))), tuple(chain.from_iterable(rows)))

    def rows(self) -> list[tuple[int, ...]]:
        """The ids that were kept, token by token."""
        return [self.token_ids[begin:end] for begin, end in pairwise(self.offsets)]


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Which experts tokens went through, layer by layer. `numpy.asarray` of it is the array of its
    shape, without a copy.

    Attributes:
        shape: rows, layers of the model, experts of a token. There is a row for each token of
            prompt and completion but the last one, which nothing was computed of.
        dtype: of an id.
        data: the ids in C order, little-endian; those of a token and layer rise. A layer without
            experts has zeros.

    Raises `InvalidRequest` where the three do not fit together.
    """

    shape: tuple[int, ...]
    dtype: Literal["uint8", "uint16"]
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        size = 1 if self.dtype == "uint8" else 2
        fits = math.prod(self.shape) * size == len(self.data)
        if len(self.shape) != 3 or min(self.shape) < 0 or not fits:
            raise InvalidRequest(
                f"routed experts of shape {self.shape} and {self.dtype} do not fit "
                f"{len(self.data)} bytes."
            )

    @property
    def __array_interface__(self) -> dict[str, object]:
        """By which numpy reads it."""
        typestr = "|u1" if self.dtype == "uint8" else "<u2"
        return {"version": 3, "shape": self.shape, "typestr": typestr, "data": self.data}

    def rows(self, start: int, end: int | None = None) -> "RoutedExperts":
        """The rows from `start` on, before `end`."""
        kept = range(self.shape[0])[start:end]
        width = self.shape[1] * self.shape[2] * (1 if self.dtype == "uint8" else 2)
        data = self.data[kept.start * width : kept.stop * width]
        return RoutedExperts((len(kept), *self.shape[1:]), self.dtype, data)


class ContextVersions(NamedTuple):
    """Which weights computed what the completion tokens [token_start, token_end) attended to.

    `versions` tile the context of the last of them, by position in the whole sequence; an earlier
    one saw the part before it. Neighbours of one version are one span.
    """

    token_start: int
    token_end: int
    versions: tuple[VersionSpan, ...]


class TopLogprobs(NamedTuple):
    """The most probable tokens of one position, best first, ties by lower id."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One finished (or aborted) sample: what RL training needs of it. All per-token tuples have one
    entry a token.

    Attributes:
        prompt_tokens: the prompt as it was given.
        completion_tokens: sampled ids, a stop id included.
        logprobs: log-probability of each completion token under the distribution that it was drawn
            from (after masks, temperature and filters; natural log). At temperature 0 these are the
            raw ones.
        ref_logprobs: the reference model's own log-probability of each completion token
            (temperature 1, nothing applied); None where there is no reference model, or the sample
            was aborted before it was scored.
        weight_version: of the weights that sampled the last token.
        finish_reason: `"stop"`, `"length"` or `"abort"`.
        stop_reason: the id or the string that stopped it; for an abort a word on why, where there
            is more to say; else None.
        weight_versions: which version sampled which tokens, in order, without gaps. Tokens that
            were appended belong to the span before them.
        kv_versions: which versions computed the keys and values that the tokens attended to; a new
            entry only where that changed: at an update, or where the context was computed again.
            Appended tokens have none.
        loss_mask: False at tokens that were appended (a tool's, an environment's), not sampled;
            their logprob is 0.
        raw_logprobs: the model's own log-probabilities (temperature 1, nothing applied), if asked
            for.
        log_kept_mass: log of the mass that masks and filters left of the distribution over the full
            vocabulary, after bias, penalties and temperature (0 where nothing was cut): `logprobs +
            log_kept_mass` is what a trainer over the full vocabulary computes at that temperature.
            At temperature 0 it is 0, as `logprobs` are raw.
        sampling_mask: the ids that the filters kept, if asked for.
        top_logprobs: the most probable tokens at each position, if asked for, under the
            distribution that `logprobs` is of. Tokens that filters or masks cut are not among them.
        prompt_logprobs: the model's own log-probability of each prompt token after those before it,
            if asked for. The first is nan.
        numerics: fingerprint of the arithmetic; the same fingerprint promises the same bits.
        seed: with `sample_index` and the weights it reproduces the sample.
        sample_index: position in the request's group.
        request_id: what `add_request` returned.
        group_id: the request that began the sample's group. `resume_from` keeps it, so the samples
            of one prompt have one `group_id` in all turns. None: the sample comes from a file of an
            older release.
        cached_tokens: prompt tokens that the prefix cache provided, as first computed for the
            group.
        text: the completion as text, where the prompt was text or stop strings were given. It ends
            before a stop string and leaves special tokens out.
        sampling_params: what the request asked for: with prompt, seed and weights all that a replay
            needs.
        prompt_top_logprobs: the most probable tokens in the place of each prompt token, if asked
            for, under the distribution that `prompt_logprobs` is of. The first entry is empty.
        adapter_versions: which version of its adapter (`sampling_params.adapter`) sampled which
            tokens, as in `weight_versions`; empty without one.
        routed_experts: the experts that each token went through as its keys and values were
            computed, if asked for and known.
        routed_experts_unknown: why they are not known; None: they are, or were not asked for.
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
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    numerics: str = ""
    seed: int = 0
    sample_index: int = 0
    request_id: int = 0
    cached_tokens: int = 0
    text: str | None = None
    kv_versions: tuple[ContextVersions, ...] = ()
    loss_mask: tuple[bool, ...] = ()
    sampling_params: SamplingParams | None = None
    prompt_top_logprobs: tuple[TopLogprobs, ...] | None = None
    adapter_versions: tuple[VersionSpan, ...] = ()
    routed_experts: RoutedExperts | None = None
    routed_experts_unknown: str | None = None
    group_id: int | None = None

    @property
    def oldest_weight_version(self) -> int:
        """The oldest version that sampled a token of it: what a filter for stale samples asks."""
        return min((span.version for span in self.weight_versions), default=self.weight_version)


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a sample while it grows.

    Attributes:
        request_id, sample_index: which sample.
        token_ids, logprobs: what was sampled since the last piece.
        text: new text that will not change, where text is wanted; it may lag behind the tokens.
        finished: the whole sample, in its last piece, which has no tokens.
        top_logprobs, raw_logprobs: of `token_ids`, as in `TrainingSample`; None unless asked for.
        cached_tokens: prompt tokens that the prefix cache provided.
        queued: seconds from when the request was handed in until its first chunk was planned, or
            until it ended.
        log_kept_mass: of `token_ids`, as in `TrainingSample`; None where neither masks nor filters
            can cut.
        weight_version: of the weights that sampled `token_ids`; 0 where there are none.
        past_versions: positions of the context that earlier weights computed (`kv_policy="keep"`);
            the weights of `weight_version` computed the rest. See `TrainingSample.kv_versions`.
        adapter_version: of the adapter that sampled `token_ids`; 0 where there is none.
    """

    request_id: int
    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str | None
    finished: TrainingSample | None = None
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    raw_logprobs: tuple[float, ...] | None = None
    cached_tokens: int = 0
    queued: float = field(default=0.0, compare=False)
    log_kept_mass: tuple[float, ...] | None = None
    weight_version: int = 0
    past_versions: tuple[VersionSpan, ...] = ()
    adapter_version: int = 0


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that requests may ask for.

    Attributes:
        name: by which they do.
        version: that serves.
        rank: the largest of its matrices.
        targets: kinds of modules that it changes.
        num_bytes: of its numbers.
        folder: that it was read from; None: its tensors were given.
    """

    name: str
    version: int
    rank: int
    targets: tuple[str, ...]
    num_bytes: int
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What became of drafts since the engine was built (docs/speculation.md).

    Attributes:
        sources: that are asked; one that failed is missing.
        drafted, accepted: by source: rows computed for drafts at each place behind the known
            tokens, and those of them whose draft was drawn.
        step_rows, step_seconds: what a step was found to cost by its rows, at start; empty: it was
            not measured.
    """

    sources: tuple[str, ...]
    drafted: Mapping[str, tuple[int, ...]]
    accepted: Mapping[str, tuple[int, ...]]
    step_rows: tuple[int, ...] = ()
    step_seconds: tuple[float, ...] = ()

    @property
    def num_drafted(self) -> int:
        """Rows that were computed for drafts."""
        return sum(map(sum, self.drafted.values()))

    @property
    def num_accepted(self) -> int:
        """Those of them that were not in vain."""
        return sum(map(sum, self.accepted.values()))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of one engine since it was built, and its state now.

    Attributes:
        num_waiting, num_running: sequences (a group whose prompt is not computed yet counts once).
        num_held: sequences that wait for a weight version, or for the end of a pause.
        weight_version: that new tokens are computed by.
        num_free_blocks, num_blocks: block ids. Where layers have a window, `kv_use` says how full
            the memory is.
        num_cached_blocks: of the free ones, those in which a prefix can still be found.
        num_shared_blocks: of the others, those that more than one sequence holds.
        kv_leaked_blocks: blocks that were in use when the engine was last without a request: 0, or
            there is a bug.
        kv_use: share of the KV memory that sequences hold; the rest may still hold prefixes.
        num_steps, num_preemptions: since the engine was built, like all that follow.
        tokens_computed: rows that went through a forward, of all weight sets.
        prompt_tokens_computed, prompt_tokens_cached: of the policy; computed, and found in the
            prefix cache.
        hit_rate: share of `prompt_tokens_cached` in both.
        prompt_tokens: of the requests that were let in; a prompt counts once, whatever its samples
            and recomputations.
        prompt_tokens_queried: tokens looked up in the prefix cache; `prompt_tokens_cached` of them
            were found there. A sequence that was preempted looks again, with its completion so far.
        completion_tokens: sampled.
        tokens_per_second: completion tokens by time spent in steps.
        step_microseconds: host time of an average step, by phase: what the loop did in it, and in
            `wait` for the device. A CPU is its own device: there `forward` and `sample` hold the
            work itself.
        ranks_busy, ranks_waiting: seconds of each rank in steps: with its own part, and waiting for
            other stages of the pipeline (rank 0: for samples). As the host sees it, which on a GPU
            is only ahead of the work.
        grammars_compiled, grammars_failed: compilations of grammars, beside the steps; one serves
            all requests of a grammar while it is kept.
        grammar_seconds: that they took.
        speculation: None: it is off.
        num_kept_blocks: that requests asked to keep (`SamplingParams.keep_cache_seconds`) and that
            are in memory now.
        kept_file_bytes: of kept blocks that were evicted, in files now.
        kept_blocks_written, kept_blocks_read: to files, and back.
    """

    num_waiting: int
    num_running: int
    num_held: int
    weight_version: int
    num_free_blocks: int
    num_blocks: int
    num_cached_blocks: int
    num_shared_blocks: int
    kv_leaked_blocks: int
    kv_use: float
    num_steps: int
    num_preemptions: int
    tokens_computed: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    hit_rate: float
    prompt_tokens: int
    prompt_tokens_queried: int
    completion_tokens: int
    tokens_per_second: float
    step_microseconds: Mapping[str, float]
    ranks_busy: tuple[float, ...]
    ranks_waiting: tuple[float, ...]
    grammars_compiled: int
    grammars_failed: int
    grammar_seconds: float
    speculation: SpeculationStats | None = None
    num_kept_blocks: int = 0
    kept_file_bytes: int = 0
    kept_blocks_written: int = 0
    kept_blocks_read: int = 0
