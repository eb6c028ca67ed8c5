"""`apply` carries out a decision on sequences and cache.

`commit` adds the tokens that the step sampled.
"""

import itertools
import math
from collections.abc import Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace

from nano_inference.core.decision import SchedulerOutput
from nano_inference.core.named_ids import named_logprobs
from nano_inference.core.sequence import POLICY, Sequence, Sequences, SequenceStatus
from nano_inference.core.stopping import (
    LENGTH,
    MASK_FULL,
    NOT_FINITE,
    Finish,
    copied_text,
    ends_by_id,
    failure,
    finish_of,
    follow_grammar,
    grammar_failure,
    may_stop,
    whole_text,
)
from nano_inference.kv_cache.manager import KVCacheManager
from nano_inference.sampling.drafted import NO_DRAFTS, Drafts
from nano_inference.types import ContextVersions, TopLogprobs, TrainingSample, VersionSpan

_NOTHING = TopLogprobs((), ())  # placeholder for the first token of every prompt


@dataclass(frozen=True, slots=True)
class Applied:
    """The runner's view of an applied decision.

    Attributes:
        block_copies: Pairs of source and target blocks to copy before anything is written.
        sampled: Sequences that draw a token, in the order of the draw rows. A sequence with drafts
            is listed once for each of its rows. The other samples of a forked group are included.
    """

    block_copies: tuple[tuple[int, int], ...]
    sampled: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One step's samples and scores on the host: one entry per draw row, one per score."""

    token_ids: Listed[int]
    logprobs: Listed[float]
    raw_logprobs: Listed[float]
    log_kept_mass: Listed[float]
    masks: Listed[Listed[int]] | None = None
    top: Listed[tuple[Listed[int], Listed[float]]] | None = None  # best tokens and their logprobs
    scores: Listed[float] = ()
    # float32 logprobs of the rows' `logprob_token_ids`: as drawn, and the model's own
    named: tuple[bytes, bytes] | None = None
    # like `top`, for the rows in `ForwardBatch.best_rows`
    score_best: Listed[tuple[Listed[int], Listed[float]]] = ()


def apply(decision: SchedulerOutput, sequences: Sequences, cache: KVCacheManager) -> Applied:
    """Carry out a decision: preempt, admit, allocate, fork and publish.

    A decision that only preempts must be applied too.
    """
    _preempt_and_admit(decision, sequences, cache)
    copies: list[tuple[int, int]] = []
    sampled: list[Sequence] = []
    moved: list[tuple[Sequence, int]] = []
    slides, size = cache.layout.num_sliding > 0, cache.block_size
    columns = (
        decision.seq_ids,
        decision.starts,
        decision.lengths,
        decision.samples,
        decision.fresh_blocks,
        decision.drafts,
    )
    for seq_id, start, length, num_samples, fresh, drafts in zip(*columns, strict=True):
        seq, end = sequences.by_id[seq_id], start + length
        if fresh:
            copies += cache.extend(seq.block_ids, start, end)
        if num_samples:
            sampled.append(seq)
        if drafts:  # draft rows count as computed once accepted
            end -= len(drafts)
            sampled += [seq] * len(drafts)
        seq.num_computed_tokens = end
        if end // size > seq.num_published_blocks:
            publish(seq, cache)
        if slides:
            moved.append((seq, start))
        if num_samples > 1:
            forks = _fork(seq, num_samples, start, sequences, cache)
            sampled += forks
            moved += [(fork, start) for fork in forks if slides]
    # slide last: a later chunk of this step must not take blocks that an earlier one reads
    for seq, start in moved:
        cache.slide(seq.block_ids, start, seq.num_computed_tokens)
    return Applied(tuple(copies), tuple(sampled))


