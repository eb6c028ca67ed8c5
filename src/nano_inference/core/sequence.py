"""`Sequence`: one sample in the making. `Sequences`: all of them, in scheduling order."""

import bisect
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys, adapter_key
from nano_inference.system.moved import Removed
from nano_inference.types import (
    ContextVersions,
    RoutedExperts,
    SamplingMask,
    SamplingParams,
    TopLogprobs,
    TrainingSample,
    VersionSpan,
)

POLICY = "policy"  # the weight set that samples are drawn from
PREVIOUS = "previous"  # the policy's old weights, while sequences finish on them
REFERENCE = "reference"  # a frozen model that scores samples
DRAFT = "draft"  # a model that drafts tokens; no sequence belongs to it
# weight set -> weight set in the names of its blocks
_LINEAGE = {PREVIOUS: POLICY}


class SequenceStatus(Enum):
    """Scheduling state of a sequence.

    Waiting and held sequences hold no blocks. Held sequences must not be scheduled yet.
    """

    HELD = auto()
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class GrowingText(Protocol):
    """A sample's text, extended token by token and searched for stop strings.

    A Protocol, because `text.detokenizer.OutputText` is in a higher layer.
    """

    @property
    def text(self) -> str:
        """Whole text so far. After `finish`, the whole text to return."""
        ...

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Feed a token and return the stop string that it completes, or None."""
        ...

    def take(self) -> str:
        """Return the text that was not taken yet and can no longer change."""
        ...

    def finish(self) -> str:
        """Mark the sample as ended and return the text that was not taken yet."""
        ...

    def copy(self) -> "GrowingText":
        """Return a copy for another sample with the same past."""
        ...


class GrowingGrammar(Protocol):
    """The grammar of one sample, advanced token by token.

    A Protocol, because `structured.matching.GrammarState` needs numpy, which this module does not
    import.
    """

    @property
    def is_ready(self) -> bool:
        """True once the grammar is compiled or has failed."""
        ...

    @property
    def is_ended(self) -> bool:
        """True if the sample's text is complete."""
        ...

    @property
    def problem(self) -> str | None:
        """Reason why the grammar failed, or None."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by the sample's next token."""
        ...

    def fill(self, others: Iterable[Any] = ()) -> None:
        """Compute the mask of the next token, and those of other samples' grammars."""
        ...

    def look_ahead(self, drafts: Iterable[int]) -> int:
        """Compute the masks after each draft. Return how many drafts the grammar allows."""
        ...

    def mask_behind(self, num_drafts: int) -> Any:
        """Return the mask after `num_drafts` drafts of the last `look_ahead`, int32 [W]."""
        ...

    def forced(self) -> Listed[int]:
        """Return the tokens that must follow, as far as the grammar allows only one."""
        ...

    def fork(self) -> "GrowingGrammar":
        """Return a copy for another sample with the same past."""
        ...


class OwnRules(Protocol):
    """Masks that follow from a sample's own tokens.

    A Protocol, because `sampling.token_rules.TokenRules` needs numpy.
    """

    def mask(
        self,
        token_ids: Listed[int],
        drafts: Listed[int] = (),
        words: Any = None,
        end: int | None = None,
    ) -> Any:
        """Return the mask of the token after known tokens and drafts, or None for no mask."""
        ...

    def forced(self, token_ids: Listed[int]) -> tuple[int, ...]:
        """Return the tokens that must follow."""
        ...

    def num_allowed(self, token_ids: Listed[int], drafts: Listed[int]) -> int:
        """Return how many drafts are allowed."""
        ...

    def fork(self) -> "OwnRules":
        """Return a copy for another sample with the same past."""
        ...


class ServedAdapter(Protocol):
    """One version of an adapter that computes sequences.

    A Protocol, because `ops.lora.Adapter` has tensors and is in a higher layer.
    """

    @property
    def name(self) -> str:
        """Name by which requests select the adapter."""
        ...

    @property
    def version(self) -> int:
        """Version number, which rises with each update of the adapter."""
        ...


class GrowingMask:
    """A sample's `SamplingMask` in the making, at four bytes per id.

    Args:
        most: Maximum number of ids in the mask. None for no limit.
        rows: Ids of the known tokens, one row each.
    """

    def __init__(self, most: int | None = None, rows: Iterable[Listed[int]] = ()) -> None:
        self.most = most
        self._ids, self._offsets = array("i"), [0]
        for row in rows:
            self.append(row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GrowingMask) and vars(self) == vars(other)

    def has_room(self, row: Listed[int]) -> bool:
        """Return True if the ids of one more token fit."""
        return self.most is None or len(self._ids) + len(row) <= self.most

    def append(self, row: Listed[int]) -> None:
        """Add the ids of the next token."""
        self._ids.extend(row)
        self._offsets.append(len(self._ids))

    def fork(self) -> "GrowingMask":
        """Return an empty mask with the same limit, for another sample."""
        return GrowingMask(self.most)

    def whole(self) -> SamplingMask:
        """Return the finished mask, made of Python integers."""
        return SamplingMask(tuple(self._offsets), tuple(self._ids))


