"""Attention by FlashInfer (arXiv:2501.01005), a package of its own:
`EngineConfig(attention="flashinfer")`.

Its kernels read our KV cache where it lies, as pages with strides, and blocks are its pages. What
each step does is planned on the host, which waits for the device: CUDA graphs cannot hold it, and
nothing is promised about a row's bits.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.core.batch import ForwardBatch
from nano_inference.errors import ConfigError
from nano_inference.ops.interface import KvcacheView

_WORKSPACE = 128 * 2**20  # bytes, as its documentation recommends
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class FlashInferPlan:
    """The chunks of one batch that have rows, as FlashInfer wants them: int32."""

    qo_indptr: Tensor  # [chunks + 1] first row of each, and the number of rows; on the host
    page_indptr: Tensor  # [chunks + 1] where its pages begin among those of all; on the host
    pages: Tensor  # on the device
    last_page_len: Tensor  # [chunks] tokens in the last page; on the host
    block_size: int
    window: int


class FlashInferAttention:
    """Attention with the signatures of `Ops.plan_attention` and `Ops.attention`.

    Raises:
        ConfigError: the package is missing or cannot be imported.
    """

    def __init__(self) -> None:
        self._package = _import()
        self._workspace: Tensor | None = None
        # One of FlashInfer's wrappers for each window: layers with and without one take turns. Each
        # with what it is planned for.
        self._wrappers: dict[int, tuple[Any, FlashInferPlan | None, tuple[Any, ...]]] = {}

    def plan(self, batch: ForwardBatch, block_size: int, window: int = 0) -> FlashInferPlan:
        """Which pages the chunks read. Waits for the device."""
        lengths, contexts = torch.stack((batch.cu_seqlens_q.diff(), batch.seq_lens)).cpu()
        chunks = lengths.nonzero()[:, 0]  # padding has no rows
        lengths, contexts = lengths[chunks], contexts[chunks]
        counts = (contexts + block_size - 1) // block_size
        page_indptr = functional.pad(counts.cumsum(0), (1, 0))
        tables = batch.block_tables
        stride = tables.stride(0) if batch.table_stride is None else int(batch.table_stride)
        within = torch.arange(int(page_indptr[-1])) - page_indptr[:-1].repeat_interleave(counts)
        places = (chunks * stride).repeat_interleave(counts) + within
        extent = int(places.max()) + 1 if len(places) else 0
        return FlashInferPlan(
            qo_indptr=functional.pad(lengths.cumsum(0), (1, 0)).int(),
            page_indptr=page_indptr.int(),
            pages=tables.as_strided((extent,), (1,))[places.to(tables.device)].int(),
            last_page_len=((contexts - 1) % block_size + 1).int(),
            block_size=block_size,
            window=window,
        )

    def attend(
        self, q: Tensor, view: KvcacheView, layer: int, plan: FlashInferPlan, scale: float
    ) -> Tensor:
        """See `Ops.attention`. Rows of padding are zero.

        Raises:
            RuntimeError: the cache is made of units; `plan_memory` gives FlashInfer one of whole
                blocks.
            ValueError: queries or cache are not of 16 bits.
        """
        if view.unit_map is not None:
            raise RuntimeError(
                "FlashInfer reads whole blocks; plan_memory keeps them apart from units."
            )
        _, place = view.places[layer]
        # [kv heads, blocks, block_size, D] -> its layout "HND": [blocks, kv heads, block_size, D],
        # by strides
        keys, values = (cache[place].transpose(0, 1) for cache in (view.keys, view.values))
        for dtype in (q.dtype, keys.dtype):
            if dtype not in DTYPES:
                raise ValueError(f"FlashInfer computes in bfloat16 and float16, not in {dtype}.")
        num_rows = int(plan.qo_indptr[-1])
        out = q.new_zeros(len(q), q.shape[1] * q.shape[2])
        if num_rows:
            wrapper = self._planned(plan, q, keys, scale)
            out[:num_rows] = wrapper.run(q[:num_rows], (keys, values)).flatten(1)
        return out

    def _planned(self, plan: FlashInferPlan, q: Tensor, keys: Tensor, scale: float) -> Any:
        """The wrapper of this window, ready for this batch and for such heads."""
        heads = (q.shape[1], keys.shape[1], q.shape[2], scale, q.dtype, keys.dtype)
        if plan.window not in self._wrappers:
            if self._workspace is None:
                self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=q.device)
            made = self._package.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
            self._wrappers[plan.window] = made, None, ()
        wrapper, held, shape = self._wrappers[plan.window]
        if held is not plan or shape != heads:
            wrapper.plan(
                plan.qo_indptr,
                plan.page_indptr,
                plan.pages,
                plan.last_page_len,
                *heads[:3],
                plan.block_size,
                causal=True,
                sm_scale=scale,
                window_left=plan.window - 1,  # keys before the row's own; -1: all
                q_data_type=q.dtype,
                kv_data_type=keys.dtype,
            )
            self._wrappers[plan.window] = wrapper, plan, heads
        return wrapper


def _import() -> ModuleType:
    try:
        import flashinfer  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(
            f"attention='flashinfer' is not available: {error}; pip install flashinfer-python."
        ) from error
    return flashinfer
