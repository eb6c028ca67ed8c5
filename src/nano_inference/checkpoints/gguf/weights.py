"""Tensors of a GGUF file with Hugging Face's names, row order and shapes, read by slices.

The file is memory-mapped and nothing is written.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from nano_inference.arrays import Device, Dtype, Tensor, namespace, torch_cpu
from nano_inference.checkpoints.gguf.codes import KINDS, numbers_of, read_blocks
from nano_inference.checkpoints.gguf.config import kind_of, tensor_names
from nano_inference.checkpoints.gguf.families import Config, Family
from nano_inference.checkpoints.gguf.file import read_model
from nano_inference.checkpoints.gguf.header import StoredTensor
from nano_inference.errors import ModelLoadError
from nano_inference.models.parameters.fused import fused_tensors
from nano_inference.models.parameters.mtp import whole_table
from nano_inference.models.parameters.slots import named_slots
from nano_inference.models.spec.mtp_layer import with_mtp
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.formats import FORMATS, Format
from nano_inference.ops.quantised import Codes

Stored = Mapping[str, StoredTensor]

CHUNK = 2**20  # numbers dequantized at a time
# Types of plain numbers, with the same names as in safetensors.
_KEPT = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": np.int16}


@dataclass(frozen=True, slots=True)
class _Target:
    """Hugging Face tensor, and the stored tensors that it consists of.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the tensor.
        dtype: Smallest type that holds its numbers, by safetensors' name.
        pieces: Rows of stored tensors in Hugging Face's order, to be concatenated.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[StoredTensor, range], ...]

    @property
    def kinds(self) -> set[str]:
        """GGUF types of the stored tensors."""
        return {tensor.kind for tensor, _ in self.pieces}


class GgufReader:
    """Tensors of a model in `.gguf` files, with the methods of an open safetensors file.

    Args:
        path: Path of the file, or of any part of a split one.
        dtype: Dtype of matrices that are stored in blocks. Vectors and plain numbers keep their
            full precision. None: float32.
        device: Device of the tensors. None: the CPU, as torch tensors.

    Raises `ModelLoadError` for unknown tensors, or for tensors that do not match the metadata.
    """

    def __init__(
        self,
        path: Path,
        dtype: Dtype | None = None,
        device: Device | None = None,
    ) -> None:
        model = read_model(path)
        self._family, self._config = model.family, model.config()
        self._device = torch_cpu() if device is None else device
        self._dtype = namespace(self._device).float32 if dtype is None else dtype
        targets = _targets(self._family, self._config, model.stored)
        self._targets = {target.name: target for target in targets}

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._targets)

    def get_slice(self, name: str) -> "GgufTensor":
        """Return a tensor to be read by slices."""
        target = self._targets[name]
        return GgufTensor(target, self._family, self._config, self._dtype, self._device)

    def get_tensor(self, name: str) -> Tensor:
        """Return a whole tensor in its own memory."""
        tensor = self.get_slice(name)[:]
        return tensor.clone() if set(_KEPT) >= self._targets[name].kinds else tensor


