"""Allocation of parameters, their sizes in bytes, and their formats."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nano_inference.arrays import Device, Dtype, Tensor, is_tensor, namespace
from nano_inference.errors import ConfigError
from nano_inference.models.parameters.param import Formats, ParamSpec
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.formats import Format, Stack, bounds_of, groups_of, parts_of

Allocate = Callable[..., Any]  # `Ops.allocate`


def allocate(
    table: tuple[ParamSpec, ...],
    dtype: Dtype,
    device: Device,
    matrix: Allocate | None = None,
    quantization: Formats = None,
    vector: Allocate | None = None,
) -> dict[str, Any]:
    """Allocate parameters, uninitialized, by name.

    Args:
        table: Parameters.
        dtype: Dtype of the parameters that are not always float32.
        device: Device of the parameters.
        matrix: Function that makes matrices. None: that of the reference backend.
        quantization: Formats of the matrices.
        vector: Function that makes plain tensors of a shape and dtype. None: `empty`.
    """
    if matrix is None:
        from nano_inference.ops.reference.backend import allocate as matrix  # imports torch
    xp = namespace(dtype)
    if vector is None:
        vector = partial(_empty, xp, device)
    return {
        param.name: matrix(param.shape, dtype, device, **_how(param, quantization))
        if len(param.shape) == 2 and not param.keep_float32
        else vector(param.shape, xp.float32 if param.keep_float32 else dtype)
        for param in table
    }


def _empty(xp: Any, device: Device, shape: tuple[int, ...], dtype: Dtype) -> Tensor:
    return xp.empty(shape, dtype=dtype, device=device)


def _how(param: ParamSpec, quantization: Formats) -> dict[str, Any]:
    """Return the keyword arguments of `Ops.allocate`."""
    form = param.form(quantization)
    if form is not None:
        return {"form": form, "segments": param.segments}
    return {} if param.latent is None else {"latent": param.latent}


def num_bytes(table: tuple[ParamSpec, ...], dtype: Dtype, quantization: Formats = None) -> int:
    """Return the size of a table's parameters in bytes."""
    return sum(_bytes_of(param, dtype, param.form(quantization)) for param in table)


def codes_bytes(table: tuple[ParamSpec, ...], dtype: Dtype, quantization: Formats) -> int:
    """Return the size in bytes of quantized copies of the parameters that may be quantized."""
    forms = ((param, param.form(quantization)) for param in table)
    return sum(_bytes_of(param, dtype, form) for param, form in forms if form is not None)


def _bytes_of(param: ParamSpec, dtype: Dtype, form: Format | Stack | None) -> int:
    if form is None:
        size = 4 if param.keep_float32 else dtype.itemsize
        return math.prod(param.shape) * size
    rows, columns = param.shape
    return sum(
        count * _row_bytes(columns, each, bounds_of(param.segments, columns, each))
        for count, each in parts_of(form, rows)
    )


def _row_bytes(columns: int, form: Format, bounds: tuple[int, ...]) -> int:
    groups = len(groups_of(bounds, form))
    return -(-columns * form.bits // 8) + math.ceil(groups * form.group_bytes)


def require_whole_groups(
    spec: ModelSpec, ranks: int, name: str, quantization: Formats = None
) -> None:
    """Raise `ConfigError` if tensor ranks cannot divide the quantized weights.

    A rank's columns must be whole groups, and its sums must equal those of a single rank.

    Args:
        spec: Description of the whole model.
        ranks: Number of ranks that share a layer.
        name: Value of `EngineConfig.quantization`.
        quantization: `name`, or the format of each parameter.
    """
    for param in param_table(spec):
        form, segments = param.form(quantization), param.segments
        if form is None or segments is None or isinstance(form, Stack):
            continue  # a stack is not cut by columns
        if (len(bounds_of(segments, param.shape[1], form)) - 1) % ranks:
            raise ConfigError(
                f"quantization={name!r} is not possible with tensor_parallel={ranks} for "
                f"{spec.architecture}: the {param.shape[1]} columns of {param.name!r} are not "
                f"divided at multiples of {form.input_group or 4}; use fewer ranks."
            )


def form_of(param: Any) -> Format | Stack | None:
    """Return the format of a parameter, or None if unquantized."""
    return getattr(param, "form", None)


def numbers_of(param: Any) -> Tensor:
    """Return all numbers of a parameter, [rows, columns]: a view, or a copy if it is packed."""
    return param if is_tensor(param) else param.read()


def coded_copies(
    table: tuple[ParamSpec, ...], params: Mapping[str, Any], matrix: Allocate, quantization: Formats
) -> dict[str, Any]:
    """Return the parameters with quantized copies of the matrices that may be quantized.

    Other parameters are shared, not copied.
    """
    copies = dict(params)
    for param in table:
        weight = params[param.name]
        if param.form(quantization) is not None and form_of(weight) is None:
            copy = matrix(param.shape, weight.dtype, weight.device, **_how(param, quantization))
            copy.write(0, numbers_of(weight))
            copies[param.name] = copy
    return copies


def formats_of(params: Mapping[str, Any]) -> dict[str, Format | Stack]:
    """Return the format of each quantized parameter."""
    return {name: form for name, param in params.items() if (form := form_of(param)) is not None}
