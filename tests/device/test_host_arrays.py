"""Storages and sleep on host arrays, with the bits of tensors."""

import itertools
import subprocess
import sys
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from nano_inference import ConfigError, EngineConfig
from nano_inference.arrays import HOST, HostArray, as_host, as_torch, dtype_for, host
from nano_inference.device import backends
from nano_inference.device.backends import (
    choose_dtype,
    choose_ops,
    device_of,
    in_kind_of_ops,
    numerics_of,
)
from nano_inference.device.kv_tensors import KVStorage, common_layout, state_layout
from nano_inference.device.sleep import Sleep
from nano_inference.device.state_tensors import StateStorage
from nano_inference.device.units import UnitMap
from nano_inference.kv_cache.sliding_window import UNIFORM, UnitPool
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.cpu.build import available_instruction_set
from nano_inference.ops.cuda import availability
from nano_inference.ops.reference.backend import reference_ops
from tests.models.tiny import MORE_FAMILIES, llama_config

CPU = torch.device("cpu")
BLOCKS, SIZE = 6, 4
FAMILIES = ["llama", "windows", "gemma4", "deepseek-v3", "lfm2", "qwen3_5"]


def spec_of(family: str) -> ModelSpec:
    fields = llama_config() | MORE_FAMILIES.get(family, {})
    spec = spec_from_config(fields | ({"hidden_act": None} if family == "gemma4" else {}))
    return replace(spec, windows=(0, 5)) if family == "windows" else spec


def storage_on(device: Any, spec: ModelSpec, dtype: str, kept: Any = "auto") -> KVStorage:
    layout = state_layout([spec], SIZE) or common_layout([spec], 64)
    units = None
    if layout != UNIFORM:
        pool = UnitPool(24, BLOCKS, layout)
        order = np.random.default_rng(1).permutation(24)[: len(pool.unit_of)]
        for index, unit in enumerate(order.tolist()):
            pool.unit_of[index] = unit
        units = UnitMap(pool, device)
    storage = KVStorage(spec, BLOCKS, SIZE, dtype_for(device, dtype), device, units, kept)
    for tensor in storage.tensors:
        tensor.fill_(0)
    return storage


def same(one: Any, other: Any) -> bool:
    """Return True if a host array and a tensor have the same dtype, shape and bits."""
    assert isinstance(one, HostArray)
    assert isinstance(other, Tensor)
    one = as_torch(one)
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_storage_of_host_arrays_has_the_bits_of_tensors(family: str, dtype: str) -> None:
    torch.manual_seed(0)
    spec = spec_of(family)
    ours, theirs = (storage_on(device, spec, dtype) for device in (HOST, CPU))
    assert ours.block_shape == theirs.block_shape
    slots = torch.randperm(BLOCKS * SIZE)[:13]
    layers = [layer for layer, place in enumerate(theirs.places) if place[0] >= 0]
    for layer in layers:
        heads, _, _, width = theirs.lie(layer)[0].shape
        keys, values = torch.randn(2, 13, heads, width)
        theirs.write(layer, slots, keys, values)
        ours.write(layer, *on_host(slots, keys, values))
    if theirs.states is not None:
        write_states(ours.states, theirs.states, slots)
    for storage in (ours, theirs):
        storage.copy_blocks(((0, 3), (2, 5)))
    grid = torch.arange(BLOCKS * SIZE).reshape(SIZE, BLOCKS)
    for layer in layers:
        pairs = zip(ours.gather(layer, *on_host(grid)), theirs.gather(layer, grid), strict=True)
        assert all(same(*pair) for pair in pairs)
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert same(one, other)
    data = theirs.read_blocks([5, 0, 2])
    assert same(ours.read_blocks([5, 0, 2]), data)
    assert ours.read_blocks([]).shape == theirs.read_blocks([]).shape
    ours.write_blocks([1, 4, 3], *on_host(data))
    theirs.write_blocks([1, 4, 3], data)
    assert same(ours.read_blocks(range(BLOCKS)), theirs.read_blocks(range(BLOCKS)))


def on_host(*tensors: Tensor) -> list[Any]:
    return [as_host(each) for each in tensors]


def write_states(ours: Any, theirs: StateStorage, slots: Tensor) -> None:
    """Write the same states, and compare what is read."""
    blocks = torch.tensor([4, 1])
    columns = theirs.spec.columns.items()
    for layer, (name, column) in itertools.product(theirs.places, columns):
        places = slots if column.per_token else blocks
        rows = torch.randn(len(places), *column.shape)
        for states, (where, values) in ((theirs, (places, rows)), (ours, on_host(places, rows))):
            if column.per_token:
                states.write(layer, name, where, values)
            else:
                states.write_state(layer, where, values)
        if column.per_token:
            pair = (
                states.gather(layer, name, where) for states, where in both(ours, theirs, slots)
            )
        else:
            pair = (states.read_state(layer, where) for states, where in both(ours, theirs, blocks))
        assert same(*pair)


def both(ours: Any, theirs: StateStorage, places: Tensor) -> list[tuple[Any, Any]]:
    return [(ours, as_host(places)), (theirs, places)]