class GgufTensor:
    """Tensor that is read by slices."""

    def __init__(
        self,
        target: _Target,
        family: Family,
        config: Config,
        dtype: Dtype,
        device: Device,
    ) -> None:
        self._target, self._family, self._config = target, family, config
        self._device = device
        in_blocks = len(target.shape) > 1 and not target.kinds <= _KEPT.keys()
        self._dtype = dtype if in_blocks else getattr(namespace(dtype), _KEPT[target.dtype])
        first, rows = target.pieces[0]
        # numbers of an assembled row; the shape may have additional dimensions of 1
        self._width = len(rows) if self._is_turned(first) else _columns(first)

    def get_dtype(self) -> str:
        """Return the dtype by safetensors' name."""
        return self._target.dtype

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor."""
        return list(self._target.shape)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """Return a slice of the tensor, as a view of the mapped file if the layouts match."""
        first, *others = index if isinstance(index, tuple) else (index,)
        start, stop, _ = first.indices(self._target.shape[0])
        inner, width = prod(self._target.shape[1:]), self._width
        if stop <= start or not inner:
            shape = (max(stop - start, 0), *self._target.shape[1:])
            xp = namespace(self._dtype)
            return xp.empty(shape, dtype=self._dtype, device=self._device)[:, *others]
        if len(self._target.shape) == 2 and len(others) == 1 and inner == width:
            return self._rows(start, stop, range(width)[others[0]]).to(self._device)
        at = start * inner // width
        numbers = self._rows(at, -(-stop * inner // width), range(width)).reshape(-1)
        numbers = numbers[start * inner - at * width : stop * inner - at * width]
        numbers = numbers.reshape(stop - start, *self._target.shape[1:])
        return (numbers[:, *others] if others else numbers).to(self._device)

    @cached_property
    def form(self) -> Format | None:
        """Format of the codes, or None if products cannot read them."""
        target, family = self._target, self._family
        named = {kind_of(tensor.name) for tensor, _ in target.pieces}
        is_changed = bool(named & {*family.turned, *family.changed})
        if is_changed or len(target.kinds) > 1 or target.shape[1:] != (self._width,):
            return None
        (name,) = target.kinds
        kind = KINDS.get(name)
        return None if kind is None else FORMATS[kind.form]

    def codes(self, start: int, stop: int) -> Iterator[Codes]:
        """Yield the codes of rows [start, stop), a few rows at a time. `form` must not be None.
        Columns are in the order of `column_parts`.

        Raises `ModelLoadError` for scales or minima that are not finite.
        """
        form, columns = self.form, self._width
        assert form is not None
        for tensor, rows, part in self._parts(start, stop):
            for stored in self._stored(tensor, rows, part):
                blocks = read_blocks(tensor.kind, stored, columns)
                factors = (blocks.scales, blocks.mins)
                if not all(each is None or np.isfinite(each).all() for each in factors):
                    raise ModelLoadError(
                        f"the GGUF tensor {tensor.name} of {tensor.file} has scales or minima "
                        "that are not finite: the file is damaged; download it again."
                    )
                codes, scales, mins, steps, min_steps = (
                    None
                    if each is None
                    else namespace(self._dtype).from_numpy(each).to(self._device)
                    for each in blocks
                )
                assert codes is not None
                assert scales is not None
                scales, bounds = scales.float(), (0, columns)
                yield Codes(codes, scales, form, bounds, mins, steps, min_steps)

    def _is_turned(self, tensor: StoredTensor) -> bool:
        return kind_of(tensor.name) in self._family.turned

    def _parts(self, start: int, stop: int) -> Iterator[tuple[StoredTensor, range, range]]:
        """Yield the pieces of rows [start, stop): tensor, rows of the piece, selected rows."""
        at = 0
        for tensor, rows in self._target.pieces:
            count = _columns(tensor) if self._is_turned(tensor) else len(rows)
            part = range(max(start - at, 0), min(stop - at, count))
            at += count
            if part:
                yield tensor, rows, part

    @cached_property
    def _stored_columns(self) -> np.ndarray | None:
        """Stored column of each column, or None if they are the same."""
        order = self._family.column_orders.get(kind_of(self._target.pieces[0][0].name))
        places = None if order is None else order(self._config)
        return None if places is None or (np.diff(places) == 1).all() else places

    @property
    def column_parts(self) -> tuple[tuple[int, int], ...] | None:
        """Columns in the order of the codes, as [start, stop). None: all in order."""
        places = self._stored_columns
        if places is None:
            return None
        return tuple((run.start, run.stop) for run in _runs(np.argsort(places)))

    def _rows(self, start: int, stop: int, columns: range) -> Tensor:
        """Return some columns of rows [start, stop)."""
        places = self._stored_columns
        runs = [columns] if places is None else _runs(places[columns.start : columns.stop])
        parts = [self._run(start, stop, run) for run in runs]
        return parts[0] if len(parts) == 1 else namespace(self._dtype).cat(parts, dim=1)

    def _run(self, start: int, stop: int, columns: range) -> Tensor:
        """Return some columns of rows [start, stop), both as the file numbers columns."""
        parts = list(self._parts(start, stop))
        if len(parts) == 1 and (mapped := self._mapped(*parts[0])) is not None:
            return mapped[:, columns.start : columns.stop]
        xp = namespace(self._dtype)
        result = xp.empty((stop - start, len(columns)), dtype=self._dtype)
        at = 0
        for part in parts:
            for numbers in self._numbers(*part, columns):
                # rounds to the nearest, ties to even
                result[at : at + len(numbers)] = xp.from_numpy(numbers)
                at += len(numbers)
        return result

    def _mapped(self, tensor: StoredTensor, rows: range, part: range) -> Tensor | None:
        """Return mapped rows if the file stores them in the final order and type, else None."""
        kind = kind_of(tensor.name)
        is_moved = kind in {*self._family.row_orders, *self._family.turned, *self._family.changed}
        if is_moved or tensor.kind != self._target.dtype:
            return None
        stored = _all_rows(tensor)[rows.start + part.start : rows.start + part.stop]
        numbers = stored.view(_NUMPY[tensor.kind])
        numbers = numbers if numbers.flags.aligned else numbers.copy()
        return namespace(self._dtype).from_numpy(numbers).view(self._dtype)

    def _numbers(
        self, tensor: StoredTensor, rows: range, part: range, columns: range
    ) -> Iterator[np.ndarray]:
        """Yield rows of a piece in float32, a few at a time."""
        kind = kind_of(tensor.name)
        change = self._family.changed.get(kind)
        if kind in self._family.turned:
            stored = _all_rows(tensor)[rows.start : rows.stop]
            numbers = _cut(tensor, stored, part).T[:, columns.start : columns.stop]
            yield np.ascontiguousarray(numbers)
            return
        for stored in self._stored(tensor, rows, part):
            numbers = _cut(tensor, stored, columns)
            try:
                yield numbers if change is None else change(numbers)
            except ValueError as problem:
                raise ModelLoadError(
                    f"the GGUF tensor {tensor.name} of {tensor.file} {problem}: the file is "
                    "damaged; download it again."
                ) from problem

    def _stored(self, tensor: StoredTensor, rows: range, part: range) -> Iterator[np.ndarray]:
        """Yield rows of a piece as stored, a few at a time, in Hugging Face's order."""
        order = self._family.row_orders.get(kind_of(tensor.name))
        places, stored = None if order is None else order(self._config), _all_rows(tensor)
        step = max(1, CHUNK // _columns(tensor))
        for at in range(rows.start + part.start, rows.start + part.stop, step):
            some = slice(at, min(at + step, rows.start + part.stop))
            yield stored[some] if places is None else stored[places[some]]


def _all_rows(tensor: StoredTensor) -> np.ndarray:
    return tensor.rows().reshape(_num_rows(tensor), -1)


def _runs(places: np.ndarray) -> list[range]:
    """Return the runs of consecutive numbers."""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]


