"""Rotary embedding of queries and keys, and storing keys and values, in one kernel."""

from torch import Tensor

from nano_inference.ops import reference
from nano_inference.ops.backend import KvcacheView, Norm


def rope_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    view: KvcacheView,
    layer: int,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """See `Ops.rope_and_store`. A row whose slot is negative is padding: nothing of it is stored."""
    return reference.rope_and_store(qkv, cos, sin, positions, view, layer, slot_mapping, num_heads, num_kv_heads, norms)
