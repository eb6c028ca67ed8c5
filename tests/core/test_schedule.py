"""One test per scheduling rule, without a model."""

import copy
import math
from dataclasses import replace

import pytest

from nano_inference import PagedKVCache, SamplingParams, SchedulerConfig, schedule
from nano_inference.core.apply import Applied, SampledTokens, apply, commit, preempt
from nano_inference.core.decision import SchedulerOutput
from nano_inference.core.sequence import CheckedRequest, Sequence, Sequences
from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys
from nano_inference.kv_cache.sliding_window import BlockLayout


class Stage:
    """Sequences and a cache between two decisions."""

    def __init__(self, num_blocks: int = 100, block_size: int = 4, **limits: int) -> None:
        self.config = SchedulerConfig(block_size=block_size, **limits)  # pyright: ignore[reportArgumentType]
        self.cache = PagedKVCache(num_blocks, block_size)
        self.sequences = Sequences()
        self.pending: dict[int, int] = {}

    def add(self, prompt: list[int], **options: object) -> Sequence:
        num_samples = int(str(options.pop("num_samples", 1)))
        params = SamplingParams(**options)  # pyright: ignore[reportArgumentType]
        seq_id = self.sequences.new_id()
        seq = Sequence(
            seq_id,
            CheckedRequest(seq_id, len(prompt), params),
            list(prompt),
            num_samples,
            prefix=PrefixKeys(Namespace(salt=params.cache_salt)),
        )
        seq.prefix.extend(prompt, self.config.block_size)
        self.sequences.insert(seq)
        return seq

    def decide(self) -> SchedulerOutput:
        live = self.sequences
        return schedule(live.waiting, live.running, self.cache, self.config, self.pending)

    def apply(self, decision: SchedulerOutput) -> Applied:
        applied = apply(decision, self.sequences, self.cache)
        self.cache.check(self.sequences.block_tables())
        return applied

    def step(self) -> SchedulerOutput:
        """Decide, apply, and deliver every sampled token immediately."""
        decision = self.decide()
        for seq in self.apply(decision).sampled:
            seq.append_token(5, -1.0)
            seq.prefix.extend(seq.token_ids, self.config.block_size)
        return decision


def test_schedule_has_no_side_effects() -> None:
    stage = Stage(num_blocks=6)
    for length in (3, 9, 4):
        stage.add(list(range(length)), num_samples=2)
    stage.step()
    before = (
        copy.deepcopy([vars_of(s) for s in stage.sequences.by_id.values()]),
        stage.cache.num_free_blocks(),
    )
    assert stage.decide() == stage.decide()
    assert before == (
        [vars_of(s) for s in stage.sequences.by_id.values()],
        stage.cache.num_free_blocks(),
    )


def vars_of(seq: Sequence) -> dict[str, object]:
    values = {name: getattr(seq, name) for name in Sequence.__slots__}
    return {**values, "prefix": (seq.prefix.namespace, list(seq.prefix.hashes))}


def test_sequence_that_ends_by_length_is_not_planned_again() -> None:
    stage = Stage()
    seq = stage.add([1, 2, 3], max_tokens=1)
    stage.apply(stage.decide())
    stage.pending = {seq.seq_id: 1}  # its only token is in flight
    assert stage.decide().seq_ids == ()


def test_token_in_flight_counts_as_known() -> None:
    stage = Stage()
    seq = stage.add([1, 2, 3], max_tokens=5)
    stage.apply(stage.decide())
    stage.pending = {seq.seq_id: 1}
    decision = stage.decide()
    assert (decision.starts, decision.lengths, decision.samples) == ((3,), (1,), (1,))
    assert decision.decode_seqs == (seq.seq_id,)


def test_preempted_sequence_waits_for_its_token_in_flight() -> None:
    stage = Stage()
    seq = stage.add([1, 2, 3], max_tokens=5)
    stage.apply(stage.decide())
    stage.pending = {seq.seq_id: 1}
    preempt(seq, stage.sequences, stage.cache)
    assert stage.decide().admitted == ()
    stage.pending = {}
    assert [admission.seq_id for admission in stage.decide().admitted] == [seq.seq_id]


@pytest.mark.parametrize("length", [4, 8, 12])
def test_match_leaves_the_last_token_to_compute(length: int) -> None:
    stage = Stage()
    stage.add(list(range(length)))
    stage.step()
    stage.add(list(range(length)))
    decision = stage.decide()
    assert decision.admitted[0].cached.cached_length == length - 4
    assert decision.lengths[-1] == 4


def test_twin_waits_one_step_and_then_hits() -> None:
    stage = Stage()
    first, twin, other = (stage.add(ids) for ids in ([1] * 9, [1] * 9, [2] * 9))
    assert stage.step().seq_ids == (first.seq_id, other.seq_id)
    decision = stage.step()
    assert decision.admitted[0].seq_id == twin.seq_id
    assert decision.admitted[0].cached.cached_length == 8


