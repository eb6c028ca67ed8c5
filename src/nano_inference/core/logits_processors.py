"""Logits processors: functions of the caller that change the logits of some requests.

A processor's change becomes part of the draw's own bias and masks, so that all later stages, and
the bits of other samples, are those of any draw.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import Any

import numpy as np

from nano_inference.core.batch import Chunks
from nano_inference.core.failures import NoTokenLeft, SampleFailure
from nano_inference.core.interfaces import Runner
from nano_inference.core.sequence import Sequence
from nano_inference.errors import InvalidRequest
from nano_inference.sampling.sampling_batch import Biases, Masks
from nano_inference.structured.mask_bits import mask_of

# token ids so far, prompt included, and a copy of the model's logits, float32 [V] -> new logits
LogitsProcessor = Callable[[Listed[int], np.ndarray], np.ndarray]


class ProcessorFailed(SampleFailure):
    """A processor raised, or returned a wrong value."""


class LogitsProcessors:
    """Processors of an engine, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, LogitsProcessor] = {}

    def register(self, name: str, processor: LogitsProcessor) -> None:
        """Add a processor. Raises `InvalidRequest` if the name is taken."""
        if not isinstance(name, str) or not name.isidentifier():  # pyright: ignore
            raise InvalidRequest(f"name={name!r} of a logits processor must be an identifier.")
        if not callable(processor):
            raise InvalidRequest(f"the logits processor {name!r} must be a function.")
        if self._by_name.get(name, processor) is not processor:
            raise InvalidRequest(
                f"the logits processor {name!r} is registered already; choose another name, "
                "because samples name their processors."
            )
        self._by_name = self._by_name | {name: processor}

    def require(self, names: Listed[str]) -> None:
        """Raise `InvalidRequest` unless all names are registered."""
        if unknown := [name for name in names if name not in self._by_name]:
            known = ", ".join(map(repr, self._by_name)) or "none"
            raise InvalidRequest(
                f"logits_processors names {unknown[0]!r}, which is not registered; registered "
                f"ones: {known}."
            )

    def changes(
        self, runner: Runner, result: Any, chunks: Chunks, masks: Masks
    ) -> tuple[Biases, Masks]:
        """Return the changes to a step's samples as biases, and the masks with what they cut.

        Raises `SampleFailure` for the first sample whose processor failed.
        """
        if not self._by_name:
            return (), masks
        indices = [i for i, s in enumerate(chunks.sampled) if s.request.params.logits_processors]
        if not indices:
            return (), masks
        rows = runner.logits(result, chunks.rows[indices])
        words, biases = dict(masks), list[tuple[int, tuple[np.ndarray, np.ndarray]]]()
        for index, old in zip(indices, rows, strict=True):
            seq = chunks.sampled[index]
            new = self._processed(seq, chunks.behind.get(index, ()), old)
            cut = np.isneginf(new)
            changed = np.flatnonzero((new != old) & ~cut)
            if len(changed):
                biases.append((index, (changed, new[changed] - old[changed])))
            if cut.any():
                words[index] = _without(words.get(index), seq, cut)
        return biases, sorted(words.items())

    def _processed(self, seq: Sequence, drafts: Listed[int], old: np.ndarray) -> np.ndarray:
        new = old
        for name in seq.request.params.logits_processors:
            try:
                new = np.asarray(self._by_name[name]((*seq.token_ids, *drafts), new.copy()))
            except Exception as problem:
                raise ProcessorFailed(
                    f"the logits processor {name!r} raised {type(problem).__name__}: {problem}"
                ) from problem
            if new.shape != old.shape or new.dtype != old.dtype:
                raise ProcessorFailed(
                    f"the logits processor {name!r} returned {new.dtype} {list(new.shape)}, not "
                    f"{old.dtype} {list(old.shape)}"
                )
            if np.isnan(new).any() or np.isposinf(new).any():
                raise ProcessorFailed(
                    f"the logits processor {name!r} returned a value that is not finite"
                )
        return new


def _without(words: np.ndarray | None, seq: Sequence, cut: np.ndarray) -> np.ndarray:
    """Return the mask without the ids that a processor cut, bool [V]."""
    if words is None:
        allowed = seq.request.params.allowed_token_ids
        words = mask_of(range(len(cut)) if allowed is None else allowed)
    kept = mask_of(np.flatnonzero(~cut).tolist())
    size = min(len(words), len(kept))
    left = words[:size] & kept[:size]
    if not left.any():
        raise NoTokenLeft("logits_processors left no token to draw")
    return left
