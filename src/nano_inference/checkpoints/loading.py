"""Loading: find a model's files, read its specification, and stream parameters tensor by tensor.

Tensors come from safetensors files, or from `.gguf` files by a reader with the same methods.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nano_inference.arrays import HOST, Device, Dtype, Tensor, host, namespace, torch_cpu
from nano_inference.checkpoints.folders import held_instead, require_plain_weights
from nano_inference.checkpoints.folders import load_spec as load_spec
from nano_inference.checkpoints.folders import resolve_model as resolve_model
from nano_inference.checkpoints.gguf.file import described_by, gguf_in, read_model
from nano_inference.checkpoints.gguf.weights import GgufReader
from nano_inference.checkpoints.host_file import HostFile
from nano_inference.checkpoints.quantised_weights import ACTIVATIONS, quantised_weight
from nano_inference.errors import ModelLoadError
from nano_inference.models.parameters.fused import fused_tensors
from nano_inference.models.parameters.mtp import whole_table
from nano_inference.models.parameters.param import Formats, ParamSpec, Source
from nano_inference.models.parameters.slots import Slot, named_slots
from nano_inference.models.parameters.storage import (
    Allocate,
    allocate,
    form_of,
    require_whole_groups,
)
from nano_inference.models.parameters.table import HEAD
from nano_inference.models.parameters.values import WEIGHT_DTYPES, as_held, read, write
from nano_inference.models.sharding.shard import ModelShard
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.quantisation import GGUF, quantisation_of
from nano_inference.models.spec.text_part import is_of_another_part
from nano_inference.ops.cpu.build import CPUINFO, flags_in
from nano_inference.ops.cpu.weights import LANES
from nano_inference.ops.formats import FILE, Format, Stack, widest
from nano_inference.ops.quantised import Codes, widened
from nano_inference.system.progress import Progress
from nano_inference.system.regular_files import open_regular, read_json

# Skipped tensors: old checkpoints' buffers, which are computed, and activations' parameters.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", *ACTIVATIONS)
MOST_HEADER = 10**8  # bytes: safetensors rejects longer headers
# names of safetensors
_STORED_DTYPES = tuple(each.replace("bfloat", "BF").replace("float", "F") for each in WEIGHT_DTYPES)


def resolve_dtype(
    asked: str, spec: ModelSpec, *, bf16_gains: bool = False, device: Device | None = None
) -> Dtype:
    """Return the requested dtype, with `"auto"` resolved for this checkpoint and machine.

    Args:
        asked: Value of `EngineConfig.dtype`.
        spec: Specification of the model.
        bf16_gains: True if the operations compute bfloat16 at least as fast as float32.
        device: Device of the model, which decides the library of the dtype. None: torch's.
    """
    xp = namespace(device)
    return getattr(xp, _dtype_named(asked, spec, bf16_gains or _has_gpu(xp)))


def _dtype_named(asked: str, spec: ModelSpec, bf16_gains: bool) -> str:
    if asked != "auto":
        return asked
    if spec.quantisation is not None:
        return "bfloat16"
    if spec.quantized_source:
        return "bfloat16" if bf16_gains or cpu_multiplies_bf16() else "float32"
    kept = ("float32", "bfloat16", "float16")
    return spec.checkpoint_dtype if spec.checkpoint_dtype in kept else "float32"


def _has_gpu(xp: Any) -> bool:
    return xp is not host and xp.cuda.is_available()


def load_params(
    folder: Path,
    spec: ModelSpec,
    dtype: Dtype,
    device: Device,
    matrix: Allocate | None = None,
    part: ModelShard | None = None,
    quantization: Formats = None,
    vector: Allocate | None = None,
) -> dict[str, Any]:
    """Load all parameters of a model, or of a rank's part of it.

    Parameters are streamed from safetensors or `.gguf` files. Codes are dequantized, unless the
    format selected by `quantization` can hold them unchanged. Other ranks' parts are not read.
    Memory: the parameters and one tensor, both on the device.

    Raises `ModelLoadError`, before it allocates the parameters, for the first unknown, misshapen or
    missing tensor. The same applies to codes that must stay unchanged but products cannot read.
    Raises `ConfigError` if ranks would split codes within a group.
    """
    table = whole_table(spec, part)
    places = named_slots(table)
    whole = table if part is None else whole_table(spec)
    weights = _weights(folder, spec, whole, dtype, device)
    _require_all(folder, places, weights)
    if quantization == FILE:
        if part is not None and (ranks := part.position.mesh.tensor) > 1:
            require_whole_groups(spec, ranks, FILE, _file_formats(folder, whole, weights))
        quantization = _file_formats(folder, table, weights)
    params = allocate(table, dtype, device, matrix, quantization, vector)
    wanted = [  # excludes absent tied heads and other ranks' tensors
        (name, slot)
        for name, slot in sorted(places.items(), key=lambda item: item[0] == HEAD)
        if name in weights and 0 not in slot.local_shape
    ]
    size = sum(prod(slot.local_shape) for _, slot in wanted) * dtype.itemsize
    with Progress(_loading(folder, spec, part, quantization), size) as progress:
        for name, slot in wanted:
            if slot.tied_to is not None:
                if not _is_equal(params, slot, weights[name], weights[slot.tied_to]):
                    raise ModelLoadError(_untied(name, slot))
            elif _holds(params[slot.param], slot, weights[name]):
                _write_codes(params[slot.param], slot, weights[name])
            else:
                write(params, slot, slot.take(weights[name]))
            progress.add(prod(slot.local_shape) * dtype.itemsize)
    return params


def _file_formats(
    folder: Path, table: tuple[ParamSpec, ...], weights: Mapping[str, Any]
) -> dict[str, Format | Stack]:
    """Return the format of each parameter whose tensors are all stored as codes that products read.

    Other codes of a .gguf file are dequantized. In other files they raise `ModelLoadError`.
    """
    said = quantisation_of(folder)
    if said is None:
        raise ModelLoadError(
            f"quantization='file' needs a quantized checkpoint, but {folder} holds plain weights; "
            "use 'int8', 'int8-32' or 'int4' to quantize them."
        )
    formats: dict[str, Format | Stack] = {}
    for param in (each for each in table if each.codes is not None):
        sources = {source.name: weights[source.name] for source in param.sources}
        forms = {source.name: _form_of(source, sources[source.name]) for source in param.sources}
        known = [form for form in forms.values() if form is not None]
        if len(known) == len(forms):
            formats[param.name] = _held(param, known)
        elif said.method != GGUF:
            _require_no_codes(sources, forms)
    return formats


def gguf_formats(file: Path, table: tuple[ParamSpec, ...]) -> dict[str, Format | Stack]:
    """Return the formats that `load_params` gives a `.gguf` file's parameters with quantization
    `"file"`.

    Only the headers of the file and its parts are read. Raises `ModelLoadError`.
    """
    reader = GgufReader(file, device=HOST)
    stored = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118 (not a dict)
    formats: dict[str, Format | Stack] = {}
    for param in (each for each in table if each.codes is not None):
        sources = [_form_of(source, stored.get(source.name)) for source in param.sources]
        known = [form for form in sources if form is not None]
        if len(known) == len(sources):
            formats[param.name] = _held(param, known)
    return formats


def _form_of(source: Source, weight: Any) -> Format | None:
    """Return the format of a weight's codes, or None if it has none or their columns are in another
    order than the source takes them.
    """
    stored = getattr(weight, "column_parts", None)
    taken = source.parts if source.axis == 1 else None
    is_one_part = stored is None and taken is not None and len(taken) == 1
    return getattr(weight, "form", None) if taken == stored or is_one_part else None


def _held(param: ParamSpec, forms: Sequence[Format]) -> Format | Stack:
    """Return the format that holds a parameter's sources, which have these formats."""
    columns, rows = param.shape[1], [source.local_shape[0] for source in param.sources]
    if not param.stacks or len(set(forms)) == 1 or any(count % LANES for count in rows[:-1]):
        return widest(forms, columns)
    parts: list[tuple[int, Format]] = []
    for count, form in zip(rows, (widest([form], columns) for form in forms), strict=True):
        if parts and parts[-1][1] == form:
            count += parts.pop()[0]
        parts.append((count, form))
    return Stack(tuple(parts)) if len(parts) > 1 else parts[0][1]


