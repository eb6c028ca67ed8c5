"""Implementation of `resume_from`: continue a sample of this engine, or of another one with the
same numerics.
"""

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Listed
from dataclasses import replace

from nano_inference.core.named_ids import fill_named, prompt_scoring, resumed_scores
from nano_inference.core.sequence import (
    REFERENCE,
    CheckedRequest,
    GrowingMask,
    SampleGroup,
    Sequence,
)
from nano_inference.engine.intake import Intake
from nano_inference.engine.requests import checked_ids
from nano_inference.errors import InvalidRequest
from nano_inference.fields.options import is_whole
from nano_inference.text.detokenizer import OutputText
from nano_inference.types import SamplingParams, TopLogprobs, TrainingSample


def resumed(
    intake: Intake,
    sample: TrainingSample,
    append: Iterable[int] = (),
    max_new_tokens: int | None = None,
    *,
    stream: bool = False,
    request_id: int | None = None,
    group: SampleGroup | None = None,
    max_staleness: int | None = None,
) -> Sequence:
    """Return a sequence that continues a sample. Raises `InvalidRequest` or `RequestTooLarge`.

    Args:
        intake: Intake of the engine.
        sample: Sample, as in `InferenceEngine.resume_from`.
        append: Tokens to append, as in `InferenceEngine.resume_from`.
        max_new_tokens: Number of new tokens, as in `InferenceEngine.resume_from`.
        stream: Streaming, as in `Intake.sequence`.
        request_id: Id of the new request, as in `Intake.sequence`.
        group: Shared state if only some samples of the group are wanted.
        max_staleness: Limit, as in `InferenceEngine.add_request`.
    """
    checks = intake.checks
    appended = checked_ids(append, checks.spec.vocab_size)
    params = _params_to_resume(intake.numerics, sample, len(appended), max_new_tokens)
    prompt_len, drawn = len(sample.prompt_tokens), len(sample.completion_tokens)
    most_mask_ids = checks.require(prompt_len, params, 1)
    new = (range(drawn, drawn + len(appended)),) if appended else ()
    request = CheckedRequest(
        request_id=intake.new_request_id() if request_id is None else request_id,
        num_prompt_tokens=prompt_len,
        params=params,
        stop_ids=checks.stop_ids(params),
        seed=sample.seed,
        max_staleness=max_staleness,
        group=group,
        **prompt_scoring(params, sample.prompt_tokens),
        streaming=stream,
        past_contexts=sample.kv_versions,
        appended=_appended_before(sample) + new,
        at_end=intake.take_routes if params.routed_experts else None,
        first_request_id=sample.group_id if request_id is None else None,
    )
    starts = [(span.version, span.start) for span in sample.weight_versions]
    seq = Sequence(
        intake.live.new_id(),
        request,
        [*sample.prompt_tokens, *sample.completion_tokens, *appended],
        sample_index=sample.sample_index,
        cached_tokens=sample.cached_tokens,
        version_starts=starts or ([(sample.weight_version, 0)] if appended else []),
        # The scores of a partly computed prompt may come from another version.
        scores=resumed_scores(sample, params) if drawn else [],
        score_best=list((sample.prompt_top_logprobs or ())[1:]) if drawn else [],
        mask=GrowingMask(most_mask_ids),
        adapter=intake.adapter_of(params.adapter),
        adapter_starts=[(span.version, span.start) for span in sample.adapter_versions],
    )
    _fill(seq, sample, len(appended))
    seq.rules = intake.rules_of(params, prompt_len)
    intake.processors.require(params.logits_processors)
    # appended tokens are not part of the grammar's text, which restarts after them
    begins = request.appended[-1].stop if request.appended else 0
    seq.grammar = intake.grammar_of(params, seq.token_ids[prompt_len + begins :])
    if sample.text is not None or params.stop:
        text = OutputText(checks.need_tokenizer("the text of a sample"), params.stop)
        for token_id in seq.token_ids[prompt_len:]:
            text.append(token_id, may_stop=False)
        text.take()  # a streaming caller already has this text
        seq.output_text = text
    return seq


