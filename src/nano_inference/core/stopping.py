"""End of a sequence: by its tokens, its text or its grammar.

`text.detokenizer` searches the text for stop strings.
"""

import logging
from typing import NamedTuple

from nano_inference.core.failures import SampleFailure
from nano_inference.core.sequence import GrowingText, Sequence
from nano_inference.types import ERROR, FinishReason


class Finish(NamedTuple):
    """Reason why a sequence ended.

    `stop_reason` is the id or string that stopped it, or the explanation of an abort.
    """

    reason: FinishReason
    stop_reason: int | str | None = None


LENGTH = Finish("length")
NOT_FINITE = Finish("abort", f"{ERROR}the model's logits are not finite")
MASK_FULL = Finish(
    "abort", "sampling_mask exceeds the entries that max_request_entries leaves for each sample"
)


def follow_grammar(seq: Sequence) -> Finish | None:
    """Feed the newest token to the sequence's grammar. Return the finish that follows, or None."""
    grammar = seq.grammar
    if grammar is None:
        return None
    grammar.accept(seq.token_ids[-1])
    if grammar.problem is not None:
        return grammar_failure(grammar.problem)
    if not grammar.is_ended:
        return None
    ended_by = seq.token_ids[-1] in seq.request.stop_ids
    return Finish("stop", seq.token_ids[-1] if ended_by else None)


def grammar_failure(problem: str) -> Finish:
    """Return the finish of a sequence whose grammar failed."""
    return Finish("abort", f"{ERROR}{problem}")


def may_stop(seq: Sequence) -> bool:
    """Return True if `min_tokens` allows the newest token to stop the sequence."""
    request = seq.request
    return len(seq.token_ids) - request.num_prompt_tokens > request.params.min_tokens


def ends_by_id(seq: Sequence) -> bool:
    """Return True if the newest known token is a stop id that may end the sequence."""
    return seq.token_ids[-1] in seq.request.stop_ids and may_stop(seq)


def finish_of(seq: Sequence) -> Finish | None:
    """Return the finish that the newest known token causes, or None.

    A stop id takes precedence over a stop string, and both over the length.
    """
    if ends_by_id(seq):
        return Finish("stop", seq.token_ids[-1])
    if seq.stop_string is not None:
        return Finish("stop", seq.stop_string)
    if len(seq.token_ids) >= seq.most_tokens:
        return LENGTH
    return None


logger = logging.getLogger("nano_inference")


def failure(seq: Sequence, what: str, problem: Exception) -> Finish:
    """Log an exception of one sequence and return the sequence's finish.

    Callers see the exception type, and the log has the traceback.

    Args:
        seq: The sequence.
        what: The part that raised: "the draw", "the text".
        problem: The exception.
    """
    if isinstance(problem, SampleFailure):
        return Finish("abort", f"{ERROR}{problem}")
    kind = type(problem).__name__
    logger.error(
        "Request %d, sample %d: %s raised %s.",
        seq.request_id,
        seq.sample_index,
        what,
        kind,
        exc_info=problem,
    )
    return Finish("abort", f"{ERROR}{what} raised {kind}")


class LostText:
    """Replacement for a text that could not be copied. Every use raises the original exception."""

    def __init__(self, problem: Exception) -> None:
        self._problem = problem

    @property
    def text(self) -> str:
        """Raise the original exception."""
        raise self._problem

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Raise the original exception."""
        raise self._problem

    def take(self) -> str:
        """Raise the original exception."""
        raise self._problem

    def finish(self) -> str:
        """Raise the original exception."""
        raise self._problem

    def copy(self) -> "LostText":
        return self


def copied_text(seq: Sequence) -> GrowingText | None:
    """Return a copy of a sequence's text for another sample.

    If copying raises, only the other sample fails.
    """
    try:
        return seq.output_text.copy() if seq.output_text is not None else None
    except Exception as problem:
        return LostText(problem)


def take_text(seq: Sequence, ended: bool) -> tuple[str | None, Finish | None]:
    """Return the new text of a sequence, including withheld text once it has ended.

    If that raises, the sequence loses its text, and the second value is its finish.
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
    """Return the text of a finished sequence and None, or None and the finish that replaces it."""
    text = seq.output_text
    if text is None:
        return None, None
    try:
        text.finish()
        return text.text, None
    except Exception as problem:
        seq.output_text = None
        return None, failure(seq, "the text", problem)