def _preempt_and_admit(
    decision: SchedulerOutput, sequences: Sequences, cache: KVCacheManager
) -> None:
    for seq_id in decision.preempted_seqs:
        preempt(sequences.by_id[seq_id], sequences, cache)
    for admission in decision.admitted:  # hold all matches before taking any fresh block
        seq = sequences.by_id[admission.seq_id]
        sequences.move(seq, SequenceStatus.RUNNING)
        cache.adopt(admission.cached.block_ids, _num_slid(admission.cached.cached_length, cache))
        seq.block_ids = list(admission.cached.block_ids)
        seq.num_computed_tokens = admission.cached.cached_length
        seq.num_published_blocks = len(seq.block_ids)
        seq.begin_context((), sequences.versions[seq.weight_set])
        if not seq.num_completion_tokens:
            seq.cached_tokens = admission.cached.cached_length


def commit(
    owners: Listed[Sequence],
    sampled: SampledTokens,
    sequences: Sequences,
    cache: KVCacheManager,
    drafts: Drafts = NO_DRAFTS,
) -> list[tuple[Sequence, Finish]]:
    """Add a step's tokens to their sequences, and return the sequences that ended.

    Tokens of finished sequences are dropped. The rows of a sequence with drafts are consecutive.
    `drafts` maps a row to the drafts that the row follows.

    A sequence whose detokenizer raises ends with the tokens that it has. A sequence whose
    `SamplingMask` has no room ends without the new token. The other sequences continue.
    """
    finished: list[tuple[Sequence, Finish]] = []
    followed: list[Sequence] = []
    masked, size = sampled.masks is not None, cache.block_size
    named = _named_of(owners, sampled.named)
    for row, seq in _rows_that_count(owners, drafts, cache):
        finish = NOT_FINITE if not math.isfinite(sampled.logprobs[row]) else None
        if masked and finish is None:
            finish = _take_mask(seq, row, sampled)
        if finish is None:
            _append(seq, row, sampled, sequences.versions[seq.weight_set], named.get(row))
            finish = _grow_text(seq) if seq.output_text is not None else None
            if len(seq.token_ids) % size == 0:  # another block is full
                seq.prefix.extend(seq.token_ids, size)
                publish(seq, cache)
            finish = finish or finish_of(seq)
            if finish is None or finish == LENGTH:
                ended = follow_grammar(seq)
                # at the length limit a complete text counts, but a grammar failure does not
                if finish is None or (ended is not None and ended.reason == "stop"):
                    finish = ended
            if seq.grammar is not None and finish is None:
                followed.append(seq)
        if finish is not None:
            retire(seq, sequences, cache)
            finished.append((seq, finish))
    for seq in dict.fromkeys(owners[row] for row in drafts):
        _give_back_blocks(seq, cache)
    return finished + _fill_masks(followed, sequences, cache)


def _named_of(
    owners: Listed[Sequence], named: tuple[bytes, bytes] | None
) -> dict[int, tuple[bytes, bytes]]:
    """Return the logprobs of named ids by row: as drawn, and the model's own."""
    if named is None:
        return {}
    ends = list(itertools.accumulate(4 * len(s.request.params.logprob_token_ids) for s in owners))
    spans = enumerate(itertools.pairwise([0, *ends]))
    return {row: (named[0][a:b], named[1][a:b]) for row, (a, b) in spans if b > a}


def _fill_masks(
    seqs: Listed[Sequence], sequences: Sequences, cache: KVCacheManager
) -> list[tuple[Sequence, Finish]]:
    """Compute the masks of the tokens that these sequences draw next.

    Return the sequences that end because their grammar failed.
    """
    left = [  # one mask per sequence, after its last token of this step
        (seq, seq.grammar)
        for seq in dict.fromkeys(seqs)
        if seq.grammar is not None and seq.status is not SequenceStatus.FINISHED
    ]
    if left:
        left[0][1].fill([grammar for _, grammar in left[1:]])
    finished: list[tuple[Sequence, Finish]] = []
    for seq, grammar in left:
        if grammar.problem is not None:
            retire(seq, sequences, cache)
            finished.append((seq, grammar_failure(grammar.problem)))
    return finished