def resumed_here(
    intake: Intake,
    samples: Listed[TrainingSample],
    *,
    stream: bool,
    request_id: int,
    num_wanted: int | None = None,
    max_staleness: int | None = None,
) -> list[Sequence]:
    """Return sequences of one request that resume its partial samples, as
    `InferenceEngine.resume_many` documents.
    """
    group = SampleGroup(num_wanted) if num_wanted is not None else None
    sequences = [
        resumed(
            intake,
            sample,
            stream=stream,
            request_id=request_id,
            group=group,
            max_staleness=max_staleness,
        )
        for sample in samples
    ]
    if any(seq.num_completion_tokens and _may_have_ended(intake, seq) for seq in sequences):
        raise InvalidRequest("the sample may already have ended; sample it again.")
    return sequences


def _may_have_ended(intake: Intake, seq: Sequence) -> bool:
    """Return True if the last token of a sequence may have been its last one.

    A sample that has ended still looks unfinished while it waits for its reference logprobs, and
    between the streaming of its last token and of its end. A grammar ends a sample only by `eos`.
    """
    request, last = seq.request, seq.token_ids[-1]
    if seq.grammar is not None and last in intake.checks.spec.eos_token_ids:
        return True
    if last in request.stop_ids and seq.num_completion_tokens > request.params.min_tokens:
        return True
    if not request.params.stop:
        return False
    if REFERENCE in intake.live.versions:
        return True
    text = OutputText(intake.checks.tokenizer, request.params.stop)
    completion = enumerate(seq.token_ids[request.num_prompt_tokens :], start=1)
    return any(
        text.append(token_id, count > request.params.min_tokens) for count, token_id in completion
    )


def _params_to_resume(
    numerics: str, sample: TrainingSample, num_appended: int, max_new_tokens: int | None
) -> SamplingParams:
    params = sample.sampling_params
    if params is None:
        raise InvalidRequest("the sample has no sampling_params, which resuming needs.")
    numerics = params.numerics(numerics)
    if sample.numerics != numerics:
        raise InvalidRequest(
            f"the sample's numerics is {sample.numerics!r}, this engine's is {numerics!r}, so the "
            "bits would differ; add its tokens as a prompt instead."
        )
    known = len(sample.completion_tokens) + num_appended
    if sample.finish_reason == "stop" and not num_appended:
        raise InvalidRequest(
            "the sample ended by itself (finish_reason 'stop'); append tokens to resume it."
        )
    if max_new_tokens is not None:
        if not is_whole(max_new_tokens, 1):
            raise InvalidRequest(f"max_new_tokens={max_new_tokens!r} must be a positive integer.")
        if known + max_new_tokens < params.min_tokens:
            raise InvalidRequest(
                f"max_new_tokens={max_new_tokens} would end the sample before its "
                f"min_tokens={params.min_tokens}; set at least {params.min_tokens - known}."
            )
        return replace(params, max_tokens=known + max_new_tokens)
    if known >= params.max_tokens:
        raise InvalidRequest(
            f"the sample has {known} of max_tokens={params.max_tokens} completion tokens; set "
            "max_new_tokens."
        )
    return params


def _appended_before(sample: TrainingSample) -> tuple[range, ...]:
    """Return the runs of a sample's tokens that were appended instead of sampled."""
    runs = itertools.groupby(range(len(sample.loss_mask)), key=sample.loss_mask.__getitem__)
    groups = [(sampled, list(places)) for sampled, places in runs]
    return tuple(range(places[0], places[-1] + 1) for sampled, places in groups if not sampled)


def _fill(seq: Sequence, sample: TrainingSample, num_appended: int) -> None:
    """Copy a sample's per-token values to a sequence. Appended tokens get neutral values."""
    zeros = [0.0] * num_appended
    seq.output_logprobs = [*sample.logprobs, *zeros]
    seq.output_log_kept_mass = [*(sample.log_kept_mass or ()), *zeros]
    if sample.raw_logprobs is not None:
        seq.output_raw_logprobs = [*sample.raw_logprobs, *zeros]
    if sample.sampling_mask is not None:
        seq.mask = GrowingMask(seq.mask.most, sample.sampling_mask.rows() + [()] * num_appended)
    if sample.top_logprobs is not None:
        seq.output_top = [*sample.top_logprobs, *[TopLogprobs((), ())] * num_appended]
    fill_named(seq, sample, num_appended)
