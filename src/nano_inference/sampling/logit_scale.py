"""`LogitScale`: what lies between the head's products and logits. Nothing here imports torch."""

from typing import NamedTuple


class LogitScale(NamedTuple):
    """From products z of hidden rows and the head to logits: z / divisor, and where there is a cap
    (above 0), cap * tanh(z / divisor / cap), as in Gemma 2 (arXiv:2408.00118).
    """

    divisor: float = 1.0
    cap: float = 0.0


UNSCALED = LogitScale()
