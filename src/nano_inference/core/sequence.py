"""`Sequence`: one sample in the making; and `Sequences`: all of them, waiting or running, in
scheduling order.
"""

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
PREVIOUS = "previous"  # the policy's old weights, for as long as sequences finish on them
REFERENCE = "reference"  # a frozen model that scores them
DRAFT = "draft"  # a model that guesses their tokens; no sequence is its
# whose versions a set holds, where that is another one's: blocks go by lineage
_LINEAGE = {PREVIOUS: POLICY}


class SequenceStatus(Enum):
    """Where a sequence stands. Waiting and held sequences hold no blocks; held ones are not to be
    scheduled yet.
    """

    HELD = auto()
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class GrowingText(Protocol):
    """A sample's text as its tokens become known, and the stop strings that it is searched for.

    A Protocol, because `text.detokenizer.OutputText` is in a layer above.
    """

    @property
    def text(self) -> str:
        """All of it so far; after `finish` all that is to be shown."""
        ...

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Feed a token; returns the stop string that it completes."""
        ...

    def take(self) -> str:
        """What was not taken yet and will not change."""
        ...

    def finish(self) -> str:
        """The sample ended: what was not taken yet."""
        ...

    def copy(self) -> "GrowingText":
        """Another sample's, with the same past."""
        ...


class GrowingGrammar(Protocol):
    """The grammar of a sample, as far as its tokens are known.

    A Protocol, because `structured.matching.GrammarState` needs numpy and this module has none.
    """

    @property
    def is_ready(self) -> bool:
        """False: it is being compiled."""
        ...

    @property
    def is_ended(self) -> bool:
        """Whether its text has ended."""
        ...

    @property
    def problem(self) -> str | None:
        """Why it cannot go on."""
        ...

    def accept(self, token_id: int) -> None:
        """The sample goes on with this token."""
        ...

    def fill(self, others: Iterable[Any] = ()) -> None:
        """Make the mask of the token that comes next, and those of other samples' grammars."""
        ...

    def look_ahead(self, drafts: Iterable[int]) -> int:
        """Make the masks behind drafts; returns how many of these the grammar allows."""
        ...

    def mask_behind(self, num_drafts: int) -> Any:
        """The mask behind so many of the drafts that were looked at last, int32 [W]."""
        ...

    def forced(self) -> Listed[int]:
        """Tokens that have to follow."""
        ...

    def fork(self) -> "GrowingGrammar":
        """Another sample's, with the same past."""
        ...


class ServedAdapter(Protocol):
    """One version of an adapter that sequences are computed with.

    A Protocol, because `ops.lora.Adapter` has tensors and is in a layer above.
    """

    @property
    def name(self) -> str:
        """Under which requests ask for it."""
        ...

    @property
    def version(self) -> int:
        """Counts up with each update of the name."""
        ...


class GrowingMask:
    """Four bytes an id; Python's own integers only when the sample has ended.

    Args:
        most: ids that it may have in all; None: no bound.
        rows: those of the tokens that are known.
    """

    def __init__(self, most: int | None = None, rows: Iterable[Listed[int]] = ()) -> None:
        self.most = most
        self._ids, self._offsets = array("i"), [0]
        for row in rows:
            self.append(row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GrowingMask) and vars(self) == vars(other)

    def has_room(self, row: Listed[int]) -> bool:
        """Whether the ids of one more token fit."""
        return self.most is None or len(self._ids) + len(row) <= self.most

    def append(self, row: Listed[int]) -> None:
        """The ids of the next token."""
        self._ids.extend(row)
        self._offsets.append(len(self._ids))

    def fork(self) -> "GrowingMask":
        """One of a sample that has no token yet, with the same bound."""
        return GrowingMask(self.most)

    def whole(self) -> SamplingMask:
        """All of it."""
        return SamplingMask(tuple(self._offsets), tuple(self._ids))


class Context(NamedTuple):
    """From which completion token on, which versions computed the head of the context, and which
    computes the rest.
    """

    token_start: int
    past: tuple[VersionSpan, ...]
    version: int


