"""Storage formats of keys and values: numbers of the model's dtype, or codes of 8 bits.

A row is the key or the value of one token and one KV head. Rows are encoded like a product's inputs
(`quantised.quantise_rows` with one group). With scale = max|x| / 127, each number becomes the
integer nearest to x / scale, ties to even, and attention reads scale * code. The scale is a float32
that takes 4 bytes next to `head_dim` codes, and no number is rounded twice. A row with a non-finite
number is NaN as a whole.

Attention reads the stored form of a chunk's own rows too, so no bit depends on the cuts between
chunks.
"""

from dataclasses import dataclass

from nano_inference.arrays import Dtype, Tensor, namespace
from nano_inference.ops.quantised import quantise_rows

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KvFormat:
    """Storage format of rows of keys and values.

    Attributes:
        dtype: Dtype of queries. Rows are rounded to it first.
        coded: If True, rows are stored as codes, each followed by its scale.
    """

    dtype: Dtype
    coded: bool = False

    @property
    def stored(self) -> Dtype:
        """Dtype of the stored numbers."""
        return namespace(self.dtype).int8 if self.coded else self.dtype

    def width(self, head_dim: int) -> int:
        """Return the number of stored numbers per row."""
        return head_dim + SCALE_BYTES if self.coded else head_dim

    def head_dim(self, width: int) -> int:
        """Return the number of values that attention reads from a row of this width."""
        return width - SCALE_BYTES if self.coded else width

    def encode(self, rows: Tensor) -> Tensor:
        """Encode rows [..., D] of any dtype for storage, [..., width]."""
        rows = rows.to(self.dtype)
        if not self.coded:
            return rows
        flat = rows.reshape(-1, rows.shape[-1])
        codes, scales = quantise_rows(flat, [(0, flat.shape[1])])
        xp = namespace(rows)
        kept = xp.cat([codes.to(xp.int8), scales.view(xp.int8)], dim=1)
        return kept.reshape(*rows.shape[:-1], kept.shape[1])

    def decode(self, kept: Tensor) -> Tensor:
        """Decode stored rows [..., width] to the float32 [..., D] that attention reads."""
        if not self.coded:
            return kept.float()
        scales = kept[..., -SCALE_BYTES:].contiguous().view(namespace(kept).float32)
        return kept[..., :-SCALE_BYTES].float() * scales

    def rounded(self, rows: Tensor) -> Tensor:
        """Return rows [..., D] with the values that attention reads, in their own dtype. Gradients
        pass through unchanged.
        """
        if not self.coded:
            return rows
        plain = rows.detach()
        change = self.decode(self.encode(plain)) - plain.float()
        return (rows.float() + change).to(rows.dtype)
