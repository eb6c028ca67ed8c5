"""Is a sequence finished, and why: pure predicates over its known tokens."""

from typing import NamedTuple

from nano_inference.scheduling.sequence import Sequence
from nano_inference.types import FinishReason


class Finish(NamedTuple):
    """Why a sequence ended; `stop_reason` is the id or the string that stopped it, or a word on an
    abort.
    """

    reason: FinishReason
    stop_reason: int | str | None = None


NOT_FINITE = Finish("abort", "error: the model's logits are not finite")
MASK_FULL = Finish(
    "abort", "sampling_mask has grown beyond what max_request_entries leaves each sample"
)


def may_stop(seq: Sequence) -> bool:
    """Whether the newest known token may end this sequence by what it is."""
    return len(seq.token_ids) - seq.num_prompt_tokens > seq.params.min_tokens


def ends_by_id(seq: Sequence) -> bool:
    """Whether the newest known token is a stop id that counts."""
    return seq.token_ids[-1] in seq.stop_ids and may_stop(seq)


def finish_of(seq: Sequence) -> Finish | None:
    """How the newest known token ends this sequence, or None. A stop id counts before a string,
    both before length.
    """
    if ends_by_id(seq):
        return Finish("stop", seq.token_ids[-1])
    if seq.stop_string is not None:
        return Finish("stop", seq.stop_string)
    if len(seq.token_ids) >= seq.most_tokens:
        return Finish("length")
    return None
