"""Frozen types of the public interface: requests and results. Standard library only."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Literal, NamedTuple, TypedDict

from nano_inference.errors import InvalidRequest
from nano_inference.features import REQUEST_LIMITS, Setting, require
from nano_inference.fields.checks import (
    PENALTIES,
    bad_words,
    biases,
    processor_names,
    real,
    stop_strings,
    token_id_row,
    token_id_rows,
    token_id_set,
    whole,
)
from nano_inference.fields.options import option, strict_options
from nano_inference.structured.grammar import Grammar

SAMPLING = "Sampling"  # group of options in `--help`

FinishReason = Literal["stop", "length", "abort"]

# Effect of a weight update on running requests.
# recompute: recompute their context under the new weights, then continue.
# keep: continue with the keys and values computed so far.
# abort: end them with the tokens sampled so far.
# wait: delay the update until they finish.
# finish_old: finish them on the old weights, which stay in memory until then.
KvPolicy = Literal["recompute", "keep", "abort", "wait", "finish_old"]

# Effect of a pause on running requests. keep: suspend them; wait: let them finish first;
# abort: end them.
PauseMode = Literal["keep", "wait", "abort"]

# stop_reason of a sample that ended because enough others of its group had finished
GROUP_COMPLETE = "group complete"
# stop_reason of a sample whose requested weight version is no longer served
VERSION_GONE = "the weight version is gone"
# prefix of the stop_reason of a failed sample
ERROR = "error: "

# upper limit of keep_cache_seconds, so that no request can hold blocks forever
MOST_KEPT_SECONDS = 86400.0

# Parts of its memory that a sleeping engine can release.
Memory = Literal["weights", "kv_cache"]


class Limits(TypedDict, total=False):
    """Limits of a request: group size, weight versions and cost. `InferenceEngine.add_request`
    documents them.
    """

    num_wanted: int | None
    min_version: int | None
    max_staleness: int | None
    exact_version: int | None
    max_entries: int | None
    turn_of: int | None


class UpdateOptions(TypedDict, total=False):
    """Options of a weight update. `InferenceEngine.update_weights` documents them."""

    kv_policy: KvPolicy | None
    version: int | None
    complete: bool
    check_finite: bool


@strict_options(InvalidRequest)
@dataclass(frozen=True)
class SamplingParams:
    """Sampling distribution, stop conditions and requested outputs. Raises `InvalidRequest` at
    construction if a value is invalid.

    The distribution is made in this order: logits processors, bias, penalties, masks
    (`allowed_token_ids`, `min_tokens`, `bad_words`, `thinking_token_budget`), temperature, top_k,
    top_p, min_p (`docs/sampling.md`).

    Attributes:
        temperature: Sampling temperature. 0 is greedy: the most likely token, the lower id on a
            tie.
        max_tokens: Maximum number of completion tokens.
        stop_token_ids: Token ids that end the sample. The id is kept as its last token.
        stop: Strings that end the sample. Tokens up to and including the one that completes the
            string are kept. The sample's `text` ends before the string.
        top_p: Keep the shortest prefix of tokens, by falling probability, whose mass reaches this
            value. 1 keeps all.
        top_k: Keep exactly this many tokens. 0 keeps all.
        min_p: Keep tokens at least this probable relative to the most probable one. 0 keeps all.
        presence_penalty: Value in [-2, 2] subtracted from the logit of every token in the
            completion.
        frequency_penalty: Value in [-2, 2] subtracted from a token's logit once for each of its
            occurrences in the completion.
        repetition_penalty: Factor in [0.01, 100] for tokens in the prompt or the completion.
            Positive logits are divided by it, negative ones multiplied (arXiv:1909.05858). 1
            changes nothing.
        logit_bias: Map from token id to a value in [-100, 100] that is added to its logit.
        allowed_token_ids: Only ids that may be drawn. None allows all. Include the end-of-sequence
            id if the sample may end by it.
        min_tokens: Number of completion tokens before a stop id or a stop string can end the
            sample. Stop ids are masked until then.
        ignore_eos: Continue after the model's own end-of-sequence ids.
        seed: Seed that decides every draw, together with sample index and position. None draws a
            fresh seed, which is returned with the sample.
        top_logprobs: Number of most probable tokens whose ids and logprobs to return at every
            completion position.
        prompt_logprobs: Return the model's own logprob of every prompt token. Such a request reads
            no cached prefix.
        raw_logprobs: Return the model's own logprobs (temperature 1, nothing applied).
        sampling_mask: Return the ids that the filters kept at every completion position.
        cache_salt: Salt of the prefix cache. Only requests with equal salts share prefixes.
        priority: Scheduling priority. Lower values run first, equal values by arrival.
        prompt_top_logprobs: Number of most probable tokens whose ids and logprobs to return at
            every prompt position. Needs `prompt_logprobs`.
        grammar: Grammar that the completion follows (docs/structured.md). The sample ends when its
            text is complete, even before `min_tokens`.
        adapter: Name of the adapter to sample with (docs/adapters.md). None samples with the
            weights only.
        routed_experts: Return the experts that each token was routed to. Needs an engine with
            `enable_return_routed_experts`.
        keep_cache_seconds: Seconds for which to keep the sample's blocks in the cache after its
            end, at most 86400 (a day). Kept blocks are evicted after all other unused ones
            (docs/caches.md). 0 keeps none.
        cache_priority: Eviction priority of kept blocks. Higher ones are evicted later. Needs
            `keep_cache_seconds`.
        thinking_token_budget: Maximum number of tokens of thought in a turn, counted after the
            model's opening marker. Then the closing marker is forced (docs/sampling.md). None: no
            limit.
        bad_words: Texts that the completion must not contain, with or without a space before them.
            The token that would complete one is masked.
        logprob_token_ids: Ids whose logprobs to return at every completion position
            (`TrainingSample.token_id_logprobs`).
        prompt_logprob_token_ids: Ids whose logprobs to return at prompt positions
            (`TrainingSample.prompt_token_id_logprobs`): one list for all positions, or one for each
            position after `prompt_logprob_start`. Such a request reads no cached prefix beyond
            `prompt_logprob_start`.
        prompt_logprob_start: Index of the prompt token after which the first of these positions
            lies. Needs `prompt_logprob_token_ids`.
        logits_processors: Names of functions that change the model's logits, in this order, before
            all other steps (`InferenceEngine.register_logits_processor`).
        receipt: Return a receipt with the sample (docs/receipts.md). The first sample under new
            weights waits until their hash is computed.
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
        0.0, SAMPLING, "Lower the logit of a token once for each time that it occurs."
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
    thinking_token_budget: int | None = option(
        None, SAMPLING, "Close the model's thought after this many tokens. Default: no limit."
    )
    bad_words: tuple[str, ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprob_token_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprob_start: int = 0
    logits_processors: tuple[str, ...] = ()
    receipt: bool = option(
        False, SAMPLING, "Add a receipt to each sample, for `nano-inference verify`."
    )

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
        whole("prompt_logprob_start", self.prompt_logprob_start, 0)
        whole("priority", self.priority, -(2**31), 2**31)
        if self.seed is not None:
            whole("seed", self.seed, 0, 2**64)
        if self.thinking_token_budget is not None:
            whole("thinking_token_budget", self.thinking_token_budget, 0)
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
        object.__setattr__(
            self, "logprob_token_ids", token_id_row("logprob_token_ids", self.logprob_token_ids)
        )
        rows = token_id_rows("prompt_logprob_token_ids", self.prompt_logprob_token_ids)
        object.__setattr__(self, "prompt_logprob_token_ids", rows)
        object.__setattr__(self, "stop", stop_strings(self.stop))
        object.__setattr__(self, "bad_words", bad_words(self.bad_words))
        object.__setattr__(self, "logits_processors", processor_names(self.logits_processors))
        object.__setattr__(self, "logit_bias", biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            object.__setattr__(
                self, "allowed_token_ids", token_id_set("allowed_token_ids", self.allowed_token_ids)
            )
            self._check_allowed(self.allowed_token_ids)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower "
                "min_tokens or raise max_tokens."
            )
        if self.sampling_mask and not self.filters:
            raise InvalidRequest(
                "sampling_mask needs temperature > 0 and a filter (top_k, top_p or min_p); "
                "otherwise every token is kept."
            )

    def _check_allowed(self, allowed: frozenset[int]) -> None:
        if not allowed:
            raise InvalidRequest(
                "allowed_token_ids is empty, so no token can be drawn; omit it to allow all."
            )
        if unreachable := self.stop_token_ids - allowed:
            raise InvalidRequest(
                f"stop token id {min(unreachable)} is not among allowed_token_ids and can never "
                "be drawn; add it to allowed_token_ids or remove it from stop_token_ids."
            )
        if self.min_tokens and allowed <= self.stop_token_ids:
            raise InvalidRequest(
                f"every one of the {len(allowed)} allowed_token_ids stops the sample, so "
                f"min_tokens={self.min_tokens} leaves no token to draw; allow an id that does "
                "not stop it."
            )

    @property
    def penalizes(self) -> bool:
        """True if earlier tokens change the distribution."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    def numerics(self, fingerprint: str) -> str:
        """Return an engine's fingerprint with the processors, by whose names their code counts."""
        return "+".join((fingerprint, *self.logits_processors))

    @property
    def scores_prompt(self) -> bool:
        """True if logprobs at prompt positions are returned."""
        return self.prompt_logprobs or bool(self.prompt_logprob_token_ids)

    @property
    def filters(self) -> bool:
        """True if a filter can cut the distribution. Greedy sampling applies none."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def has_rules(self) -> bool:
        """True if masks follow from the sample's own tokens, without a grammar."""
        return self.thinking_token_budget is not None or bool(self.bad_words)

    @property
    def cuts(self) -> bool:
        """True if a mask or a filter can cut the distribution, so that `log_kept_mass` can be below
        0. At temperature 0 the kept mass is always 1, because logprobs are the raw ones.
        """
        masks = (
            self.allowed_token_ids is not None
            or self.min_tokens > 0
            or self.grammar is not None
            or self.has_rules
            or bool(self.logits_processors)
        )
        return self.filters or (masks and self.temperature > 0)


_FLAGS = (
    *("ignore_eos", "prompt_logprobs", "raw_logprobs", "sampling_mask", "routed_experts"),
    "receipt",
)


def _require_name(adapter: object) -> None:
    if adapter is not None and not (isinstance(adapter, str) and adapter):
        raise InvalidRequest(f"adapter={adapter!r} must be a non-empty string or None.")


def _require_keeping(seconds: float, priority: int) -> None:
    real("keep_cache_seconds", seconds, 0.0, MOST_KEPT_SECONDS)
    whole("cache_priority", priority, -(2**31), 2**31)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Span of tokens [start, end) that weights of one version produced: completion tokens sampled
    from them, or context positions computed by them.
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """Ids that the filters kept, in CSR form. Token i was drawn from
    `token_ids[offsets[i]:offsets[i + 1]]`.
    """

    offsets: tuple[int, ...]
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]]) -> "SamplingMask":
        """Build the mask from the kept ids of each token."""
        return cls((0, *accumulate(map(len, rows))), tuple(chain.from_iterable(rows)))

    def rows(self) -> list[tuple[int, ...]]:
        """Return the kept ids of each token."""
        return [self.token_ids[begin:end] for begin, end in pairwise(self.offsets)]


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Experts that each token was routed to, in every layer. `numpy.asarray` reads it as an array
    of `shape` without a copy. Raises `InvalidRequest` if `shape`, `dtype` and `data` do not match.

    Attributes:
        shape: (rows, layers of the model, experts per token). Every token of prompt and completion
            has a row, except the last one, which is never fed to the model.
        dtype: Data type of an expert id.
        data: Expert ids in C order, little-endian, ascending within a token and layer. A layer
            without experts has zeros.
    """

    shape: tuple[int, ...]
    dtype: Literal["uint8", "uint16"]
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        size = 1 if self.dtype == "uint8" else 2
        fits = math.prod(self.shape) * size == len(self.data)
        if len(self.shape) != 3 or min(self.shape) < 0 or not fits:
            raise InvalidRequest(
                f"routed experts of shape {self.shape} and {self.dtype} do not match "
                f"{len(self.data)} bytes of data; pass three dimensions and all their ids."
            )

    @property
    def __array_interface__(self) -> dict[str, object]:
        """NumPy's description of the array."""
        typestr = "|u1" if self.dtype == "uint8" else "<u2"
        return {"version": 3, "shape": self.shape, "typestr": typestr, "data": self.data}

    def rows(self, start: int, end: int | None = None) -> "RoutedExperts":
        """Return rows [start, end). None as `end` means up to the last row."""
        kept = range(self.shape[0])[start:end]
        width = self.shape[1] * self.shape[2] * (1 if self.dtype == "uint8" else 2)
        data = self.data[kept.start * width : kept.stop * width]
        return RoutedExperts((len(kept), *self.shape[1:]), self.dtype, data)


