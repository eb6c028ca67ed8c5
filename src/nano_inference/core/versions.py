"""Effects of a new weight version on live sequences.

A sequence recomputes its context, keeps it, or finishes on the old version.
"""

from collections.abc import Iterable

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
STALE = Finish("abort", "exceeds max_staleness")
BELATED = Finish("abort", VERSION_GONE)


def begun(sequences: Sequences, *weight_sets: str) -> list[Sequence]:
    """Return live sequences of these sets that run, or have sampled and wait to run again.

    Sequences that only score count once they run.
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
    """Adapt sequences and cache to new weights of a weight set. Nothing may be in flight.

    Running sequences recompute their context under the new weights. With `keep` they retain their
    keys and values instead, so their blocks mix versions and are no longer published. A prompt that
    is being scored is always recomputed, because scores must come from one version. With
    `finish_old`, sequences that have begun stay on the old version, now in the weight set
    `previous`.

    Old blocks cannot match other sequences, because block names include the version.
    """
    old, sequences.versions[weight_set] = sequences.versions[weight_set], version
    if kv_policy == "finish_old":
        stay = begun(sequences, weight_set)
        for seq in stay:
            seq.weight_set = PREVIOUS
        if stay:
            sequences.versions[PREVIOUS] = old
    for seq in _recomputed(sequences.of_weight_set(weight_set), sequences, cache, kv_policy):
        seq.begin_context(_mixed(seq, old), version)
    if old != version and not (weight_set == POLICY and sequences.versions.get(PREVIOUS) == old):
        cache.drop_version(weight_set, old)


def change_adapter(
    sequences: Sequences, cache: KVCacheManager, adapter: ServedAdapter, kv_policy: KvPolicy
) -> None:
    """Serve a new adapter, or a new version of an adapter. Nothing may be in flight.

    Sequences of the old version recompute their context under the new one. With `keep` they keep
    their keys and values, and no longer publish blocks. With `finish_old`, sequences that have
    begun stay on the old version.

    Old blocks cannot match other sequences, because block names include the adapter's version.
    """
    old = sequences.adapters.get(adapter.name)
    sequences.adapters[adapter.name] = adapter
    if old is None:
        return
    begun_with = set(of_adapter(sequences, adapter.name))
    follow = [
        seq
        for seq in sequences.by_id.values()
        if seq.adapter is old and not (kv_policy == "finish_old" and seq in begun_with)
    ]
    for seq in follow:
        seq.adapter = adapter
    _recomputed(follow, sequences, cache, kv_policy)
    if old is not adapter:
        cache.let_go_adapter(adapter_key(old.name, old.version))


def _recomputed(
    seqs: Iterable[Sequence], sequences: Sequences, cache: KVCacheManager, kv_policy: KvPolicy
) -> list[Sequence]:
    """Recompute the context of sequences that follow new weights, or a new adapter.

    With `keep`, running samples keep their keys and values, and no longer publish blocks. Return
    these samples.
    """
    kept: list[Sequence] = []
    for seq in seqs:
        runs = seq.status is SequenceStatus.RUNNING
        # a score from the old version could outlive its context
        scoring = seq.request.scored and not seq.num_completion_tokens
        if runs and kv_policy == "keep" and seq.num_samples and not scoring:
            seq.publishable = False
            kept.append(seq)
            continue
        if runs:
            preempt(seq, sequences, cache)
        else:
            seq.release(sequences.namespace_of(seq))
            seq.prefix.extend(seq.token_ids, cache.block_size)
        if not seq.num_samples or not seq.num_completion_tokens:
            seq.forget_scores()  # a sequence's scores must come from one version
    return kept


def settle_adapter(seq: Sequence, sequences: Sequences) -> Finish | None:
    """Resolve a new sequence's adapter: its newest version, or the weights if it is merged.

    Return the sequence's finish if neither can compute it.

    This runs when the sequence enters, not when its request is checked, because the adapter may be
    merged or unmerged in between.
    """
    adapter, merged = seq.adapter, sequences.merged
    if adapter is None:
        return None
    if sequences.merging is not None:
        return Finish("abort", being_merged(sequences.merging))
    if merged is None:
        if not seq.num_completion_tokens:
            seq.adapter = sequences.adapters.get(adapter.name, adapter)
        return None
    if adapter.name != merged:
        return Finish("abort", f"adapter {merged!r} is merged into the weights")
    seq.adapter, seq.is_of_merged = None, True
    return None


def being_merged(name: str) -> str:
    """Return the reason why requests for adapters are rejected during a merge."""
    return f"adapter {name!r} is being merged into the weights, or unmerged"


def of_adapter(sequences: Sequences, name: str) -> list[Sequence]:
    """Return live sequences that have begun with an adapter."""
    return [
        seq
        for seq in begun(sequences, *_ON_POLICY)
        if seq.adapter is not None and seq.adapter.name == name
    ]


def free_previous(sequences: Sequences, cache: KVCacheManager) -> bool:
    """Free the previous version once no sequence needs it. Return True if that happened now."""
    if PREVIOUS not in sequences.versions or sequences.of_weight_set(PREVIOUS):
        return False
    cache.drop_version(POLICY, sequences.versions.pop(PREVIOUS))
    return True


def outdated(sequences: Sequences) -> list[tuple[Sequence, Finish]]:
    """Return sequences that a new version makes unusable, each with its finish."""
    ends: list[tuple[Sequence, Finish]] = []
    for seq in sequences.by_id.values():
        if seq.weight_set in _ON_POLICY:
            if _is_stale(seq, sequences.versions[POLICY]):
                ends.append((seq, STALE))
            elif _is_belated(seq, sequences.versions[seq.weight_set]):
                ends.append((seq, BELATED))
    return ends


def is_held(seq: Sequence, sequences: Sequences) -> bool:
    """Return True if the sequence waits for a version that is not live yet, or for its grammar."""
    if seq.grammar is not None and not seq.grammar.is_ready:
        return True
    return (
        max(seq.request.min_version or 0, seq.behind or 0, seq.request.exact_version or 0)
        > sequences.versions[POLICY]
    )


def release_held(sequences: Sequences) -> None:
    """Queue the held sequences whose version is live and whose grammar is ready."""
    for seq in [seq for seq in sequences.held if not is_held(seq, sequences)]:
        sequences.move(seq, SequenceStatus.WAITING)


def _mixed(seq: Sequence, old: int) -> tuple[VersionSpan, ...]:
    """Return the spans of a sequence's context by the version that computed them.

    `old`, which is about to be replaced, computed the tail.
    """
    past = seq.contexts[-1].past if seq.contexts else ()
    start = past[-1].end if past else 0
    return (
        (*past, VersionSpan(old, start, seq.num_computed_tokens))
        if seq.num_computed_tokens > start
        else past
    )


def _is_stale(seq: Sequence, newest: int) -> bool:
    """Return True if a sequence's oldest version lags behind `newest` by more than allowed."""
    if seq.request.max_staleness is None:
        return False
    oldest = seq.oldest_version
    return oldest is not None and newest - oldest > seq.request.max_staleness


def _is_belated(seq: Sequence, version: int) -> bool:
    """Return True if the first token would come from a newer version than `exact_version`."""
    return (
        seq.request.exact_version is not None
        and not seq.num_completion_tokens
        and version > seq.request.exact_version
    )
