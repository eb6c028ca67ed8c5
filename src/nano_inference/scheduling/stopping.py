"""Is a sequence finished, and why: pure predicates over its known tokens."""

from typing import NamedTuple

from nano_inference.scheduling.sequence import Sequence
from nano_inference.types import FinishReason


class Finish(NamedTuple):
    """Why a sequence ended; `stop_reason` is the id that stopped it, or a word on an abort."""

    reason: FinishReason
    stop_reason: int | str | None = None


def finish_of(seq: Sequence) -> Finish | None:
    """How the newest known token ends this sequence, or None. A stop id counts before the length."""
    if seq.num_completion_tokens == 0:
        return None
    newest = seq.token_ids[-1]
    if newest in seq.stop_ids and seq.num_completion_tokens > seq.params.min_tokens:
        return Finish("stop", newest)
    if seq.num_completion_tokens >= seq.max_tokens:
        return Finish("length")
    return None