@dataclass(frozen=True, slots=True)
class LogprobMatrix:
    """Logprobs of named token ids: a row for each position, a column for each id.
    `numpy.asarray` reads it as a float32 array of `shape` without a copy. Raises `InvalidRequest`
    if `shape` and `data` do not match.

    Attributes:
        shape: (positions, ids of a position).
        data: float32 in C order, little-endian.
    """

    shape: tuple[int, ...]
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        fits = math.prod(self.shape) * 4 == len(self.data)
        if len(self.shape) != 2 or min(self.shape) < 0 or not fits:
            raise InvalidRequest(
                f"logprobs of shape {self.shape} do not match {len(self.data)} bytes of data; pass "
                "two dimensions and all their numbers."
            )

    @property
    def __array_interface__(self) -> dict[str, object]:
        """NumPy's description of the array."""
        return {"version": 3, "shape": self.shape, "typestr": "<f4", "data": self.data}

    @classmethod
    def joined(cls, parts: "Sequence[LogprobMatrix]") -> "LogprobMatrix":
        """Return the rows of several matrices of equal width, at least one, in one matrix."""
        shape = sum(map(len, parts)), parts[0].shape[1]
        return cls(shape, b"".join(part.data for part in parts))

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, start: int, end: int | None = None) -> "LogprobMatrix":
        """Return rows [start, end). None as `end` means up to the last row."""
        kept, width = range(self.shape[0])[start:end], self.shape[1]
        data = self.data[kept.start * width * 4 : kept.stop * width * 4]
        return LogprobMatrix((len(kept), width), data)

    def tolist(self) -> list[list[float]]:
        """Return the numbers of each row."""
        width = self.shape[1]
        numbers = struct.unpack(f"<{len(self.data) // 4}f", self.data)
        return [list(numbers[row * width : (row + 1) * width]) for row in range(self.shape[0])]


