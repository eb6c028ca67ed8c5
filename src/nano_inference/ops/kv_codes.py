"""Storage formats of keys and values: numbers of the model's dtype, or codes of 8 bits.

A row is the key or the value of one token and one KV head. With scale = max|x| / most, each number
becomes the code nearest to x / scale, ties to even, and attention reads scale * code. The scale is
a float32 that takes 4 bytes next to `head_dim` codes, and no number is rounded twice. A row with a
non-finite number is NaN as a whole.

    codes   most   numbers
    int8    127    whole numbers, like a product's inputs (`quantised.quantise_rows`)
    fp8     448    e4m3 without infinities (arXiv:2209.05433): four significant bits

A block of one KV head stores the codes of its tokens, then their scales, so that kernels read 16
bytes at a time. (The CPU kernels order codes in their own way.)

Attention reads the stored form of a chunk's own rows too, so no bit depends on the cuts between
chunks.
"""

from dataclasses import dataclass
from typing import Literal

from nano_inference.arrays import Dtype, Tensor, namespace
from nano_inference.ops.quantised import MOST, scaled_rows

SCALE_BYTES = 4
KvCodes = Literal["int8", "fp8"]
MOST_OF: dict[KvCodes, int] = {"int8": MOST, "fp8": 448}  # largest numbers of codes


@dataclass(frozen=True, slots=True)
class KvFormat:
    """Storage format of rows of keys and values.

    Attributes:
        dtype: Dtype of queries. Rows are rounded to it first.
        codes: Codes in which rows are stored, each row with a scale. None: plain numbers.
    """

    dtype: Dtype
    codes: KvCodes | None = None

    @property
    def coded(self) -> bool:
        """Whether rows are stored as codes."""
        return self.codes is not None

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
        """Encode rows [..., D] of any dtype for storage, [..., width]: codes, then the scale."""
        rows = rows.to(self.dtype)
        if self.codes is None:
            return rows
        xp, flat = namespace(rows), rows.reshape(-1, rows.shape[-1]).float()
        numbers, scales = scaled_rows(flat, MOST_OF[self.codes])
        if self.codes == "fp8":
            codes = numbers.to(xp.float8_e4m3fn).view(xp.int8)
        else:
            codes = xp.round(numbers).to(xp.int8)
        kept = xp.cat([codes, scales.view(xp.int8)], dim=1)
        return kept.reshape(*rows.shape[:-1], kept.shape[1])

    def decode(self, kept: Tensor) -> Tensor:
        """Decode stored rows [..., width] to the float32 [..., D] that attention reads."""
        if not self.coded:
            return kept.float()
        xp = namespace(kept)
        scales = kept[..., -SCALE_BYTES:].contiguous().view(xp.float32)
        codes = kept[..., :-SCALE_BYTES]
        if self.codes == "fp8":
            codes = codes.contiguous().view(xp.float8_e4m3fn)
        return codes.float() * scales

    def places(self, slots: Tensor, block_size: int, width: int) -> Tensor:
        """Return the places of codes and scales at slots [N] among the bytes of one KV head: int64
        [N, width].
        """
        xp, size = namespace(slots), self.head_dim(width)
        blocks, tokens = (slots // block_size)[:, None], (slots % block_size)[:, None]
        codes = tokens * size + xp.arange(size, device=slots.device)
        scales = (
            block_size * size + tokens * SCALE_BYTES + xp.arange(SCALE_BYTES, device=slots.device)
        )
        return blocks * (block_size * width) + xp.cat([codes, scales], dim=1)

    def rounded(self, rows: Tensor) -> Tensor:
        """Return rows [..., D] with the values that attention reads, in their own dtype. Gradients
        pass through unchanged.
        """
        if not self.coded:
            return rows
        plain = rows.detach()
        change = self.decode(self.encode(plain)) - plain.float()
        return (rows.float() + change).to(rows.dtype)
