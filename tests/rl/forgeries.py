"""Forgeries of samples with receipts, by a forger who changes the sample only, and by one who also
computes the receipt's chain again.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import numpy as np

from nano_inference import SamplingParams, TrainingSample
from nano_inference.data.receipts import receipt_of


class Material(NamedTuple):
    """Parts of forgeries.

    Attributes:
        true: Honest samples, in groups of one prompt.
        of_others: Honest samples of other weights, one for each of `true`.
    """

    true: list[TrainingSample]
    of_others: list[TrainingSample]


def rechained(sample: TrainingSample) -> TrainingSample:
    """Return a sample with a receipt that fits it, with the hashes of the receipt that it has."""
    receipt = sample.receipt
    assert receipt is not None
    fitting = receipt_of(sample, receipt.weights, receipt.adapters)
    return replace(sample, receipt=fitting)


def params_of(sample: TrainingSample, **changes: Any) -> SamplingParams:
    assert sample.sampling_params is not None
    return replace(sample.sampling_params, **changes)


def bit_off(rng: Random, number: float) -> float:
    """Return a float32 with one bit of its mantissa flipped."""
    bits = np.float32(number).view(np.int32)
    return float((bits ^ np.int32(1 << rng.randrange(23))).view(np.float32))


def _replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _other_weights(rng: Random, material: Material, index: int) -> TrainingSample:
    """Claim that the weights drew what others drew."""
    other, receipt = material.of_others[index], material.true[index].receipt
    assert receipt is not None
    return replace(other, receipt=receipt_of(other, receipt.weights))


def _swapped(rng: Random, material: Material, index: int) -> TrainingSample:
    sample = material.true[index]
    tokens, logprobs = list(sample.completion_tokens), list(sample.logprobs)
    places = range(len(tokens))
    i, j = next(
        (a, b) for a, b in (rng.sample(places, 2) for _ in range(1000)) if tokens[a] != tokens[b]
    )
    tokens[i], tokens[j], logprobs[i], logprobs[j] = tokens[j], tokens[i], logprobs[j], logprobs[i]
    return replace(sample, completion_tokens=tuple(tokens), logprobs=tuple(logprobs))


def _bit(rng: Random, material: Material, index: int) -> TrainingSample:
    sample = material.true[index]
    at = rng.randrange(len(sample.logprobs))
    value = bit_off(rng, sample.logprobs[at])
    return replace(sample, logprobs=_replaced(sample.logprobs, at, value))


def _seed(rng: Random, material: Material, index: int) -> TrainingSample:
    sample = material.true[index]
    seed = rng.choice([each for each in range(2**16) if each != sample.seed])
    asked = params_of(sample).seed
    params = params_of(sample, seed=None if asked is None else seed)
    return replace(sample, seed=seed, sampling_params=params)


# changes that matter to every sample of the tests, which have a temperature and no filters
_PARAMS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 1.25},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.5},
    {"min_p": 0.3},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0},
    {"frequency_penalty": -1.5},
    {"logit_bias": dict.fromkeys(range(40), 3.0)},
    {"allowed_token_ids": frozenset(range(3, 200))},
    {"max_tokens": 99},
)


def _param(rng: Random, material: Material, index: int) -> TrainingSample:
    sample = material.true[index]
    return replace(sample, sampling_params=params_of(sample, **rng.choice(_PARAMS)))


def _prompt(rng: Random, material: Material, index: int) -> TrainingSample:
    sample = material.true[index]
    others = [s.prompt_tokens for s in material.true if s.prompt_tokens != sample.prompt_tokens]
    same = [each for each in others if len(each) == len(sample.prompt_tokens)]
    return replace(sample, prompt_tokens=rng.choice(same))


Forge = Callable[[Random, Material, int], TrainingSample]
# the forgeries of single samples
KINDS: dict[str, Forge] = {
    "weights": _other_weights,
    "tokens": _swapped,
    "logprob": _bit,
    "seed": _seed,
    "parameter": _param,
    "prompt": _prompt,
}


def forged(kind: str, smart: bool, rng: Random, material: Material, index: int) -> TrainingSample:
    """Return one forgery of a kind."""
    if kind == "weights" and not smart:
        return material.of_others[index]  # the receipt says so itself
    forgery = KINDS[kind](rng, material, index)
    return rechained(forgery) if smart else forgery


def truncated(rng: Random, lines: list[TrainingSample]) -> list[TrainingSample]:
    """Return the lines of a file without some of them."""
    dropped = set(rng.sample(range(len(lines)), rng.randint(1, len(lines) - 1)))
    return [line for index, line in enumerate(lines) if index not in dropped]


def reordered(rng: Random, lines: list[TrainingSample]) -> list[TrainingSample]:
    """Return the lines of a file in another order."""
    other = lines[:]
    while other == lines:
        rng.shuffle(other)
    return other
