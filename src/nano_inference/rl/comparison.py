"""Bitwise differences between a sample and its replay."""

import itertools
import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from nano_inference.types import LogprobMatrix, SamplingMask, TrainingSample

OF_PROMPT = ("prompt_logprobs", "prompt_top_logprobs", "prompt_token_id_logprobs")
_PER_TOKEN = (
    "completion_tokens",
    "logprobs",
    "raw_logprobs",
    "log_kept_mass",
    "ref_logprobs",
    "top_logprobs",
    "token_id_logprobs",
    "raw_token_id_logprobs",
)
_SHORT = reprlib.Repr()
_SHORT.maxother = 200
_OF_ALL = ("weight_versions", "weight_version", "finish_reason", "stop_reason", "text")


class Difference(NamedTuple):
    """The first difference in one field.

    Attributes:
        field: Field of `TrainingSample`.
        token: Index in the completion, or in the prompt for fields of the prompt. None: the field
            describes the whole sample.
        recorded: The sample's value there. None: the sample ends earlier or lacks the field.
        replayed: The replay's value.
    """

    field: str
    token: int | None
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        where = "the sample"
        if self.token is not None:
            where = f"{'prompt' if self.field in OF_PROMPT else 'completion'} token {self.token}"
        return (
            f"{where}: {self.field} is {_SHORT.repr(self.recorded)}, replayed "
            f"{_SHORT.repr(self.replayed)}"
        )


def differences(sample: TrainingSample, replayed: TrainingSample) -> tuple[Difference, ...]:
    """Return the first difference in every differing field, ordered by token.

    Floats are compared by their bits, and nan equals nan. Only results of the computation are
    compared: tokens and their draws, prompt and reference logprobs, weight versions, and the finish
    reason.
    """
    differing = [
        _of_tokens(name, getattr(sample, name), getattr(replayed, name)) for name in OF_PROMPT
    ]
    columns = [
        _of_tokens(name, getattr(sample, name), getattr(replayed, name)) for name in _PER_TOKEN
    ]
    columns.append(
        _of_tokens("sampling_mask", _rows(sample.sampling_mask), _rows(replayed.sampling_mask))
    )
    differing += sorted(
        (each for each in columns if each is not None), key=lambda each: each.token or 0
    )
    for name in _OF_ALL:
        mine, other = getattr(sample, name), getattr(replayed, name)
        if mine != other:
            differing.append(Difference(name, None, mine, other))
    return tuple(each for each in differing if each is not None)


def _of_tokens(
    name: str, recorded: Sequence[Any] | None, replayed: Sequence[Any] | None
) -> Difference | None:
    if recorded is None or replayed is None:
        return None if recorded is replayed else Difference(name, 0, recorded, replayed)
    pairs = itertools.zip_longest(_listed(recorded), _listed(replayed))
    for token, (mine, other) in enumerate(pairs):
        if _bits(mine) != _bits(other):
            return Difference(name, token, mine, other)
    return None


def _bits(value: Any) -> Any:
    if isinstance(value, float):
        return value.hex()
    return tuple(map(_bits, value)) if isinstance(value, tuple) else value


def _listed(values: Sequence[Any] | LogprobMatrix) -> Sequence[Any]:
    return [*map(tuple, values.tolist())] if isinstance(values, LogprobMatrix) else values


def _rows(mask: SamplingMask | None) -> list[tuple[int, ...]] | None:
    return None if mask is None else mask.rows()
