"""Rows of attention over latents at the sizes of DeepSeek-V3, for the tests of this folder."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nano_inference.device.kv_tensors import KVStorage
from nano_inference.ops.cuda.latent import store, values
from nano_inference.ops.interface import LatentWeights, RopeArgs
from nano_inference.ops.rowwise import Norm
from nano_inference.ops.settings import Latent
from tests.gpu.target import Target, numbers

LATENT = Latent(rank=512, rotary=64, plain=128, value=128)
TOY_LATENT = Latent(rank=32, rotary=16, plain=24, value=48)
BLOCK = 16


class Latents:
    """Weights and input rows of one layer."""

    def __init__(
        self, target: Target, dtype: torch.dtype, heads: int, sizes: Latent, rows: int
    ) -> None:
        self.device, self.dtype, self.heads, self.sizes, self.rows = (
            *(torch.device(target.device), dtype, heads, sizes),
            rows,
        )
        by_head = sizes.plain + sizes.value
        norm = Norm(1 + self._numbers(1, sizes.rank) / 4, 1e-6, 0.0, dtype)
        kv = numbers(2, heads * by_head, sizes.rank, device=target.device, scale=sizes.rank**-0.5)
        self.weights = LatentWeights(kv.to(dtype), norm, sizes)
        angles = numbers(3, 512, sizes.rotary // 2, device=target.device)
        self.rope = RopeArgs(angles.cos(), angles.sin(), heads, 1, interleaved=True)
        self.q = self._numbers(4, rows, heads * (sizes.plain + sizes.rotary))
        self.c = self._numbers(5, rows, sizes.rank + sizes.rotary)
        self.attended = self._numbers(6, rows, heads * sizes.key)
        self.positions = torch.arange(rows, device=self.device) * 3 % 512

    def _numbers(self, seed: int, *shape: int) -> Tensor:
        return numbers(seed, *shape, device=str(self.device), dtype=self.dtype)

    def made(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [N, heads, key], keys [N, key] and outputs [N, heads * value] of rows."""
        some, count = list(rows), len(rows)
        spec: Any = SimpleNamespace(
            num_layers=1,
            num_kv_heads=1,
            head_dim=self.sizes.key,
            windows=(0,),
            state=None,
            kv_tensors=1,
            kinds=(),
        )
        view = KVStorage(spec, -(-count // BLOCK), BLOCK, self.dtype, self.device)
        slots = torch.arange(count, device=self.device)
        where = self.positions[some], slots, view, 0
        queries = store(self.q[some], self.c[some], self.weights, self.rope, *where)
        keys = view.keys[0, 0].flatten(0, 1)[:count]
        return queries, keys, values(self.attended[some], self.weights)

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same for all rows in double precision."""
        sizes, norm = self.sizes, self.weights.norm
        kv: Any = self.weights.kv
        keys, rows = (
            kv.double().unflatten(0, (self.heads, -1)).split([sizes.plain, sizes.value], dim=1)
        )
        q = self.q.double().unflatten(1, (self.heads, -1))
        plain, turning = q.split([sizes.plain, sizes.rotary], dim=-1)
        latent, turned = self.c.double().split([sizes.rank, sizes.rotary], dim=-1)
        assert norm.weight is not None
        latent = latent * (latent.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt()
        latent = latent * norm.weight.double()
        attended = self.attended.double().unflatten(1, (self.heads, -1))[:, :, sizes.rotary :]
        met = torch.einsum("nhp,hpr->nhr", plain, keys)
        return (
            torch.cat((self._rotated(turning), met), dim=-1),
            torch.cat((self._rotated(turned[:, None])[:, 0], latent), dim=-1),
            torch.einsum("nhr,hvr->nhv", attended, rows).flatten(1),
        )

    def _rotated(self, heads: Tensor) -> Tensor:
        cos, sin = (
            table[self.positions].double()[:, None] for table in (self.rope.cos, self.rope.sin)
        )
        first, second = heads[..., 0::2], heads[..., 1::2]
        pair = first * cos - second * sin, second * cos + first * sin
        return torch.stack(pair, dim=-1).flatten(-2)
