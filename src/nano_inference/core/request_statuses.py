"""Status of every open request, and the reason why it waits: derived from the next decision."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from time import perf_counter

from nano_inference.core.decision import SchedulerOutput, Wait
from nano_inference.core.lifecycle import Lifecycle
from nano_inference.core.sequence import POLICY, Sequence, Sequences, SequenceStatus
from nano_inference.types import RequestStatus

_RUNNING, _HELD = SequenceStatus.RUNNING, SequenceStatus.HELD


def request_statuses(
    sequences: Sequences, life: Lifecycle, decision: SchedulerOutput
) -> list[RequestStatus]:
    """Return the status of every open request, oldest first. Changes nothing.

    Args:
        sequences: All live sequences.
        life: State of the engine.
        decision: Decision about the next step, made from the same state.
    """
    waits, now = dict(decision.waits), perf_counter()
    planned = set(decision.seq_ids)
    behind = _blocker(sequences.waiting, waits)
    every = sorted(sequences.by_id.values(), key=lambda seq: seq.order[2:])
    statuses: list[RequestStatus] = []
    for request_id, group in groupby(every, key=lambda seq: seq.request_id):
        samples = list(group)
        runs = any(seq.status is _RUNNING for seq in samples)
        first = samples[0]
        reason, blocker = "", None
        if not life.launching:
            reason = _why_stopped(life)
        elif first.status is _HELD:
            reason = _why_held(first, sequences, life)
        elif not runs and planned.isdisjoint(seq.seq_id for seq in samples):
            reason = waits.get(first.seq_id, "")
            if not reason and behind is None:  # the step preempts, so it admits none
                reason = Wait.MEMORY
            elif not reason:
                blocker, reason = behind, "an earlier request goes first"
        statuses.append(
            RequestStatus(
                request_id=request_id,
                name=None,
                state="running" if runs else "held" if first.status is _HELD else "waiting",
                reason=str(reason),
                behind=blocker,
                num_samples=sum(seq.width for seq in samples),
                priority=first.request.params.priority,
                prompt_tokens=first.request.num_prompt_tokens,
                computed_tokens=sum(seq.num_computed_tokens for seq in samples),
                completion_tokens=sum(seq.num_completion_tokens for seq in samples),
                cached_tokens=first.cached_tokens,
                blocks=len({block_id for seq in samples for block_id in seq.block_ids}),
                weight_version=sequences.versions[first.weight_set],
                adapter=first.request.params.adapter,
                queued=first.queued if first.posted is None else now - first.posted,
            )
        )
    return statuses


def _blocker(waiting: Iterable[Sequence], waits: Mapping[int, Wait]) -> int | None:
    """Return the id of the request that no later one may overtake, or None."""
    blockers = (
        seq.request_id
        for seq in waiting
        if waits.get(seq.seq_id, Wait.SAME_PREFIX) is not Wait.SAME_PREFIX
    )
    return next(blockers, None)


def _why_stopped(life: Lifecycle) -> str:
    if life.asleep:
        return "the engine is asleep"
    return "the engine is paused"


def _why_held(seq: Sequence, sequences: Sequences, life: Lifecycle) -> str:
    if seq.grammar is not None and not seq.grammar.is_ready:
        return "its grammar is being compiled"
    live, request = sequences.versions[POLICY], seq.request
    if (wanted := max(request.min_version or 0, request.exact_version or 0)) > live:
        return f"weight version {wanted} is not live yet"
    if (seq.behind or 0) > live:
        return f"the update to weight version {seq.behind} goes first"
    return "a pause waits for the running requests" if life.launching else _why_stopped(life)
