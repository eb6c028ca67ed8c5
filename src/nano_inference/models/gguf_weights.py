"""The tensors of a GGUF file, written as a safetensors file: Hugging Face's names, order of rows
and shapes.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from nano_inference.errors import ModelLoadError
from nano_inference.models.gguf_codes import KINDS, read_blocks
from nano_inference.models.gguf_families import OPTIONAL_NAMES, Config, Family
from nano_inference.models.gguf_header import StoredTensor
from nano_inference.models.spec import spec_from_config
from nano_inference.ops.formats import FORMATS
from nano_inference.progress import Progress

Stored = Mapping[str, StoredTensor]

CHUNK = 2**22  # numbers that are dequantised at a time
# Types that are kept as they are: safetensors has them too, with their bytes of a number.
_KEPT = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor of Hugging Face's, and what it is made of.

    Attributes:
        name: its name.
        shape: its shape.
        dtype: safetensors' name of what it is written in.
        pieces: rows of stored tensors, in Hugging Face's order, one after the other.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[StoredTensor, range], ...]

    def kinds(self) -> set[str]:
        """GGUF's types of what it is made of."""
        return {tensor.kind.name for tensor, _ in self.pieces}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor that is written.

    Attributes:
        name, dtype, shape: in the header.
        num_bytes: that it takes.
        target: of which it holds the numbers, or a part of the codes.
        part: number of that part in `Blocks`; None: the numbers.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    target: _Target
    part: int | None = None

    def chunks(self, family: Family, config: Config) -> Iterator[np.ndarray]:
        """What is written, piece by piece."""
        for tensor, rows in self.target.pieces:
            yield from _chunks(tensor, rows, self.target.dtype, family, config, self.part)


def require_names(family: Family, config: Config, stored: Stored) -> None:
    """Raise `ModelLoadError` for a tensor that is not known, or is missing."""
    names = _names(family, config)
    if unknown := sorted(stored.keys() - names.keys() - family.rope_factors):
        raise ModelLoadError(
            f"the GGUF tensor {unknown[0]} is not mapped for {family.architecture}"
        )
    optional = OPTIONAL_NAMES | family.optional_names
    if missing := sorted(
        name for name in names.keys() - stored.keys() if _kind_of(name) not in optional
    ):
        raise ModelLoadError(
            f"the GGUF file has no tensor {missing[0]}, which {family.architecture} needs"
        )


def write_safetensors(
    path: Path, family: Family, config: Config, stored: Stored, source: str, coded: bool = False
) -> None:
    """Write the tensors of a file, `source`, one at a time: the header follows from the shapes, so
    no two are ever in memory at once. Coded: matrices as codes where their type has them.

    Raises `ModelLoadError` where shapes contradict the config, or the disk has no room, before
    anything is written.
    """
    entries = [
        entry
        for target in _targets(family, config, stored)
        for entry in (_coded(target, family) if coded else None) or [_plain(target)]
    ]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in entries:
        begin, end = end, end + each.num_bytes
        header[each.name] = {
            "dtype": each.dtype,
            "shape": each.shape,
            "data_offsets": [begin, end],
        }
    _require_room(path, end)
    encoded = json.dumps(header).encode("utf-8")
    encoded += b" " * (-len(encoded) % 8)  # the tensors start at a multiple of 8
    with path.open("wb") as file, Progress(f"converting {source}", end) as progress:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for each in entries:
            for chunk in each.chunks(family, config):
                file.write(chunk.data)
                progress.add(chunk.nbytes)
        file.flush()
        # the rename that publishes the folder must not reach the disk before its contents
        os.fsync(file.fileno())


def _plain(target: _Target) -> _Entry:
    size = prod(target.shape) * _KEPT[target.dtype]
    return _Entry(target.name, target.dtype, target.shape, size, target)