def test_group_is_one_sequence_until_its_prompt_is_computed() -> None:
    stage = Stage(max_tokens_per_batch=4)
    stage.add([1, 2, 3, 4, 5, 6], num_samples=3)
    decisions = [stage.step() for _ in range(3)]
    assert [d.lengths for d in decisions] == [(4,), (2,), (1, 1, 1)]
    assert [d.samples for d in decisions] == [(0,), (3,), (1, 1, 1)]
    tables = [seq.block_ids for seq in stage.sequences.running]
    assert len({table[0] for table in tables}) == 1, "full blocks are shared"
    assert len({table[1] for table in tables}) == 3, (
        "the partial block was copied on the first write"
    )


def test_single_tokens_go_before_prompts() -> None:
    stage = Stage(max_tokens_per_batch=6)
    short = stage.add([1, 2])
    stage.step()
    long = stage.add([3] * 20)
    assert stage.step().seq_ids == (short.seq_id, long.seq_id)
    late = stage.add([7, 8])
    decision = stage.decide()
    assert decision.lengths[:2] == (1, 5), "the decode first, what is left to the prompt"
    assert late.seq_id not in decision.seq_ids


def test_oldest_request_decodes_first() -> None:
    stage = Stage(max_tokens_per_batch=4)
    for token in range(4):
        stage.add([token + 1], max_tokens=3, priority=int(token == 0))
    stage.step()
    stage.config = SchedulerConfig(block_size=4, max_tokens_per_batch=2)
    turns = [stage.step().seq_ids for _ in range(4)]
    assert turns == [(1, 2), (1, 2), (3, 0), (3, 0)], "by priority, then by arrival"


def test_group_samples_advance_evenly() -> None:
    stage = Stage(max_tokens_per_batch=4)
    group, late = stage.add([1], num_samples=3), stage.add([2])
    stage.step()
    stage.config = SchedulerConfig(block_size=4, max_tokens_per_batch=2)
    places = {seq.seq_id: seq.sample_index for seq in stage.sequences.running if seq is not late}
    assert len(places) == 3
    turns = [[places.get(seq_id) for seq_id in stage.step().seq_ids] for _ in range(3)]
    assert turns == [[0, 1], [0, 2], [1, 2]], "the later request waits"
    assert group.num_samples == 1


def test_preempted_sample_comes_back_before_a_later_group() -> None:
    stage = Stage(num_blocks=8)
    stage.add([1] * 4, num_samples=3)
    stage.step()
    later = stage.add([2] * 4, num_samples=3)
    last = stage.sequences.running[-1]
    preempt(last, stage.sequences, stage.cache)
    assert stage.sequences.waiting == [last, later]
    assert stage.step().admitted[0].seq_id == last.seq_id


def test_preemption_takes_the_youngest_and_admits_no_sequence() -> None:
    stage = Stage(num_blocks=4)
    old, young = stage.add([1, 2, 3]), stage.add([4, 5, 6, 7, 8, 9, 1])
    stage.step()
    stage.step()
    waiting = stage.add([9])
    while not (decision := stage.step()).preempted_seqs:
        assert waiting.seq_id not in decision.seq_ids or stage.cache.num_free_blocks() >= 0
    assert decision.preempted_seqs[0] in (young.seq_id, waiting.seq_id)
    assert old.seq_id in decision.seq_ids
    assert decision.admitted == ()
    assert not set(decision.preempted_seqs) & set(decision.seq_ids)


def test_sequence_that_does_not_fit_is_not_overtaken() -> None:
    stage = Stage(num_blocks=4)
    running = stage.add([1] * 5)
    stage.step()
    stage.add([2] * 12)
    stage.add([3])
    assert stage.decide().seq_ids == (running.seq_id,)


def test_priority_precedes_arrival_and_preempts_lower_priorities() -> None:
    stage = Stage(num_blocks=4)
    low = stage.add([1] * 13, priority=1)
    stage.step()
    high = stage.add([2] * 10, priority=0)
    decision = stage.decide()
    assert decision.preempted_seqs == (low.seq_id,)
    assert decision.seq_ids == (high.seq_id,)
    stage.apply(decision)
    assert stage.decide().preempted_seqs == ()


def test_unchunked_prompt_runs_in_one_step_or_waits() -> None:
    stage = Stage(max_tokens_per_batch=8)
    stage.config = SchedulerConfig(
        block_size=4, max_tokens_per_batch=8, enable_chunked_prefill=False
    )
    stage.add([1] * 5)
    second = stage.add([2] * 8)
    assert stage.step().lengths == (5,)
    assert second.seq_id not in stage.step().seq_ids


