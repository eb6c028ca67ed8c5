"""The CPU backend's layers with a state: kernels/state.cpp on tensors."""

import ctypes
from typing import Any

from nano_inference.arrays import Tensor, dtype_for, has_dtype, namespace
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.cpu.library import struct
from nano_inference.ops.cpu.weights import LANES
from nano_inference.ops.state import DeltaWeights, ShortConvWeights, StateView

STEP, CONVOLUTION, RULE = struct("StateStep"), struct("Convolution"), struct("DeltaRule")
MOST_HEAD = 256  # numbers per head, as in kernels/state.cpp
_COLUMNS = ("positions", "slot_mapping", "row_chunks", "cu_seqlens_q", "block_tables")
PROBLEMS = {
    1: "a row's slot does not match its position.",
    2: "a block does not exist.",
    3: "rows and chunks do not match.",
    4: "a block that a row reads has no unit.",
}


class CpuStates:
    """Implementation of `Ops.short_conv`, `Ops.delta_net` and `Ops.sigmoid_gate` for a fixed number
    of threads.
    """

    def __init__(self, kernels: ctypes.CDLL, num_threads: int) -> None:
        self.kernels = kernels
        self.num_threads = num_threads
        self._last: tuple[StateView, list[Tensor], Any] | None = None

    def short_conv(
        self,
        projected: Tensor,
        weights: ShortConvWeights,
        batch: ForwardBatch,
        view: StateView,
        layer: int,
    ) -> Tensor:
        """Implement `Ops.short_conv`. The result is rounded to the weights' dtype."""
        dtype, channels = dtype_for(projected, weights.conv.dtype), len(weights.conv)
        rows = _rows(projected, 3 * channels)
        out = namespace(rows).empty((len(rows), channels), dtype=dtype)
        kept = view.column(layer, "inputs")
        step, conv = _step(batch, view), _convolution(weights.conv, weights.bias, kept)
        _require_fit(
            self.kernels.nano_short_conv(
                ctypes.addressof(step),
                ctypes.addressof(conv),
                rows.data_ptr(),
                has_dtype(out, "bfloat16"),
                out.data_ptr(),
                self.num_threads,
            )
        )
        return out

    def delta_net(
        self,
        projected: Tensor,
        weights: DeltaWeights,
        batch: ForwardBatch,
        view: StateView,
        layer: int,
    ) -> Tensor:
        """Implement `Ops.delta_net`. The result is rounded to the weights' dtype."""
        dtype, width = dtype_for(projected, weights.conv.dtype), weights.width
        rows = projected.float().contiguous()
        out = namespace(rows).empty((len(rows), width), dtype=dtype)
        self.delta_layer(weights, view, layer)(batch, rows, out)
        return out

    def delta_layer(self, weights: DeltaWeights, view: StateView, layer: int) -> "CpuDeltaLayer":
        """Return a layer of the delta rule on the states of a view."""
        return CpuDeltaLayer(self, weights, view, layer)

    def step_of(self, batch: ForwardBatch, view: StateView) -> Any:
        """Return the structure of `_step`. The layers of a step share it."""
        columns = [getattr(batch, name) for name in _COLUMNS]
        last = self._last
        if (
            last is None
            or last[0] is not view
            or any(one is not other for one, other in zip(columns, last[1], strict=True))
        ):
            self._last = last = view, columns, _step(batch, view)
        return last[2]

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = x.contiguous(), gate.float()
        _require_lanes(x.shape[1])
        if gate.stride(1) != 1 or gate.shape != x.shape:
            raise ValueError(
                f"a gate {tuple(gate.shape)} does not match rows {tuple(x.shape)}; both must "
                "have the same shape and adjacent columns."
            )
        out = namespace(x).empty_like(x)
        self.kernels.nano_sigmoid_gate(
            x.data_ptr(),
            gate.data_ptr(),
            gate.stride(0),
            *x.shape,
            has_dtype(x, "bfloat16"),
            out.data_ptr(),
            self.num_threads,
        )
        return out


