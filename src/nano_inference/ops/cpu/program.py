"""`Program`: recorded operations with their memory, run on a batch by few calls. `run_once` runs
single operations.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import ref

from nano_inference.arrays import Dtype, Tensor, has_dtype, namespace
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.cpu.library import struct
from nano_inference.ops.cpu.operations import (
    CALL,
    ROPE_AND_STORE,
    Buffer,
    Operation,
    place_buffers,
    to_struct,
)
from nano_inference.ops.cpu.recorder import Recorder
from nano_inference.ops.lora import Adapted, Adapter
from nano_inference.sampling.columns import columns_of

ALIGNMENT = 64  # bytes
NO_TABLE = 2**62  # limit on positions for a program without a rotary table
Step, ProgramSpec, Layer, Window, Op, LoraPart, LoraParts = (
    struct(name)
    for name in ("Step", "ProgramSpec", "Layer", "Window", "Op", "LoraPart", "LoraParts")
)
# columns that a step of the kernels reads: fields of `BatchRows`, and the tokens
STEP_COLUMNS = [
    name
    for name in columns_of(ForwardBatch)
    if name in dict(struct("BatchRows")._fields_) or name == "input_ids"
]
BAD_KIND = 7  # `Problem` of program.cpp, like the keys below
PROBLEMS = {
    1: "a token id is outside the vocabulary.",
    2: "a position is negative or beyond the rotary table.",
    3: "a slot is outside the KV cache.",
    4: "a block table names a block that does not exist.",
    6: "a row names an adapter that the step does not have.",
    5: "chunk lengths, context lengths, positions and block tables do not fit each other.",
}


class Program:
    """The contents of a `Recorder`, ready to run.

    Args:
        recorder: Recorder after all operations were recorded.
        inputs: Buffers that the caller supplies in every run.
        outputs: Buffers whose contents are returned.
        storage: KV storage that attention reads. None without attention.
        num_threads: Number of threads that run the program.
        kernels: Library of the kernels.
    """

    def __init__(
        self,
        recorder: Recorder,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        storage: Any,
        num_threads: int,
        kernels: ctypes.CDLL,
    ) -> None:
        self.operations = recorder.joined()
        recorder.mark_read_once(self.operations, (*inputs, *outputs))
        self.num_threads = num_threads
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._places, self._sizes = place_buffers(self.operations, (*inputs, *outputs))
        self._storage = storage
        self._c = kernels
        spec, _alive = self._spec(recorder, storage)
        # copies all that `spec` points to
        self._program = self._c.nano_program_new(ctypes.byref(spec))
        self._pieces = _pieces(self.operations)
        self._row_bytes = (ctypes.c_int64 * len(self._sizes))(*self._sizes)
        self._pointers = (ctypes.c_void_p * len(self._sizes))()
        self._step = Step(
            buffers=ctypes.addressof(self._pointers),
            row_bytes=ctypes.addressof(self._row_bytes),
            num_threads=num_threads,
        )
        self._adapted = tuple(recorder.adapted)
        # Adapters of the previous step, as weak references: an adapter's memory is freed with the
        # last request that uses it.
        self._adapters: tuple[ref[Adapter], ...] = ()
        self._adapter_rows = (ctypes.c_void_p * 0)()
        self._xp = namespace(recorder.dtype)
        self._capacity = 0
        self._memory: list[Tensor] = []
        self._views: dict[Buffer, Tensor] = {}  # by buffer, over all rows in memory

    def __del__(self) -> None:
        if getattr(self, "_program", None):
            self._c.nano_program_free(self._program)
            self._program = None

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Run a recorded decoder. Return the output of its last norm, [N, H], valid until the next
        run.
        """
        return self.run(len(batch.input_ids), batch=batch)[0]

    def run(
        self,
        num_rows: int,
        inputs: Sequence[Tensor] = (),
        batch: ForwardBatch | None = None,
        adapted: Adapted | None = None,
        **rows: Tensor,
    ) -> list[Tensor]:
        """Run the program on `num_rows` rows. Return views [N, columns] of the outputs, valid until
        the next run.

        Raise `ValueError` for tensors that do not fit, before anything is read or written.
        """
        self._grow(max(num_rows, 1))
        for buffer, tensor in zip(self._inputs, inputs, strict=True):
            expected = (num_rows, buffer.columns)
            if (
                tuple(tensor.shape) != expected
                or tensor.dtype != buffer.dtype
                or not tensor.is_contiguous()
            ):
                raise ValueError(
                    f"expected a contiguous {buffer.dtype} tensor {expected}; got {tensor.dtype} "
                    f"{tuple(tensor.shape)}."
                )
            self._pointers[self._places[buffer.index]] = tensor.data_ptr()
        step = self._step
        step.num_rows = num_rows
        if batch is not None:
            rows = {name: getattr(batch, name) for name in STEP_COLUMNS}
            step.num_chunks, step.table_stride = batch.block_tables.shape
            adapted = batch
        if adapted is not None:
            self._take_adapters(adapted)
        for name, tensor in rows.items():
            if (
                not has_dtype(tensor, "int64")
                or not tensor.is_contiguous()
                or tensor.device.type != "cpu"
            ):
                raise ValueError(
                    f"{name} must be a contiguous int64 tensor on the CPU; got {tensor.dtype} on "
                    f"{tensor.device.type}."
                )
            size = {
                "cu_seqlens_q": step.num_chunks + 1,
                "seq_lens": step.num_chunks,
                "block_tables": tensor.numel(),
            }.get(name, num_rows)
            if tensor.numel() != size:
                raise ValueError(f"{name} must have {size} numbers; got {tensor.numel()}.")
            setattr(step, name, tensor.data_ptr())
        self._run_pieces(num_rows, batch)
        return [self._view(buffer, num_rows) for buffer in self._outputs]

    def _take_adapters(self, batch: Adapted) -> None:
        """Set the adapter of each row."""
        step = self._step
        step.row_adapters = batch.row_adapters.data_ptr() if batch.adapters else None
        if batch.adapters != tuple(each() for each in self._adapters):
            self._adapters = tuple(map(ref, batch.adapters))
            addresses = [packed(each, self._adapted) for each in batch.adapters]
            self._adapter_rows = (ctypes.c_void_p * len(addresses))(*addresses)
            step.adapters = ctypes.addressof(self._adapter_rows)
            step.num_adapters = len(addresses)

    def _run_pieces(self, num_rows: int, batch: ForwardBatch | None) -> None:
        """Run C++ operations and Python calls alternately, in order."""
        for first, last in self._pieces:
            if num_rows:
                self._step.first, self._step.last = first, last
                problem = self._c.nano_program_run(self._program, ctypes.byref(self._step))
                if problem == BAD_KIND:
                    raise NotImplementedError("no kernel for an operation of this program.")
                if problem:
                    raise ValueError(f"the batch does not fit the program: {PROBLEMS[problem]}")
            if last < len(self.operations):
                self._call(self.operations[last], num_rows, batch)

    def _call(self, operation: Operation, num_rows: int, batch: ForwardBatch | None) -> None:
        """Call a Python function with views of its buffers."""
        assert operation.function is not None
        inputs = [self._view(buffer, num_rows) for buffer in operation.inputs]
        # Python functions only occur in trunks, which always run on a batch
        operation.function(
            cast("ForwardBatch", batch), self._view(operation.output, num_rows), *inputs
        )

    def _grow(self, num_rows: int) -> None:
        if num_rows <= self._capacity:
            return
        self._capacity = max(16, 2 ** (num_rows - 1).bit_length())
        self._memory = [
            self._xp.empty(self._capacity * size + ALIGNMENT, dtype=self._xp.uint8)
            for size in self._sizes
        ]
        for index, memory in enumerate(self._memory):
            offset = -memory.data_ptr() % ALIGNMENT
            self._memory[index] = memory[offset : offset + self._capacity * self._sizes[index]]
            self._pointers[index] = self._memory[index].data_ptr()
        self._views.clear()

    def _view(self, buffer: Buffer, num_rows: int) -> Tensor:
        if buffer not in self._views:
            memory = self._memory[self._places[buffer.index]].view(buffer.dtype)
            whole = memory.reshape(self._capacity, -1)
            self._views[buffer] = whole[:, buffer.first : buffer.first + buffer.columns]
        return self._views[buffer][:num_rows]

    def _spec(self, recorder: Recorder, storage: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the program's structure, and the arrays that it points to."""
        ops = (Op * len(self.operations))(
            *(to_struct(each, self._places) for each in self.operations)
        )
        windows = (Window * len(recorder.windows))(*recorder.windows)
        layers = None if storage is None else _layers(storage, recorder)
        spec = ProgramSpec(
            num_ops=len(ops),
            num_windows=len(windows),
            ops=ctypes.addressof(ops),
            windows=ctypes.addressof(windows),
            is_bf16=has_dtype(recorder, "bfloat16"),
            num_positions=recorder.num_positions or NO_TABLE,
            block_size=1,
        )
        if storage is not None and layers is not None:
            spec.num_layers, spec.layers = len(layers), ctypes.addressof(layers)
            spec.block_size, spec.num_blocks = storage.block_size, storage.num_blocks
            spec.kv_codes = storage.format.coded
        return spec, (ops, windows, layers)


def packed(adapter: Adapter, names: tuple[str, ...]) -> int:
    """Return the address of an adapter in the form that the kernels read: an array of `LoraParts`,
    one per product in `names`. It is valid as long as the adapter lives.
    """
    if names not in adapter.packed:
        arrays = [
            (LoraPart * len(parts))(
                *(
                    LoraPart(a.data_ptr(), b.data_ptr(), len(a), first, b.shape[1], scale)
                    for first, a, b, scale in parts
                )
            )
            for parts in (adapter.parts.get(name, ()) for name in names)
        ]
        rows = (LoraParts * len(names))(
            *(LoraParts(ctypes.addressof(each), len(each)) for each in arrays)
        )
        adapter.packed[names] = rows, arrays
    return ctypes.addressof(adapter.packed[names][0])


def _pieces(operations: Sequence[Operation]) -> list[tuple[int, int]]:
    """Return the runs of C++ operations [first, last), possibly empty. A Python call follows each
    run except the last.
    """
    calls = [place for place, operation in enumerate(operations) if operation.kind == CALL]
    return list(zip([0, *(place + 1 for place in calls)], [*calls, len(operations)], strict=True))


def _layers(storage: Any, recorder: Recorder) -> Any:
    """Return the addresses of each layer's keys and values, as an array of `Layer`."""
    kept = storage.format
    if kept.dtype != recorder.dtype:
        raise ValueError(f"the KV storage is {kept.dtype}, but the program is {recorder.dtype}.")
    for operation in recorder.operations:
        if operation.kind == ROPE_AND_STORE and operation.values["kv_heads"]:
            layer, shape = (
                operation.values["layer"],
                (operation.values["kv_heads"], operation.values["head_dim"]),
            )
            kv_heads, _, _, row = storage.lie(layer)[0].shape
            if (shape[0], kept.width(shape[1])) != (kv_heads, row):
                raise ValueError(
                    f"the KV storage has [{kv_heads} heads, {row}] in layer {layer}, but the "
                    f"program has [{shape[0]} heads, {kept.width(shape[1])}]."
                )
    units = storage.unit_map.units() if storage.unit_map is not None else None
    layers = (Layer * len(storage.places))()
    for layer, (unit, _) in enumerate(storage.places):
        keys, values = storage.lie(layer)
        layers[layer] = Layer(
            keys.data_ptr(),
            values.data_ptr(),
            None if units is None else units[unit].data_ptr(),
            *keys.stride()[:2],
        )
    return layers


def run_once(
    record: Callable[..., Any],
    *inputs: Tensor | None,
    dtype: Dtype,
    num_threads: int,
    kernels: ctypes.CDLL,
    storage: Any = None,
    **rows: Any,
) -> list[Tensor]:
    """Record a single operation on buffers for `inputs`, run it, and return its outputs."""
    recorder = Recorder(dtype)
    tensors = [tensor for tensor in inputs if tensor is not None]
    buffers = [
        None if tensor is None else recorder.new(tensor.shape[1], tensor.dtype) for tensor in inputs
    ]
    outputs = record(recorder, *buffers)
    outputs = (
        outputs if isinstance(outputs, tuple) and not isinstance(outputs, Buffer) else (outputs,)
    )
    brought = [buffer for buffer in buffers if buffer is not None]
    program = Program(
        recorder,
        brought,
        [out for out in outputs if out not in brought],
        storage,
        num_threads,
        kernels,
    )
    num_rows = len(tensors[0]) if tensors else len(next(iter(rows.values())))
    return [out.clone() for out in program.run(num_rows, tensors, **rows)]