def test_host_unit_map_reads_the_pool_itself() -> None:
    pool = UnitPool(24, BLOCKS, common_layout([spec_of("windows")], 64))
    units = UnitMap(pool, HOST)
    pool.unit_of[0] = 17
    assert units.units()[0, 0] == 17
    assert isinstance(units.units(), HostArray)


class Model:
    """A model of the host without recorded work to drop."""

    device = HOST


@pytest.mark.parametrize("dtype", [host.bfloat16, host.float32])
def test_sleep_of_host_arrays_changes_no_bit(dtype: Any) -> None:
    arrays = [host.ones(shape, dtype=dtype) for shape in ((3, 5), (1024, 1024), (0,))]
    arrays[1][:] = np.random.default_rng(0).standard_normal((1024, 1024))
    addresses, before = [each.data_ptr() for each in arrays], [each.clone() for each in arrays]
    sleep = Sleep(cast("Any", arrays), [cast("Any", Model())], keep=True)
    assert not arrays[1][512].any(), "the system has the pages"
    sleep.end()
    assert [each.data_ptr() for each in arrays] == addresses
    assert all(host.equal(*pair) for pair in zip(arrays, before, strict=True))


# -- choice of the device --------------------------------------------------------------------------


@pytest.fixture
def host_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "has_nvidia_device", lambda: False)
    if available_instruction_set() is None:
        pytest.skip("there are no CPU kernels")


@pytest.mark.parametrize(
    ("options", "is_host"),
    [
        ({}, True),
        ({"device": "cpu"}, True),
        ({"backend": "cpu"}, True),
        ({"backend": "reference"}, False),
        ({"attention": "flex"}, False),
        ({"tensor_parallel": 2}, False),
        ({"pipeline_parallel": 2}, False),
    ],
)
@pytest.mark.usefixtures("host_arrays")
def test_device_of_chooses_the_host_for_one_rank_on_cpu_kernels(
    options: dict[str, Any], is_host: bool
) -> None:
    assert device_of(EngineConfig("m", **options)) == (HOST if is_host else CPU)


@pytest.mark.usefixtures("host_arrays")
def test_device_without_kernels_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "available_instruction_set", lambda: None)
    assert device_of(EngineConfig("m")) == CPU


@pytest.mark.usefixtures("host_arrays")
def test_gpu_takes_precedence_over_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(EngineConfig("m")) is HOST, "torch is not asked without a device"
    monkeypatch.setattr(availability, "has_nvidia_device", lambda: True)
    assert device_of(EngineConfig("m")) == torch.device("cuda")
    backends._warn_once.cache_clear()
    monkeypatch.setattr(backends, "_has_torch", lambda: False)
    assert device_of(EngineConfig("m")) is HOST
    assert "although there is a GPU: the CUDA kernels need torch" in caplog.text


@pytest.mark.usefixtures("host_arrays")
def test_models_without_kernels_fall_back_to_tensors() -> None:
    config, spec = EngineConfig("m"), spec_of("llama")
    specs = {"policy": spec}
    dtype = choose_dtype(config, spec, HOST)
    assert dtype is host.float32
    ops = choose_ops(config, specs, dtype, HOST)(1)
    assert ops.name == "cpu"
    assert in_kind_of_ops(ops, dtype, HOST) == (host.float32, HOST)
    narrow = {"policy": replace(spec, head_dim=24)}
    ops = choose_ops(config, narrow, dtype, HOST)(1)
    assert in_kind_of_ops(ops, dtype, HOST) == (torch.float32, CPU)


IMPORTS = """
import importlib, sys

sys.modules["torch"] = None  # any import of it fails
for name in sys.argv[1:]:
    importlib.import_module(f"nano_inference.{name}")
"""
# modules of an engine of one rank on the CPU kernels
ON_HOST = (
    *("device." + name for name in ("backends", "blocks", "kept_files", "kept_ids", "kv_tensors")),
    *("device." + name for name in ("memory", "quantization", "routed_experts", "runner", "sleep")),
    *("device.state_tensors", "device.units", "drafts.costs", "drafts.drafter", "drafts.eagle"),
    *("drafts.heads", "drafts.history", "drafts.joined", "drafts.medusa", "drafts.model"),
    *("drafts.sources", "drafts.suffix", "ranks.build", "ranks.lockstep", "ranks.parts"),
    *("ops.cuda.availability", "engine.engine"),
)


def test_engine_on_the_host_imports_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *ON_HOST], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_missing_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"needs torch, which is not installed: .*pip install"):
        device_of(EngineConfig("m", backend="reference"))


def test_numerics_of_the_cpu_kernels_do_not_name_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    config, ops = EngineConfig("m"), replace(reference_ops(), name="cpu")
    numerics = numerics_of(config, ops, cast("Any", host.bfloat16), HOST)
    assert numerics.fingerprint == f"cpu-{ops.version}/bfloat16/cpu"
    assert numerics == numerics_of(config, ops, torch.bfloat16, CPU)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert numerics == numerics_of(config, ops, torch.bfloat16, CPU)
    assert "/torch-" in numerics_of(config, reference_ops(), torch.bfloat16, CPU).fingerprint
