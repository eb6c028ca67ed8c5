"""Samples that the engine did not draw: answers of a data set, and edited completions."""

from dataclasses import replace
from typing import Any

import torch

from nano_inference import Grammar, InferenceEngine, TrainingSample
from nano_inference.rl import LoraPolicy, PolicyModel


def answered(engine: InferenceEngine, prompt: Any, answer: Any, version: int) -> TrainingSample:
    """Return a prompt with its answer. An answer in text ends with the model's end token."""
    first, last = prompt, answer
    if isinstance(prompt, str):
        first = engine.tokenizer.encode(prompt, add_special_tokens=True)
    elif isinstance(prompt[0], dict):
        first = engine.conversation(prompt).token_ids
    if isinstance(answer, str):
        end = engine.tokenizer.eos_token_id
        last = [*engine.tokenizer.encode(answer), *(() if end is None else (end,))]
    return TrainingSample(tuple(first), tuple(last), (), None, version, "stop")


def rewritten(
    policy: PolicyModel | LoraPolicy,
    sample: TrainingSample,
    tokens: list[int],
    temperature: float,
    grammar: Grammar | None,
) -> TrainingSample:
    """Return a sample with another completion, whose logprobs the policy computes."""
    with torch.no_grad():
        (logprobs,) = policy.logprobs(
            [(*sample.prompt_tokens, *tokens)],
            from_position=len(sample.prompt_tokens),
            temperature=temperature,
            grammar=grammar,
        )
    return replace(
        sample,
        completion_tokens=tuple(tokens),
        logprobs=tuple(logprobs.tolist()),
        text=policy.engine.tokenizer.decode(tokens) if sample.text is not None else None,
        weight_versions=(),
        loss_mask=(),
    )
