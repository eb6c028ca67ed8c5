"""What the samples of one request have in common comes from the engine once: prompt and parameters
are known to who asked, and the prompt's logprobs come with the first sample that ends.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nano_inference.serving.messages import Generate, Resume
from nano_inference.types import Delta, TopLogprobs, TrainingSample

# entries in a message, or one delta: while it is made or read, others have to wait
AT_ONCE = 65_536


class CommonParts:
    """The engine's side of one request: takes out of its samples what the other side has. `()`
    stands for it.
    """

    def __init__(self) -> None:
        self._logprobs: tuple[float, ...] = ()
        self._top: tuple[TopLogprobs, ...] = ()

    def leave_out(self, sample: TrainingSample) -> TrainingSample:
        """The sample as it travels. Only what is the same to the bit counts as told."""
        logprobs, top = sample.prompt_logprobs, sample.prompt_top_logprobs
        if (
            logprobs is not None
            and _are_same(logprobs, self._logprobs)
            and _are_same(top or (), self._top)
        ):
            logprobs, top = (), top and ()
        else:
            self._logprobs, self._top = logprobs or (), top or ()
        common = {"prompt_logprobs": logprobs, "prompt_top_logprobs": top}
        return replace(sample, prompt_tokens=(), sampling_params=None, **common)


class AskedParts:
    """The other side of it: puts them back. All samples then share them.

    Args:
        message: the request.
    """

    def __init__(self, message: Generate | Resume) -> None:
        first = (
            message
            if isinstance(message, Generate)
            else message.samples[0]
            if message.samples
            else None
        )
        self._prompt: Sequence[int] = ()
        if isinstance(first, TrainingSample):
            self._prompt, self._params = first.prompt_tokens, first.sampling_params
        elif first is not None:
            self._prompt, self._params = first.prompt, first.params
        self._logprobs: tuple[float, ...] | None = None
        self._top: tuple[TopLogprobs, ...] | None = None

    def complete(self, delta: Delta) -> Delta:
        """A sample's last delta with all that the sample has. One that lacks nothing stays as it
        is.
        """
        sample = delta.finished
        if sample is None or sample.sampling_params is not None:
            return delta
        if sample.prompt_logprobs:
            self._logprobs, self._top = sample.prompt_logprobs, sample.prompt_top_logprobs
        self._prompt = tuple(self._prompt)
        common = {
            "prompt_logprobs": None if sample.prompt_logprobs is None else self._logprobs,
            "prompt_top_logprobs": None if sample.prompt_top_logprobs is None else self._top,
        }
        whole = replace(sample, prompt_tokens=self._prompt, sampling_params=self._params, **common)
        return replace(delta, finished=whole)


def messages_of(
    deltas: Sequence[Delta], request_ids: Sequence[int]
) -> Iterator[tuple[list[Delta], list[int]]]:
    """Deltas with the ids of their requests, in their order, in portions of which none holds too
    much.
    """
    begin = size = 0
    for place, delta in enumerate(deltas):
        own = _size(delta)
        if size and size + own > AT_ONCE:
            yield list(deltas[begin:place]), list(request_ids[begin:place])
            begin, size = place, 0
        size += own
    yield list(deltas[begin:]), list(request_ids[begin:])


def _size(delta: Delta) -> int:
    """Entries in it, about."""
    sample = delta.finished
    if sample is None:
        return 1 + len(delta.token_ids)
    best = [*(sample.top_logprobs or ())[:1], *(sample.prompt_top_logprobs or ())[1:2]]
    tokens = len(sample.completion_tokens) + len(sample.prompt_logprobs or ())
    masked = 0 if sample.sampling_mask is None else len(sample.sampling_mask.token_ids)
    return 1 + masked + tokens * (1 + sum(len(each.token_ids) for each in best))


def _are_same(these: Sequence[object], those: Sequence[object]) -> bool:
    """Whether they are the same to the bit. Samples of a group share the very objects; others may
    be equal.
    """
    if len(these) != len(those):
        return False
    return all(map(operator.is_, these, those)) or repr(these) == repr(those)
