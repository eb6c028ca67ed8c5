"""Parts of the decoder that compute alike with host arrays and tensors."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nano_inference.arrays import HOST, as_host, host
from nano_inference.models.activations import UNGATED
from nano_inference.models.blocks.step import rounded
from nano_inference.models.parameters.fused import FusedTensor
from nano_inference.models.parameters.param import ParamSpec, Source
from nano_inference.models.parameters.slots import Slot
from nano_inference.models.parameters.storage import allocate
from nano_inference.models.parameters.values import as_held, holds_numbers, patch, read, write
from nano_inference.models.rope import rotation
from nano_inference.models.routes import RouteRecord
from nano_inference.models.spec.rope import RopeSpec
from nano_inference.models.taps import Taps
from nano_inference.ops.rowwise import Norm, gate, normed_rows
from tests.models.test_rope import SCALINGS, longrope, spec_of
from tests.same_bits import same

CPU = torch.device("cpu")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def rope_of(kind: str, head_dim: int) -> RopeSpec:
    if kind == "longrope":
        return spec_of(longrope(head_dim), 1e4, 1024, head_dim)
    if kind == "proportional":
        return RopeSpec(theta=1e6, kind="proportional", share=0.25, factor=2.0)
    if kind == "none":
        return RopeSpec(kind="none")
    if kind == "query scales":
        scaled = spec_of(SCALINGS["yarn"], 1e6, 1024, head_dim)
        return replace(scaled, query_beta=0.1, original_max_position=100)
    return spec_of(SCALINGS[kind], 5e5, 1024, head_dim)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("kind", [*SCALINGS, "longrope", "proportional", "none", "query scales"])
def test_rotary_tables_equal_tensors(kind: str, head_dim: int) -> None:
    spec = rope_of(kind, head_dim)
    on_host, on_torch = (rotation(spec, head_dim, 999, device) for device in (HOST, CPU))
    assert same(on_host.cos, on_torch.cos)
    assert same(on_host.sin, on_torch.sin)
    assert on_host.cos.dtype == host.float32
    assert (on_host.query_scales is None) == (kind != "query scales")
    if on_host.query_scales is not None:
        assert same(on_host.query_scales, on_torch.query_scales)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_are_rounded_alike(dtype: str) -> None:
    for number in np.random.default_rng(0).uniform(0, 100, 2000).tolist():
        wanted = float(torch.tensor(number, dtype=getattr(torch, dtype)))
        assert rounded(number, getattr(host, dtype)) == wanted
        assert rounded(number, getattr(torch, dtype)) == wanted


def test_activations_agree_with_tensors() -> None:
    x, numbers = randn(40, 33) * 4, torch.tensor([0.8, 0.3, 0.5, -1e-6])
    x[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert same(UNGATED["relu2"](as_host(x), None), UNGATED["relu2"](x, None))
    on_host = UNGATED["xielu"](as_host(x[1:]), as_host(numbers))
    torch.testing.assert_close(
        torch.from_numpy(on_host.numpy()), UNGATED["xielu"](x[1:], numbers), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gates_and_norms_agree_with_tensors(dtype: str) -> None:
    x, weight = randn(7, 3, 64).to(getattr(torch, dtype)), randn(64)
    norms = [Norm(each, 1e-6, 1.0, library) for each, library in _norms(weight, dtype)]
    for on_host, on_torch in (
        (normed_rows(as_host(x), norms[0]), normed_rows(x, norms[1])),
        *((gate(as_host(x), name), gate(x, name)) for name in ("silu", "gelu_tanh")),
        (gate(as_host(x), "clamped_swiglu"), gate(x, "clamped_swiglu")),
    ):
        assert on_host.dtype == as_host(on_torch).dtype
        close = 1e-6 if dtype == "float32" else 2e-2
        wanted = on_torch.float().numpy()
        np.testing.assert_allclose(on_host.float().numpy(), wanted, rtol=close, atol=1e-6)


def _norms(weight: torch.Tensor, dtype: str) -> list[tuple[Any, Any]]:
    return [(as_host(weight), getattr(host, dtype)), (weight, getattr(torch, dtype))]


def test_parts_of_a_fused_tensor_equal_tensors() -> None:
    names = ("a", "b", "c", "d")
    fused = FusedTensor((2, 8, 6), names, (2, 4, 2, 6), (0, 2, 1, 3))
    whole = randn(2, 8, 6)
    parts, others = fused.split(as_host(whole)), fused.split(whole)
    assert all(same(a, b) and x == y for (x, a), (y, b) in zip(parts, others, strict=True))
    assert same(fused.join([part for _, part in parts]), whole)
    places = torch.randperm(96)[:40]
    pieces = fused.split_places(as_host(places), as_host(whole.flatten()[places]))
    flat = dict(parts)
    for name, inside, numbers in pieces:
        assert same(flat[name].contiguous().flatten()[inside], torch.from_numpy(numbers.numpy()))
    wanted = fused.split_places(places, whole.flatten()[places])
    for (a, *arrays), (b, *tensors) in zip(pieces, wanted, strict=True):
        assert a == b
        assert all(map(same, arrays, tensors))


@pytest.mark.parametrize("axis", [0, 1])
def test_slots_select_the_same_numbers(axis: int) -> None:
    slot = Slot("w", (8, 6), axis, ((1, 2), (3, 6)), param="p", start=0)
    whole, indices = randn(8, 6), torch.randperm(48)[:30]
    assert same(slot.take(as_host(whole)), slot.take(whole))
    both = slot.take_places(as_host(indices), as_host(whole.flatten()[indices]))
    assert all(map(same, both, slot.take_places(indices, whole.flatten()[indices])))
    on_host, on_torch = host.zeros(8, 6), torch.zeros(8, 6)
    slot.put(on_host, slot.take(as_host(whole)))
    slot.put(on_torch, slot.take(whole))
    assert same(on_host, on_torch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_parameters_equal_tensors(dtype: str) -> None:
    table = (
        ParamSpec("norm", (6,), (Source("n", (6,)),), keep_float32=True),
        ParamSpec("bias", (6,), (Source("b", (6,)),)),
    )
    held = {}
    for library, device in ((host, HOST), (torch, CPU)):
        params: dict[str, Any] = allocate(table, getattr(library, dtype), device)
        for name, kept in (("norm", "float32"), ("bias", dtype)):
            values: Any = randn(6) if library is torch else as_host(randn(6))
            slot = Slot(name, (6,), param=name, start=0)
            assert holds_numbers(values)
            write(params, slot, values)
            assert params[name].dtype == getattr(library, kept)
            patch(params, slot, library.tensor([4, 1]), values[:2] * 3)
            held[name, device] = read(params, slot)
            held["as held " + name, device] = as_held(params, slot, values)
    for name in {name for name, _ in held}:
        assert same(held[name, HOST], held[name, CPU])


def test_route_records_equal_tensors() -> None:
    moe: Any = SimpleNamespace(layers=(False, True, True), experts_per_token=2)
    records = [RouteRecord(moe, 4, 8, device) for device in (HOST, CPU)]
    ids, slots = torch.randint(0, 9, (12, 2)), torch.tensor([*range(4, 14), -1, -1])
    for record, kind in zip(records, (as_host, lambda x: x), strict=True):
        record.write(2, kind(slots), kind(ids))
        record.copy_blocks(((1, 3),))
        record.forget([0])
    assert same(*(record.read([3, 0, 1], 20) for record in records))


def test_tapped_rows_equal_tensors() -> None:
    taps = [Taps((2, 0)), Taps((2, 0))]
    for layer in (0, 2):
        x = randn(3, 4 + layer)
        batch: Any = None
        taps[0].note(layer, batch, host.empty(x.shape), as_host(x))
        taps[1].note(layer, batch, torch.empty(x.shape), x)
    assert same(*(each.rows(3) for each in taps))


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from importlib import import_module
for name in sys.argv[1:]:
    import_module("nano_inference.models." + name)
"""
MODULES = (
    *("rope", "routes", "taps", "activations", "blocks.build", "sharding.rank_exchange"),
    *("sharding.context", "parameters.table", "parameters.values", "parameters.fused"),
    *("parameters.slots", "parameters.storage"),
)


def test_models_are_imported_without_torch() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, *MODULES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
