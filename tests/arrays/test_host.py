"""Every function of `host` returns the numbers, dtype, shape and memory of torch's."""

import inspect
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.arrays import host
from tests.arrays import twins as of
from tests.arrays.twins import Case, Twins, compare, twins
from tests.depth import at_depth

SEEDS = st.integers(0, 2**32)


@dataclass(frozen=True)
class Function:
    """A function and the arrays for which numpy and torch shall agree, as in `Method`."""

    run: Case
    dtypes: tuple[str, ...] = of.EVERY
    min_dims: int = 0
    max_dims: int = 4
    odd: bool = True
    tolerance: float = 0.0
    signed_zeros: bool = True


def creation(name: str, is_filled: bool = True) -> Case:
    def run(x: Any, xp: Any, pick: random.Random) -> Any:
        make = getattr(xp, name)
        made = [
            make(2, 3),
            make(0),
            make([3, pick.randrange(3)], dtype=x.dtype),
            make((), device=x.device, dtype=None),
            make(x.shape, dtype=x.dtype),
        ]
        return made if is_filled else [each.fill_(0) for each in made]

    return run


def full(x: Any, xp: Any, pick: random.Random) -> Any:
    value = pick.choice((0, 1, True, 0.5, -xp.inf))
    return (
        xp.full((2, 0, 3), value),
        xp.full(x.shape, value, device=x.device),
        xp.full((3,), 1, dtype=x.dtype),
        xp.full_like(x, True),
        xp.full_like(x, value, dtype=xp.float32),
    )


def alike(x: Any, xp: Any, pick: random.Random) -> Any:
    dtype = getattr(xp, pick.choice(of.EVERY))
    uninitialized = xp.empty_like(x, dtype=dtype), xp.empty_like(x, device=x.device)
    zeros = xp.zeros_like(x), xp.zeros_like(x, dtype=dtype, device=x.device)
    return [each.fill_(1) for each in uninitialized], zeros


def arange(x: Any, xp: Any, pick: random.Random) -> Any:
    start, step = pick.randrange(-5, 5), pick.randrange(1, 4)
    end = start + pick.randrange(10, 20)
    dtype = getattr(xp, pick.choice((*of.FLOATS, "int32", "int64")))
    return (
        xp.arange(max(end, 0)),
        xp.arange(start, end, device=x.device),
        xp.arange(start, end, step, dtype=dtype),
        xp.arange(start, end, float(step)),
        xp.arange(start / 2, end, step / 4),
    )


def tensor(x: Any, xp: Any, pick: random.Random) -> Any:
    dtype = getattr(xp, pick.choice(of.FLOATS))
    return (
        [xp.tensor(each) for each in ([1, 2], [1, 2.5], 3, 0.5, True, [[True], [False]], [], [[]])],
        xp.tensor(x.tolist()) if x.numel() and x.ndim else (),
        xp.tensor([1, 2.25], dtype=dtype, device=x.device),
        [xp.tensor(values) for values in (np.ones(2, np.int8), np.ones((1, 2)))],
    )


def from_numpy(x: Any, xp: Any, pick: random.Random) -> Any:
    numbers = np.arange(6).reshape(2, 3)
    array = xp.from_numpy(numbers)
    array[1, 2] = 9
    return array, numbers.tolist()


def frombuffer(x: Any, xp: Any, pick: random.Random) -> Any:
    memory = bytearray(range(48))
    size = x.element_size()
    part = xp.frombuffer(memory, dtype=x.dtype, count=2, offset=size)
    part[0] = 0
    return part, xp.frombuffer(memory, dtype=x.dtype), list(memory)


def cat(x: Any, xp: Any, pick: random.Random) -> Any:
    dim = pick.randrange(-x.ndim, x.ndim)
    part = x.narrow(dim, 0, pick.randrange(x.shape[dim] + 1))
    nothing = xp.empty(0, dtype=x.dtype)
    return (
        xp.cat([x, part], dim=dim),
        xp.cat((nothing, x, nothing, part, x), dim),
        xp.cat([nothing, nothing]),
        xp.cat([x]),
    )


def stack(x: Any, xp: Any, pick: random.Random) -> Any:
    return xp.stack([x] * pick.randrange(1, 4), dim=pick.randrange(-x.ndim - 1, x.ndim + 1))


def where(x: Any, xp: Any, pick: random.Random) -> Any:
    mask = xp.tensor([pick.random() < 0.5 for _ in range(x.shape[-1])], dtype=xp.bool)
    number = pick.choice((0, 1, 0.3, -xp.inf, True))
    return (
        xp.where(mask, x, x + x),
        xp.where(mask, x, number),
        xp.where(mask, number, x),
        xp.where(x == x, x, xp.zeros((), dtype=x.dtype)),
        [xp.where(mask, first, other) for first, other in ((1, 0), (0.1, 0.0), (True, False))],
        xp.where(mask, 1, 0.1),
    )


def equal(x: Any, xp: Any, pick: random.Random) -> Any:
    same, other = x.clone(), x.contiguous().clone()
    if x.numel():
        other.reshape(-1)[pick.randrange(x.numel())] = 1
    return xp.equal(x, same), xp.equal(x, other), xp.equal(x, x.reshape(1, *x.shape))


def searchsorted(x: Any, xp: Any, pick: random.Random) -> Any:
    dtype = getattr(xp, pick.choice(("int32", "int64", "float32", "float64")))
    ordered = xp.tensor(sorted(pick.choices(range(-3, 4), k=pick.randrange(6))), dtype=dtype)
    values, right = x.to(dtype).contiguous(), pick.random() < 0.5
    return xp.searchsorted(ordered, values, right=right), xp.searchsorted(ordered, 1)