class ContextVersions(NamedTuple):
    """Weight versions that computed the context of completion tokens [token_start, token_end).

    Spans in `versions` cover the context of the last of these tokens, by position in prompt and
    completion. The context of an earlier token is the part before that token. Adjacent positions of
    equal version share a span.
    """

    token_start: int
    token_end: int
    versions: tuple[VersionSpan, ...]


class TopLogprobs(NamedTuple):
    """Most probable tokens of one position, best first, ties by lower id."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class ContentHash(NamedTuple):
    """SHA-256 of the weights, or of an adapter's matrices, of one version.

    `sha256` is empty if the engine that finished the sample never had this version.
    """

    version: int
    sha256: str


class FilePlace(NamedTuple):
    """Place of a sample in its file.

    Attributes:
        line: Number of the sample, from 1.
        lines: Number of samples in the file.
        chain: SHA-256 over the chain of the sample before it, this sample's receipt and both
            numbers.
    """

    line: int
    lines: int
    chain: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """Hash chain over a sample (docs/receipts.md). `nano_inference.data.receipts` computes it.

    Attributes:
        format: Version of the format.
        weights: Hash of the weights of every version in `kv_versions`, by version.
        adapters: The same for `adapter_versions`.
        links: First eight bytes of each value of the chain: one for each field, then one for each
            completion token. They name the first field or token that was changed.
        head: Last value of the chain, SHA-256 in hexadecimal digits.
        public_key: Ed25519 key that verifies `signature`, 32 bytes. Empty without a signature.
        signature: Ed25519 signature of the format and the head, 64 bytes. Empty without a key.
        file_place: Place in a file, if the sample was written to one with `sealed`.
    """

    format: int
    weights: tuple[ContentHash, ...]
    adapters: tuple[ContentHash, ...]
    links: bytes = field(repr=False)
    head: str
    public_key: bytes = b""
    signature: bytes = b""
    file_place: FilePlace | None = None


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """Finished or aborted sample with everything that RL training needs. Per-token tuples have one
    entry per token.

    Attributes:
        prompt_tokens: Token ids of the prompt.
        completion_tokens: Sampled ids, including a stop id.
        logprobs: Log-probability of each completion token under the distribution it was drawn from
            (after masks, temperature and filters; natural log). At temperature 0 these are the raw
            ones.
        ref_logprobs: Reference model's own log-probability of each completion token (temperature 1,
            nothing applied). None without a reference model, or if the sample was aborted before it
            was scored.
        weight_version: Version of the weights that sampled the last token.
        finish_reason: `"stop"`, `"length"` or `"abort"`.
        stop_reason: Id or string that stopped the sample. For an abort, its cause if known.
            Otherwise None.
        weight_versions: Spans of completion tokens by the version that sampled them, in order and
            without gaps. Appended tokens belong to the span before them.
        kv_versions: Versions that computed the keys and values that the tokens attended to. A new
            entry begins only if they changed: at an update, or if the context was recomputed.
            Appended tokens have none.
        loss_mask: False for tokens that were appended (by a tool or an environment) instead of
            sampled. Their logprob is 0.
        raw_logprobs: Model's own log-probabilities (temperature 1, nothing applied), if requested.
        log_kept_mass: Log of the probability mass that masks and filters left, relative to the full
            vocabulary after bias, penalties and temperature. 0 if nothing was cut, and at
            temperature 0, since `logprobs` are raw there. `logprobs + log_kept_mass` is the value
            that a trainer over the full vocabulary computes at that temperature.
        sampling_mask: Ids that the filters kept, if requested.
        top_logprobs: Most probable tokens at each position, if requested, under the same
            distribution as `logprobs`. Tokens that filters or masks cut are not among them.
        prompt_logprobs: Model's own log-probability of each prompt token given those before it, if
            requested. The first is nan.
        numerics: Fingerprint of the arithmetic. Equal fingerprints promise equal bits.
        seed: Seed that reproduces the sample, together with `sample_index` and the weights.
        sample_index: Position in the request's group.
        request_id: Id that `add_request` returned.
        group_id: Id of the request that began the sample's group. `resume_from` keeps it, so all
            samples of one prompt share it in all turns. None for a sample read from a file of an
            older release.
        cached_tokens: Prompt tokens found in the prefix cache when the group was first computed.
        text: Completion as text, if the prompt was text or stop strings were given. It ends before
            a stop string and omits special tokens.
        sampling_params: Sampling parameters of the request. With prompt, seed and weights they
            suffice for a replay.
        prompt_top_logprobs: Most probable tokens at the position of each prompt token, if
            requested, under the same distribution as `prompt_logprobs`. The first entry is empty.
        adapter_versions: Spans of completion tokens by the version of the adapter
            (`sampling_params.adapter`) that sampled them. Empty without an adapter.
        routed_experts: Experts that each token was routed to when its keys and values were
            computed, if requested and known.
        routed_experts_unknown: Reason why `routed_experts` is unknown. None if it is known or was
            not requested.
        token_id_logprobs: Logprobs of `logprob_token_ids` at each completion token, if requested,
            under the same distribution as `logprobs`. -inf for ids that masks or filters cut, nan
            at appended tokens.
        raw_token_id_logprobs: The model's own logprobs of these ids, if `raw_logprobs` are
            requested.
        prompt_token_id_logprobs: The model's own logprobs of `prompt_logprob_token_ids`, if
            requested. Row i belongs to prompt token `prompt_logprob_start + 1 + i`. Rows with fewer
            ids end with -inf.
        receipt: Receipt of the sample, if requested.
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
    token_id_logprobs: LogprobMatrix | None = None
    raw_token_id_logprobs: LogprobMatrix | None = None
    prompt_token_id_logprobs: LogprobMatrix | None = None
    receipt: Receipt | None = None

    @property
    def oldest_weight_version(self) -> int:
        """Oldest version that sampled a token of this sample. Use it to filter stale samples."""
        return min((span.version for span in self.weight_versions), default=self.weight_version)


