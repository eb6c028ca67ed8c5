"""Convert requests of `sample` for the engine, and the engine's samples for the client."""

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
    """Return the engine's parameters. Raises `Refused`, or `InvalidRequest` from the engine."""
    for name, is_set in (
        ("target_prompt_logprobs", request.target_prompt_logprobs is not None),
        ("prompt_alt_tokens_k", request.prompt_alt_tokens_k != 0),
        ("record_stability_info", bool(request.record_stability_info)),
    ):
        if is_set:
            raise Refused(f"{name} is not supported by this service; leave it out.")
    if not prompt:
        raise Refused("the prompt is empty.")
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 1 <= last < len(prompt)):
        raise Refused(
            f"prompt_logprobs_last_n={last} requires prompt_logprobs and must be between 1 and "
            f"{len(prompt) - 1}."
        )
    wanted = request.sampling_params
    room = base.max_model_len - len(prompt)
    if wanted.max_tokens is None and room < 1:
        raise Refused(
            f"the prompt has {len(prompt)} tokens, which leaves no room for a sampled token within "
            f"max_model_len={base.max_model_len}; shorten it."
        )
    stop = [wanted.stop] if isinstance(wanted.stop, str) else wanted.stop
    stop_ids = [each for each in stop or () if isinstance(each, int)]
    return SamplingParams(
        temperature=wanted.temperature,
        max_tokens=room if wanted.max_tokens is None else wanted.max_tokens,
        top_k=max(wanted.top_k, 0),
        top_p=wanted.top_p,
        seed=wanted.seed,
        stop=tuple(each for each in stop or () if isinstance(each, str)),
        stop_token_ids=frozenset(stop_ids),
        ignore_eos=stop == [],
        top_logprobs=request.topk_sample_logprobs,
        prompt_logprobs=bool(request.prompt_logprobs) or request.topk_prompt_logprobs > 0,
        prompt_top_logprobs=request.topk_prompt_logprobs,
    )


def sampled(request: Sample, samples: Sequence[TrainingSample]) -> bytes:
    """Encode the result. Raises `Refused` if a sample was aborted."""
    for sample in samples:
        if sample.finish_reason not in _REASONS:
            raise Refused(f"the engine aborted a sample: {sample.stop_reason}.", 500, "server")
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