def _require_no_codes(sources: Mapping[str, Any], forms: Mapping[str, Format | None]) -> None:
    """Raise `ModelLoadError` if codes are unsupported, or mixed with plain tensors."""
    plain = next(name for name, form in forms.items() if form is None)
    for name, weight in sources.items():
        why = getattr(weight, "why", None)
        if why is None and forms[name] is not None:
            why = f"it shares a parameter with {plain!r}, which has no such codes"
        if why is not None:
            raise ModelLoadError(
                f"quantization='file' cannot compute with the codes of {name!r}: {why}; omit the "
                "option to dequantize the checkpoint."
            )


def _form_at(param: Any, slot: Slot) -> Format | None:
    """Return the format of a slot's rows, or None if unquantized."""
    form = form_of(param)
    return form.at(slot.start) if isinstance(form, Stack) else form


def _holds(param: Any, slot: Slot, weight: Any) -> bool:
    """Return True if a parameter can store a file's codes unchanged."""
    held = _form_at(param, slot)
    form = None if held is None else getattr(weight, "form", None)
    return held is not None and form is not None and held.holds(form)


def _write_codes(param: Any, slot: Slot, weight: Any) -> None:
    """Copy a file's codes into a parameter unchanged, a few rows at a time."""
    rows, columns = slot.shape
    parts, within = slot.parts or ((0, rows),), (0, columns)
    if slot.parts is not None and slot.axis == 1:
        parts = ((0, rows),)
        if len(slot.parts) == 1:  # several are in the file's order
            (within,) = slot.parts
    start, form = slot.start, _form_at(param, slot)
    assert form is not None
    for first, last in parts:
        for codes in weight.codes(first, last):
            piece = widened(codes, form, (0, columns)).columns(*within)
            param.write_codes(start, piece)
            start += len(piece.codes)