def _cut(tensor: StoredTensor, stored: np.ndarray, columns: range) -> np.ndarray:
    """Return some columns of stored rows in float32, reading only the blocks that contain them."""
    _, block, size = tensor.layout
    first, last = columns.start // block, -(-columns.stop // block)
    stored = stored[:, first * size : last * size]
    numbers = numbers_of(tensor.kind, stored, (last - first) * block)
    return numbers[:, columns.start - first * block : columns.stop - first * block]


def _targets(family: Family, config: Config, stored: Stored) -> list[_Target]:
    """Return all tensors, checked against the decoder's parameters."""
    sources: dict[str, list[StoredTensor]] = {}
    for name, hf_name in tensor_names(family, config).items():
        if name in stored:
            _require_order(stored[name], family, config)
            sources.setdefault(hf_name, []).append(stored[name])
    targets: list[_Target] = []
    for hf_name, tensors in sources.items():
        is_cut = "{expert}" in hf_name
        experts = tensors[0].shape[0] if is_cut or len(tensors[0].shape) == 3 else 1
        dtypes = {_stored_as(tensor, family) for tensor in tensors}
        dtype = dtypes.pop() if len(dtypes) == 1 else "F32"
        cuts = [tuple(_expert(tensor, i, experts) for tensor in tensors) for i in range(experts)]
        shapes = [_shape_of(tensor, family) for tensor in tensors]
        shape = shapes[0]
        if is_cut:
            targets += [
                _Target(hf_name.format(expert=i), shape[1:], dtype, pieces)
                for i, pieces in enumerate(cuts)
            ]
            continue
        if any(kind_of(tensor.name) in family.turned for tensor in tensors):
            _require_groups(tensors, shapes)
            shape = (sum(prod(each[:-1]) for each in shapes), shape[-1])
        elif len(tensors) > 1:
            if any(each != shape for each in shapes):
                names = ", ".join(f"{tensor.name} {tensor.shape}" for tensor in tensors)
                raise ModelLoadError(f"the GGUF tensors {names} must have the same shape")
            rows = sum(tensor.num_rows for tensor in tensors) // experts
            shape = (*shape[:-2], rows, shape[-1])
        targets.append(_Target(hf_name, shape, dtype, tuple(part for all in cuts for part in all)))
    return _checked_all(targets, config)


