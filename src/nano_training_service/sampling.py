"""Requests of `sample` in the engine's terms, and its samples in the client's."""

from collections.abc import Sequence

import numpy as np

from nano_inference.types import SamplingParams, TrainingSample
from nano_training_service.base import Base
from nano_training_service.errors import Refused
from nano_training_service.messages import Sample
from nano_training_service.protobuf import (
    REACHED_LENGTH,
    STOPPED,
    sample_response,
    sampled_sequence,
    top_logprobs,
)

_REASONS = {"stop": STOPPED, "length": REACHED_LENGTH}


def sampling_params(request: Sample, prompt: Sequence[int], base: Base) -> SamplingParams:
    """Raises `Refused`, and `InvalidRequest` for values that the engine does not take."""
    for name, given in (
        ("target_prompt_logprobs", request.target_prompt_logprobs is not None),
        ("prompt_alt_tokens_k", request.prompt_alt_tokens_k != 0),
        ("record_stability_info", bool(request.record_stability_info)),
    ):
        if given:
            raise Refused(f"{name} is not among what this service can do.")
    if not prompt:
        raise Refused("the prompt is empty.")
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 1 <= last < len(prompt)):
        raise Refused(
            f"prompt_logprobs_last_n={last} needs prompt_logprobs, and must be between 1 and "
            f"{len(prompt) - 1}."
        )
    given = request.sampling_params
    room = base.max_model_len - len(prompt)
    if given.max_tokens is None and room < 1:
        raise Refused(
            f"the prompt has {len(prompt)} tokens, and the model takes {base.max_model_len} with "
            "the sampled ones."
        )
    stop = [given.stop] if isinstance(given.stop, str) else given.stop
    stop_ids = [each for each in stop or () if isinstance(each, int)]
    return SamplingParams(
        temperature=given.temperature,
        max_tokens=room if given.max_tokens is None else given.max_tokens,
        top_k=max(given.top_k, 0),
        top_p=given.top_p,
        seed=given.seed,
        stop=tuple(each for each in stop or () if isinstance(each, str)),
        stop_token_ids=frozenset(stop_ids),
        ignore_eos=stop == [],
        top_logprobs=request.topk_sample_logprobs,
        prompt_logprobs=bool(request.prompt_logprobs) or request.topk_prompt_logprobs > 0,
        prompt_top_logprobs=request.topk_prompt_logprobs,
    )


def sampled(request: Sample, samples: Sequence[TrainingSample]) -> bytes:
    """The result. Raises `Refused` where a sample was aborted."""
    for each in samples:
        if each.finish_reason not in _REASONS:
            raise Refused(f"the engine ended a sample: {each.stop_reason}.", 500, "server")
    width = request.topk_sample_logprobs
    sequences = [
        sampled_sequence(
            _REASONS[each.finish_reason],
            each.completion_tokens,
            each.logprobs,
            top_logprobs(each.top_logprobs or (), width) if width else None,
        )
        for each in samples
    ]
    first, last = samples[0], request.prompt_logprobs_last_n
    hidden = 0 if last is None else len(first.prompt_tokens) - last
    prompt = None
    if request.prompt_logprobs and first.prompt_logprobs is not None:
        prompt = np.array(first.prompt_logprobs, np.float32)
        prompt[:hidden] = np.nan
    tops = None
    if request.topk_prompt_logprobs and first.prompt_top_logprobs is not None:
        rows = [*([((), ())] * hidden), *first.prompt_top_logprobs[hidden:]]
        tops = top_logprobs(rows, request.topk_prompt_logprobs)
    return sample_response(sequences, prompt, tops, first.cached_tokens)