class Context(NamedTuple):
    """Versions that computed the context of the tokens from `token_start` on.

    The versions in `past` computed the head of the context, and `version` computes the rest.
    """

    token_start: int
    past: tuple[VersionSpan, ...]
    version: int


@dataclass(slots=True)
class SampleGroup:
    """State shared by the samples of a request that needs only some of them."""

    num_left: int  # needed samples that have not finished


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A validated request, immutable and shared by its samples.

    Attributes:
        request_id: Number of the request, in order of arrival.
        num_prompt_tokens: Number of prompt tokens at the start of each sequence.
        params: Sampling parameters.
        stop_ids: The request's stop ids and, unless ignored, the model's end-of-sequence ids.
        seed: Seed of all draws.
        min_version: Policy version that must be live before the request runs.
        exact_version: Version that must sample the first token. The request ends if that is
            impossible.
        max_staleness: Largest number of versions that a sequence's oldest version may lag behind
            the newest. The sequence ends if it lags further.
        group: Shared state if only some samples are needed.
        scored: Rows (positions) whose next token's logprob is requested.
        score_temperature: Temperature of the scores, above 0.
        score_masks: Tokens that the scores are normalized over, int32 [W] for each scored row.
            Empty for all tokens.
        score_targets: Tokens to score after each scored row, equally many for each. Empty to score
            the sequence's own next token.
        num_best: Number of most probable tokens to return with each score.
        streaming: True if every token is delivered as it is sampled.
        past_contexts: Contexts of the sample that the request resumes.
        appended: Completion tokens of that sample that were appended, not sampled.
        scored_sample: Finished sample that the scores belong to. Its sequence draws nothing.
        at_end: Called once with each sequence of the request before it releases its blocks.
        first_request_id: Request that began the group of the resumed sample, or None.
        turn_of: Earlier request whose place in the queue this one takes, or None.
    """

    request_id: int
    num_prompt_tokens: int
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    min_version: int | None = None
    exact_version: int | None = None
    max_staleness: int | None = None
    group: SampleGroup | None = None
    scored: range = range(0)
    score_temperature: float = 1.0
    score_masks: Listed[Any] = ()
    score_targets: Listed[Listed[int]] = ()
    num_best: int = 0
    streaming: bool = False
    past_contexts: tuple[ContextVersions, ...] = ()
    appended: tuple[range, ...] = ()
    scored_sample: TrainingSample | None = None
    at_end: Callable[["Sequence"], None] | None = None
    first_request_id: int | None = None
    turn_of: int | None = None

    @property
    def arrival(self) -> int:
        """Place in the queue: ids rise, so an older request comes first."""
        return self.request_id if self.turn_of is None else min(self.turn_of, self.request_id)

    @property
    def group_id(self) -> int:
        """Id of the request that began the group of samples."""
        return self.request_id if self.first_request_id is None else self.first_request_id

    @property
    def score_width(self) -> int:
        """Number of scores for each row."""
        return len(self.score_targets[0]) if len(self.score_targets) else 1


@dataclass(slots=True, eq=False)
class Sequence:
    """Known tokens, the number computed, and the blocks that hold their keys and values.

    A step closes the gap between `len(token_ids)` (plus tokens in flight) and
    `num_computed_tokens`. Prefill, decode and recomputation are therefore the same case.

    A sequence represents all `num_samples` samples of its group until its prompt is computed, and
    is then forked. A sequence with `num_samples=0` only scores its tokens, and ends when they are
    scored. `request` holds the caller's values.

    Attributes:
        most_tokens: Number of known tokens, prompt included, at which the sequence ends by length.
        publishable: False once its blocks mix weight versions.
        cached_tokens: Prompt tokens that the prefix cache provided.
        posted: Time of submission by `time.perf_counter`. None once the sequence has left the
            queue.
        queued: Seconds spent in the queue.
        behind: Version of an update that waits for running requests. The sequence is held until
            that version is live or the update has failed.
        version_starts: Pairs of weight version and the index of its first completion token.
        contexts: Contexts since the sequence was created or resumed.
        scores: Scores so far, `score_width` for each row of `request.scored`. The samples of a
            group share the list.
        score_best: Most probable tokens for these rows. Shared like `scores`.
        output_text: Text of the sample, if requested.
        stop_string: Stop string that the newest token completed.
        grammar: Grammar that the completion follows, if any.
        rules: Masks that follow from `token_ids`, if any.
        adapter: Adapter applied on top of the weights, if any.
        is_of_merged: True if the request names the adapter that is merged into the weights, which
            then compute it without `adapter`.
        adapter_starts: Pairs of adapter version and the index of its first completion token.
        routed_experts: Experts of each token, if requested, or the reason why they are unknown.
            Set at the end.
    """

    seq_id: int
    request: CheckedRequest
    token_ids: list[int]
    num_samples: int = 1
    sample_index: int = 0
    most_tokens: int = field(init=False)
    weight_set: str = POLICY
    status: SequenceStatus = SequenceStatus.WAITING
    prefix: PrefixKeys = field(default_factory=PrefixKeys)
    block_ids: list[int] = field(default_factory=list[int])
    num_computed_tokens: int = 0
    num_published_blocks: int = 0
    publishable: bool = True
    cached_tokens: int = 0
    posted: float | None = None
    queued: float = 0.0
    behind: int | None = None
    version_starts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    contexts: list[Context] = field(default_factory=list[Context])
    scores: list[float] = field(default_factory=list[float])
    score_best: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    output_text: GrowingText | None = None
    stop_string: str | None = None
    grammar: GrowingGrammar | None = None
    rules: OwnRules | None = None
    adapter: ServedAdapter | None = None
    is_of_merged: bool = False
    adapter_starts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    output_logprobs: list[float] = field(default_factory=list[float])
    output_raw_logprobs: list[float] = field(default_factory=list[float])
    output_log_kept_mass: list[float] = field(default_factory=list[float])
    mask: GrowingMask = field(default_factory=GrowingMask)
    output_top: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    routed_experts: RoutedExperts | str | None = None
    # float32 logprobs of the request's `logprob_token_ids`, token by token
    output_named: bytearray = field(default_factory=bytearray)
    output_raw_named: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.most_tokens = self.request.num_prompt_tokens + self.request.params.max_tokens

    params = seed = stop_ids = num_prompt_tokens = group = streaming = scored = Removed(
        "a Sequence has no copies of its request's fields; read them from sequence.request."
    )

    @property
    def request_id(self) -> int:
        """Id of the sequence's request."""
        return self.request.request_id

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Scheduling order: priority, then arrival, then request, then sample."""
        request = self.request
        return request.params.priority, request.arrival, request.request_id, self.sample_index

    @property
    def num_completion_tokens(self) -> int:
        """Number of known completion tokens."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        """Number of known tokens that must be computed in total.

        The last one counts only if a token is drawn after it.
        """
        return len(self.token_ids) - (self.num_samples == 0)

    @property
    def width(self) -> int:
        """Number of samples that the sequence represents, at least 1."""
        return max(self.num_samples, 1)

    @property
    def num_matchable(self) -> int:
        """Number of known tokens that may come from the prefix cache.

        The row to draw from and rows to score must be computed.
        """
        end, scored = self.num_to_compute - 1, self.request.scored
        if self.num_scored >= len(scored):
            return end
        return min(end, scored.start + self.num_scored)

    @property
    def num_scored(self) -> int:
        """Number of the request's rows that have their scores."""
        return len(self.scores) // self.request.score_width

    def rows_to_score(self, start: int, end: int) -> range:
        """Return the rows of a chunk [start, end) that still need scores."""
        scored = self.request.scored
        return range(max(start, scored.start + self.num_scored), min(end, scored.stop))

    def add_scores(
        self, start: int, logprobs: Listed[float], best: Listed[TopLogprobs] = ()
    ) -> None:
        """Add the scores of rows from `start` on.

        Rows that were recomputed after a preemption count once.
        """
        known = self.request.scored.start + self.num_scored - start
        self.scores += logprobs[known * self.request.score_width :]
        self.score_best += best[known:]

    def forget_scores(self) -> None:
        """Discard all scores, so that every row is scored again."""
        self.scores.clear()
        self.score_best.clear()

    @property
    def temperature(self) -> float:
        """Temperature of the request."""
        return self.request.params.temperature

    @property
    def max_tokens(self) -> int:
        """Token limit of the request."""
        return self.request.params.max_tokens

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Stop token ids of the request's parameters."""
        return self.request.params.stop_token_ids

    def append_token(self, token_id: int, logprob: float, log_kept_mass: float = 0.0) -> None:
        """Append a sampled token to the known tokens."""
        self.token_ids.append(token_id)
        self.output_logprobs.append(logprob)
        self.output_log_kept_mass.append(log_kept_mass)

    def append_named(self, logprobs: bytes, raw_logprobs: bytes) -> None:
        """Append the newest token's logprobs of the request's `logprob_token_ids`, float32."""
        self.output_named += logprobs
        if self.request.params.raw_logprobs:
            self.output_raw_named += raw_logprobs

    @property
    def oldest_version(self) -> int | None:
        """Oldest version that sampled a token or computed its context, or None before any did."""
        versions = [version for version, _ in self.version_starts[:1]]
        for past in self.request.past_contexts:
            versions += [span.version for span in past.versions]
        # the newest context may have drawn nothing, and its blocks may be released
        for context in self.contexts:
            if self.num_computed_tokens or context.token_start < self.num_completion_tokens:
                versions += [context.version, *(span.version for span in context.past)]
        return min(versions, default=None)

    def begin_context(self, past: tuple[VersionSpan, ...], version: int) -> None:
        """Begin a context at the next completion token.

        The versions in `past` have computed its head, and `version` computes the rest.
        """
        at = self.num_completion_tokens
        while self.contexts and self.contexts[-1].token_start >= at:
            self.contexts.pop()
        if not self.contexts or self.contexts[-1][1:] != (past, version):
            self.contexts.append(Context(at, past, version))

    def release(self, namespace: Namespace) -> list[int]:
        """Give up all blocks, return them, and reset the counts for `namespace`."""
        block_ids, self.block_ids = self.block_ids, []
        self.num_computed_tokens = self.num_published_blocks = 0
        self.publishable = True
        if self.prefix.namespace != namespace:
            self.prefix = PrefixKeys(namespace)
        return block_ids

    def fork(self, seq_id: int, sample_index: int, output_text: GrowingText | None) -> "Sequence":
        """Return another sample of the same prompt, with `output_text` as its text.

        The two samples share all blocks so far.
        """
        return replace(
            self,
            seq_id=seq_id,
            num_samples=1,
            sample_index=sample_index,
            token_ids=list(self.token_ids),
            prefix=self.prefix.copy(),
            block_ids=list(self.block_ids),
            contexts=list(self.contexts),
            output_text=output_text,
            grammar=self.grammar.fork() if self.grammar is not None else None,
            rules=self.rules.fork() if self.rules is not None else None,
            # the fork has no completion token yet
            version_starts=[],
            adapter_starts=[],
            output_logprobs=[],
            output_raw_logprobs=[],
            output_log_kept_mass=[],
            mask=self.mask.fork(),
            output_top=[],
            output_named=bytearray(),
            output_raw_named=bytearray(),
        )


