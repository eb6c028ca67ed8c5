"""Conversion between verl and the engine: sampling parameters, samples, and the trainer's steps as
weight versions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from nano_inference.errors import InvalidRequest
from nano_inference.fields import is_whole
from nano_inference.types import FinishReason, SamplingParams, TrainingSample

# verl resumes samples that are "aborted" and treats all others as complete.
STOP_REASONS: Mapping[FinishReason, str] = {
    "stop": "completed",
    "length": "completed",
    "abort": "aborted",
}

# Parameters without a field in `TokenOutput`, or with another name in verl, are excluded.
_OWN = {field.name for field in fields(SamplingParams)} - {
    "raw_logprobs",
    "prompt_logprobs",
    "prompt_top_logprobs",
    "top_logprobs",
    "sampling_mask",
    "routed_experts",
    "logits_processors",
}


@dataclass(frozen=True)
class RequestDefaults:
    """Defaults of a rollout for requests.

    Attributes:
        prompt_length: Tokens of a prompt in the trainer's tensors.
        response_length: Tokens of a response in the trainer's tensors.
        max_model_len: Maximum sequence length of the engine.
        repetition_penalty, ignore_eos: Fields of `SamplingParams`.
        seed: Seed of requests without one (verl's `full_determinism`). None: random seeds.
        raw_logprobs: True if `log_probs` come from the model's own distribution instead of the
            sampling distribution.
        routed_experts: True to return each token's experts for verl's routing replay.
    """

    prompt_length: int
    response_length: int
    max_model_len: int
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    seed: int | None = None
    raw_logprobs: bool = False
    routed_experts: bool = False


@dataclass(frozen=True)
class Wanted:
    """Sampling parameters for the engine, and the logprobs that verl requested."""

    params: SamplingParams
    log_probs: bool
    # number of top logprobs per prompt token; 0: only the token's own; None: none
    prompt_logprobs: int | None


def wanted(
    sampling_params: Mapping[str, Any],
    prompt_len: int,
    defaults: RequestDefaults,
    *,
    priority: int = 0,
) -> Wanted:
    """Convert verl's `sampling_params` for the engine.

    `max_tokens`, or `max_new_tokens`, is limited to the remaining context. The default is
    `response_length`, limited to `prompt_length + response_length - prompt_len`. Raises
    `InvalidRequest`, also for unknown keys.
    """
    rest = dict(sampling_params)
    max_tokens = _max_tokens(rest, prompt_len, defaults)
    log_probs = _flag("logprobs", rest.pop("logprobs", False))
    best = rest.pop("prompt_logprobs", None)
    if best is not None and not is_whole(best, 0):
        raise InvalidRequest(f"prompt_logprobs={best!r} must be a whole number, or None.")
    if rest.pop("n", 1) != 1:
        raise InvalidRequest(
            f"n={sampling_params['n']!r} is not supported; send one request per sample."
        )
    if unknown := sorted(rest.keys() - _OWN):
        raise InvalidRequest(
            f"{unknown[0]!r} is not a sampling parameter; use {', '.join(sorted(_OWN))}."
        )
    if rest.get("top_k") == -1:
        rest["top_k"] = 0
    rest.setdefault("repetition_penalty", defaults.repetition_penalty)
    rest.setdefault("ignore_eos", defaults.ignore_eos)
    rest.setdefault("priority", priority)
    if rest.get("seed") is None:
        rest["seed"] = defaults.seed
    params = SamplingParams(
        **rest,
        max_tokens=max_tokens,
        raw_logprobs=log_probs and defaults.raw_logprobs,
        routed_experts=defaults.routed_experts,
        prompt_logprobs=best is not None,
        prompt_top_logprobs=best or 0,
    )
    return Wanted(params, log_probs, best)


def _max_tokens(rest: dict[str, Any], prompt_len: int, defaults: RequestDefaults) -> int:
    """Pop both names from `rest` and return the limit. `max_tokens` wins, as in verl's servers."""
    room = defaults.max_model_len - prompt_len
    if room < 1:
        raise InvalidRequest(
            f"the prompt of {prompt_len} tokens leaves no room within "
            f"max_model_len={defaults.max_model_len}; send at most "
            f"{defaults.max_model_len - 1}."
        )
    limits = [rest.pop(name) for name in ("max_tokens", "max_new_tokens") if name in rest]
    for value in limits:
        if not is_whole(value):
            raise InvalidRequest(f"max_tokens={value!r} must be a whole number.")
    left = defaults.prompt_length + defaults.response_length - prompt_len
    return max(1, min(room, limits[0] if limits else min(defaults.response_length, left)))


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be True or False, not {value!r}.")
    return value


class GlobalSteps:
    """The trainer's step of each weight version. A version without a step has that of the version
    before it.
    """

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}

    def version_for(self, step: int | None, newest: int) -> int | None:
        """Return the version for an update: the step, or None (the engine counts up) if the step is
        not larger than `newest`.
        """
        return step if step is not None and step > newest else None

    def name(self, version: int, step: int | None) -> None:
        """Set the step of a version. None removes it."""
        if step is None:
            self._steps.pop(version, None)
        else:
            self._steps[version] = step

    def of(self, version: int) -> int | None:
        """Return the step of a version. None before the first named one."""
        known = [each for each in self._steps if each <= version]
        return self._steps[max(known)] if known else None