def _is_equal(params: dict[str, Any], slot: Slot, head: Any, embedding: Any) -> bool:
    """Return True if a head equals its tied embedding, which is already written."""
    tensor = slot.take(head)
    if _holds(params[slot.param], slot, embedding):
        return namespace(tensor).equal(tensor, slot.take(embedding))
    return namespace(tensor).equal(as_held(params, slot, tensor), read(params, slot))


def _loading(folder: Path, spec: ModelSpec, part: ModelShard | None, quantization: Formats) -> str:
    in_codes = quantization and not isinstance(quantization, str)
    doing = "loading" if in_codes or spec.quantisation is None else "dequantising and loading"
    rank = (
        ""
        if part is None or part.position.mesh.world_size == 1
        else f" (rank {part.position.rank})"
    )
    return f"{doing} {(described_by(folder) or folder).name}{rank}"


class _PlainWeight:
    """Tensor of a file, read by slices. Failures raise `ModelLoadError` with its name."""

    def __init__(self, name: str, file: Path, opened: Any) -> None:
        self.name, self.file = name, file
        with _reading(name, file):
            self._slice = opened.get_slice(name)

    @property
    def tensors(self) -> frozenset[str]:
        """Names of the tensors that hold the weight."""
        return frozenset((self.name,))

    def get_dtype(self) -> str:
        """Return the dtype by safetensors' name."""
        return str(self._slice.get_dtype())

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor. A scalar is a vector of one number."""
        return list(self._slice.get_shape()) or [1]

    def __getitem__(self, index: Any) -> Tensor:
        """Return a slice of the tensor."""
        with _reading(self.name, self.file):
            if not self._slice.get_shape():
                return self._slice[...].reshape(1)[index]
            return self._slice[index]


class _Blocks(_PlainWeight):
    """Tensor of a `.gguf` file whose codes products may read unchanged."""

    @property
    def form(self) -> Format | None:
        """Format of the codes, or None if products cannot read them."""
        return self._slice.form

    @property
    def column_parts(self) -> tuple[tuple[int, int], ...] | None:
        """Columns in the order of the codes. None: all in order."""
        return self._slice.column_parts

    def codes(self, start: int, stop: int) -> Iterator[Codes]:
        """Yield the codes of rows [start, stop), a few rows at a time."""
        return self._slice.codes(start, stop)


def _weights(
    folder: Path,
    spec: ModelSpec,
    table: tuple[ParamSpec, ...],
    dtype: Dtype,
    device: Device,
) -> dict[str, Any]:
    """Return a model's checked weights in a folder, to be read by slices.

    Raises `ModelLoadError`.
    """
    said = quantisation_of(folder)
    in_blocks = said is not None and said.method == GGUF
    if in_blocks and described_by(folder) is None:
        raise ModelLoadError(
            f"{folder} is a copy of a .gguf file by an earlier version; use the .gguf file itself "
            "and remove the copy."
        )
    tensors = {
        name: (_Blocks if in_blocks else _PlainWeight)(name, file, opened)
        for name, file, opened in _tensors_of(folder, device, dtype)
        if not spec.ignores(name) and not (spec.is_text_part and is_of_another_part(name))
    }
    used: set[str] = set()

    def stored(name: str, shape: tuple[int, ...], slot: Slot | None) -> Any:
        weight = tensors.get(name)
        if said is not None and not in_blocks:
            weight = quantised_weight(name, shape, tensors, said, dtype) or weight
        if weight is not None:
            used.update(weight.tensors)
        if isinstance(weight, _PlainWeight):
            _require_plain(folder, weight, shape, slot)
        return weight

    places = named_slots(table)
    weights = {name: stored(name, slot.shape, slot) for name, slot in places.items()}
    weights = {name: weight for name, weight in weights.items() if weight is not None}
    for name, fused in fused_tensors(table).items():
        if name not in places and (whole := stored(name, fused.shape, None)) is not None:
            weights |= fused.cut(whole)
    if unknown := next((name for name in tensors if name not in used), None):
        raise ModelLoadError(f"{folder}: tensor {unknown!r} is not part of {spec.architecture}.")
    return weights


def _require_plain(
    folder: Path, weight: _PlainWeight, needed: tuple[int, ...], slot: Slot | None
) -> None:
    if (stored := weight.get_dtype()) not in _STORED_DTYPES:
        raise ModelLoadError(
            f"tensor {weight.name!r} of {weight.file} has dtype {stored}, expected one of "
            f"{', '.join(_STORED_DTYPES)}: the checkpoint is quantized, but its config.json does "
            "not say how; use an unquantized checkpoint or a GGUF file."
        )
    if (shape := tuple(weight.get_shape())) != needed:
        raise ModelLoadError(
            _untied(weight.name, slot)
            if slot is not None and slot.tied_to is not None
            else f"{folder}: tensor {weight.name!r} has shape {shape}, expected {needed}."
        )


def _require_all(folder: Path, places: Mapping[str, Slot], weights: Mapping[str, Any]) -> None:
    needed = {name for name, slot in places.items() if slot.tied_to is None}
    if missing := needed - weights.keys():
        raise ModelLoadError(
            f"{folder}: tensor {min(missing)!r} is missing ({len(missing)} of {len(needed)} are)."
        )


def read_tensors(path: Path, device: Device | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, tensor) of a model folder, or of a .safetensors or `.gguf` file.

    Tensors are read one at a time onto `device`, on CUDA directly from the file's pages. None: as
    torch tensors on the CPU. A head that may be tied comes last. Blocks of a `.gguf` file are
    dequantized to float32.

    Raises `ModelLoadError` for a missing, truncated or unsupported file, and for a folder with an
    adapter or quantized weights.
    """
    if path.is_dir():
        require_plain_weights(path)
    for name, file, opened in _tensors_of(path, torch_cpu() if device is None else device):
        with _reading(name, file):
            tensor = opened.get_tensor(name)
        yield name, tensor


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a model folder, .safetensors or `.gguf` file by checkpoint name.

    Raises `ModelLoadError`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, file, opened in _tensors_of(path, HOST):
        with _reading(name, file):
            shapes[name] = tuple(opened.get_slice(name).get_shape())
    return shapes


