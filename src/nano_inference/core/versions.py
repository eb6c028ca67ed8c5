"""What a new weight version means for live sequences: who recomputes, keeps, or finishes on the old
one.
"""

from nano_inference.core.apply import preempt
from nano_inference.core.sequence import (
    POLICY,
    PREVIOUS,
    Sequence,
    Sequences,
    SequenceStatus,
    ServedAdapter,
)
from nano_inference.core.stopping import Finish
from nano_inference.kv_cache.block_hash import adapter_key
from nano_inference.kv_cache.manager import KVCacheManager
from nano_inference.types import VERSION_GONE, KvPolicy, VersionSpan

_ON_POLICY = (POLICY, PREVIOUS)
STALE = Finish("abort", "it is too stale")
BELATED = Finish("abort", VERSION_GONE)


def begun(sequences: Sequences, *weight_sets: str) -> list[Sequence]:
    """Live sequences of these sets that run, or have sampled and wait to run; scorers count as soon
    as they run.
    """
    running, held = SequenceStatus.RUNNING, SequenceStatus.HELD
    return [
        seq
        for seq in sequences.by_id.values()
        if seq.weight_set in weight_sets
        and (
            seq.status is running
            or (seq.status is not held and seq.num_samples and seq.num_completion_tokens)
        )
    ]


def change_version(
    sequences: Sequences,
    cache: KVCacheManager,
    weight_set: str,
    version: int,
    kv_policy: KvPolicy = "recompute",
) -> None:
    """A weight set has new weights. Nothing may be in flight.

    Running sequences recompute their context under the new weights, or `keep` their keys and
    values: then their blocks mix versions and are not published any more (not so while the prompt
    is scored: scores are of one version). With `finish_old` those that have begun stay with the old
    version, which the set `previous` holds now. Old blocks cannot match for others: the version is
    in their name.
    """
    old, sequences.versions[weight_set] = sequences.versions[weight_set], version
    if kv_policy == "finish_old":
        stay = begun(sequences, weight_set)
        for seq in stay:
            seq.weight_set = PREVIOUS
        if stay:
            sequences.versions[PREVIOUS] = old
    for seq in [s for s in sequences.running if s.weight_set == weight_set]:
        # a score of an old version could outlive its context
        scoring = seq.request.scored and not seq.num_completion_tokens
        if kv_policy == "keep" and seq.num_samples and not scoring:
            seq.publishable = False
            seq.begin_context(_mixed(seq, old), version)
        else:
            preempt(seq, sequences, cache)
    for seq in [*sequences.waiting, *sequences.held]:
        if seq.weight_set == weight_set:
            seq.release(sequences.namespace_of(seq))
            seq.prefix.extend(seq.token_ids, cache.block_size)
            if not seq.num_samples or not seq.num_completion_tokens:
                seq.forget_scores()  # scores of one sequence are of one version
    if old != version and not (weight_set == POLICY and sequences.versions.get(PREVIOUS) == old):
        cache.drop_version(weight_set, old)


def change_adapter(
    sequences: Sequences, cache: KVCacheManager, adapter: ServedAdapter, kv_policy: KvPolicy
) -> None:
    """An adapter is there, or has a new version. Nothing may be in flight.

    Sequences of the old version recompute their context under the new one, or `keep` their keys and
    values, and then publish no blocks any more; with `finish_old` those that have begun stay with
    the old version. Its name is in the blocks' names, so old ones match for no other.
    """
    old = sequences.adapters.get(adapter.name)
    sequences.adapters[adapter.name] = adapter
    begun_with = set(of_adapter(sequences, adapter.name))
    for seq in [s for s in sequences.by_id.values() if s.adapter is old and old is not None]:
        if kv_policy == "finish_old" and seq in begun_with:
            continue
        seq.adapter = adapter
        if seq.status is SequenceStatus.RUNNING:
            scoring = seq.request.scored and not seq.num_completion_tokens
            if kv_policy == "keep" and seq.num_samples and not scoring:
                seq.publishable = False
                continue
            preempt(seq, sequences, cache)
        else:
            seq.release(sequences.namespace_of(seq))
            seq.prefix.extend(seq.token_ids, cache.block_size)
        if not seq.num_samples or not seq.num_completion_tokens:
            seq.forget_scores()  # scores of one sequence are of one version
    if old is not None and old is not adapter:
        cache.let_go_adapter(adapter_key(old.name, old.version))


