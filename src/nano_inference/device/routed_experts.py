"""Routed experts of samples, read from the policy's record while their blocks are held."""

from collections.abc import Callable

import numpy as np

from nano_inference.arrays import Tensor
from nano_inference.core.sequence import Sequence
from nano_inference.models.decoder import Decoder
from nano_inference.models.routes import RouteRecord
from nano_inference.models.spec.experts import MoeSpec
from nano_inference.types import RoutedExperts


def route_taker(policy: Decoder) -> Callable[[Sequence], None] | None:
    """Return a function that stores a finished sequence's experts (`CheckedRequest.at_end`).

    Return None if experts are not recorded.
    """
    record, moe = policy.routes, policy.spec.moe
    if record is None or moe is None:
        return None

    def take(seq: Sequence) -> None:
        seq.routed_experts = _read(seq, record, moe)

    return take


def _read(seq: Sequence, record: RouteRecord, moe: MoeSpec) -> RoutedExperts | str:
    """Return the experts of all tokens except the last, or the reason why they are unknown."""
    num_rows = len(seq.token_ids) - 1
    if seq.num_computed_tokens < num_rows:
        return (
            f"only {seq.num_computed_tokens} of {num_rows} tokens had keys in the cache when the "
            "sample ended"
        )
    ids = record.read(seq.block_ids, num_rows)
    if (foreign := int((ids < 0).flatten(1).any(1).sum())) > 0:
        return f"keys of {foreign} of {num_rows} tokens came from another engine or from a file"
    return packed(ids, moe)


def packed(ids: Tensor, moe: MoeSpec) -> RoutedExperts:
    """Return a record's ids, int16 [rows, layers of experts, K], in the format of samples."""
    dtype = "uint8" if moe.num_experts <= 256 else "uint16"
    shape = (len(ids), len(moe.layers), moe.experts_per_token)
    whole = np.zeros(shape, dtype="|u1" if dtype == "uint8" else "<u2")
    whole[:, np.array(moe.layers)] = ids.numpy()
    return RoutedExperts(shape, dtype, whole.tobytes())
