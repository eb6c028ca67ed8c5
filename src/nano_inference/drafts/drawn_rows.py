"""`DrawnRows`: the policy's rows from which the newest tokens were drawn.

Draft heads guess from them.
"""

from collections import deque

from nano_inference.arrays import Tensor
from nano_inference.core.batch import Chunks
from nano_inference.core.sequence import Sequence

STEPS = 4  # steps to keep; a sequence that is absent for longer gets no drafts


class DrawnRows:
    """Rows [L, X] of the last steps, by sequence and position of the drawn token."""

    def __init__(self) -> None:
        self._steps: deque[tuple[dict[tuple[int, int], int], Tensor]] = deque(maxlen=STEPS)

    def keep(self, chunks: Chunks, rows: Tensor) -> None:
        """Keep the rows of a step's logits, in order. Do not modify them afterwards.

        A row counts only if its token becomes known.
        """
        ids = [seq.seq_id for seq in chunks.sampled]
        places = zip(ids, chunks.positions.tolist(), strict=True)
        self._steps.appendleft((dict(zip(places, chunks.rows.tolist(), strict=True)), rows))

    def of(self, seq: Sequence, position: int) -> Tensor | None:
        """Return the row [X] from which the token at a position was drawn, or None."""
        for places, rows in self._steps:
            row = places.get((seq.seq_id, position))
            if row is not None:
                return rows[row]
        return None