def test_step_limits_hold() -> None:
    stage = Stage(max_batch_size=2, max_tokens_per_batch=7, max_chunk_tokens=3)
    for token in range(4):
        stage.add([token + 1] * 10, max_tokens=4)
    for _ in range(60):
        decision = stage.step()
        assert len(decision.seq_ids) <= 2
        assert decision.num_tokens <= 7
        assert max(decision.lengths, default=0) <= 3


@pytest.mark.parametrize("window", [0, 5])
def test_draft_rows_count_once_drafts_are_drawn(window: int) -> None:
    """Only then do draft rows count as computed, leave the window and fill matchable blocks. Blocks
    that wrong drafts needed become free again.
    """
    layout = BlockLayout(num_sliding=1, window=window) if window else BlockLayout()
    stage = Stage(num_blocks=8)
    stage.cache = PagedKVCache(8, stage.config.block_size, layout=layout)
    seq = stage.add([1, 2, 3, 4, 5, 6])
    apply(stage.decide(), stage.sequences, stage.cache)
    tokens = SampledTokens([7], [-1.0], [-1.0], [0.0])
    assert commit([seq], tokens, stage.sequences, stage.cache) == []
    live, wanted = stage.sequences, (8, 5, 9, 10, 12, 13)
    config = replace(stage.config, max_drafts=6)
    decision = schedule([], live.running, stage.cache, config, drafts={seq.seq_id: wanted})
    assert decision.drafts == (wanted,)
    assert decision.lengths == (7,)
    applied = apply(decision, live, stage.cache)
    assert applied.sampled == (seq,) * 7
    assert len(seq.block_ids) == 4
    assert (seq.num_computed_tokens, seq.num_published_blocks) == (7, 1)
    # 9 was sampled instead of 5, so later drafts are invalid even if they look right
    tokens, zeros = [8, 9, 4, 10, 11, 13, 14], [0.0] * 7
    drawn = SampledTokens(tokens, [-1.0] * 2 + [math.nan] * 5, zeros, zeros)
    behind = {row: wanted[:row] for row in range(1, 7)}
    assert commit(applied.sampled, drawn, live, stage.cache, behind) == []
    assert seq.token_ids[-3:] == [7, 8, 9]
    assert len(seq.output_logprobs) == 3
    assert (seq.num_computed_tokens, seq.num_published_blocks) == (8, 2)
    assert len(seq.block_ids) == 3
    slid = [layout.num_slid(seq.num_computed_tokens, stage.config.block_size)]
    stage.cache.check(stage.sequences.block_tables(), slid)


def test_drafts_use_the_remaining_budget() -> None:
    stage = Stage(num_blocks=5, max_batch_size=4, max_drafts=3, max_tokens_per_batch=9)
    first, second = stage.add([1, 2, 3, 4]), stage.add([5, 6, 7])
    stage.step()
    live = stage.sequences
    drafts = {first.seq_id: (1, 2, 3), second.seq_id: (1, 2, 3)}

    def lengths(**limits: int) -> tuple[int, ...]:
        config = replace(stage.config, **limits)
        return schedule(live.waiting, live.running, stage.cache, config, drafts=drafts).lengths

    assert lengths() == (3, 1)  # four rows are sampled
    assert lengths(max_batch_size=8) == (4, 4)
    assert lengths(max_batch_size=8, max_tokens_per_batch=7) == (4, 3)
    assert lengths(max_batch_size=8, max_chunk_tokens=2) == (2, 2)
    waiting = stage.add([9] * 6)
    assert lengths(max_batch_size=8) == (2, 1, 6)  # waiting sequences come first
    live.remove(waiting)
    stage.pending = {first.seq_id: 1}
    decision = schedule([], live.running, stage.cache, stage.config, stage.pending, drafts=drafts)
    assert decision.seq_ids == (second.seq_id,)  # drafts follow known tokens


def test_drafts_end_at_the_sample_limit() -> None:
    stage = Stage(max_drafts=3)
    seq = stage.add([1, 2, 3, 4], max_tokens=3)
    stage.step()
    live = stage.sequences
    drafts = {seq.seq_id: (1, 2, 3)}
    decision = schedule([], live.running, stage.cache, stage.config, drafts=drafts)
    assert decision.drafts == ((1,),)  # with this token and the next there are three


def test_drafts_preempt_no_sequence() -> None:
    stage = Stage(num_blocks=4, block_size=2, max_drafts=8)
    seqs = [stage.add([1, 2, 3]), stage.add([4, 5, 6])]  # two blocks each: the whole pool
    stage.step()
    drafts = {seq.seq_id: (7,) * 8 for seq in seqs}
    live = stage.sequences
    decision = schedule([], live.running, stage.cache, stage.config, drafts=drafts)
    assert decision.drafts == ((), ())
    assert not decision.preempted_seqs
