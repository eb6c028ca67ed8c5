"""One sequence's failure is its own: what it raised becomes the reason why it, and it alone,
ended.
"""

import logging

from nano_inference.scheduling.sequence import GrowingText, Sequence
from nano_inference.scheduling.stopping import Finish

logger = logging.getLogger("nano_inference")


def failure(seq: Sequence, what: str, problem: Exception) -> Finish:
    """How a sequence ends of which a part raised. The caller learns the kind, the log has the rest.

    Args:
        seq: the sequence.
        what: the part: "the draw", "the text".
        problem: what it raised.
    """
    kind = type(problem).__name__
    logger.error(
        "Request %d, sample %d: %s raised %s.",
        seq.request_id,
        seq.sample_index,
        what,
        kind,
        exc_info=problem,
    )
    return Finish("abort", f"error: {what} raised {kind}")


class LostText:
    """In the place of a text that could not be copied: whoever uses it gets to know why."""

    def __init__(self, problem: Exception) -> None:
        self._problem = problem

    @property
    def text(self) -> str:
        """Raises."""
        raise self._problem

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Raises."""
        raise self._problem

    def take(self) -> str:
        """Raises."""
        raise self._problem

    def finish(self) -> str:
        """Raises."""
        raise self._problem

    def copy(self) -> "LostText":
        """Itself."""
        return self


def copied_text(seq: Sequence) -> GrowingText | None:
    """A text with the past of a sequence's, for another sample. Where that raises, the other ends
    by it, not this.
    """
    try:
        return seq.output_text.copy() if seq.output_text is not None else None
    except Exception as problem:
        return LostText(problem)


def take_text(seq: Sequence, ended: bool) -> tuple[str | None, Finish | None]:
    """The text of a sequence that nobody took yet; once it has ended, all that was held back too.

    Where that raises, the sequence has no text from then on, and ends as the second value says.
    """
    text = seq.output_text
    if text is None:
        return None, None
    try:
        return (text.take() + text.finish() if ended else text.take()), None
    except Exception as problem:
        seq.output_text = None
        return None, failure(seq, "the text", problem)


def whole_text(seq: Sequence) -> tuple[str | None, Finish | None]:
    """The text of a sequence that has ended, or how it ends instead."""
    text = seq.output_text
    if text is None:
        return None, None
    try:
        text.finish()
        return text.text, None
    except Exception as problem:
        seq.output_text = None
        return None, failure(seq, "the text", problem)
