"""What verl says and what the engine says: sampling parameters, samples, steps of the trainer and
versions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from nano_inference.errors import InvalidRequest
from nano_inference.fields import is_whole
from nano_inference.types import FinishReason, SamplingParams, TrainingSample

# verl tells "go on with this one" (aborted) from everything else.
STOP_REASONS: Mapping[FinishReason, str] = {
    "stop": "completed",
    "length": "completed",
    "abort": "aborted",
}

# What a `TokenOutput` has no place for, or verl says by another name, is not among them.
_OWN = {field.name for field in fields(SamplingParams)} - {
    "raw_logprobs",
    "prompt_logprobs",
    "prompt_top_logprobs",
    "top_logprobs",
    "sampling_mask",
    "routed_experts",
}


@dataclass(frozen=True)
class RequestDefaults:
    """What a rollout's configuration says about requests that do not.

    Attributes:
        prompt_length, response_length: tokens of a prompt, and of a response, that the trainer's
            tensors hold.
        max_model_len: of the engine.
        repetition_penalty, ignore_eos: as in `SamplingParams`.
        seed: of every request that brings none (verl's `full_determinism`); None: fresh ones.
        raw_logprobs: `log_probs` are the model's own, not those of the distribution that was
            sampled from.
        routed_experts: the experts of each token are handed out, for verl's routing replay.
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
    """A request as the engine takes it, and what of its sample verl wants to see."""

    params: SamplingParams
    log_probs: bool
    # so many of the best beside each token of the prompt; 0: the token's own; None: none
    prompt_logprobs: int | None


def wanted(
    told: Mapping[str, Any], prompt_len: int, defaults: RequestDefaults, *, priority: int = 0
) -> Wanted:
    """Verl's `sampling_params` as the engine's.

    `max_tokens`, or `max_new_tokens`, is lowered to what the context leaves. Without one it is
    verl's: a response's length, and no more than prompt and response together leave. Raises
    `InvalidRequest`, also for an unknown key.
    """
    rest = dict(told)
    max_tokens = _max_tokens(rest, prompt_len, defaults)
    log_probs = _flag("logprobs", rest.pop("logprobs", False))
    best = rest.pop("prompt_logprobs", None)
    if best is not None and not is_whole(best, 0):
        raise InvalidRequest(f"prompt_logprobs={best!r} must be a whole number, or None.")
    if rest.pop("n", 1) != 1:
        raise InvalidRequest(f"n={told['n']!r}: verl asks for each sample by itself; leave it out.")
    if unknown := sorted(rest.keys() - _OWN):
        raise InvalidRequest(
            f"{unknown[0]!r} is not a sampling parameter; there are {', '.join(sorted(_OWN))}."
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
    """Takes both names out of `rest`; the first one counts, as in verl's servers."""
    room = defaults.max_model_len - prompt_len
    if room < 1:
        raise InvalidRequest(
            f"the prompt of {prompt_len} tokens leaves no room in "
            f"max_model_len={defaults.max_model_len}; at most "
            f"{defaults.max_model_len - 1} fit."
        )
    told = [rest.pop(name) for name in ("max_tokens", "max_new_tokens") if name in rest]
    for value in told:
        if not is_whole(value):
            raise InvalidRequest(f"max_tokens={value!r} must be a whole number.")
    left = defaults.prompt_length + defaults.response_length - prompt_len
    return max(1, min(room, told[0] if told else min(defaults.response_length, left)))


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be True or False, not {value!r}.")
    return value


class GlobalSteps:
    """Which step of the trainer each of the engine's versions is. A version without one goes by the
    one before it.
    """

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}

    def version_for(self, step: int | None, newest: int) -> int | None:
        """The number that an update shall have: the step itself, or None (counted up) where that
        would not rise.
        """
        return step if step is not None and step > newest else None

    def name(self, version: int, step: int | None) -> None:
        """From now on `version` is known as `step`; None: as nothing."""
        if step is None:
            self._steps.pop(version, None)
        else:
            self._steps[version] = step

    def of(self, version: int) -> int | None:
        """The step of a version; None before the trainer has named one."""
        known = [each for each in self._steps if each <= version]
        return self._steps[max(known)] if known else None


def token_output(sample: TrainingSample, asked: Wanted, steps: GlobalSteps) -> dict[str, Any]:
    """The fields of verl's `TokenOutput`: what was sampled, partly if it was aborted, and by which
    steps' weights.
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
    """An array int32 [tokens - 1, layers, K] that verl may write to, where they are known."""
    if sample.routed_experts is None:
        return {}
    return {"routed_experts": np.array(sample.routed_experts, dtype=np.int32)}


def refused_output(step: int | None) -> dict[str, Any]:
    """The fields of the `TokenOutput` of a request that was turned away: verl sends it
    elsewhere.
    """
    return {
        "token_ids": [],
        "log_probs": None,
        "stop_reason": "aborted",
        "extra_fields": {"global_steps": step},
    }


def _prompt_logprobs(sample: TrainingSample, best: int) -> dict[str, Any]:
    """Row i is of the token after i, as verl's distillation wants it; the last row is padding."""
    ids: list[list[int]] = [[token_id] for token_id in sample.prompt_tokens[1:]]
    logprobs: list[list[float]] = [[logprob] for logprob in (sample.prompt_logprobs or ())[1:]]
    if best:
        ids = [list(each.token_ids) for each in (sample.prompt_top_logprobs or ())[1:]]
        logprobs = [list(each.logprobs) for each in (sample.prompt_top_logprobs or ())[1:]]
    width = max(best, 1)
    return {"prompt_ids": [*ids, [0] * width], "prompt_logprobs": [*logprobs, [0.0] * width]}
