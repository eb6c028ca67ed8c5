"""Application of a `LogitScale`, and the soft cap that scores of attention share."""

import numpy as np

from nano_inference.arrays import Tensor, namespace
from nano_inference.sampling.logit_scale import LogitScale


def scaled(products: Tensor, scale: LogitScale) -> Tensor:
    """Apply a `LogitScale` to products: divide, then cap."""
    whole = products if scale.divisor == 1 else products / scale.divisor
    return capped(whole, scale.cap) if scale.cap else whole


@np.errstate(over="ignore")
def capped(x: Tensor, cap: float) -> Tensor:
    """Compute cap * tanh(x / cap) in float32, written out like the activations."""
    return cap * (1 - 2 / (1 + namespace(x).exp(x * (2 / cap))))
