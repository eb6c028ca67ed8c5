"""How long a step takes by the rows that it computes, and how many drafts of a batch pay."""

import bisect
from collections.abc import Sequence as Listed
from functools import lru_cache

import numpy as np

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)  # that are measured at start


class StepCosts:
    """Seconds of a step, by rows: measured at some numbers of them, and on lines between. Beyond
    the last two the line goes on.

    Args:
        rows: rising, at least one.
        seconds: of each; made to rise with the rows.
    """

    def __init__(self, rows: Listed[int], seconds: Listed[float]) -> None:
        self.rows = tuple(rows)
        self.seconds = tuple(np.maximum.accumulate(np.array(seconds, dtype=np.float64)).tolist())
        # what a draft's chance must be above at least, by rows and sequences of the step
        self.threshold = lru_cache(4096)(self._threshold)

    def of(self, num_rows: np.ndarray) -> np.ndarray:
        """Seconds of steps with so many rows, float64 [N]."""
        last = bisect.bisect_left(self.rows, self.rows[-1] // 2)
        rows, seconds = np.array(self.rows), np.array(self.seconds)
        if last == len(rows) - 1:
            slope = seconds[-1] / rows[-1]
        else:
            slope = (seconds[-1] - seconds[last]) / (rows[-1] - rows[last])
        beyond = np.maximum(num_rows - rows[-1], 0)
        return np.interp(num_rows, rows, seconds) + beyond * slope

    def most_paying(self, num_rows: int, num_seqs: int, chances: Listed[float]) -> int:
        """How many drafts to compute, the likeliest first, so that tokens come fastest.

        Args:
            num_rows: of the step without drafts.
            num_seqs: that get a token in it.
            chances: that a draft and all before it are drawn, falling.
        """
        if not chances:
            return 0
        tokens = num_seqs + np.concatenate(([0.0], np.cumsum(chances)))
        seconds = self.of(num_rows + np.arange(len(chances) + 1))
        return int(np.argmax(tokens / seconds))

    def _threshold(self, num_rows: int, num_seqs: int, most: int) -> float:
        """Drafts that are drawn less often than this cannot pay in such a step, however many."""
        more = np.arange(1, most + 1)
        ratio = self.of(num_rows + more) / self.of(np.array([num_rows]))
        return float(np.min(num_seqs * (ratio - 1) / more))