def _rows_that_count(
    owners: Listed[Sequence], drafts: Drafts, cache: KVCacheManager
) -> Iterator[tuple[int, Sequence]]:
    """Yield rows to commit. The caller commits each row before it asks for the next.

    A row after drafts counts if all of these drafts were drawn. The result of such a row is bit for
    bit the result without drafts. The first row that does not count is dropped, and so are the
    sequence's later rows.
    """
    wrong: Sequence | None = None
    for row, seq in enumerate(owners):
        if seq.status is SequenceStatus.FINISHED:
            continue  # ended or aborted, possibly by the previous row
        if drafts and row in drafts:
            if seq is wrong or seq.token_ids[-1] != drafts[row][-1]:
                wrong = seq
                continue
            _accept_row(seq, cache)
        yield row, seq


def _give_back_blocks(seq: Sequence, cache: KVCacheManager) -> None:
    """Free blocks that only drafts needed."""
    wanted = -(-len(seq.token_ids) // cache.block_size)
    if len(seq.block_ids) > wanted:
        cache.deallocate(seq.block_ids[wanted:])
        del seq.block_ids[wanted:]


def _accept_row(seq: Sequence, cache: KVCacheManager) -> None:
    """Count a draft row as computed, now that its draft was drawn.

    The window may move, and a block that the row fills may be published, only now.
    """
    if seq.status is SequenceStatus.RUNNING:  # otherwise its blocks are gone
        seq.num_computed_tokens += 1
        cache.slide(seq.block_ids, seq.num_computed_tokens - 1, seq.num_computed_tokens)
        publish(seq, cache)


def commit_scores(
    scored: Listed[tuple[Sequence, int, int]],
    sampled: SampledTokens,
    sequences: Sequences,
    cache: KVCacheManager,
) -> list[TrainingSample]:
    """Add a step's scores to their sequences, and return the samples that are now scored.

    Each entry of `scored` is a sequence and its rows [start, end).
    """
    done: list[TrainingSample] = []
    scores, rows = iter(sampled.scores), iter(sampled.score_best)
    for seq, start, end in scored:
        values = list(itertools.islice(scores, (end - start) * seq.request.score_width))
        best = (
            [_top(*row, seq.request.num_best) for row in itertools.islice(rows, end - start)]
            if seq.request.num_best
            else ()
        )
        if seq.status is SequenceStatus.FINISHED:
            continue
        seq.add_scores(start, values, best)
        sample = seq.request.scored_sample
        if sample is not None and seq.num_scored == len(seq.request.scored):
            retire(seq, sequences, cache)
            best = tuple(seq.score_best) if seq.request.num_best else sample.prompt_top_logprobs
            done.append(replace(sample, ref_logprobs=tuple(seq.scores), prompt_top_logprobs=best))
    return done


def enter(seq: Sequence, sequences: Sequences, block_size: int) -> None:
    """Insert a new sequence according to its status."""
    seq.prefix.namespace = sequences.namespace_of(seq)
    seq.prefix.extend(seq.token_ids, block_size)
    sequences.insert(seq)


def preempt(seq: Sequence, sequences: Sequences, cache: KVCacheManager) -> None:
    """Take a running sequence's blocks away and return it to the waiting list.

    When it is admitted again, it recomputes its tokens or finds their blocks in the cache.
    """
    num_slid = _num_slid(seq.num_computed_tokens, cache)
    cache.deallocate(seq.release(sequences.namespace_of(seq)), num_slid)
    seq.prefix.extend(seq.token_ids, cache.block_size)
    sequences.move(seq, SequenceStatus.WAITING)


def retire(seq: Sequence, sequences: Sequences, cache: KVCacheManager) -> None:
    """Remove a sequence and free its blocks immediately.

    A step in flight may still read the blocks. Reusing them is safe, because later steps run after
    it on the same in-order stream.
    """
    if seq.request.at_end is not None:
        seq.request.at_end(seq)
    sequences.remove(seq)
    _keep(seq, sequences, cache)
    cache.deallocate(seq.block_ids, _num_slid(seq.num_computed_tokens, cache))
    seq.block_ids = []


def _keep(seq: Sequence, sequences: Sequences, cache: KVCacheManager) -> None:
    """Keep the blocks of a finished sequence, if its request asked for that.

    Blocks that an old version computed, even in part, are not kept.
    """
    params, adapter = seq.request.params, seq.adapter
    newest = adapter is None or sequences.adapters.get(adapter.name) is adapter
    is_current = seq.publishable and seq.weight_set == POLICY and newest
    if params.keep_cache_seconds and is_current:
        start = seq.request.num_prompt_tokens
        cache.keep(seq.prefix, start, params.keep_cache_seconds, params.cache_priority)


def publish(seq: Sequence, cache: KVCacheManager) -> None:
    """Make full blocks matchable once their computation is launched."""
    if seq.publishable:
        full = min(seq.num_computed_tokens // cache.block_size, len(seq.prefix.hashes))
        if full > seq.num_published_blocks:
            cache.publish(
                seq.block_ids, seq.token_ids, seq.prefix, range(seq.num_published_blocks, full)
            )
            seq.num_published_blocks = full


def context_versions(seq: Sequence) -> tuple[ContextVersions, ...]:
    """Return the versions that computed the context of the completion tokens.

    Token i is drawn at row prompt + i - 1.
    """
    entries = list(seq.request.past_contexts)
    ends = [context.token_start for context in seq.contexts[1:]] + [seq.num_completion_tokens]
    for (start, past, version), end in zip(seq.contexts, ends, strict=False):  # may be empty
        if end > start:
            last = VersionSpan(
                version, past[-1].end if past else 0, seq.request.num_prompt_tokens + end - 1
            )
            entries.append(ContextVersions(start, end, (*past, last)))
    return tuple(entries)


def training_samples(
    seq: Sequence, finish: Finish, version: int, numerics: str
) -> list[TrainingSample]:
    """Return the sample of a finished sequence, or all samples of a group without forks."""
    request, params = seq.request, seq.request.params
    if request.scored_sample is not None:  # ended before it was fully scored
        return [request.scored_sample]
    prompt = seq.token_ids[: request.num_prompt_tokens]
    completion = seq.token_ids[request.num_prompt_tokens :]
    text, failed = whole_text(seq)
    finish = failed or finish
    spans = _spans(seq.version_starts, len(completion))
    experts = seq.routed_experts
    return [
        TrainingSample(
            prompt_tokens=tuple(prompt),
            completion_tokens=tuple(completion),
            logprobs=tuple(seq.output_logprobs),
            ref_logprobs=None,
            weight_version=spans[-1].version if spans else version,
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            weight_versions=spans,
            prompt_logprobs=(math.nan, *seq.scores[:: request.score_width])
            if params.prompt_logprobs
            else None,
            raw_logprobs=tuple(seq.output_raw_logprobs) if params.raw_logprobs else None,
            log_kept_mass=tuple(seq.output_log_kept_mass),
            sampling_mask=seq.mask.whole() if params.sampling_mask else None,
            top_logprobs=tuple(seq.output_top) if params.top_logprobs else None,
            text=text,
            numerics=params.numerics(numerics),
            seed=request.seed,
            sample_index=index,
            request_id=seq.request_id,
            group_id=request.group_id,
            cached_tokens=seq.cached_tokens,
            adapter_versions=_spans(seq.adapter_starts, len(completion)),
            kv_versions=context_versions(seq),
            loss_mask=_loss_mask(len(completion), request.appended),
            sampling_params=params,
            prompt_top_logprobs=(_NOTHING, *seq.score_best) if params.prompt_top_logprobs else None,
            routed_experts=None if isinstance(experts, str) else experts,
            routed_experts_unknown=experts if isinstance(experts, str) else None,
            receipt=None,  # the loop adds it
            **named_logprobs(seq),
        )
        for index in range(seq.sample_index, seq.sample_index + seq.num_samples)
    ]


def _spans(starts: Listed[tuple[int, int]], end: int) -> tuple[VersionSpan, ...]:
    """Return the spans of versions that begin at (version, token). The last span stops at `end`."""
    ends = [start for _, start in starts[1:]] + [end]
    return tuple(
        VersionSpan(version, start, stop)
        for (version, start), stop in zip(starts, ends, strict=False)  # may be empty
    )


def _loss_mask(length: int, appended: Listed[range]) -> tuple[bool, ...]:
    """Return a mask that is True for completion tokens that were sampled, not appended."""
    mask = [True] * length
    for tokens in appended:
        mask[tokens.start : tokens.stop] = [False] * len(tokens)
    return tuple(mask)


def _fork(
    seq: Sequence, num_samples: int, start: int, sequences: Sequences, cache: KVCacheManager
) -> list[Sequence]:
    """Create the other samples of a group when a chunk from `start` on completes its prompt.

    The samples share all blocks.
    """
    forks = [
        seq.fork(sequences.new_id(), index, copied_text(seq)) for index in range(1, num_samples)
    ]
    for fork in forks:
        cache.adopt(fork.block_ids, _num_slid(start, cache))
        sequences.insert(fork)
    seq.num_samples = 1
    return forks


def _num_slid(computed: int, cache: KVCacheManager) -> int:
    return cache.layout.num_slid(computed, cache.block_size)


def _append(
    seq: Sequence,
    row: int,
    sampled: SampledTokens,
    version: int,
    named: tuple[bytes, bytes] | None = None,
) -> None:
    starts, params = seq.version_starts, seq.request.params
    if not starts or starts[-1][0] != version:
        starts.append((version, seq.num_completion_tokens))
    if seq.adapter is not None and (
        not seq.adapter_starts or seq.adapter_starts[-1][0] != seq.adapter.version
    ):
        seq.adapter_starts.append((seq.adapter.version, seq.num_completion_tokens))
    seq.append_token(sampled.token_ids[row], sampled.logprobs[row], sampled.log_kept_mass[row])
    if named is not None:
        seq.append_named(*named)
    if params.raw_logprobs:
        seq.output_raw_logprobs.append(sampled.raw_logprobs[row])
    if sampled.top is not None and params.top_logprobs:
        seq.output_top.append(_top(*sampled.top[row], params.top_logprobs))


def _take_mask(seq: Sequence, row: int, sampled: SampledTokens) -> Finish | None:
    """Record the ids that filters kept for the newest token.

    Return `MASK_FULL` if they do not fit.
    """
    assert sampled.masks is not None
    if not seq.request.params.sampling_mask:
        return None
    ids = sampled.masks[row]
    if not seq.mask.has_room(ids):
        return MASK_FULL
    seq.mask.append(ids)
    return None


def _grow_text(seq: Sequence) -> Finish | None:
    """Feed the newest token to the text.

    If that raises, drop the text and return the sequence's finish.
    """
    text = seq.output_text
    if text is None or ends_by_id(seq):  # the text ends before a stop id
        return None
    try:
        seq.stop_string = text.append(seq.token_ids[-1], may_stop(seq))
    except Exception as problem:
        seq.output_text = None
        return failure(seq, "the text", problem)
    return None


def _top(token_ids: Listed[int], logprobs: Listed[float], k: int) -> TopLogprobs:
    best = [(i, p) for i, p in zip(token_ids[:k], logprobs[:k], strict=True) if p > -math.inf]
    return TopLogprobs(tuple(i for i, _ in best), tuple(p for _, p in best))