def _shape_of(tensor: StoredTensor, family: Family) -> tuple[int, ...]:
    """Return a tensor's shape in Hugging Face, which swaps rows and columns of some tensors."""
    if kind_of(tensor.name) not in family.turned or len(tensor.shape) < 2:
        return tensor.shape
    return (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2])


def _require_groups(tensors: list[StoredTensor], shapes: list[tuple[int, ...]]) -> None:
    """Raise `ModelLoadError` unless the tensors' groups can be concatenated row by row."""
    fit = {(len(shape), shape[0], shape[-1]) for shape in shapes}
    if len(fit) > 1 or len(shapes[0]) != 3:
        names = ", ".join(f"{tensor.name} {tensor.shape}" for tensor in tensors)
        raise ModelLoadError(f"the GGUF tensors {names} must have equal head counts and widths")


def _expert(tensor: StoredTensor, number: int, experts: int) -> tuple[StoredTensor, range]:
    """Return the rows of one expert."""
    size = _num_rows(tensor) // experts
    return tensor, range(number * size, (number + 1) * size)


def _num_rows(tensor: StoredTensor) -> int:
    """Return the number of rows. A vector has rows of one number, so that it can be reordered."""
    is_vector = len(tensor.shape) == 1 and tensor.kind in _KEPT
    return tensor.shape[0] if is_vector else tensor.num_rows


def _columns(tensor: StoredTensor) -> int:
    """Return the number of numbers per row, as `_num_rows` counts rows."""
    return 1 if _num_rows(tensor) != tensor.num_rows else tensor.shape[-1]


def _checked_all(targets: list[_Target], config: Config) -> list[_Target]:
    """Raise `ModelLoadError` unless these are the decoder's tensors, separate or fused."""
    spec = spec_from_config(config)
    table = whole_table(with_mtp(spec) if config.get("mtp_num_hidden_layers") else spec)
    slots, fused = named_slots(table), fused_tensors(table)
    shapes = {name: each.shape for name, each in (*slots.items(), *fused.items())}
    checked = [_checked(target, shapes) for target in targets]
    there = {
        part
        for each in checked
        for part in (fused[each.name].parts if each.name in fused else (each.name,))
    }
    for name, slot in slots.items():
        if name not in there and slot.tied_to is None:
            raise ModelLoadError(f"the GGUF file lacks the tensor {name}")
    return checked


def _checked(target: _Target, shapes: Mapping[str, tuple[int, ...]]) -> _Target:
    """Return the target with the expected shape, which may have additional dimensions of 1."""
    origin = " and ".join(tensor.name for tensor, _ in target.pieces[:2])
    expected = shapes.get(target.name)
    if expected is None:
        raise ModelLoadError(
            f"the GGUF file contains {origin}, but its metadata excludes {target.name}"
        )
    if [size for size in expected if size > 1] != [size for size in target.shape if size > 1]:
        raise ModelLoadError(
            f"the GGUF file has shape {target.shape} for {target.name} ({origin}), expected "
            f"{expected} by its metadata"
        )
    return _Target(target.name, expected, target.dtype, target.pieces)


def _require_order(tensor: StoredTensor, family: Family, config: Config) -> None:
    for orders, axis, what in (
        (family.row_orders, 0, "rows"),
        (family.column_orders, -1, "columns"),
    ):
        order = orders.get(kind_of(tensor.name))
        if order is not None and len(order(config)) != tensor.shape[axis]:
            raise ModelLoadError(
                f"the GGUF tensor {tensor.name} has {tensor.shape[axis]} {what}, expected "
                f"{len(order(config))} by its metadata"
            )


def _stored_as(tensor: StoredTensor, family: Family) -> str:
    """Return the smallest dtype that holds a tensor's numbers, by safetensors' name."""
    if kind_of(tensor.name) in family.changed:
        return "F32"  # computing (1 + w) - 1 in 16 bits would lose the digits of a small w
    return tensor.kind if tensor.kind in _KEPT else "F32"