@dataclass(slots=True)
class SampleGroup:
    """What the samples of a request share of which only some are wanted."""

    num_left: int  # how many of those have not finished


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """What a caller asked for, after its checks. Its samples share it, and nothing changes it.

    Attributes:
        request_id: counts up in order of arrival.
        num_prompt_tokens: of the known tokens of its sequences.
        params: of sampling.
        stop_ids: the request's stop ids and, unless ignored, the model's end-of-sequence ids.
        seed: of all draws.
        min_version: held until this version of the policy serves.
        exact_version: the version that samples the first token; it ends if that cannot be.
        max_staleness: it ends when its oldest version is this much older than the newest.
        group: where not all of its samples are wanted.
        scored: rows (positions) whose next token's logprob is wanted.
        score_temperature: under which; above 0.
        score_masks: and among which tokens, int32 [W] for each of these rows; empty: all.
        score_targets: the tokens that are scored after each of these rows, as many after each;
            empty: the sequence's own next token.
        num_best: most probable tokens that are wanted beside each of the scores.
        streaming: every token is handed out as it is sampled.
        past_contexts: of the sample that it resumes.
        appended: completion tokens that were appended to that, not sampled.
        scored_sample: the sample that the scores belong to, where nothing is sampled.
        at_end: called once with each of its sequences, which still holds its blocks.
        first_request_id: the request that began the group of the sample that it resumes; None: it
            resumes none.
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

    @property
    def group_id(self) -> int:
        """The request that began the group of its samples."""
        return self.request_id if self.first_request_id is None else self.first_request_id

    @property
    def score_width(self) -> int:
        """Scores of each row."""
        return len(self.score_targets[0]) if self.score_targets else 1


@dataclass(slots=True, eq=False)
class Sequence:
    """Known tokens, how many of them are computed, and the blocks that hold their keys and values.

    A step closes the gap between `len(token_ids)` (plus what is in flight) and
    `num_computed_tokens`; prefill, decode and recomputation are the same case. Until its prompt is
    computed a sequence stands for all `num_samples` of its group; then it is forked. One of no
    samples only scores its tokens; it ends when they are scored. `request` has
    what the caller asked for.

    Attributes:
        most_tokens: known tokens, the prompt's too, with which it ends by length.
        publishable: False once its blocks mix weight versions.
        cached_tokens: prompt tokens that the prefix cache provided.
        posted: when it was handed in, by `time.perf_counter`; None once it has left the queue.
        queued: seconds that this took.
        behind: held until the update to this version, which waits for others, serves or failed.
        version_starts: (weight version, first completion token).
        contexts: since it was made or resumed.
        scores: of the first of the request's rows to score, `score_width` of each; the group's
            samples share the list.
        score_best: the most probable tokens beside these; shared like the scores.
        output_text: where text is wanted.
        stop_string: the one that the newest token completed.
        grammar: that its completion follows, where there is one.
        adapter: that computes it, on top of the weights, where there is one.
        is_of_merged: it asks for the adapter that is part of the weights, which compute it alone.
        adapter_starts: (version of the adapter, first completion token).
        routed_experts: of its tokens, once it has ended, where they are wanted; or why they are not
            known.
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
    adapter: ServedAdapter | None = None
    is_of_merged: bool = False
    adapter_starts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    output_logprobs: list[float] = field(default_factory=list[float])
    output_raw_logprobs: list[float] = field(default_factory=list[float])
    output_log_kept_mass: list[float] = field(default_factory=list[float])
    mask: GrowingMask = field(default_factory=GrowingMask)
    output_top: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    routed_experts: RoutedExperts | str | None = None

    def __post_init__(self) -> None:
        self.most_tokens = self.request.num_prompt_tokens + self.request.params.max_tokens

    params = seed = stop_ids = num_prompt_tokens = group = streaming = scored = Removed(
        "a Sequence has only its own fields; read sequence.request for those of its request."
    )

    @property
    def request_id(self) -> int:
        """As in the request."""
        return self.request.request_id

    @property
    def order(self) -> tuple[int, int, int]:
        """Scheduling order: priority, then arrival (request ids count up), then sample."""
        return self.request.params.priority, self.request.request_id, self.sample_index

    @property
    def num_completion_tokens(self) -> int:
        """Completion tokens that are known."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        """Known tokens that have to be computed. The last one is only where something is drawn
        after it.
        """
        return len(self.token_ids) - (self.num_samples == 0)

    @property
    def width(self) -> int:
        """Sequences that it counts as: the samples that it stands for."""
        return max(self.num_samples, 1)

    @property
    def num_matchable(self) -> int:
        """Known tokens that may come from the prefix cache: the row that is drawn from and rows to
        score may not.
        """
        end, scored = self.num_to_compute - 1, self.request.scored
        if self.num_scored >= len(scored):
            return end
        return min(end, scored.start + self.num_scored)

    @property
    def num_scored(self) -> int:
        """Rows of the request's that have their scores."""
        return len(self.scores) // self.request.score_width

    def rows_to_score(self, start: int, end: int) -> range:
        """Rows of a chunk [start, end) that are to be scored and are not yet."""
        scored = self.request.scored
        return range(max(start, scored.start + self.num_scored), min(end, scored.stop))

    def add_scores(
        self, start: int, logprobs: Listed[float], best: Listed[TopLogprobs] = ()
    ) -> None:
        """Take in the scores of rows from `start` on. Rows that a preemption made compute twice
        count once.
        """
        known = self.request.scored.start + self.num_scored - start
        self.scores += logprobs[known * self.request.score_width :]
        self.score_best += best[known:]

    def forget_scores(self) -> None:
        """Let all rows be scored again."""
        self.scores.clear()
        self.score_best.clear()

    @property
    def temperature(self) -> float:
        """As in the request."""
        return self.request.params.temperature

    @property
    def max_tokens(self) -> int:
        """As in the request."""
        return self.request.params.max_tokens

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """As in the request."""
        return self.request.params.stop_token_ids

    def append_token(self, token_id: int, logprob: float, log_kept_mass: float = 0.0) -> None:
        """Make a sampled token known."""
        self.token_ids.append(token_id)
        self.output_logprobs.append(logprob)
        self.output_log_kept_mass.append(log_kept_mass)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that sampled a token of it or computed what it attends to; None before
        any did.
        """
        versions = [version for version, _ in self.version_starts[:1]]
        for past in self.request.past_contexts:
            versions += [span.version for span in past.versions]
        # the last may have drawn nothing yet, and may have been given up since
        for context in self.contexts:
            if self.num_computed_tokens or context.token_start < self.num_completion_tokens:
                versions += [context.version, *(span.version for span in context.past)]
        return min(versions, default=None)

    def begin_context(self, past: tuple[VersionSpan, ...], version: int) -> None:
        """From the next token on the context is computed by the versions in `past`, and then by
        `version`.
        """
        at = self.num_completion_tokens
        while self.contexts and self.contexts[-1].token_start >= at:
            self.contexts.pop()
        if not self.contexts or self.contexts[-1][1:] != (past, version):
            self.contexts.append(Context(at, past, version))

    def release(self, namespace: Namespace) -> list[int]:
        """Give up all blocks (returned) and start over; what is computed next belongs to
        `namespace`.
        """
        block_ids, self.block_ids = self.block_ids, []
        self.num_computed_tokens = self.num_published_blocks = 0
        self.publishable = True
        if self.prefix.namespace != namespace:
            self.prefix = PrefixKeys(namespace)
        return block_ids

    def fork(self, seq_id: int, sample_index: int, output_text: GrowingText | None) -> "Sequence":
        """Another sample of the same prompt that shares all blocks so far, with a text of its
        own.
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
            # it has no completion token yet
            version_starts=[],
            adapter_starts=[],
            output_logprobs=[],
            output_raw_logprobs=[],
            output_log_kept_mass=[],
            mask=self.mask.fork(),
            output_top=[],
        )


