"""A module in FlashInfer's place: the wrappers that we call, in plain torch, after its
documentation.

It computes what the documentation says the wrapper computes, and refuses what it says the wrapper
refuses. Whether the real package agrees shows on a GPU alone (`tests/gpu`).
"""

import torch
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    """Causal attention of ragged queries over pages. `planned`: how often, over all wrappers."""

    planned = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        self.layout = kv_layout
        self.chunks = None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        type(self).planned += 1
        for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert each.dtype == torch.int32
        chunks = len(qo_indptr) - 1
        assert len(paged_kv_indptr) == chunks + 1
        assert len(paged_kv_last_page_len) == chunks
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert num_qo_heads % num_kv_heads == 0
        self.heads = num_qo_heads, num_kv_heads, head_dim_qk
        self.page_size, self.causal, self.scale, self.window_left = (
            page_size,
            causal,
            sm_scale,
            window_left,
        )
        self.dtypes = q_data_type, kv_data_type or q_data_type
        self.qo, self.pages = qo_indptr.tolist(), paged_kv_indices
        self.indptr, self.last = paged_kv_indptr.tolist(), paged_kv_last_page_len.tolist()

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        heads, kv_heads, head_dim = self.heads
        assert q.shape == (self.qo[-1], heads, head_dim)
        assert self.layout == "HND"
        assert keys.shape[1:] == (kv_heads, self.page_size, head_dim)
        assert (q.dtype, keys.dtype) == self.dtypes
        assert keys.stride() == values.stride()
        assert keys.stride(-1) == q.stride(-1) == 1
        assert keys.stride(0) % keys.stride(2) == 0, "what its kernels for sm_90 want of a page"
        out = torch.zeros_like(q)
        for chunk in range(len(self.qo) - 1):
            pages = self.pages[self.indptr[chunk] : self.indptr[chunk + 1]].long()
            length = (len(pages) - 1) * self.page_size + self.last[chunk]
            k, v = (
                cache[pages].transpose(0, 1).flatten(1, 2)[:, :length].float()
                for cache in (keys, values)
            )
            rows = slice(self.qo[chunk], self.qo[chunk + 1])
            out[rows] = (
                self._attention(q[rows].float().transpose(0, 1), k, v).transpose(0, 1).to(q.dtype)
            )
        return out

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[heads, rows, D] over [kv heads, length, D]: the last row is the last key's."""
        group = len(q) // len(k)
        scores = (
            q @ k.repeat_interleave(group, 0).transpose(1, 2) * (self.scale or q.shape[-1] ** -0.5)
        )
        own = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
        at = torch.arange(k.shape[1])[None, :]
        seen = (at <= own) if self.causal else torch.ones_like(at <= own)
        if self.window_left >= 0:
            seen &= at >= own - self.window_left  # the left, inclusive
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(group, 0)


class BatchDecodeWithPagedKVCacheWrapper:
    """Attention of one query a sequence over pages, as captured graphs use it: the plan goes to
    buffers of the caller.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        buffers = (
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        assert not use_cuda_graph or None not in buffers
        self._buffers = buffers
        self._inner = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        for buffer, values in zip(self._buffers, (indptr, indices, last_page_len), strict=True):
            assert buffer is not None
            assert len(values) <= len(buffer), "more than the graph's buffer holds"
            buffer[: len(values)] = values
        rows = torch.arange(len(indptr), dtype=torch.int32)
        self._inner.plan(
            rows, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            causal=True, sm_scale=sm_scale, q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        return self._inner.run(q, paged_kv_cache)
