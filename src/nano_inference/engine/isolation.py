"""Whose fault a draw is: where that of a step raises, every sample is drawn alone, and those that
raise again end.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from nano_inference.batch import Chunks
from nano_inference.engine.device import is_device_failure
from nano_inference.scheduling.commit import SampledTokens
from nano_inference.scheduling.failure import failure
from nano_inference.scheduling.sequence import Sequence
from nano_inference.scheduling.stopping import Finish


class Known(NamedTuple):
    """Samples that are on the host already, where others would be on their way."""

    tokens: SampledTokens

    def wait(self) -> SampledTokens:
        """They."""
        return self.tokens


class Isolated(NamedTuple):
    """A draw without those who made it fail."""

    chunks: Chunks  # of the step, with the samples that are left
    tokens: Any  # theirs
    failed: list[tuple[Sequence, Finish]]  # the others, and how they end


def draw_without_the_failing(draw: Callable[[Chunks], Any], chunks: Chunks) -> Isolated:
    """Draw a step's samples after `draw` of all of them has raised.

    A draw does not depend on its neighbours, so the samples that are left have the bits that they
    would have had. Raises what `draw` raises of these, and what is the device's: that is nobody's
    own.
    """
    failed: dict[int, Finish] = {}
    for place, seq in enumerate(chunks.sampled):
        try:
            draw(chunks.drawing([place])).wait()
        except Exception as problem:
            if is_device_failure(problem):
                raise
            failed[place] = failure(seq, "the draw", problem)
    left = chunks.drawing([place for place in range(len(chunks.sampled)) if place not in failed])
    return Isolated(
        left, draw(left), [(chunks.sampled[place], finish) for place, finish in failed.items()]
    )
