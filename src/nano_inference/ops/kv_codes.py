"""How keys and values are kept: as numbers of the model's dtype, or as codes of 8 bits.

A row is the key, or the value, of one token and one KV head. As codes it is rounded as an input of
a product in codes is (`quantised.quantise_rows`, of one group): with scale = max|x| / 127 each
number becomes the nearest whole one to x / scale, ties to even, and what is attended is scale *
code. The scale is a float32: it costs 4 bytes beside `head_dim` of codes, and nothing is rounded
twice. A row that is not finite is NaN as a whole.

Also the rows of the chunk that made them are attended as they are kept, so no bit depends on how a
prompt is cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nano_inference.ops.quantised import quantise_rows

SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class KvFormat:
    """Of rows of keys and values.

    Attributes:
        dtype: of queries; rows are rounded to it first.
        coded: rows are kept as codes, each with its scale behind it.
    """

    dtype: torch.dtype
    coded: bool = False

    @property
    def stored(self) -> torch.dtype:
        """Of the numbers that are kept."""
        return torch.int8 if self.coded else self.dtype

    def width(self, head_dim: int) -> int:
        """How many of them a row takes."""
        return head_dim + SCALE_BYTES if self.coded else head_dim

    def head_dim(self, width: int) -> int:
        """Numbers that are attended of a row so wide."""
        return width - SCALE_BYTES if self.coded else width

    def encode(self, rows: Tensor) -> Tensor:
        """Rows [..., D] of any dtype as they are kept, [..., width]."""
        rows = rows.to(self.dtype)
        if not self.coded:
            return rows
        flat = rows.reshape(-1, rows.shape[-1])
        codes, scales = quantise_rows(flat, [(0, flat.shape[1])])
        kept = torch.cat([codes.to(torch.int8), scales.view(torch.int8)], dim=1)
        return kept.view(*rows.shape[:-1], kept.shape[1])

    def decode(self, kept: Tensor) -> Tensor:
        """What is attended, float32 [..., D], of rows [..., width]."""
        if not self.coded:
            return kept.float()
        scales = kept[..., -SCALE_BYTES:].contiguous().view(torch.float32)
        return kept[..., :-SCALE_BYTES].float() * scales

    def rounded(self, rows: Tensor) -> Tensor:
        """Rows [..., D] with the values that are attended, in their own dtype; gradients pass as
        they are.
        """
        if not self.coded:
            return rows
        with torch.no_grad():
            change = self.decode(self.encode(rows)) - rows.float()
        return (rows.float() + change).to(rows.dtype)
