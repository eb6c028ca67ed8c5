"""The plain torch loop with FlashInfer's decode attention over pages: a stronger peer than torch's
attention with a mask. Nothing else differs.

FlashInfer plans on the host before every step, as its users do; the plan goes to buffers that the
graph reads, and one graph serves all lengths.
"""

import importlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.torch_loop import TorchLoop, captured

PAGE = 16  # tokens
WORKSPACE = 128 << 20  # bytes; what FlashInfer's documentation recommends


def is_there() -> bool:
    """Whether FlashInfer is installed."""
    return find_spec("flashinfer") is not None


class FlashLoop(TorchLoop):
    """See `TorchLoop`; a sequence has the same number of pages whatever its length."""

    def _make_cache(self) -> None:
        spec, device = self.spec, self.device
        self.pages = -(-self.longest // PAGE)
        shape = (spec.num_layers, self.batch * self.pages, spec.num_kv_heads, PAGE, spec.head_dim)
        self.keys, self.values = (
            torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(2)
        )
        self.lengths = [0] * self.batch  # tokens of each sequence, with the one of the next step
        self._graph: Callable[[], None] | None = None
        integers = {"dtype": torch.int32, "device": device}
        package: Any = importlib.import_module("flashinfer")
        self._wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE, dtype=torch.uint8, device=device),
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.zeros(self.batch + 1, **integers),
            paged_kv_indices_buffer=torch.zeros(self.batch * self.pages, **integers),
            paged_kv_last_page_len_buffer=torch.ones(self.batch, **integers),
        )

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """See `TorchLoop.prefill`."""
        super().prefill(prompts)
        self.lengths[: len(prompts)] = [len(prompt) + 1 for prompt in prompts]

    @torch.inference_mode()
    def decode(self, steps: int, longest: int) -> None:
        """See `TorchLoop.decode`; lengths are known here."""
        for _ in range(steps):
            self._plan()
            if self._graph is None:
                self._capture()
            else:
                self._graph()
            self.lengths = [min(length + 1, self.longest) for length in self.lengths]

    @torch.inference_mode()
    def capture_all(self, longest: int) -> None:
        """Make the one graph, so that none is made while it is timed."""
        self.positions.zero_()
        self.lengths = [1] * self.batch
        self._plan()
        self._capture()

    def _capture(self) -> None:
        """Make the graph, and compute a step with it: captured work warms up on copies."""
        kept = self.tokens.clone(), self.positions.clone()
        self._graph = captured(lambda: self._step(1), self.device)
        self.tokens.copy_(kept[0])
        self.positions.copy_(kept[1])
        self._graph()

    def _plan(self) -> None:
        spec = self.spec
        counts = [-(-length // PAGE) for length in self.lengths]
        ends = torch.tensor([0, *counts]).cumsum(0)
        indices = [
            row * self.pages + page for row, count in enumerate(counts) for page in range(count)
        ]
        last = [(length - 1) % PAGE + 1 for length in self.lengths]
        self._wrapper.plan(
            ends.to(torch.int32),
            torch.tensor(indices, dtype=torch.int32, device=self.device),
            torch.tensor(last, dtype=torch.int32),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            PAGE,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )

    def _store_prompts(self, i: int, start: int, k: Tensor, v: Tensor) -> None:
        width = k.shape[1]
        places = torch.arange(width, device=self.device)
        rows = torch.arange(start, start + len(k), device=self.device)[:, None] * self.pages
        pages, offsets = rows + places // PAGE, (places % PAGE).expand(len(k), width)
        self.keys[i, pages, :, offsets] = k
        self.values[i, pages, :, offsets] = v

    def _attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        pages, offsets = self.rows * self.pages + self.positions // PAGE, self.positions % PAGE
        self.keys[i, pages, :, offsets] = k[:, 0]
        self.values[i, pages, :, offsets] = v[:, 0]
        return self._wrapper.run(q[:, 0].contiguous(), (self.keys[i], self.values[i]))
