"""Workloads for the loop: requests with arrivals, aborts and weight changes under random limits,
and their execution.
"""

import random
import typing
from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field, replace

from nano_inference.config import CacheType, SchedulerConfig
from nano_inference.core.lifecycle import Drain, Settle, Stop
from nano_inference.core.loop import Abort, Add, EngineLoop, LoopHooks
from nano_inference.core.sequence import (
    POLICY,
    PREVIOUS,
    REFERENCE,
    CheckedRequest,
    SampleGroup,
    Sequence,
    Sequences,
    SequenceStatus,
)
from nano_inference.kv_cache.caches import CACHES
from nano_inference.kv_cache.sliding_window import UNIFORM, BlockLayout
from nano_inference.sampling.noise import noise_keys
from nano_inference.types import (
    GROUP_COMPLETE,
    VERSION_GONE,
    KvPolicy,
    SamplingParams,
    TopLogprobs,
    TrainingSample,
)
from tests.simulation.fake_model import (
    EOS,
    VOCAB,
    FakeRunner,
    FakeWeights,
    oracle,
    oracle_best,
    oracle_scores,
    queue_update,
)

POLICIES: tuple[KvPolicy, ...] = typing.get_args(KvPolicy)


@dataclass(frozen=True)
class Ask:
    """One request: its arrival and its parameters."""

    prompt: list[int]
    max_tokens: int
    num_samples: int = 1
    arrives: int = 0
    aborted: int | None = None
    priority: int = 0
    salt: str | None = None
    prompt_logprobs: bool = False
    prompt_top: int = 0
    min_version: int | None = None
    max_staleness: int | None = None
    exact_version: int | None = None
    num_wanted: int | None = None
    turn_of: int | None = None


@dataclass(frozen=True)
class Workload:
    """Requests and the engine that runs them."""

    asks: list[Ask]
    config: SchedulerConfig
    num_blocks: int
    lookahead: int
    updates: dict[int, KvPolicy] = field(default_factory=dict)  # by step
    cache_type: CacheType = "paged"
    judged: bool = False  # a reference model scores every sample
    layout: BlockLayout = UNIFORM
    num_units: int | None = None  # None: enough for every block
    drafts: str | None = None  # quality of drafts: see `FakeDrafts`
    # first step -> end, newcomers enter meanwhile
    pauses: dict[int, tuple[int, bool]] = field(default_factory=dict)


@dataclass
class Outcome:
    """Results of a run, summed up by the caller."""

    steps: int = 0
    preemptions: int = 0
    tokens_computed: int = 0
    tokens_cached: int = 0
    samples: int = 0
    aborted: int = 0
    updates: int = 0
    mixed: int = 0  # tokens that attended to keys of several versions
    previous: int = 0  # number of times old weights were kept
    stragglers: int = 0  # samples that ended because enough others had finished
    belated: int = 0  # samples that ended because their version was gone
    drafted: int = 0  # rows for drafts
    accepted: int = 0  # draft tokens