class CpuDeltaLayer:
    """A layer of the delta rule, with the addresses that its weights and states have at
    construction.
    """

    def __init__(
        self, states: CpuStates, weights: DeltaWeights, view: StateView, layer: int
    ) -> None:
        require_heads(weights.key_dim, weights.value_dim)
        self._states, self._weights, self._view = states, weights, view
        names = ("inputs", "keys", "values", "decays", "state")
        kept = {name: view.column(layer, name) for name in names}
        vectors = {"log_decay": weights.log_decay, "decay_bias": weights.decay_bias}
        for name, vector in (*vectors.items(), ("norm", weights.norm)):
            if not vector.is_contiguous():
                raise ValueError(f"{name} must be contiguous; got {tuple(vector.shape)}.")
        if weights.norm.dtype != weights.conv.dtype:
            raise ValueError(f"the norm is {weights.norm.dtype}, its input {weights.conv.dtype}.")
        self._channels = len(weights.conv)
        self._columns = self._channels + weights.width + 2 * weights.value_heads
        self._conv = _convolution(weights.conv, None, kept["inputs"])
        self._rule = RULE(
            stride=self._columns,
            norm=weights.norm.data_ptr(),
            key_heads=weights.key_heads,
            value_heads=weights.value_heads,
            key_dim=weights.key_dim,
            value_dim=weights.value_dim,
            in_tiles=weights.in_tiles,
            eps=weights.eps,
            **{name: kept[name].data_ptr() for name in names[1:]},
            **{name: vector.data_ptr() for name, vector in vectors.items()},
        )

    def __call__(self, batch: ForwardBatch, rows: Tensor, out: Tensor) -> None:
        """Compute rows, contiguous float32 [N, columns] -> out [N, width]."""
        if rows.shape[1] != self._columns:
            raise ValueError(f"rows must have {self._columns} columns; got {rows.shape[1]}.")
        states = self._states
        mixed = namespace(rows).empty((len(rows), self._channels))
        self._rule.projected, self._rule.mixed = rows.data_ptr(), mixed.data_ptr()
        _require_fit(
            states.kernels.nano_delta_net(
                ctypes.addressof(states.step_of(batch, self._view)),
                ctypes.addressof(self._conv),
                ctypes.addressof(self._rule),
                has_dtype(out, "bfloat16"),
                out.data_ptr(),
                states.num_threads,
            )
        )


def _require_fit(problem: int) -> None:
    if problem:
        raise ValueError(f"the batch does not match the stored states: {PROBLEMS[problem]}")


def require_heads(key_dim: int, value_dim: int) -> None:
    """Raise `ValueError` for head sizes that the kernel does not support."""
    for size in (key_dim, value_dim):
        _require_lanes(size)
        if size > MOST_HEAD:
            raise ValueError(f"heads of {size} numbers exceed the maximum of {MOST_HEAD}.")


def _require_lanes(size: int) -> None:
    if size % LANES:
        raise ValueError(f"{size} must be a multiple of {LANES}.")


def _rows(projected: Tensor, columns: int) -> Tensor:
    if projected.shape[1] != columns:
        raise ValueError(f"rows must have {columns} columns; got {projected.shape[1]}.")
    return projected.float().contiguous()


def _step(batch: ForwardBatch, view: StateView) -> Any:
    """Return the structure that kernels/state.cpp reads. It is valid as long as the batch and the
    view live.
    """
    columns = {name: getattr(batch, name) for name in _COLUMNS}
    if any(not has_dtype(each, "int64") or not each.is_contiguous() for each in columns.values()):
        raise ValueError("a batch's columns must be contiguous int64 tensors.")
    units = view.unit_row()
    return STEP(
        num_rows=len(batch.positions),
        num_chunks=len(batch.block_tables),
        block_size=view.block_size,
        table_stride=batch.block_tables.shape[1],
        num_blocks=view.num_blocks,
        num_units=view.num_units,
        window=view.window,
        units=None if units is None else units.data_ptr(),
        **{name: each.data_ptr() for name, each in columns.items()},
    )


def _convolution(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Any:
    _require_lanes(len(weight))
    for tensor in (weight, inputs) if bias is None else (weight, inputs, bias):
        if tensor.dtype != weight.dtype or not tensor.is_contiguous():
            raise ValueError("weights and stored inputs must be contiguous and of one dtype.")
    return CONVOLUTION(
        inputs=inputs.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        channels=len(weight),
        taps=weight.shape[2],
    )
