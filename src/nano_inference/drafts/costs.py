"""Time of a step by its number of rows, and the number of drafts that pay off."""

import bisect
from collections.abc import Sequence as Listed
from functools import lru_cache

import numpy as np

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)  # measured at start


class StepCosts:
    """Seconds of a step by its number of rows.

    Interpolated linearly between measured sizes. Beyond the largest size, the slope over the upper
    half of the sizes continues.

    Args:
        rows: Measured sizes, ascending, at least one.
        seconds: Seconds for each size. A value below an earlier one is raised to it.
    """

    def __init__(self, rows: Listed[int], seconds: Listed[float]) -> None:
        self.rows = tuple(rows)
        self.seconds = tuple(np.maximum.accumulate(np.array(seconds, dtype=np.float64)).tolist())
        # lowest chance at which drafts can pay off, by rows, sequences and most drafts of a step
        self.threshold = lru_cache(4096)(self._threshold)

    def of(self, num_rows: np.ndarray) -> np.ndarray:
        """Return the seconds of steps with `num_rows` rows, float64 [N]."""
        last = bisect.bisect_left(self.rows, self.rows[-1] // 2)
        rows, seconds = np.array(self.rows), np.array(self.seconds)
        if last == len(rows) - 1:
            slope = seconds[-1] / rows[-1]
        else:
            slope = (seconds[-1] - seconds[last]) / (rows[-1] - rows[last])
        beyond = np.maximum(num_rows - rows[-1], 0)
        return np.interp(num_rows, rows, seconds) + beyond * slope

    def most_paying(self, num_rows: int, num_seqs: int, chances: Listed[float]) -> int:
        """Return how many drafts to compute, most likely first, for the most tokens per second.

        Args:
            num_rows: Rows of the step without drafts.
            num_seqs: Sequences that get a token in the step.
            chances: Probabilities, descending, that a draft and all drafts before it are drawn.
        """
        if not chances:
            return 0
        tokens = num_seqs + np.concatenate(([0.0], np.cumsum(chances)))
        seconds = self.of(num_rows + np.arange(len(chances) + 1))
        return int(np.argmax(tokens / seconds))

    def _threshold(self, num_rows: int, num_seqs: int, most: int) -> float:
        """Return the chance below which no number of drafts pays off in such a step."""
        more = np.arange(1, most + 1)
        ratio = self.of(num_rows + more) / self.of(np.array([num_rows]))
        return float(np.min(num_seqs * (ratio - 1) / more))