def random_workload(seed: int) -> Workload:
    """Return a workload whose requests fit one by one, but often not all together."""
    r = random.Random(seed)
    block_size = r.choice([1, 2, 3, 4, 8])
    stems = [[r.randrange(1, VOCAB) for _ in range(r.randrange(1, 20))] for _ in range(2)]
    updates = {r.randrange(0, 40): r.choice(POLICIES) for _ in range(r.choice([0, 0, 0, 1, 2, 4]))}
    asks: list[Ask] = []
    for _ in range(r.randrange(1, 9)):
        tail = [r.randrange(1, VOCAB) for _ in range(r.randrange(0, 12))]
        prompt = (r.choice(stems) + tail) if r.random() < 0.6 else (tail or [1])
        asks.append(
            Ask(
                prompt=prompt,
                max_tokens=r.randrange(1, 15),
                num_samples=r.choice([1, 1, 1, 2, 3, 5]),
                arrives=r.choice([0, 0, r.randrange(0, 30)]),
                aborted=r.randrange(0, 40) if r.random() < 0.1 else None,
                priority=r.choice([0, 0, 0, 1, -1]),
                salt=r.choice([None, None, None, "a"]),
                prompt_logprobs=(scored := r.random() < 0.15),
                prompt_top=len(asks) % 3 if scored else 0,
                min_version=r.randrange(1, len(updates) + 1)
                if updates and r.random() < 0.15
                else None,
                max_staleness=r.randrange(0, 3) if r.random() < 0.15 else None,
            )
        )
    asks = [
        _limited(ask, len(updates), random.Random(f"{seed} {place}"))
        for place, ask in enumerate(asks)
    ]
    longest = max(len(ask.prompt) + ask.max_tokens for ask in asks)
    chunked = r.random() < 0.8
    config = SchedulerConfig(
        max_batch_size=r.choice([1, 2, 4, 64]),
        max_tokens_per_batch=r.choice([1, 3, 8, 64]) if chunked else longest + r.randrange(0, 20),
        block_size=block_size,
        max_chunk_tokens=r.choice([None, 1, 3, 7]) if chunked else None,
        enable_prefix_caching=r.random() < 0.8,
        enable_chunked_prefill=chunked,
    )
    least = -(-longest // block_size)
    pauses = {
        r.randrange(0, 40): (r.randrange(0, 60), r.random() < 0.5)
        for _ in range(r.choice([0, 0, 0, 1]))
    }
    num_blocks, lookahead = least + r.choice([0, 1, 3, 10, 100]), r.choice([0, 1])
    cache_type = r.choice(["paged", "radix"])
    workload = Workload(
        asks,
        config,
        num_blocks,
        lookahead,
        updates,
        cache_type,
        judged=r.random() < 0.3,
        pauses=pauses,
    )
    return workload if r.random() < 0.4 else _windowed(workload, longest, r)


def with_drafts(workload: Workload, kind: str, most: int) -> Workload:
    """Return the workload for an engine with drafts."""
    return replace(workload, config=replace(workload.config, max_drafts=most), drafts=kind)


class FakeDrafts:
    """Drafts that are all right, all wrong, random, or one of these per step."""

    KINDS = ("right", "wrong", "any", "nearly right", "changing")

    def __init__(self, workload: Workload) -> None:
        assert workload.drafts in self.KINDS
        self._workload, self._kind = workload, workload.drafts
        self._random = random.Random(len(workload.asks))
        self.num_drafted = self.num_accepted = 0
        self._known: dict[int, int] = {}

    def propose(
        self, live: Sequences, pending: Container[int], config: SchedulerConfig
    ) -> dict[int, tuple[int, ...]]:
        """Propose drafts, also for sequences that cannot have any now."""
        self._known = {seq.seq_id: len(seq.token_ids) for seq in live.running}
        return {seq.seq_id: self._drafts(seq) for seq in live.running if seq.num_samples}

    def learn(self, seqs: Listed[Sequence], drafts: Mapping[int, tuple[int, ...]]) -> int:
        """Record the accepted drafts."""
        self.num_drafted += sum(map(len, drafts.values()))
        more = sum(
            max(len(seq.token_ids) - self._known[seq.seq_id] - 1, 0)
            for seq in seqs
            if seq.seq_id in drafts
        )
        self.num_accepted += more
        return more

    def _drafts(self, seq: Sequence) -> tuple[int, ...]:
        ask = self._workload.asks[seq.request_id]
        alone = oracle(ask.prompt, 1000 + seq.request_id, seq.sample_index, ask.max_tokens)
        kind, r = self._kind, self._random
        kind = r.choice(self.KINDS[:-1]) if kind == "changing" else kind
        tokens = alone[seq.num_completion_tokens :][: r.randrange(1, 9)]
        if kind == "wrong":
            tokens = [(token + 1) % VOCAB for token in tokens]
        elif kind == "any":
            tokens = [r.randrange(VOCAB) for _ in tokens]
        elif kind == "nearly right" and tokens:
            tokens[r.randrange(len(tokens))] = r.randrange(VOCAB)
        return tuple(tokens)


def with_groups(workload: Workload, groups: int) -> Workload:
    """Return the workload for an engine whose steps pass through several stages."""
    return replace(workload, config=replace(workload.config, groups=groups), lookahead=groups - 1)


def _limited(ask: Ask, num_updates: int, r: random.Random) -> Ask:
    """Want only some of the samples, take an earlier place, or limit the request to one version."""
    if r.random() < 0.2:
        ask = replace(ask, turn_of=r.randrange(0, 9))
    if ask.num_samples > 1 and r.random() < 0.4:
        ask = replace(ask, num_wanted=r.randrange(1, ask.num_samples + 1))
    return (
        replace(ask, exact_version=r.randrange(0, num_updates + 1))
        if num_updates and r.random() < 0.1
        else ask
    )


def _windowed(workload: Workload, longest: int, r: random.Random) -> Workload:
    """Return the workload for a model with window layers, and memory for little more than the
    longest request.
    """
    size, chunked = workload.config.block_size, workload.config.enable_chunked_prefill
    layout = BlockLayout(
        r.choice([0, 0, 1, 2]), r.choice([1, 1, 2, 5]), r.choice([2, 3, 4, 5, 7, 12, 30])
    )
    num_blocks = workload.num_blocks + (r.choice([0, 10, 100]) if layout.num_full == 0 else 0)
    least = layout.most_units(longest, 1 if chunked else longest, size)
    num_units = least + r.choice(
        [0, 1, 2, layout.num_units, 3 * layout.num_units, 20 * layout.num_units]
    )
    if layout.num_full:
        num_blocks = max(1, num_units // layout.num_full)
    return replace(workload, layout=layout, num_blocks=num_blocks, num_units=num_units)


def run(
    workload: Workload,
    max_steps: int = 4000,
    on_sample: Callable[[TrainingSample, int], object] = lambda sample, step: None,
) -> Outcome:
    """Run to the end and assert after every step. Raise AssertionError on a leak, a livelock or a
    wrong token.

    `on_sample` is called with every sample and its step.
    """
    config = workload.config
    kind = CACHES[workload.cache_type]
    cache = kind(
        workload.num_blocks, config.block_size, layout=workload.layout, num_units=workload.num_units
    )
    runner = FakeRunner(
        cache.num_units * config.block_size, config.block_size, cache.units, config.groups == 1
    )
    runner.one_version_only = "keep" not in workload.updates.values()
    drafts = FakeDrafts(workload) if workload.drafts is not None else None
    hooks = LoopHooks(weights=FakeWeights(runner), drafter=drafts)
    loop = EngineLoop(cache, runner, config, workload.lookahead, "fake", hooks)
    if workload.judged:
        loop.sequences.versions[REFERENCE] = 0
    outcome = Outcome(updates=len(workload.updates))
    samples: list[TrainingSample] = []
    ends: dict[tuple[int, int], int] = {}  # (request, sample) -> step of its delivery
    last_event = max(
        [
            0,
            *workload.updates,
            *(end for end, _ in workload.pauses.values()),
            *(ask.arrives for ask in workload.asks),
        ]
    )
    for step in range(max_steps):
        if step > last_event and not loop.has_pending():
            break
        _post_messages(loop, workload, step)
        waiting = _waiting(loop)
        came = loop.step()
        if not workload.updates:
            assert all(seq.status is not SequenceStatus.RUNNING for seq in waiting), (
                "a request was admitted against the reason why it waits"
            )
        samples += came
        ends |= {(sample.request_id, sample.sample_index): step for sample in came}
        for sample in came:
            on_sample(sample, step)
        loop.check()
        _check_flights(loop)
    else:
        raise AssertionError("livelock: requests are left after many steps")
    _check_end(workload, loop, runner, samples)
    _check_groups(workload, samples, ends)
    if drafts is not None:
        outcome.drafted, outcome.accepted = drafts.num_drafted, drafts.num_accepted
        assert loop.num_completion_tokens >= sum(len(s.completion_tokens) for s in samples)
    outcome.steps, outcome.preemptions = loop.num_steps, loop.num_preemptions
    outcome.tokens_computed, outcome.tokens_cached = runner.tokens_computed, loop.num_cached_tokens
    outcome.samples = len(samples)
    outcome.previous = runner.num_dropped
    outcome.mixed = sum(
        len(entry.versions) > 1 for sample in samples for entry in sample.kv_versions
    )
    outcome.stragglers = sum(sample.stop_reason == GROUP_COMPLETE for sample in samples)
    outcome.belated = sum(sample.stop_reason == VERSION_GONE for sample in samples)
    outcome.aborted = sum(sample.finish_reason == "abort" for sample in samples)
    return outcome


def _waiting(loop: EngineLoop) -> list[Sequence]:
    """Return the sequences of requests that wait for a reason which the next step cannot lift."""
    statuses = {each.request_id: each for each in loop.request_statuses()}
    assert statuses.keys() == {seq.request_id for seq in loop.sequences.by_id.values()}
    assert all(each.reason for each in statuses.values() if each.state == "held")
    if loop.inbox:
        return []
    reasons = {request_id for request_id, each in statuses.items() if each.reason}
    return [seq for seq in loop.sequences.waiting if seq.request_id in reasons]


def _check_flights(loop: EngineLoop) -> None:
    """Check that no sequence is in the pipeline twice, and that no step exceeds its share."""
    assert len(loop.in_flight) <= loop.lookahead
    if loop.config.groups > 1 or loop.config.max_drafts:
        drawn = [seq_id for each in loop.in_flight for seq_id in {s.seq_id for s in each.sampled}]
        assert len(drawn) == len(set(drawn)), (
            "a sequence was planned again while its token was on its way"
        )


def _post_messages(loop: EngineLoop, workload: Workload, step: int) -> None:
    for request_id, ask in enumerate(workload.asks):
        if ask.arrives == step:
            loop.inbox.append(Add(_sequence(loop, request_id, ask)))
        if ask.aborted == step:
            loop.inbox.append(Abort(frozenset([request_id])))
    if step in workload.updates:
        version = 1 + sum(earlier < step for earlier in workload.updates)
        queue_update(loop, version, workload.updates[step])
    for start, (end, enters) in workload.pauses.items():
        if step == start < end:
            loop.become(Stop())
            if not enters:
                loop.become(Drain())
        if step == end:
            loop.become(Settle())


def _sequence(loop: EngineLoop, request_id: int, ask: Ask) -> Sequence:
    request = CheckedRequest(
        request_id=request_id,
        num_prompt_tokens=len(ask.prompt),
        params=SamplingParams(
            max_tokens=ask.max_tokens,
            priority=ask.priority,
            cache_salt=ask.salt,
            prompt_logprobs=ask.prompt_logprobs,
            prompt_top_logprobs=ask.prompt_top,
        ),
        num_best=ask.prompt_top,
        scored=range(len(ask.prompt) - 1) if ask.prompt_logprobs else range(0),
        stop_ids=frozenset([EOS]),
        seed=1000 + request_id,
        min_version=ask.min_version,
        max_staleness=ask.max_staleness,
        exact_version=ask.exact_version,
        group=SampleGroup(ask.num_wanted) if ask.num_wanted is not None else None,
        turn_of=ask.turn_of,
    )
    return Sequence(loop.sequences.new_id(), request, list(ask.prompt), ask.num_samples)


def _check_scores(workload: Workload, ask: Ask, sample: TrainingSample) -> None:
    assert (sample.prompt_logprobs is not None) == ask.prompt_logprobs
    if sample.prompt_logprobs is not None:
        expected = oracle_scores(ask.prompt, 0, POLICY)
        scores = list(sample.prompt_logprobs[1:])
        assert scores == (
            expected[: len(scores)] if sample.finish_reason == "abort" else expected
        ), "wrong prompt scores"
    assert (sample.prompt_top_logprobs is not None) == (ask.prompt_top > 0)
    if sample.prompt_top_logprobs is not None:
        assert len(sample.prompt_top_logprobs) == len(sample.prompt_logprobs or ())
        tops = oracle_best(ask.prompt, ask.prompt_top)[: len(sample.prompt_top_logprobs) - 1]
        assert list(sample.prompt_top_logprobs) == [TopLogprobs((), ()), *tops], (
            "wrong best tokens of a prompt"
        )
    if sample.ref_logprobs is not None:
        tokens = [*sample.prompt_tokens, *sample.completion_tokens]
        assert list(sample.ref_logprobs) == oracle_scores(tokens, len(ask.prompt) - 1, REFERENCE), (
            "wrong scores"
        )
    unscored = sample.finish_reason == "abort" or ask.aborted is not None or not workload.judged
    assert unscored or sample.ref_logprobs is not None, "a sample was not scored"


def _check_versions(
    workload: Workload, runner: FakeRunner, ask: Ask, sample: TrainingSample
) -> None:
    """Check that a sample's versions match those seen by the model, token by token."""
    length = len(sample.completion_tokens)
    spans, entries = sample.weight_versions, sample.kv_versions
    assert [i for span in spans for i in range(span.start, span.end)] == list(range(length)), (
        "version spans have gaps"
    )
    assert [i for e in entries for i in range(e.token_start, e.token_end)] == list(range(length)), (
        "entries have gaps"
    )
    assert not length or sample.oldest_weight_version >= (ask.min_version or 0), (
        "sampled by a version that was too old"
    )
    newest = sample.weight_versions[-1].version if length else 0
    assert (
        ask.max_staleness is None or newest - sample.oldest_weight_version <= ask.max_staleness
    ), "it exceeds max_staleness"
    assert not length or ask.exact_version in (None, spans[0].version), (
        "begun by another version than it is for"
    )
    assert sample.stop_reason != VERSION_GONE or (ask.exact_version is not None and not length)
    if workload.layout.num_sliding:
        return
    sampled_by = [span.version for span in spans for _ in range(span.start, span.end)]
    for start, end, versions in entries:
        context = [span.version for span in versions for _ in range(span.start, span.end)]
        assert [p for span in versions for p in range(span.start, span.end)] == list(
            range(len(context))
        )
        for token in range(start, end):
            position = len(ask.prompt) + token
            low, high = noise_keys([(sample.seed, sample.sample_index, position)])[0]
            assert context[:position] == runner.contexts[int(low), int(high)], (
                "a context of other versions"
            )
            assert context[position - 1] == sampled_by[token]


def _check_groups(
    workload: Workload, samples: list[TrainingSample], ends: dict[tuple[int, int], int]
) -> None:
    """Check that a group ends once enough samples have finished, and that no finished sample is
    lost.
    """
    for request_id, ask in enumerate(workload.asks):
        group = [sample for sample in samples if sample.request_id == request_id]
        finished = [sample for sample in group if sample.finish_reason != "abort"]
        stragglers = [sample for sample in group if sample.stop_reason == GROUP_COMPLETE]
        if ask.num_wanted is None:
            assert not stragglers, "a sample ended that was wanted"
            continue
        cut = [s for s in group if s.finish_reason == "abort" and s.stop_reason != GROUP_COMPLETE]
        assert len(finished) >= ask.num_wanted or cut or not group, "too few have finished"
        for sample in stragglers:
            alone = oracle(ask.prompt, 1000 + request_id, sample.sample_index, ask.max_tokens)
            assert len(sample.completion_tokens) < len(alone), "a finished sample was thrown away"
        if workload.judged:  # finished samples arrive later, with their scores
            continue
        steps = sorted(ends[request_id, sample.sample_index] for sample in finished)
        if stragglers:
            complete = steps[ask.num_wanted - 1]
            assert {ends[request_id, sample.sample_index] for sample in stragglers} == {complete}, (
                "they went on"
            )
            assert steps[-1] == complete, "one finished after the group was complete"


def _check_end(
    workload: Workload, loop: EngineLoop, runner: FakeRunner, samples: list[TrainingSample]
) -> None:
    config, cache = workload.config, loop.cache
    assert cache.num_free_blocks() == cache.num_blocks, "a block leaked"
    assert cache.num_free_units() == cache.num_units, "a unit leaked"
    assert runner.largest_step <= config.max_tokens_per_batch, "a step took too many tokens"
    assert runner.most_chunks <= config.max_batch_size, "a step took too many sequences"
    assert runner.longest_chunk <= (config.max_chunk_tokens or runner.longest_chunk), (
        "a chunk is too long"
    )
    by_key = {(sample.request_id, sample.sample_index): sample for sample in samples}
    live = [
        i for i, ask in enumerate(workload.asks) if ask.aborted is None or ask.aborted > ask.arrives
    ]
    expected = {(i, n) for i in live for n in range(workload.asks[i].num_samples)}
    assert expected <= set(by_key), "a sample is lost"
    assert len(samples) == len(by_key), "a sample came twice"
    for (request_id, index), sample in by_key.items():
        ask = workload.asks[request_id]
        alone = oracle(ask.prompt, 1000 + request_id, index, ask.max_tokens)
        got = list(sample.completion_tokens)
        assert got == (alone[: len(got)] if sample.finish_reason == "abort" else alone), (
            "a wrong token"
        )
        assert len(sample.logprobs) == len(got), "arrays are not aligned"
        _check_scores(workload, ask, sample)
        _check_versions(workload, runner, ask, sample)
    assert not loop.has_pending()
    assert not loop.sequences.held
    assert PREVIOUS not in loop.sequences.versions, "old weights are kept without a user"
    untouched = (
        not loop.num_preemptions
        and not workload.updates
        and all(a.aborted is None for a in workload.asks)
    )
    if untouched:
        prompts = sum(len(ask.prompt) for ask in workload.asks)
        assert runner.prompt_tokens_computed == prompts - loop.num_cached_tokens, (
            "a prompt was computed twice"
        )