def settle_adapter(seq: Sequence, sequences: Sequences) -> Finish | None:
    """Find what computes a newcomer's adapter now: its newest version, or the weights alone where
    they hold it. Where neither can: returns how it ends.

    Asked here and not where the request was checked: the adapter may have been merged, or unmerged,
    in between.
    """
    own, merged = seq.adapter, sequences.merged
    if own is None:
        return None
    if sequences.merging is not None:
        return Finish("abort", being_merged(sequences.merging))
    if merged is None:
        if not seq.num_completion_tokens:
            seq.adapter = sequences.adapters.get(own.name, own)
        return None
    if own.name != merged:
        return Finish("abort", f"adapter {merged!r} is merged into the weights")
    seq.adapter, seq.is_of_merged = None, True
    return None


def being_merged(name: str) -> str:
    """Why no request for an adapter is taken."""
    return f"adapter {name!r} is being merged into the weights, or unmerged"


def of_adapter(sequences: Sequences, name: str) -> list[Sequence]:
    """Live sequences that have begun with an adapter."""
    return [
        seq
        for seq in begun(sequences, *_ON_POLICY)
        if seq.adapter is not None and seq.adapter.name == name
    ]


def free_previous(sequences: Sequences, cache: KVCacheManager) -> bool:
    """Forget the old version once no sequence finishes on it; returns whether that happened now."""
    if PREVIOUS not in sequences.versions or sequences.of_weight_set(PREVIOUS):
        return False
    cache.drop_version(POLICY, sequences.versions.pop(PREVIOUS))
    return True


def outdated(sequences: Sequences) -> list[tuple[Sequence, Finish]]:
    """Sequences that a version is too new for, and how they end."""
    ends: list[tuple[Sequence, Finish]] = []
    for seq in sequences.by_id.values():
        if seq.weight_set in _ON_POLICY:
            if _is_stale(seq, sequences.versions[POLICY]):
                ends.append((seq, STALE))
            elif _is_belated(seq, sequences.versions[seq.weight_set]):
                ends.append((seq, BELATED))
    return ends


def is_held(seq: Sequence, sequences: Sequences) -> bool:
    """Whether it waits for a version that does not serve yet, or for its grammar."""
    if seq.grammar is not None and not seq.grammar.is_ready:
        return True
    return (
        max(seq.request.min_version or 0, seq.behind or 0, seq.request.exact_version or 0)
        > sequences.versions[POLICY]
    )


def release_held(sequences: Sequences) -> None:
    """Let those wait in the queue whose version serves and whose grammar is ready."""
    for seq in [seq for seq in sequences.held if not is_held(seq, sequences)]:
        sequences.move(seq, SequenceStatus.WAITING)


def _mixed(seq: Sequence, old: int) -> tuple[VersionSpan, ...]:
    """Return the spans of a sequence's context by the version that computed them. `old` computed
    its tail, and is about to be replaced.
    """
    past = seq.contexts[-1].past if seq.contexts else ()
    start = past[-1].end if past else 0
    return (
        (*past, VersionSpan(old, start, seq.num_computed_tokens))
        if seq.num_computed_tokens > start
        else past
    )


def _is_stale(seq: Sequence, newest: int) -> bool:
    """Whether its oldest version is too much older than the policy's."""
    if seq.request.max_staleness is None:
        return False
    oldest = seq.oldest_version
    return oldest is not None and newest - oldest > seq.request.max_staleness


def _is_belated(seq: Sequence, version: int) -> bool:
    """Whether its first token would be of a newer version than it is for."""
    return (
        seq.request.exact_version is not None
        and not seq.num_completion_tokens
        and version > seq.request.exact_version
    )
