"""From a model path to parameters: find the files, read the spec, stream one tensor at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nano_inference.errors import ModelLoadError
from nano_inference.models.folders import load_spec as load_spec
from nano_inference.models.folders import require_plain_weights
from nano_inference.models.folders import resolve_model as resolve_model
from nano_inference.models.shard import ModelShard
from nano_inference.models.spec import ModelSpec
from nano_inference.models.text_part import is_of_another_part
from nano_inference.models.weights import (
    HEAD,
    WEIGHT_DTYPES,
    Allocate,
    FusedTensor,
    Slot,
    allocate,
    fused_tensors,
    named_slots,
    param_table,
    read,
    write,
)
from nano_inference.ops import reference
from nano_inference.regular_files import open_regular, read_json

# Buffers that old checkpoints carry; they are computed, not loaded.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
MOST_HEADER = 10**8  # bytes: safetensors refuses longer ones
_CPU = torch.device("cpu")
_STORED_DTYPES = tuple(
    f"{'BF' if each is torch.bfloat16 else 'F'}{8 * each.itemsize}" for each in WEIGHT_DTYPES
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(asked: str, spec: ModelSpec) -> torch.dtype:
    """The dtype that `"auto"` means for this checkpoint on this machine, or the one asked for."""
    if asked != "auto":
        return _DTYPES[asked]
    if spec.quantized_source:
        return (
            torch.bfloat16 if torch.cuda.is_available() or _cpu_multiplies_bf16() else torch.float32
        )
    return _DTYPES.get(spec.checkpoint_dtype, torch.float32)


def load_params(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    matrix: Allocate = reference.allocate,
    part: ModelShard | None = None,
) -> dict[str, Any]:
    """All parameters of a model, or of a rank's part of it, streamed from its safetensors files. Of
    other ranks' parts nothing is read. Memory: the parameters and one tensor, both on the device.

    Raises `ModelLoadError` naming the first unknown, misshapen or missing tensor.
    """
    table = param_table(spec, part)
    places = named_slots(table)
    whole = table if part is None else param_table(spec)
    known = places if part is None else named_slots(whole)
    params = allocate(table, dtype, device, matrix)
    missing = {name for name, slot in places.items() if slot.tied_to is None}
    count = len(missing)
    for name, file, stored, shape, kind in _parts_of(folder, device, fused_tensors(whole)):
        if name.startswith(spec.unused):
            continue
        if name not in known:
            if spec.is_text_part and is_of_another_part(name):
                continue
            raise ModelLoadError(f"{folder}: tensor {name!r} is not part of {spec.architecture}.")
        slot = places.get(name)
        if slot is None:  # another rank's
            continue
        with _reading(name, file):
            _require_weight(name, file, kind)
            if shape != slot.shape:
                raise ModelLoadError(
                    f"{folder}: tensor {name!r} has shape {shape}, expected {slot.shape}."
                    if slot.tied_to is None
                    else _untied(name, slot)
                )
            tensor = slot.take(stored)
        if slot.tied_to is None:
            write(params, slot, tensor)
            missing.discard(name)
        elif not torch.equal(tensor.to(device, dtype), read(params, slot)):
            raise ModelLoadError(_untied(name, slot))
    if missing:
        first = min(missing)
        raise ModelLoadError(
            f"{folder}: tensor {first!r} is missing ({len(missing)} of {count} are)."
        )
    return params


def read_tensors(path: Path, device: torch.device = _CPU) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of a model folder or a .safetensors file, one at a time; a head
    that may be tied last.

    They are on `device`; on CUDA each goes there straight from the file's pages. Raises
    `ModelLoadError` naming the file that is missing, cut short or something else, or what a folder
    says that it holds instead of plain weights.
    """
    if path.is_dir():
        require_plain_weights(path)
    for name, file, opened in _tensors_of(path, device):
        with _reading(name, file):
            tensor = opened.get_tensor(name)
        yield name, tensor


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a model folder or a .safetensors file, by checkpoint name. Raises
    `ModelLoadError`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, file, opened in _tensors_of(path, _CPU):
        with _reading(name, file):
            shapes[name] = tuple(opened.get_slice(name).get_shape())
    return shapes