@contextmanager
def _reading(name: str, file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as problem:
        raise ModelLoadError(f"tensor {name!r} of {file} cannot be read: {problem}") from problem


def _tensors_of(
    path: Path, device: Device, dtype: Dtype | None = None
) -> Iterator[tuple[str, Path, Any]]:
    """Yield (checkpoint name, file, open file) of each tensor, with a head that may be tied last.

    Matrices in blocks of a `.gguf` file are read in `dtype` (None: float32). Raises
    `ModelLoadError`, also if two files contain the same tensor.
    """
    handles: list[tuple[str, Path, Any]] = []
    files: dict[str, Path] = {}
    for file in _weight_files(path) if path.is_dir() else [path]:
        try:
            opened = _opened(file, device, dtype)
        except (SafetensorError, OSError) as problem:
            raise ModelLoadError(f"{file} cannot be read as safetensors: {problem}") from problem
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            if (other := files.setdefault(name, file)) == file:
                handles.append((name, file, opened))
            elif not file.samefile(other):  # a link has the same contents
                raise ModelLoadError(
                    f"tensor {name!r} came twice: it is in {other} and in {file.name}."
                )
    for name, file, opened in sorted(handles, key=lambda item: item[0].endswith(HEAD)):
        if not name.endswith(_IGNORED_SUFFIXES):
            yield name, file, opened


def _opened(file: Path, device: Device, dtype: Dtype | None) -> Any:
    """Open a safetensors or `.gguf` file. Raises `OSError`, `SafetensorError`, `ModelLoadError`.

    safetensors holds the GIL while it reads a header, which is slow on a network file system.
    Reading the header beforehand, by calls that release the GIL, lets other threads run.
    """
    if file.suffix == ".gguf":
        return GgufReader(file, dtype, device)
    with open_regular(file) as source:
        length = int.from_bytes(source.read(8), "little")
        source.read(min(length, MOST_HEADER))
    if namespace(device) is host:
        return HostFile(file)
    return safe_open(file, framework="pt", device=_named(device))


def _named(device: Device) -> str:
    """Return a torch device in the notation of safetensors, with its index."""
    if device.type != "cuda" or device.index is not None:
        return str(device)
    return f"cuda:{namespace(device).cuda.current_device()}"


def weight_files(path: Path) -> list[Path]:
    """Return the files of a model's weights, with all parts of a split `.gguf` file.

    Raises `ModelLoadError`.
    """
    files = _weight_files(path) if path.is_dir() else [path]
    parts = (read_model(file).parts if file.suffix == ".gguf" else (file,) for file in files)
    return [part for own in parts for part in own]


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
    if not files and (whole := described_by(folder) or gguf_in(folder)) is not None:
        return [whole]
    if not files:
        raise ModelLoadError(
            held_instead(folder)
            or f"{folder} has no .safetensors file; convert it, other formats are not supported."
        )
    for file in files:
        if not file.exists():
            raise ModelLoadError(f"{file} is named by {index.name} but missing.")
    return files


def _untied(name: str, slot: Slot) -> str:
    return f"tensor {name!r} is tied to {slot.tied_to!r} by config.json but differs from it."


def cpu_multiplies_bf16() -> bool:
    """Return True if the processor has instructions for products of bfloat16."""
    try:
        flags = flags_in(CPUINFO.read_text(encoding="utf-8"))
    except OSError:  # not Linux
        return False
    return not flags.isdisjoint(("avx512_bf16", "amx_bf16"))
