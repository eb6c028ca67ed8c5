"""A step's graphs capture only tensors on the (fake) card and never synchronize.

`FakeTensorMode` knows only shapes and devices. It rejects operations that mix devices or read a
value.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nano_inference.checkpoints.loading import load_spec
from nano_inference.device import graphs
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.step_graphs import GraphLimits, graphs_of
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.storage import allocate
from nano_inference.models.parameters.table import param_table
from nano_inference.ops.cuda.backend import cuda_ops
from nano_inference.sampling.columns import arrays_of, with_arrays
from tests.models.tiny import tiny_model

KernelInterface = pytest.importorskip("triton.runtime.jit").KernelInterface
pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="this build of torch knows no CUDA tensors"
)

CARD = torch.device("cuda:0")
LIMITS = (2**31 - 1, 65_535, 65_535)  # of a grid
# What may be captured beside kernels of ours. Views are not seen: they launch nothing.
ALLOWED = {
    *(
        "aten.empty.memory_format",
        "aten.new_empty.default",
        "aten.add.Tensor",
        "aten.copy_.default",
        "aten.clone.default",
    ),
    *(
        "aten.linear.default",
        "aten.mm.dtype",
        "aten.mm.default",
        "aten.addmm.default",
        "aten.div.Tensor",
    ),
    *(
        "aten._to_copy.default",
        "aten.to.dtype",
        "prim.device.default",
        "aten.contiguous.default",
        "aten.t.default",
    ),
}
VIEWS = (
    "view",
    "slice",
    "select",
    "split",
    "unbind",
    "detach",
    "alias",
    "unsqueeze",
    "transpose",
    "reshape",
)


class _Seen(TorchDispatchMode):
    """Record torch operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(view in str(func) for view in VIEWS):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


class _Queue:
    """Run operations that would be captured."""

    captures_early = True

    def __init__(self) -> None:
        self.num_captures = 0

    def synchronise(self) -> None:
        """Do nothing: no work is pending."""

    def new_pool(self) -> None:
        """Return no pool."""

    def capture(self, run: Callable[[], Any], pool: object) -> Any:
        self.num_captures += 1
        with _Seen() as seen:
            output = run()
        assert seen.names <= ALLOWED
        return SimpleNamespace(output=output)


def _launch(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
    assert all(0 < size <= limit for size, limit in zip(grid, LIMITS, strict=False)), f"grid {grid}"
    for value in (*args, *options.values()):
        assert not isinstance(value, Tensor) or value.device == CARD, (
            f"{kernel} reads a tensor on {value.device}"
        )


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lora_rank", [0, 40])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2", "granite", "qwen2"])
def test_captures_stay_on_the_card_without_synchronizing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    dtype: torch.dtype,
    batch_invariant: bool,
    lora_rank: int,
) -> None:
    spec = load_spec(tiny_model(tmp_path, family))
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=CARD)

    ops, cpu = cuda_ops(batch_invariant=batch_invariant), torch.device("cpu")
    params = allocate(param_table(spec), dtype, cpu, ops.allocate)
    with mode:
        model = Decoder(spec, {name: fake(param) for name, param in params.items()}, ops, 256)
    storage = KVStorage(spec, 8, 16, dtype, cpu)
    storage.keys, storage.values = fake(storage.keys), fake(storage.values)
    card = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda _: 0)
    # copied to the card before a capture
    monkeypatch.setattr(
        graphs,
        "to_device",
        lambda batch, _: with_arrays(batch, [fake(each) for each in arrays_of(batch)]),
    )
    monkeypatch.setattr(
        KernelInterface,
        "__getitem__",
        lambda kernel, grid: lambda *args, **options: _launch(kernel, *args, grid=grid, **options),
    )
    queue: Any = _Queue()
    with mode:
        results = graphs.DrawResults(16, CARD)
        limits = GraphLimits(draws=16, rows=48, chunks=16, blocks=8, lora_rank=lora_rank)
        made = graphs_of(model, storage, queue, None, results, limits)  # type: ignore[arg-type]
        made.capture_at_start()
        made.trunks.capture(made.trunks.sizes)
    # with adapters: another forward, and draws with and without adapters of the head
    decodes, trunks = (8, 2) if lora_rank else (3, 1)
    sizes = len(made.decodes.sizes), len(made.trunks.sizes)
    assert queue.num_captures == decodes * sizes[0] + trunks * sizes[1]