@contextmanager
def _reading(name: str, file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as problem:
        raise ModelLoadError(f"tensor {name!r} of {file} cannot be read: {problem}") from problem


def _tensors_of(path: Path, device: torch.device) -> Iterator[tuple[str, Path, Any]]:
    """(checkpoint name, file, the open file) of each tensor; a head that may be tied last."""
    handles: list[tuple[str, Path, Any]] = []
    for file in _weight_files(path) if path.is_dir() else [path]:
        try:
            opened = _opened(file, device)
        except (SafetensorError, OSError) as problem:
            raise ModelLoadError(f"{file} cannot be read as safetensors: {problem}") from problem
        handles += [(name, file, opened) for name in opened.keys()]  # noqa: SIM118 (not a dict)
    for name, file, opened in sorted(handles, key=lambda item: item[0].endswith(HEAD)):
        if not name.endswith(_IGNORED_SUFFIXES):
            yield name, file, opened


def _parts_of(
    folder: Path, device: torch.device, fused: Mapping[str, FusedTensor]
) -> Iterator[tuple[str, Path, Any, tuple[int, ...], str]]:
    """(name, file, what can be sliced, shape, stored dtype) of each tensor of a folder; of a tensor
    that holds several, of these.
    """
    for name, file, opened in _tensors_of(folder, device):
        with _reading(name, file):
            stored = opened.get_slice(name)
            shape, kind = tuple(stored.get_shape()), str(stored.get_dtype())
            whole = stored[:] if name in fused else None
            if not shape:  # a number is a vector of one
                stored, shape = opened.get_tensor(name).view(1), (1,)
        if whole is None:
            yield name, file, stored, shape, kind
            continue
        _require_weight(name, file, kind)
        if shape != fused[name].shape:
            raise ModelLoadError(
                f"{folder}: tensor {name!r} has shape {shape}, expected {fused[name].shape}."
            )
        for part, tensor in fused[name].split(whole):
            yield part, file, tensor, tuple(tensor.shape), kind


def _opened(file: Path, device: torch.device) -> Any:
    """An open safetensors file. safetensors keeps the interpreter while it opens one and reads its
    header: so both are done before, by calls that let other threads run, however long a share
    takes. Raises `OSError`, `SafetensorError`.
    """
    with open_regular(file) as source:
        length = int.from_bytes(source.read(8), "little")
        source.read(min(length, MOST_HEADER))
    return safe_open(file, framework="pt", device=_named(device))


def _named(device: torch.device) -> str:
    """A device as safetensors knows it: with its number."""
    return (
        f"cuda:{torch.cuda.current_device()}"
        if device.type == "cuda" and device.index is None
        else str(device)
    )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            files = [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
        except (KeyError, AttributeError, TypeError) as problem:
            raise ModelLoadError(
                f"{index} has no weight_map of tensor names to files."
            ) from problem
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(
            f"{folder} has no .safetensors file; other formats are not read, convert it first."
        )
    for file in files:
        if not file.exists():
            raise ModelLoadError(f"{file} is named by {index.name} and missing.")
    return files


def _require_weight(name: str, file: Path, stored: str) -> None:
    """`stored`: a dtype as safetensors names it."""
    if stored not in _STORED_DTYPES:
        raise ModelLoadError(
            f"tensor {name!r} of {file} has dtype {stored}, and a weight is one of "
            f"{', '.join(_STORED_DTYPES)}: the "
            "checkpoint is quantised and its config.json does not say how; use the unquantised "
            "one, or a GGUF file."
        )


def _untied(name: str, slot: Slot) -> str:
    return f"tensor {name!r} is tied to {slot.tied_to!r} by config.json and differs from it."


def _cpu_multiplies_bf16() -> bool:
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