def bincount(x: Any, xp: Any, pick: random.Random) -> Any:
    values = x.long().abs().reshape(-1)
    return xp.bincount(values), xp.bincount(values, minlength=pick.randrange(9))


def argsort(x: Any, xp: Any, pick: random.Random) -> Any:
    dim, down = pick.randrange(-x.ndim, x.ndim), pick.random() < 0.5
    return (
        xp.argsort(x, dim=dim, descending=down, stable=True),
        x.gather(dim, xp.argsort(x, dim, descending=down)),
        xp.argsort(x, stable=True),
    )


def isfinite(x: Any, xp: Any, pick: random.Random) -> Any:
    return xp.isfinite(x)


def unary(name: str) -> Case:
    return lambda x, xp, pick: getattr(xp, name)(x)


def sqrt(x: Any, xp: Any, pick: random.Random) -> Any:
    return xp.sqrt(x.abs())


def rsqrt(x: Any, xp: Any, pick: random.Random) -> Any:
    return xp.rsqrt(x.abs())


def softplus(x: Any, xp: Any, pick: random.Random) -> Any:
    return xp.nn.functional.softplus(x)


def log(x: Any, xp: Any, pick: random.Random) -> Any:
    return xp.log(x.abs())


def larger_and_smaller(x: Any, xp: Any, pick: random.Random) -> Any:
    row = x[..., :1]
    return xp.maximum(x, row), xp.minimum(row, x)


def limits(x: Any, xp: Any, pick: random.Random) -> Any:
    names = "min", "max", "bits"
    whole = [[getattr(xp.iinfo(getattr(xp, each)), name) for name in names] for each in of.INTS]
    return whole, [
        [float(getattr(xp.finfo(getattr(xp, each)), name)) for name in (*names, "eps", "tiny")]
        for each in of.FLOATS + of.FLOAT8
    ]


def randint(x: Any, xp: Any, pick: random.Random) -> Any:
    low = pick.randrange(-(2**62), 2**62)
    numbers = xp.randint(low, low + 9, tuple(x.shape))
    return (
        xp.randint(low, low + 1, tuple(x.shape)),
        (numbers >= low).all(),
        (numbers - low < 9).all(),
    )


FUNCTIONS = {
    "empty": Function(creation("empty", is_filled=False)),
    "zeros": Function(creation("zeros")),
    "ones": Function(creation("ones")),
    "full": Function(full),
    "full_like": Function(full),
    "empty_like": Function(alike),
    "zeros_like": Function(alike),
    "arange": Function(arange),
    "randint": Function(randint),
    "tensor": Function(tensor, ("float32", "int64", "bool")),
    "from_numpy": Function(from_numpy),
    "frombuffer": Function(frombuffer),
    "cat": Function(cat, min_dims=1),
    "stack": Function(stack),
    "where": Function(where, min_dims=1),
    "equal": Function(equal),
    "searchsorted": Function(searchsorted, of.NUMBERS, odd=False),
    "bincount": Function(bincount, of.SIGNED, odd=False),
    "argsort": Function(argsort, of.NUMBERS, min_dims=1, signed_zeros=False),
    "isfinite": Function(isfinite, of.NUMBERS),
    "exp": Function(unary("exp"), of.FLOATS, tolerance=1e-6),
    "log": Function(log, of.FLOATS, tolerance=1e-6),
    "cos": Function(unary("cos"), of.FLOATS, odd=False, tolerance=1e-6),
    "sin": Function(unary("sin"), of.FLOATS, odd=False, tolerance=1e-6),
    "sqrt": Function(sqrt, of.FLOATS, tolerance=3e-16),
    "rsqrt": Function(rsqrt, ("float32",), tolerance=1e-6),
    "nn": Function(softplus, ("float32",), tolerance=1e-6),
    "floor": Function(unary("floor"), of.FLOATS),
    "round": Function(unary("round"), of.FLOATS),
    "maximum": Function(larger_and_smaller, of.NUMBERS, min_dims=1, signed_zeros=False),
    "minimum": Function(larger_and_smaller, of.NUMBERS, min_dims=1, signed_zeros=False),
    "finfo": Function(limits),
    "iinfo": Function(limits),
}
IMPORTED = {"Any", "Sequence", "HostArray", "shape_of"}


def test_functions_are_all_compared_with_torch() -> None:
    names = {name for name, value in vars(host).items() if callable(value)} - IMPORTED
    names = {each for each in names if not each.startswith("_") and not inspect.ismodule(each)}
    assert names == FUNCTIONS.keys()


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@settings(max_examples=at_depth(100))
@given(data=st.data(), seed=SEEDS)
def test_function_returns_the_same_as_torch(
    function: Function, data: st.DataObject, seed: int
) -> None:
    pair: Twins = data.draw(
        twins(function.dtypes, function.min_dims, function.max_dims, odd=function.odd)
    )
    with np.errstate(all="ignore"):
        compare(
            function.run,
            pair,
            seed,
            tolerance=function.tolerance,
            signed_zeros=function.signed_zeros,
        )


def test_dtypes_have_the_names_of_torch() -> None:
    dtypes = {name: value for name, value in vars(host).items() if isinstance(value, np.dtype)}
    assert {name: value.name for name, value in dtypes.items()} == {each: each for each in dtypes}
    assert {value.itemsize for value in dtypes.values()} == {1, 2, 4, 8}
    assert all(getattr(torch, name).itemsize == value.itemsize for name, value in dtypes.items())
