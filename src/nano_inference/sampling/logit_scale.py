"""`LogitScale`: scale and soft cap between the head's products and logits. No torch here."""

from typing import NamedTuple


class LogitScale(NamedTuple):
    """Conversion of the products z of hidden rows and the head into logits.

    The logits are z / divisor. With a cap above 0 they are cap * tanh(z / divisor / cap), as in
    Gemma 2 (arXiv:2408.00118).
    """

    divisor: float = 1.0
    cap: float = 0.0


UNSCALED = LogitScale()