@dataclass(frozen=True, slots=True)
class Delta:
    """Part of a streamed sample: the tokens since the previous part.

    Attributes:
        request_id, sample_index: Sample that it belongs to.
        token_ids, logprobs: Tokens sampled since the previous part.
        text: New text that will not change, if the request yields text. It may lag the tokens.
        finished: Whole sample, in its last part. That part has no tokens.
        top_logprobs, raw_logprobs, token_id_logprobs, raw_token_id_logprobs: Values for
            `token_ids`, as in `TrainingSample`. None unless requested.
        cached_tokens: Prompt tokens found in the prefix cache.
        queued: Seconds from submission until the first chunk was planned, or until the request
            ended.
        log_kept_mass: Values for `token_ids`, as in `TrainingSample`. None if neither masks nor
            filters can cut.
        weight_version: Version of the weights that sampled `token_ids`. 0 without tokens.
        past_versions: Context positions that earlier weights computed (`kv_policy="keep"`). Weights
            of `weight_version` computed all others, as in `TrainingSample.kv_versions`.
        adapter_version: Version of the adapter that sampled `token_ids`. 0 without an adapter.
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
    token_id_logprobs: LogprobMatrix | None = None
    raw_token_id_logprobs: LogprobMatrix | None = None


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Adapter that requests can name.

    Attributes:
        name: Name of the adapter.
        version: Version in use.
        rank: Highest rank of its matrices.
        targets: Kinds of modules that it changes.
        num_bytes: Size of its matrices in bytes.
        folder: Folder that it was read from. None if its tensors were passed directly.
    """

    name: str
    version: int
    rank: int
    targets: tuple[str, ...]
    num_bytes: int
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Draft counters since the engine was built (docs/speculation.md).

    Attributes:
        sources: Draft sources in use. A source that failed is missing.
        drafted, accepted: Rows computed for drafts and rows whose draft was accepted, by source and
            by position after the known tokens.
        step_rows, step_seconds: Cost of a step by its number of rows, measured at start-up. Empty
            if not measured.
    """

    sources: tuple[str, ...]
    drafted: Mapping[str, tuple[int, ...]]
    accepted: Mapping[str, tuple[int, ...]]
    step_rows: tuple[int, ...] = ()
    step_seconds: tuple[float, ...] = ()

    @property
    def num_drafted(self) -> int:
        """Total number of rows computed for drafts."""
        return sum(map(sum, self.drafted.values()))

    @property
    def num_accepted(self) -> int:
        """Total number of rows whose draft was accepted."""
        return sum(map(sum, self.accepted.values()))


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """State of an open request between two steps. It holds no token and no text.

    Attributes:
        request_id: Id of the request.
        name: Name that its client gave it, or None.
        state: `"running"` if any sample has blocks, otherwise `"waiting"` or `"held"`. A held
            request must not be scheduled yet.
        reason: Why it computes nothing in the next step, as the scheduler decides it. Empty if it
            does, or if it runs.
        behind: Id of the waiting request that it must not overtake, if that is the reason.
        num_samples: Number of unfinished samples.
        priority: Scheduling priority. Lower goes first.
        prompt_tokens: Number of prompt tokens.
        computed_tokens: Number of its tokens whose keys and values are computed, over all samples.
        completion_tokens: Number of its sampled tokens, over all samples.
        cached_tokens: Prompt tokens found in the prefix cache.
        blocks: Number of KV blocks that it holds. A block that samples share counts once.
        weight_version: Version of the weights that computes it.
        adapter: Name of its adapter, or None.
        queued: Seconds in the queue so far.
    """

    request_id: int
    name: str | None
    state: Literal["running", "waiting", "held"]
    reason: str
    behind: int | None
    num_samples: int
    priority: int
    prompt_tokens: int
    computed_tokens: int
    completion_tokens: int
    cached_tokens: int
    blocks: int
    weight_version: int
    adapter: str | None
    queued: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of an engine since it was built, and its current state.

    Attributes:
        num_waiting, num_running: Sequences in each state. A group whose prompt is not computed yet
            counts once.
        num_held: Sequences that wait for a weight version, for their grammar or for the end of a
            pause.
        weight_version: Version of the weights that new tokens are computed with.
        num_free_blocks, num_blocks: Free and total blocks. For layers with a window, read `kv_use`
            instead to see how full the memory is.
        num_cached_blocks: Free blocks that still hold a cached prefix.
        num_shared_blocks: Used blocks that more than one sequence holds.
        kv_leaked_blocks: Blocks in use when the engine last had no request. A value above 0 is a
            bug.
        kv_use: Share of the KV memory that sequences hold. The rest may still cache prefixes.
        num_steps, num_preemptions: Counts since the engine was built, like all counters below.
        tokens_computed: Rows computed by forward passes, over all weight sets.
        prompt_tokens_computed, prompt_tokens_cached: Prompt tokens of the policy that were
            computed, and found in the prefix cache.
        hit_rate: `prompt_tokens_cached` divided by the sum of both.
        prompt_tokens: Prompt tokens of admitted requests. A prompt counts once, regardless of
            samples and recomputations.
        prompt_tokens_queried: Tokens looked up in the prefix cache, of which `prompt_tokens_cached`
            were found. A preempted sequence looks up again, including its completion so far.
        completion_tokens: Number of sampled tokens.
        tokens_per_second: Completion tokens per second spent in steps.
        step_microseconds: Host time of an average step in microseconds, by phase. `wait` is the
            time spent waiting for the device. On a CPU, `forward` and `sample` include the
            computation itself.
        ranks_busy, ranks_waiting: Seconds that each rank spent in steps on its own part, and
            waiting for other pipeline stages (rank 0: for samples). Host times: on a GPU, the host
            runs ahead of the device.
        grammars_compiled, grammars_failed: Number of compiled grammars, and of grammars that failed
            to compile. Compilation runs in parallel to steps. Requests share a compiled grammar
            while it is kept.
        grammar_seconds: Seconds spent in these compilations.
        speculation: Draft counters. None if speculation is off.
        num_kept_blocks: Blocks in memory that requests asked to keep
            (`SamplingParams.keep_cache_seconds`).
        kept_file_bytes: Bytes of evicted kept blocks in files.
        kept_blocks_written, kept_blocks_read: Kept blocks written to files and read back.
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