def _coded(target: _Target, family: Family) -> list[_Entry] | None:
    """Codes, scales and minima of a matrix; None: it cannot be written so."""
    kinds = target.kinds()
    named = {_kind_of(tensor.name) for tensor, _ in target.pieces}
    if len(kinds) != 1 or len(target.shape) != 2 or named & {*family.turned, *family.plus_one}:
        return None
    kind = KINDS.get(kinds.pop())
    if kind is None:
        return None
    rows, columns = target.shape
    form = FORMATS[kind.form]
    parts = [("codes", "I8", columns), ("scales", "F32" if form.wide else "F16", 0)]
    if form.bits == 4:
        parts[0] = ("codes", "U8", columns // 2)
    if form.mins:
        parts.append(("mins", "F32", 0))
    stem = target.name.removesuffix(".weight")
    return [
        _Entry(
            f"{stem}.{name}",
            dtype,
            (rows, size or columns // form.group),
            rows * (size or columns // form.group) * _KEPT.get(dtype, 1),
            target,
            part,
        )
        for part, (name, dtype, size) in enumerate(parts)
    ]


def _names(family: Family, config: Config) -> dict[str, str]:
    """GGUF name -> Hugging Face's of every tensor that a file of this configuration may hold."""
    names = dict(family.global_names)
    for layer in range(config["num_hidden_layers"]):
        for key, hf_name in family.layer_names.items():
            names[f"blk.{layer}.{key}"] = f"model.layers.{layer}.{hf_name}"
    return names


def _kind_of(name: str) -> str:
    """A tensor's name without its layer: `blk.7.attn_q.weight` -> `attn_q.weight`."""
    return re.sub(r"^blk\.\d+\.", "", name)


def _targets(family: Family, config: Config, stored: Stored) -> list[_Target]:
    """All that is to be written, checked against what the decoder wants."""
    sources: dict[str, list[StoredTensor]] = {}
    for name, hf_name in _names(family, config).items():
        if name in stored:
            _require_order(stored[name], family, config)
            sources.setdefault(hf_name, []).append(stored[name])
    targets: list[_Target] = []
    for hf_name, tensors in sources.items():
        is_cut = "{expert}" in hf_name
        experts = tensors[0].shape[0] if is_cut or len(tensors[0].shape) == 3 else 1
        dtypes = {_stored_as(tensor, family) for tensor in tensors}
        dtype = dtypes.pop() if len(dtypes) == 1 else "F32"
        each = [tuple(_expert(tensor, i, experts) for tensor in tensors) for i in range(experts)]
        shapes = [_shape_of(tensor, family) for tensor in tensors]
        shape = shapes[0]
        if is_cut:
            targets += [
                _Target(hf_name.format(expert=i), shape[1:], dtype, pieces)
                for i, pieces in enumerate(each)
            ]
            continue
        if any(_kind_of(tensor.name) in family.turned for tensor in tensors):
            _require_groups(tensors, shapes)
            shape = (sum(prod(each[:-1]) for each in shapes), shape[-1])
        elif len(tensors) > 1:
            if any(each != shape for each in shapes):
                told = ", ".join(f"{tensor.name} {tensor.shape}" for tensor in tensors)
                raise ModelLoadError(f"the GGUF tensors {told} must have one shape")
            rows = sum(tensor.num_rows for tensor in tensors) // experts
            shape = (*shape[:-2], rows, shape[-1])
        targets.append(_Target(hf_name, shape, dtype, tuple(part for all in each for part in all)))
    return _checked_all(targets, config)


def _shape_of(tensor: StoredTensor, family: Family) -> tuple[int, ...]:
    """As Hugging Face has it: columns of what is turned are rows."""
    if _kind_of(tensor.name) not in family.turned or len(tensor.shape) < 2:
        return tensor.shape
    return (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2])


def _require_groups(tensors: list[StoredTensor], shapes: list[tuple[int, ...]]) -> None:
    """Raise `ModelLoadError` unless rows of as many groups can follow each other."""
    fit = {(len(shape), shape[0], shape[-1]) for shape in shapes}
    if len(fit) > 1 or len(shapes[0]) != 3:
        told = ", ".join(f"{tensor.name} {tensor.shape}" for tensor in tensors)
        raise ModelLoadError(f"the GGUF tensors {told} must be of as many heads, and as wide")


def _expert(tensor: StoredTensor, number: int, experts: int) -> tuple[StoredTensor, range]:
    """The rows of one of so many experts."""
    size = _num_rows(tensor) // experts
    return tensor, range(number * size, (number + 1) * size)


def _num_rows(tensor: StoredTensor) -> int:
    """Vectors are rows of one number, so that they can be reordered as matrices are."""
    is_vector = len(tensor.shape) == 1 and tensor.kind.name in _KEPT
    return tensor.shape[0] if is_vector else tensor.num_rows


def _checked_all(targets: list[_Target], config: Config) -> list[_Target]:
    """Raise `ModelLoadError` unless they are what the decoder reads, one by one or fused."""
    from nano_inference.models.weights import (  # brings in torch
        fused_tensors,
        named_slots,
        param_table,
    )

    table = param_table(spec_from_config(config))
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
            raise ModelLoadError(f"the GGUF file has nothing for the tensor {name}")
    return checked


def _checked(target: _Target, shapes: Mapping[str, tuple[int, ...]]) -> _Target:
    """With the shape that is wanted, which may have dimensions of 1 more."""
    origin = " and ".join(tensor.name for tensor, _ in target.pieces[:2])
    wanted = shapes.get(target.name)
    if wanted is None:
        raise ModelLoadError(
            f"the GGUF file holds {origin}, and its metadata has no place for {target.name}"
        )
    if [size for size in wanted if size > 1] != [size for size in target.shape if size > 1]:
        raise ModelLoadError(
            f"the GGUF file has shape {target.shape} for {target.name} ({origin}); its metadata "
            f"asks for {wanted}"
        )
    return _Target(target.name, wanted, target.dtype, target.pieces)


def _require_order(tensor: StoredTensor, family: Family, config: Config) -> None:
    order = family.row_orders.get(_kind_of(tensor.name))
    if order is not None and len(order(config)) != tensor.shape[0]:
        raise ModelLoadError(
            f"the GGUF tensor {tensor.name} has {tensor.shape[0]} rows, and its metadata asks for "
            f"{len(order(config))}"
        )


def _stored_as(tensor: StoredTensor, family: Family) -> str:
    """safetensors' dtype of what is written of a tensor."""
    if _kind_of(tensor.name) in family.plus_one:
        return "F32"  # 1 + w - 1 in 16 bits would lose the digits of a small w
    return tensor.kind.name if tensor.kind.name in _KEPT else "BF16"


def _require_room(path: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if num_bytes > free:
        raise ModelLoadError(
            f"the converted model takes {num_bytes / 2**30:.1f} GiB, and {path.parent.parent} has "
            f"{free / 2**30:.1f} GiB free; XDG_CACHE_HOME moves the cache elsewhere"
        )


def _chunks(
    tensor: StoredTensor,
    wanted: range,
    dtype: str,
    family: Family,
    config: Config,
    part: int | None,
) -> Iterator[np.ndarray]:
    """Rows of a tensor in Hugging Face's order, piece by piece, as they are written: numbers, or a
    part of their codes.
    """
    kind = _kind_of(tensor.name)
    rows = tensor.rows().reshape(_num_rows(tensor), -1)
    order = family.row_orders[kind](config) if kind in family.row_orders else None
    turned = kind in family.turned
    # what is turned is a matrix a head
    step = len(wanted) if turned else max(1, CHUNK * _num_rows(tensor) // prod(tensor.shape))
    for start in range(wanted.start, wanted.stop, step):
        some = slice(start, min(start + step, wanted.stop))
        stored = rows[some] if order is None else rows[order[some]]
        if part is None:
            yield _written(stored, tensor, dtype, minus_one=kind in family.plus_one, turned=turned)
        else:
            yield _code_part(stored, tensor, part)


def _code_part(rows: np.ndarray, tensor: StoredTensor, part: int) -> np.ndarray:
    """Codes (those of 4 bits two in a byte, the first in its lower half), scales or minima."""
    found = read_blocks(tensor.kind.name, rows, tensor.shape[-1])[part]
    assert found is not None
    form = FORMATS[KINDS[tensor.kind.name].form]
    if part == 0 and form.bits == 4:
        bits = (found + (0 if form.mins else form.middle)).view(np.uint8)
        found = bits[:, ::2] | bits[:, 1::2] << 4
    return np.ascontiguousarray(found)


def _written(
    rows: np.ndarray, tensor: StoredTensor, dtype: str, minus_one: bool, turned: bool
) -> np.ndarray:
    """Stored rows as they are written, contiguous."""
    if tensor.kind.name == dtype and not minus_one:
        if turned:
            rows = rows.reshape(len(rows), -1, _KEPT[dtype]).swapaxes(0, 1)
        return np.ascontiguousarray(rows)
    numbers = tensor.numbers(rows)
    if turned:
        numbers = np.ascontiguousarray(numbers.T)
    if minus_one:
        numbers = numbers - np.float32(1)
    if dtype == "F32":
        return np.ascontiguousarray(numbers)
    from torch import bfloat16, from_numpy, int16  # rounds to the nearest, ties to even

    return from_numpy(numbers).to(bfloat16).view(int16).numpy()