def token_output(sample: TrainingSample, asked: Wanted, steps: GlobalSteps) -> dict[str, Any]:
    """Return the fields of verl's `TokenOutput`: the tokens (partial after an abort) and the steps
    whose weights sampled them.
    """
    log_probs: Sequence[float] | None = None
    if asked.log_probs:
        log_probs = sample.raw_logprobs if asked.params.raw_logprobs else sample.logprobs
    known = [
        step for span in sample.weight_versions if (step := steps.of(span.version)) is not None
    ]
    last = steps.of(sample.weight_version)
    extra: dict[str, Any] = {
        "global_steps": last,
        "min_global_steps": min(known, default=last),
        "max_global_steps": max(known, default=last),
        "num_cached_tokens": sample.cached_tokens,
    }
    if asked.prompt_logprobs is not None and sample.prompt_logprobs is not None:
        extra |= _prompt_logprobs(sample, asked.prompt_logprobs)
    return {
        "token_ids": list(sample.completion_tokens),
        "log_probs": None if log_probs is None else list(log_probs),
        "stop_reason": STOP_REASONS[sample.finish_reason],
        "extra_fields": extra,
    } | _routed_experts(sample)


def _routed_experts(sample: TrainingSample) -> dict[str, Any]:
    """Return the experts, if known, as a writable int32 array [tokens - 1, layers, K]."""
    if sample.routed_experts is None:
        return {}
    return {"routed_experts": np.array(sample.routed_experts, dtype=np.int32)}


def refused_output(step: int | None) -> dict[str, Any]:
    """Return the `TokenOutput` fields of a rejected request. verl resends it to another replica."""
    return {
        "token_ids": [],
        "log_probs": None,
        "stop_reason": "aborted",
        "extra_fields": {"global_steps": step},
    }


def _prompt_logprobs(sample: TrainingSample, best: int) -> dict[str, Any]:
    """Return rows for verl's distillation: row i describes token i + 1, the last row is padding."""
    ids: list[list[int]] = [[token_id] for token_id in sample.prompt_tokens[1:]]
    logprobs: list[list[float]] = [[logprob] for logprob in (sample.prompt_logprobs or ())[1:]]
    if best:
        ids = [list(each.token_ids) for each in (sample.prompt_top_logprobs or ())[1:]]
        logprobs = [list(each.logprobs) for each in (sample.prompt_top_logprobs or ())[1:]]
    width = max(best, 1)
    return {"prompt_ids": [*ids, [0] * width], "prompt_logprobs": [*logprobs, [0.0] * width]}