class Sequences:
    """Every live sequence: by id, and in lists in scheduling order. Versions of the weight sets
    stand here too.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Sequence] = {}
        self.held: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.versions: dict[str, int] = {POLICY: 0}
        # the newest version of each adapter that requests may ask for
        self.adapters: dict[str, ServedAdapter] = {}
        self.merged: str | None = None  # of them, the one that is part of the weights now
        self.merging: str | None = None  # the one that is about to be, or to be no more
        self._ids = itertools.count()

    def new_id(self) -> int:
        """A sequence id that was never used."""
        return next(self._ids)

    def namespace_of(self, seq: Sequence) -> Namespace:
        """Where blocks that are computed now for this sequence belong."""
        lineage, salt = _LINEAGE.get(seq.weight_set, seq.weight_set), seq.request.params.cache_salt
        own = seq.adapter
        adapter = None if own is None else adapter_key(own.name, own.version)
        return Namespace(lineage, self.versions[seq.weight_set], salt, adapter)

    def insert(self, seq: Sequence) -> None:
        """Add a live sequence to the list that its status names."""
        self.by_id[seq.seq_id] = seq
        bisect.insort(self._list(seq), seq, key=attrgetter("order"))

    def move(self, seq: Sequence, status: SequenceStatus) -> None:
        """Change lists."""
        self._list(seq).remove(seq)
        seq.status = status
        bisect.insort(self._list(seq), seq, key=attrgetter("order"))

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out for good."""
        self._list(seq).remove(seq)
        seq.status = SequenceStatus.FINISHED
        del self.by_id[seq.seq_id]

    def of_requests(self, request_ids: frozenset[int] | None) -> list[Sequence]:
        """Live sequences of these requests (None: of all), by request and sample."""
        found = [
            s for s in self.by_id.values() if request_ids is None or s.request_id in request_ids
        ]
        return sorted(found, key=lambda s: (s.request_id, s.sample_index))

    def of_weight_set(self, weight_set: str) -> list[Sequence]:
        """Live sequences of a weight set."""
        return [seq for seq in self.by_id.values() if seq.weight_set == weight_set]

    def block_tables(self) -> Iterator[list[int]]:
        """All live block tables, for `KVCacheManager.check`."""
        return (seq.block_ids for seq in self.by_id.values())

    def _list(self, seq: Sequence) -> list[Sequence]:
        if seq.status is SequenceStatus.RUNNING:
            return self.running
        return self.waiting if seq.status is SequenceStatus.WAITING else self.held
