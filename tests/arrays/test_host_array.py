"""Every method of `HostArray` returns the numbers, dtype, shape and memory of torch's."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.arrays import HostArray, host
from tests.arrays import twins as of
from tests.arrays.twins import Case, Twins, compare, twins
from tests.depth import at_depth

SEEDS = st.integers(0, 2**32)


@dataclass(frozen=True)
class Method:
    """A method and the arrays for which numpy and torch shall agree.

    Attributes:
        run: Calls the method on an array, with functions of its namespace and a source of choices.
        odd: Floats include NaN, infinities and fractions.
        signed_zeros: The sign of a 0 in the result is defined.
    """

    run: Case
    dtypes: tuple[str, ...] = of.EVERY + of.FLOAT8
    min_dims: int = 0
    min_size: int = 0
    odd: bool = True
    layouts: tuple[str, ...] = of.LAYOUTS
    tolerance: float = 0.0
    signed_zeros: bool = True


def dim_of(x: Any, pick: random.Random) -> int:
    """Return a dimension, counted from either end."""
    return pick.randrange(-x.ndim, x.ndim)


def some_indices(x: Any, dim: int, xp: Any, pick: random.Random) -> Any:
    size = x.shape[dim]
    chosen = [pick.randrange(size) for _ in range(pick.randrange(4))] if size else []
    return xp.tensor(chosen, dtype=xp.int64)


def read(x: Any, xp: Any, pick: random.Random) -> Any:
    return x.numel(), x.element_size(), x.dim(), x.shape


def steps(x: Any, xp: Any, pick: random.Random) -> Any:
    """Strides are defined where there are neighbors."""
    if not x.numel():
        return ()
    dims = [dim for dim in range(-x.ndim, x.ndim) if x.shape[dim] > 1]
    return [x.stride(dim) for dim in dims], [x.stride()[dim] for dim in dims]


def flatten(x: Any, xp: Any, pick: random.Random) -> Any:
    if x.ndim == 0 or pick.random() < 0.2:
        return x.flatten()
    start, end = sorted(pick.choices(range(x.ndim), k=2))
    return x.flatten(start - pick.choice((0, x.ndim)), end - pick.choice((0, x.ndim)))


def unflatten(x: Any, xp: Any, pick: random.Random) -> Any:
    dim = dim_of(x, pick)
    size = x.shape[dim]
    sizes = pick.choice([(size, 1), (1, size), (-1, 1), (1, -1, 1), *[(2, -1)] * (size % 2 == 0)])
    return x.unflatten(dim, sizes)


def expand(x: Any, xp: Any, pick: random.Random) -> Any:
    if not x.ndim:
        return x.expand(2)
    sizes = [pick.choice((size, -1)) if size != 1 else pick.randrange(4) for size in x.shape]
    sizes = [pick.randrange(3) for _ in range(pick.randrange(2))] + sizes
    return x.expand(sizes) if pick.random() < 0.5 else x.expand(*sizes)


def narrow(x: Any, xp: Any, pick: random.Random) -> Any:
    dim = dim_of(x, pick)
    size = x.shape[dim]
    start = pick.randrange(size + 1)
    length = pick.randrange(size - start + 1)
    return x.narrow(dim, start - pick.choice((0, size)) if start < size else start, length)


def select(x: Any, xp: Any, pick: random.Random) -> Any:
    dim = dim_of(x, pick)
    size = x.shape[dim]
    return x.select(dim, pick.randrange(-size, size)) if size else ()


def split(x: Any, xp: Any, pick: random.Random) -> Any:
    dim = dim_of(x, pick)
    if pick.random() < 0.5:
        return x.split(pick.randrange(1, 5), dim)
    first = pick.randrange(x.shape[dim] + 1)
    return x.split([first, 0, x.shape[dim] - first], dim=dim)


def permute(x: Any, xp: Any, pick: random.Random) -> Any:
    order = [dim - pick.choice((0, x.ndim)) for dim in pick.sample(range(x.ndim), x.ndim)]
    return x.permute(order) if pick.random() < 0.5 or not order else x.permute(*order)


def view(x: Any, xp: Any, pick: random.Random) -> Any:
    """Views in another shape or dtype. Both libraries refuse a shape that needs a copy."""
    shapes = [(x.numel(),), [1, *x.shape], (*x.shape, 1), (-1,) if x.numel() else (0, 3)]
    shape = pick.choice(shapes)
    try:
        return x.view(shape) if pick.random() < 0.5 else x.view(*shape)
    except (ValueError, RuntimeError):
        return "needs a copy"


def view_of_dtype(x: Any, xp: Any, pick: random.Random) -> Any:
    size = x.element_size()
    names = {1: ("uint8", "int8"), 2: ("int16", "bfloat16"), 4: ("int32",), 8: ("int64",)}[size]
    bits = x.view(getattr(xp, pick.choice(names)))
    if x.ndim and x.is_contiguous() and x.numel() and x.shape[-1] > 1:
        return bits, x.view(xp.uint8)
    return bits


def along(name: str, repeated: bool = True) -> Case:
    """Return a case for a reduction over all numbers, a dimension or several dimensions."""

    def run(x: Any, xp: Any, pick: random.Random) -> Any:
        method = getattr(x, name)
        if not x.ndim or pick.random() < 0.2:
            return method()
        dims = pick.sample(range(-x.ndim, 0), pick.randrange(1, x.ndim + 1))
        dim = pick.choice([dims[0], *[tuple(dims)] * repeated])
        return method(dim), method(dim=dim, keepdim=pick.random() < 0.5)

    return run


def of_dim(name: str) -> Case:
    return lambda x, xp, pick: getattr(x, name)(dim_of(x, pick))


def argsort(x: Any, xp: Any, pick: random.Random) -> Any:
    down, dim = pick.random() < 0.5, dim_of(x, pick)
    free = x.argsort(dim, descending=down)  # equal numbers may come in any order
    ordered = x.argsort(dim=dim, descending=down, stable=True)
    return ordered, x.gather(dim, free)


def index_select(x: Any, xp: Any, pick: random.Random) -> Any:
    dim = dim_of(x, pick)
    return x.index_select(dim, some_indices(x, dim, xp, pick))


def index_copy(x: Any, xp: Any, pick: random.Random) -> Any:
    dim = dim_of(x, pick)
    indices = xp.arange(pick.randrange(x.shape[dim] + 1))
    source = x.index_select(dim, indices).clone()
    return x.index_copy_(dim, x.shape[dim] - 1 - indices, source)


def index_fill(x: Any, xp: Any, pick: random.Random) -> Any:
    dim = dim_of(x, pick)
    return x.index_fill(dim, some_indices(x, dim, xp, pick), pick.choice((0, 1)))


def masked_fill(x: Any, xp: Any, pick: random.Random) -> Any:
    kept = xp.tensor([pick.random() < 0.5 for _ in range(x.shape[-1])], dtype=xp.bool)
    value = pick.choice((0, 1, *[-xp.inf, 0.3] * is_floating(x, xp)))
    return x.masked_fill(kept, value), x.masked_fill(x == x, value)


def is_floating(x: Any, xp: Any) -> bool:
    return x.dtype in {xp.float16, xp.float32, xp.float64, xp.bfloat16}


def gather(x: Any, xp: Any, pick: random.Random) -> Any:
    dim = dim_of(x, pick)
    if not x.shape[dim]:
        return ()
    shape = [pick.randrange(size + 1) for size in x.shape]
    count = int(np.prod(shape))
    indices = [pick.randrange(x.shape[dim]) for _ in range(count)]
    return x.gather(dim, xp.tensor(indices, dtype=xp.int64).reshape(shape))


def repeat_interleave(x: Any, xp: Any, pick: random.Random) -> Any:
    dim = dim_of(x, pick)
    counts = xp.tensor([pick.randrange(3) for _ in range(x.shape[dim])], dtype=xp.int64)
    return (
        x.repeat_interleave(2),
        x.repeat_interleave(pick.randrange(3), dim=dim),
        x.repeat_interleave(counts, dim),
    )


def clamp(x: Any, xp: Any, pick: random.Random) -> Any:
    low, high = (-1.3, 1.7) if is_floating(x, xp) else (1, 2)
    return x.clamp(low), x.clamp(max=high), x.clamp(low, high), x.clamp(min=high, max=low)


def div(x: Any, xp: Any, pick: random.Random) -> Any:
    by = pick.choice((1, 2, 3, *[-2, 0.75] * is_floating(x, xp)))
    by_number = x.div(by, rounding_mode="floor"), x.div(by)
    return by_number, x.div(x.clone().fill_(by)) if is_floating(x, xp) else ()


def to(x: Any, xp: Any, pick: random.Random) -> Any:
    dtype = getattr(xp, pick.choice(of.EVERY))
    return (
        x.to(dtype),
        x.to(x.dtype),
        x.to("cpu"),
        x.to(x.device, dtype),
        x.to(device=x.device, dtype=dtype, non_blocking=True),
        x.to(x.dtype, copy=True),
    )


def to_floats(x: Any, xp: Any, pick: random.Random) -> Any:
    # torch limits numbers beyond the range of float8_e4m3fn, ml_dtypes makes them NaN
    narrow = [x.clamp(-448, 448).to(getattr(xp, name)) for name in of.FLOAT8]
    return [x.to(getattr(xp, name)) for name in of.FLOATS], narrow


def new(name: str, is_filled: bool) -> Case:
    def run(x: Any, xp: Any, pick: random.Random) -> Any:
        method = getattr(x, name)
        made = (
            method(2, 0),
            method((3, 1), dtype=xp.int32),
            method([2], device=x.device),
            method(()),
        )
        return made if is_filled else [(each.shape, zeroed(each)) for each in made]

    return run


def zeroed(x: Any) -> Any:
    x[...] = 0
    return x


def copy(x: Any, xp: Any, pick: random.Random) -> Any:
    row = xp.tensor([1, 0, 1, 1][: x.shape[-1]], dtype=getattr(xp, pick.choice(of.EVERY)))
    return x.copy_(row, non_blocking=True)


def chunk(x: Any, xp: Any, pick: random.Random) -> Any:
    return x.chunk(pick.randrange(1, 6), dim_of(x, pick))


def index_put(x: Any, xp: Any, pick: random.Random) -> Any:
    rows = xp.tensor(pick.choices(range(x.shape[0]), k=3), dtype=xp.int64)
    once = xp.arange(x.shape[0])[: pick.randrange(x.shape[0] + 1)]
    added = x.index_put((rows,), xp.ones(3, *x.shape[1:], dtype=x.dtype), accumulate=True)
    return added, x.index_put((once,), x[: len(once)] + 1)


def scatter(x: Any, xp: Any, pick: random.Random) -> Any:
    dim = dim_of(x, pick)
    order = xp.zeros(x.shape, dtype=xp.int64) + pick.randrange(x.shape[dim])
    return x.scatter_(dim, order.narrow(dim, 0, 1), x.narrow(dim, 0, 1).clone() + 1)


def topk(x: Any, xp: Any, pick: random.Random) -> Any:
    dim = dim_of(x, pick)
    values, places = x.topk(pick.randrange(x.shape[dim] + 1), dim=dim)
    return values, x.gather(dim, places)


IN_PLACE = ("permuted", "strided", "narrowed")
METHODS = {
    "data_ptr": Method(lambda x, xp, pick: (x.data_ptr() % x.element_size(), x)),
    "numel": Method(read),
    "element_size": Method(read),
    "dim": Method(read),
    "stride": Method(steps),
    "is_contiguous": Method(lambda x, xp, pick: x.is_contiguous() or not x.numel()),
    "contiguous": Method(lambda x, xp, pick: x.contiguous() if x.numel() else ()),
    "detach": Method(lambda x, xp, pick: x.detach()),
    "cpu": Method(lambda x, xp, pick: x.cpu()),
    "numpy": Method(lambda x, xp, pick: x.numpy().tolist(), of.FLOATS[:3] + of.INTS),
    "clone": Method(lambda x, xp, pick: x.clone()),
    "copy_": Method(copy, of.EVERY, 1, layouts=IN_PLACE),
    "fill_": Method(lambda x, xp, pick: x.fill_(pick.choice((0, 1))), layouts=IN_PLACE),
    "zero_": Method(lambda x, xp, pick: x.zero_(), layouts=IN_PLACE),
    "to": Method(to, of.EVERY, odd=False),
    "float": Method(lambda x, xp, pick: x.float(), ("float32",) * 9 + of.EVERY),
    "double": Method(lambda x, xp, pick: x.double(), ("float64",) * 9 + of.EVERY),
    "long": Method(lambda x, xp, pick: x.long(), ("int64",) * 9 + of.EVERY, odd=False),
    "int": Method(lambda x, xp, pick: x.int(), ("int32",) * 9 + of.EVERY, odd=False),
    "bool": Method(lambda x, xp, pick: x.bool(), ("bool",) * 9 + of.EVERY),
    "view": Method(view),
    "flatten": Method(flatten),
    "unflatten": Method(unflatten, min_dims=1),
    "unsqueeze": Method(lambda x, xp, pick: x.unsqueeze(pick.randrange(-x.ndim - 1, x.ndim + 1))),
    "expand": Method(expand),
    "narrow": Method(narrow, min_dims=1),
    "select": Method(select, min_dims=1),
    "split": Method(split, min_dims=1),
    "unbind": Method(of_dim("unbind"), min_dims=1),
    "t": Method(lambda x, xp, pick: x.t() if x.ndim <= 2 else ()),
    "permute": Method(permute),
    "movedim": Method(lambda x, xp, pick: x.movedim(dim_of(x, pick), dim_of(x, pick)), min_dims=1),
    "amax": Method(along("amax"), of.EVERY, min_size=1, signed_zeros=False),
    "amin": Method(along("amin"), of.EVERY, min_size=1, signed_zeros=False),
    "aminmax": Method(
        lambda x, xp, pick: tuple(x.aminmax()), of.EVERY, min_size=1, signed_zeros=False
    ),
    "sum": Method(along("sum"), of.EVERY, odd=False),
    "any": Method(along("any"), of.FLOATS + of.SIGNED + ("bool",)),
    "all": Method(along("all"), of.FLOATS + of.SIGNED + ("bool",)),
    "argmax": Method(along("argmax", repeated=False), of.NUMBERS, min_size=1),
    "cumsum": Method(of_dim("cumsum"), of.EVERY, 1, odd=False),
    "argsort": Method(argsort, of.NUMBERS, 1, signed_zeros=False),
    "nonzero": Method(lambda x, xp, pick: (x.nonzero(), x.nonzero(as_tuple=True)), of.EVERY, 1),
    "index_select": Method(index_select, of.EVERY, 1),
    "index_copy_": Method(index_copy, of.EVERY, 1, layouts=IN_PLACE),
    "index_fill": Method(index_fill, of.EVERY, 1),
    "masked_fill": Method(masked_fill, of.EVERY, 1),
    "gather": Method(gather, of.EVERY, 1),
    "repeat_interleave": Method(repeat_interleave, of.EVERY, 1),
    "clamp": Method(clamp, of.NUMBERS),
    "isfinite": Method(lambda x, xp, pick: x.isfinite(), of.NUMBERS),
    "isnan": Method(lambda x, xp, pick: x.isnan(), of.NUMBERS),
    "abs": Method(lambda x, xp, pick: x.abs(), of.NUMBERS),
    "exp": Method(lambda x, xp, pick: x.exp(), of.FLOATS, tolerance=1e-6),
    "log": Method(lambda x, xp, pick: x.abs().log(), of.FLOATS, tolerance=1e-6),
    "square": Method(lambda x, xp, pick: x.square(), of.NUMBERS),
    "div": Method(div, of.NUMBERS),
    "new_empty": Method(new("new_empty", is_filled=False)),
    "new_zeros": Method(new("new_zeros", is_filled=True)),
    "chunk": Method(chunk, min_dims=1),
    "mean": Method(along("mean"), of.FLOATS, min_size=1, odd=False, tolerance=1e-6),
    "index_put": Method(index_put, of.NUMBERS, 1, min_size=1, odd=False),
    "scatter_": Method(scatter, of.NUMBERS, 1, min_size=1, layouts=IN_PLACE),
    "topk": Method(topk, of.NUMBERS, 1, signed_zeros=False),
    # further cases
    "view (dtype)": Method(view_of_dtype),
    "to (float)": Method(to_floats, of.FLOATS),
}


def test_methods_are_all_compared_with_torch() -> None:
    names = {name for name, value in vars(HostArray).items() if callable(value)}
    assert {each for each in names if not each.startswith("__")} <= METHODS.keys()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@settings(max_examples=at_depth(100))
@given(data=st.data(), seed=SEEDS)
def test_method_returns_the_same_as_torch(method: Method, data: st.DataObject, seed: int) -> None:
    pairs = twins(
        method.dtypes,
        method.min_dims,
        min_size=method.min_size,
        odd=method.odd,
        layouts=method.layouts,
    )
    pair: Twins = data.draw(pairs)
    with np.errstate(all="ignore"):
        compare(
            method.run,
            pair,
            seed,
            tolerance=method.tolerance,
            signed_zeros=method.signed_zeros,
        )


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_sums_of_narrow_floats_are_rounded_once(name: str) -> None:
    array, tensor = of.twins_of(np.ones((3, 3000), dtype=getattr(host, name)))
    for dim in (None, 0, 1):
        of.assert_same(array.sum(dim), tensor.sum(dim))
    of.assert_same(array.cumsum(1), tensor.cumsum(1))
    assert array.sum(1).tolist() == [3000 if name == "float16" else 3008] * 3


def test_functions_of_numpy_order_along_their_axis() -> None:
    array = host.tensor([[3, 1], [2, 4]])
    assert np.argsort(array, axis=0).tolist() == [[1, 0], [0, 1]]
    assert np.sort(array, axis=0).tolist() == [[2, 1], [3, 4]]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("narrow", (0, 1, 3)), ("narrow", (0, 4, 0)), ("narrow", (0, -4, 1)), ("narrow", (1, 0, 1))]
    + [(name, (1, 0)) for name in ("select", "index_select")]
    + [
        ("split", ([1, 1],)),
        ("view", (2, 2)),
        ("view", (4, -1)),
        ("expand", (4,)),
        ("to", ("cuda",)),
    ]
    + [("div", (2, "trunc"))],
)
def test_wrong_arguments_are_rejected(name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((ValueError, IndexError)):
        getattr(host.tensor([1, 2, 3]), name)(*arguments)


@pytest.mark.parametrize("shape", [(5, 64), (5, 0, 3), (5,)])
def test_empty_rows_have_the_strides_of_torch(shape: tuple[int, ...]) -> None:
    """Kernels require adjacent columns of arrays without rows, too."""
    array, tensor = host.zeros(shape), torch.zeros(shape)
    none = host.tensor([], dtype=host.int64), torch.tensor([], dtype=torch.int64)
    assert array[none[0]].stride() == tensor[none[1]].stride()
    assert array.stride() == tensor.stride()
