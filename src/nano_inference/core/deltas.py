"""`Delta`: the new tokens of a sequence, for callers that stream."""

import itertools

from nano_inference.core.named_ids import of_rows
from nano_inference.core.sequence import Sequence
from nano_inference.types import Delta, LogprobMatrix, TrainingSample, VersionSpan


def next_delta(seq: Sequence, before: int, text: str | None) -> Delta:
    """Return a streaming sequence's tokens from index `before` on, with their metadata."""
    version = seq.version_starts[-1][0] if len(seq.token_ids) > before else 0
    past = seq.contexts[-1].past if version and seq.contexts else ()
    return _delta(
        seq, before - seq.request.num_prompt_tokens, seq.num_completion_tokens, text, version, past
    )


def deltas_since(seq: Sequence, begin: int) -> list[Delta]:
    """Return a sequence's completion tokens from index `begin` on, without text.

    Each change of weight version, adapter version or context starts a new delta.
    """
    starts = {start for _, start in (*seq.version_starts, *seq.adapter_starts)} | {
        context.token_start for context in seq.contexts
    }
    end = seq.num_completion_tokens
    deltas: list[Delta] = []
    for first, stop in itertools.pairwise(
        [begin, *sorted(start for start in starts if begin < start < end), end]
    ):
        if first < stop:
            version = next(
                version for version, start in reversed(seq.version_starts) if start <= first
            )
            past = next(
                (each.past for each in reversed(seq.contexts) if each.token_start <= first), ()
            )
            deltas.append(_delta(seq, first, stop, None, version, past))
    return deltas


def _delta(
    seq: Sequence,
    begin: int,
    end: int,
    text: str | None,
    version: int,
    past: tuple[VersionSpan, ...],
) -> Delta:
    """Return a delta of a sequence's completion tokens [begin, end)."""
    first, params, new = seq.request.num_prompt_tokens, seq.request.params, slice(begin, end)
    return Delta(
        request_id=seq.request_id,
        sample_index=seq.sample_index,
        token_ids=tuple(seq.token_ids[first + begin : first + end]),
        logprobs=tuple(seq.output_logprobs[new]),
        text=text,
        top_logprobs=tuple(seq.output_top[new]) if params.top_logprobs else None,
        raw_logprobs=tuple(seq.output_raw_logprobs[new]) if params.raw_logprobs else None,
        cached_tokens=seq.cached_tokens,
        queued=seq.queued,
        log_kept_mass=tuple(seq.output_log_kept_mass[new]) if params.cuts else None,
        weight_version=version,
        past_versions=past,
        **of_rows(seq, new),
        adapter_version=next(
            (version for version, start in reversed(seq.adapter_starts) if start <= begin < end), 0
        ),
    )


def last_delta(sample: TrainingSample, queued: float) -> Delta:
    """Return the delta that carries a finished sample.

    Earlier deltas carried its tokens and text, if the caller streams.
    """
    return Delta(
        request_id=sample.request_id,
        sample_index=sample.sample_index,
        token_ids=(),
        logprobs=(),
        text=None if sample.text is None else "",
        finished=sample,
        top_logprobs=None if sample.top_logprobs is None else (),
        raw_logprobs=None if sample.raw_logprobs is None else (),
        token_id_logprobs=_no_rows(sample.token_id_logprobs),
        raw_token_id_logprobs=_no_rows(sample.raw_token_id_logprobs),
        cached_tokens=sample.cached_tokens,
        queued=queued,
    )


def _no_rows(matrix: LogprobMatrix | None) -> LogprobMatrix | None:
    return None if matrix is None else matrix.rows(0, 0)
