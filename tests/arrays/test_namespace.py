"""`namespace` and the predicates treat host arrays and tensors alike."""

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from nano_inference.arrays import (
    HOST,
    dtype_name,
    host,
    is_floating,
    is_tensor,
    namespace,
    without_gradients,
)

NAMES = (
    *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


@pytest.mark.parametrize(
    "sample", [np.zeros(1), host.zeros(()), host.bfloat16, np.dtype("int8"), HOST]
)
def test_namespace_of_the_host(sample: Any) -> None:
    assert namespace(sample) is host


@pytest.mark.parametrize(
    "sample", [torch.zeros(1), torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), "cpu"]
)
def test_namespace_of_torch(sample: Any) -> None:
    assert namespace(sample) is torch


@pytest.mark.parametrize("xp", [host, torch], ids=["host", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_dtypes_have_one_name(xp: Any, name: str) -> None:
    dtype = getattr(xp, name)
    assert dtype_name(dtype) == name
    assert dtype_name(xp.empty(2, dtype=dtype).dtype) == name
    assert is_floating(dtype) is name.removeprefix("b").startswith("float")
    assert namespace(dtype) is xp


def test_complex_is_not_floating() -> None:
    assert not is_floating(torch.complex64)
    assert not is_floating(np.dtype("complex64"))


def test_arrays_and_tensors_are_tensors() -> None:
    values = host.zeros(()), np.zeros(1), torch.zeros(1), torch.nn.Parameter(torch.zeros(1))
    assert all(is_tensor(each) for each in values)
    others = [0.0], None, 1, np.float32(1), ml_dtypes.bfloat16(1), host.float32, HOST, torch
    assert not any(is_tensor(each) for each in others)


def test_arrays_are_tensors_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert is_tensor(host.zeros(1))
    assert not is_tensor([1])
    assert "torch" not in sys.modules


def test_decorator_without_gradients_infers() -> None:
    weight = torch.ones(2, requires_grad=True)

    @without_gradients
    def double(tensor: torch.Tensor, *, and_one: bool = False) -> torch.Tensor:
        """Double."""
        assert torch.is_inference_mode_enabled()
        return tensor * 2 + and_one

    result = double(weight, and_one=True)
    assert not result.requires_grad
    assert result.is_inference()
    assert result.tolist() == [3, 3]
    assert (double.__name__, double.__doc__) == ("double", "Double.")
    assert not torch.is_inference_mode_enabled()
    assert (weight * 2).requires_grad


def test_decorator_without_gradients_restores_the_mode() -> None:
    @without_gradients
    def fail() -> None:
        raise KeyError("expected")

    with pytest.raises(KeyError, match="expected"):
        fail()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("is_none", [True, False], ids=["None", "absent"])
def test_decorator_without_gradients_works_without_torch(
    monkeypatch: pytest.MonkeyPatch, is_none: bool
) -> None:
    @without_gradients
    def add(a: Any, b: Any) -> Any:
        return a + b

    if is_none:
        monkeypatch.setitem(sys.modules, "torch", None)
    else:
        monkeypatch.delitem(sys.modules, "torch")
    assert add(host.ones(2), b=1).tolist() == [2, 2]
