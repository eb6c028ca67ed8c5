"""`DrawnRows`: rows of the policy after which the newest tokens were drawn, for heads that guess
from them.
"""

from collections import deque

from torch import Tensor

from nano_inference.core.batch import Chunks
from nano_inference.core.sequence import Sequence

STEPS = 4  # whose rows are kept: a sequence that is not among them for longer gets no drafts


class DrawnRows:
    """Rows [L, X] of the last steps, by the sequence and the place of the token that was drawn."""

    def __init__(self) -> None:
        self._steps: deque[tuple[dict[tuple[int, int], int], Tensor]] = deque(maxlen=STEPS)

    def keep(self, chunks: Chunks, rows: Tensor) -> None:
        """Rows of a step's logits, in their order; nothing writes to them any more. Which of them
        count is told by the tokens that become known.
        """
        ids = [seq.seq_id for seq in chunks.sampled]
        places = zip(ids, chunks.positions.tolist(), strict=True)
        self._steps.appendleft((dict(zip(places, chunks.rows.tolist(), strict=True)), rows))

    def of(self, seq: Sequence, position: int) -> Tensor | None:
        """The row [X] after which the token at a position was drawn; None: it is gone."""
        for places, rows in self._steps:
            row = places.get((seq.seq_id, position))
            if row is not None:
                return rows[row]
        return None
