"""Whether a sequence is finished, and why: by its tokens, its text and its grammar. Stop strings
are found by its text (`text.detokenizer`).
"""

import logging
from typing import NamedTuple

from nano_inference.core.sequence import GrowingText, Sequence
from nano_inference.types import ERROR, FinishReason


class Finish(NamedTuple):
    """Why a sequence ended; `stop_reason` is the id or the string that stopped it, or a word on an
    abort.
    """

    reason: FinishReason
    stop_reason: int | str | None = None


LENGTH = Finish("length")
NOT_FINITE = Finish("abort", f"{ERROR}the model's logits are not finite")
MASK_FULL = Finish(
    "abort", "sampling_mask has grown beyond what max_request_entries leaves each sample"
)


def follow_grammar(seq: Sequence) -> Finish | None:
    """Feed the newest token to the sequence's grammar. How that ends the sequence, or None."""
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
    """How a sequence ends whose grammar cannot go on."""
    return Finish("abort", f"{ERROR}{problem}")


def may_stop(seq: Sequence) -> bool:
    """Whether the newest known token may end this sequence by what it is."""
    request = seq.request
    return len(seq.token_ids) - request.num_prompt_tokens > request.params.min_tokens


def ends_by_id(seq: Sequence) -> bool:
    """Whether the newest known token is a stop id that counts."""
    return seq.token_ids[-1] in seq.request.stop_ids and may_stop(seq)


def finish_of(seq: Sequence) -> Finish | None:
    """How the newest known token ends this sequence, or None. A stop id counts before a string,
    both before length.
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
    return Finish("abort", f"{ERROR}{what} raised {kind}")


class LostText:
    """In the place of a text that could not be copied: every use of it raises why."""

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
    """The text of a sequence that was not taken yet; once it has ended, all that was held back too.

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
