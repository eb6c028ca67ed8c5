"""Engines whose weights are host arrays take a trainer's tensors from every library, with the same
bits as engines on torch.
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import torch as safetensors_torch

from nano_inference import WeightSyncManager
from nano_inference.arrays import HOST, HostArray, as_host, as_torch, host
from nano_inference.checkpoints.lora import Pair
from nano_inference.engine.adapters import merged
from nano_inference.errors import WeightUpdateError
from nano_inference.models.parameters.storage import allocate
from nano_inference.models.parameters.table import param_table
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.weights import staging
from nano_inference.weights.transports import flat_bucket, opened_bucket, wire
from nano_inference.weights.transports.files import MARKER, write_folder
from nano_inference.weights.transports.interface import Deadline
from nano_inference.weights.transports.reuse import ReusedMemory
from nano_inference.weights.transports.safetensors_bytes import SafetensorsBytes
from tests.weights.weight_cases import EMBEDDING, NEW, NORM, OLD, UP, decoder

FIRST, SECOND = (f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1))
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Exported:
    """An array of another library, which offers DLPack only."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class Unexportable:
    """An array of another library whose dtype DLPack cannot give to numpy."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("unsupported dtype")

    def __dlpack_device__(self) -> Any:
        return 1, 0

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._array


SOURCES: dict[str, Any] = {
    "torch": lambda tensor: tensor.clone().requires_grad_(),
    "numpy": lambda tensor: as_host(tensor).view(np.ndarray).copy(),
    "dlpack": lambda tensor: Exported(tensor.float().numpy().copy()),
    "array": lambda tensor: Unexportable(as_host(tensor).view(np.ndarray)),
}


def on_host(dtype: str = "float32") -> WeightSyncManager:
    """Return a manager of zeros, in host arrays."""
    model = decoder("cpu")
    params = allocate(param_table(model.spec), getattr(host, dtype), HOST, cpu_ops(2).allocate)
    part = SimpleNamespace(part=model.part, params=params, device=HOST, dtype=getattr(host, dtype))
    manager = WeightSyncManager(part)  # pyright: ignore[reportArgumentType]
    manager.sync_blocking(OLD)
    return manager


def on_torch(dtype: str = "float32") -> WeightSyncManager:
    manager = WeightSyncManager(decoder("cpu", KINDS[dtype]))
    manager.sync_blocking(OLD)
    return manager


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("source", SOURCES)
def test_update_from_any_library_has_equal_bits(source: str, dtype: str) -> None:
    managers = on_host(dtype), on_torch(dtype)
    assert managers[0].checksum() == managers[1].checksum()
    sent = {name: SOURCES[source](tensor) for name, tensor in NEW.items()}
    managers[0].sync_blocking(sent)
    managers[1].sync_blocking(NEW)
    assert managers[0].checksum() == managers[1].checksum()
    for name, tensor in managers[1].state_dict().items():
        assert torch.equal(managers[0].tensor(name), tensor)


@pytest.mark.parametrize("name", [NORM, UP])
def test_patches_from_any_library_have_equal_bits(name: str) -> None:
    managers = on_host(), on_torch()
    indices, values = torch.tensor([3, 0, 5]), torch.tensor([1.5, -2.0, 0.25]).double()
    managers[0].sync_blocking([[(name, indices.numpy(), Exported(values.numpy()))]])
    managers[1].sync_blocking([[(name, indices, values)]])
    assert managers[0].checksum() == managers[1].checksum()
    for wrong, message in ([3, 3], "index 3 more than once"), ([0, 2**40], "is outside its"):
        with pytest.raises(WeightUpdateError, match=message):
            managers[0].sync_blocking([[(name, np.array(wrong), np.ones(2, np.float32))]])


@pytest.mark.parametrize("copy", [True, False])
def test_live_weights_can_be_exchanged(copy: bool) -> None:
    """A staged tensor in the memory of live weights would be overwritten before its use."""
    manager = on_host()
    live = manager.weights.state_dict()
    manager.stage({FIRST: live[SECOND], SECOND: manager.tensor(FIRST)}, copy=copy)
    manager.finish()
    assert torch.equal(manager.tensor(FIRST), OLD[SECOND])
    assert torch.equal(manager.tensor(SECOND), OLD[FIRST])


@pytest.mark.parametrize("source", ["torch", "numpy"])
def test_copied_tensor_may_change_before_it_is_written(source: str) -> None:
    manager = on_host()
    sent = SOURCES[source](NEW[NORM])
    manager.stage({NORM: sent})
    with torch.no_grad():
        sent[...] = 0
    manager.finish()
    assert torch.equal(manager.tensor(NORM), NEW[NORM])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(64, np.int64), "floating point tensor, not int64; send one of"),
        (torch.zeros(64, dtype=torch.complex64), "floating point tensor, not complex64"),
        (np.array(["a"] * 64), "floating point tensor, not <U1"),
        ([0.0] * 64, "floating point tensor, not list"),
        (torch.empty(64, device="meta"), "dense tensor with data"),
        (np.zeros(3, np.float32), r"has shape \(3,\), expected \(64,\)"),
    ],
)
def test_unsuitable_values_are_named(value: Any, message: str) -> None:
    message = f"{NORM!r} .*{message}"
    for manager in on_host(), on_torch():
        with pytest.raises(WeightUpdateError, match=message):
            manager.sync_blocking({NORM: value})


@pytest.mark.parametrize(("dtype", "value"), [("bfloat16", 3.4e38), ("float32", np.nan)])
@pytest.mark.parametrize("source", ["torch", "numpy"])
def test_values_that_are_not_finite_are_found(source: str, dtype: str, value: float) -> None:
    tensor = NEW[NORM].double()
    tensor[7] = value * (1.01 if dtype == "bfloat16" else 1)
    with pytest.raises(WeightUpdateError, match="NaN or infinite values"):
        on_host(dtype).stage({NORM: SOURCES[source](tensor)}, check_finite=True)
    on_host(dtype).stage({NORM: SOURCES[source](NEW[NORM])}, check_finite=True)


@pytest.mark.parametrize("source", SOURCES)
def test_torch_engine_takes_arrays_of_any_library(source: str) -> None:
    manager = on_torch()
    manager.sync_blocking({NORM: SOURCES[source](NEW[NORM])})
    assert torch.equal(manager.tensor(NORM), NEW[NORM])
    manager.sync_blocking({NORM: as_host(OLD[NORM].double())})
    assert torch.equal(manager.tensor(NORM), OLD[NORM])


@pytest.mark.parametrize("kind", [lambda each: each, as_torch])
def test_memory_of_views_is_found(kind: Any) -> None:
    whole = as_host(np.zeros((4, 6), np.float32))
    start, extents = whole.data_ptr(), [staging._memory_of(kind(whole)[1:3])]
    assert extents == [(start + 24, start + 72)]
    assert staging._memory_of(kind(whole)[:, 5]) == (start + 20, start + 96)
    first, last = staging._memory_of(kind(whole)[2:2])
    assert first == last
    assert staging._memory_of(whole[::-1]) == (start, start + 96)
    joined = staging._joined([(5, 9), (1, 3), (8, 12), (3, 4)])
    assert joined == [(1, 3), (3, 4), (5, 12)]
    touched = [at for at in range(14) if staging._overlaps((at, at + 1), joined)]
    assert touched == [1, 2, 3, *range(5, 12)]
    assert staging._overlaps((4, 6), joined)
    assert not staging._overlaps((4, 5), joined)
    assert not staging._overlaps((7, 7), joined)


# -- transports ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", wire.DTYPES)
def test_files_of_arrays_and_tensors_are_equal(tmp_path: Path, dtype: str) -> None:
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in NEW.items()}
    weights[UP] = weights[UP].t().contiguous().t()
    arrays = {name: as_host(tensor).view(np.ndarray) for name, tensor in weights.items()}
    file = "weights-00001.safetensors"
    first, second = (
        write_folder(tmp_path / name, each) for name, each in (("a", weights), ("b", arrays))
    )
    content = (first / file).read_bytes()
    assert content == (second / file).read_bytes()
    assert (first / MARKER).read_bytes() == (second / MARKER).read_bytes()
    expected = {name: tensor.contiguous() for name, tensor in weights.items()}
    assert content == safetensors_torch.save(expected)
    manager = on_host()
    manager.sync_blocking(first)
    assert torch.equal(manager.tensor(UP), weights[UP].float())


def test_flat_buckets_of_arrays_and_tensors_are_equal() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in NEW.items()}
    weights = {NORM: NEW[NORM].bfloat16(), UP: NEW[UP].double(), EMBEDDING: NEW[EMBEDDING]}
    arrays = {name: as_host(tensor) for name, tensor in weights.items()}
    (description, content), (same, array) = flat_bucket(weights), flat_bucket(arrays)
    assert same == description
    assert isinstance(array, HostArray)
    assert array.tobytes() == content.numpy().tobytes()
    for name, opened in opened_bucket(description, array, shapes).items():
        assert isinstance(opened, HostArray)
        assert torch.equal(as_torch(opened), weights[name])


def test_safetensors_bytes_arrive_as_host_arrays() -> None:
    weights = {NORM: NEW[NORM].bfloat16(), EMBEDDING: NEW[EMBEDDING].double()}
    content = safetensors_torch.save(weights)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    file = SafetensorsBytes(len(content), shapes, set(), ReusedMemory())
    for start in range(0, len(content), 1000):
        file.add(content[start : start + 1000])
    assert file.is_whole
    for manager in on_host(), on_torch():
        buckets: Any = file.receive(shapes, Deadline(30)).buckets
        for bucket in buckets:
            assert all(isinstance(each, HostArray) for each in bucket.values())
            manager.sync_blocking(bucket)
        assert torch.equal(manager.tensor(NORM), weights[NORM].float())
        assert torch.equal(manager.tensor(EMBEDDING), weights[EMBEDDING].float())


# -- adapters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_have_equal_bits(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(size, generator=random) for size in ((48, 33), (5, 33), (5, 48)))
    weight = weight.to(dtype)
    expected = merged(weight, Pair(a, b.T, 0.3))
    ours: Any = merged(as_host(weight), Pair(as_host(a), as_host(b).T, 0.3))
    assert isinstance(ours, HostArray)
    assert torch.equal(as_torch(ours), expected)


def test_imports_need_no_torch() -> None:
    modules = [
        *("weights.staging", "weights.sync", "weights.sources", "weights.update"),
        *("weights.transports.files", "weights.transports.safetensors_bytes"),
        *("weights.transports.wire", "weights.transports.addresses"),
        *("engine.async_engine", "engine.engine", "engine.adapters", "engine.block_exchange"),
        *("engine.scoring", "engine.embedding", "remote.core", "remote.engine_process"),
        *("remote.engine_weights", "remote.block_link", "remote.client", "remote.in_process"),
        *("remote.process_client", "server.app", "server.main", "fleet", "cli.main"),
        *("data", "text", "structured"),
    ]
    names = ", ".join(f"nano_inference.{module}" for module in modules)
    code = f"import sys; sys.modules['torch'] = None; import {names}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
