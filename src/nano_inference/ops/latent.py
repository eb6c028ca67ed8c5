"""Attention over latents: what lies between its products and the attention itself.

A token's keys and values of all heads are products of one latent (MLA, arXiv:2405.04434), and that
is what the cache holds. A head's queries are brought to where the latents are instead, and what it
attended is brought to its values: (q W_k) · c = q · (W_k c). So attention is that of one KV head,
whose values are its keys.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from nano_inference.ops.settings import Latent

if TYPE_CHECKING:
    from nano_inference.ops.interface import Norm, Weight

X = TypeVar("X")  # rows; see `ops/interface.py`


class LatentOps(NamedTuple, Generic[X]):
    """`kv` is a weight [heads * (plain + value), rank]: of each head the rows that make its keys
    of a latent, then those that make its values.

    Attributes:
        meet: (q [N, heads * (plain + rotary)], c [N, rank + rotary], kv, norm, sizes) -> [N, (heads
            + 2) * key]: queries, then the key, which holds the normed latent, twice: what
            `Ops.rope_and_store` takes of one KV head.
        values: (attended [N, heads * key], kv, sizes) -> [N, heads * value].
    """

    meet: "Callable[[X, X, Weight, Norm, Latent], X]"
    values: "Callable[[X, Weight, Latent], X]"