class Sequences:
    """All live sequences, by id and in lists in scheduling order.

    Versions of weight sets and adapters are kept here too.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Sequence] = {}
        self.held: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.versions: dict[str, int] = {POLICY: 0}
        # newest version of each adapter that requests may name
        self.adapters: dict[str, ServedAdapter] = {}
        self.merged: str | None = None  # adapter that is part of the weights now
        self.merging: str | None = None  # adapter that is being merged or unmerged
        self._ids = itertools.count()

    def new_id(self) -> int:
        """Return a sequence id that was never used."""
        return next(self._ids)

    def namespace_of(self, seq: Sequence) -> Namespace:
        """Return the namespace of blocks that are computed now for this sequence."""
        lineage, salt = _LINEAGE.get(seq.weight_set, seq.weight_set), seq.request.params.cache_salt
        served = seq.adapter
        adapter = None if served is None else adapter_key(served.name, served.version)
        return Namespace(lineage, self.versions[seq.weight_set], salt, adapter)

    def insert(self, seq: Sequence) -> None:
        """Add a live sequence to the list for its status."""
        self.by_id[seq.seq_id] = seq
        bisect.insort(self._list(seq), seq, key=attrgetter("order"))

    def move(self, seq: Sequence, status: SequenceStatus) -> None:
        """Change a sequence's status, and move it to the list for it."""
        self._list(seq).remove(seq)
        seq.status = status
        bisect.insort(self._list(seq), seq, key=attrgetter("order"))

    def remove(self, seq: Sequence) -> None:
        """Remove a finished sequence."""
        self._list(seq).remove(seq)
        seq.status = SequenceStatus.FINISHED
        del self.by_id[seq.seq_id]

    def of_requests(self, request_ids: frozenset[int] | None) -> list[Sequence]:
        """Return the live sequences of these requests, by request and sample. None selects all."""
        sequences = [
            s for s in self.by_id.values() if request_ids is None or s.request_id in request_ids
        ]
        return sorted(sequences, key=lambda s: (s.request_id, s.sample_index))

    def of_weight_set(self, weight_set: str) -> list[Sequence]:
        """Return the live sequences of a weight set."""
        return [seq for seq in self.by_id.values() if seq.weight_set == weight_set]

    def block_tables(self) -> Iterator[list[int]]:
        """Yield all live block tables, for `KVCacheManager.check`."""
        return (seq.block_ids for seq in self.by_id.values())

    def _list(self, seq: Sequence) -> list[Sequence]:
        if seq.status is SequenceStatus.RUNNING:
            return self.running
        return self.waiting if seq.status is SequenceStatus.WAITING else self.held
