"""Loading of models by their files of packed weights."""

import hashlib
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from nano_inference.arrays import Device, Dtype, dtype_name
from nano_inference.checkpoints.gguf.file import described_by
from nano_inference.checkpoints.loading import load_params, weight_files
from nano_inference.checkpoints.packed_files import packed_file
from nano_inference.models.parameters.mtp import whole_table
from nano_inference.models.parameters.param import Formats, ParamSpec
from nano_inference.models.parameters.storage import allocate, formats_of, num_bytes
from nano_inference.models.sharding.shard import ModelShard
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.cpu.memory import RecordedArena
from nano_inference.ops.formats import form_named
from nano_inference.ops.interface import Packing
from nano_inference.system.version import __version__

logger = logging.getLogger("nano_inference")

LEAST = 16 << 20  # bytes of weights: smaller models are packed in milliseconds


def load_packed(
    folder: Path,
    spec: ModelSpec,
    dtype: Dtype,
    device: Device,
    packing: Packing,
    part: ModelShard | None = None,
    quantization: Formats = None,
) -> dict[str, Any]:
    """Return the parameters that `load_params` returns, from the file of packed weights.

    The first load of a model writes the file. Small models have none.

    Raises as `load_params`.
    """
    table, file = whole_table(spec, part), None
    if num_bytes(table, dtype, quantization) >= LEAST:
        with suppress(OSError):  # a file cannot be read, which `load_params` reports
            file = packed_file(weight_files(folder), _about(table, dtype, quantization, packing))
    if file is None:
        matrix = packing.allocate(None)
        return load_params(folder, spec, dtype, device, matrix, part, quantization)
    if (opened := file.open()) is not None:
        arena, notes = opened
        formats = {name: form_named(form) for name, form in notes["formats"].items()}
        try:
            matrix = packing.allocate(arena)
            return allocate(table, dtype, device, matrix, formats, arena.take)
        except ValueError as problem:
            logger.warning("removing the packed weights %s: %s", file.path, problem)
            file.remove()
    arena = RecordedArena()
    matrix = packing.allocate(arena)
    params = load_params(folder, spec, dtype, device, matrix, part, quantization, arena.take)
    formats = {name: form.name for name, form in formats_of(params).items()}
    file.write(arena.pieces, {"formats": formats, "model": str(described_by(folder) or folder)})
    return params


def _about(
    table: tuple[ParamSpec, ...], dtype: Dtype, quantization: Formats, packing: Packing
) -> dict[str, Any]:
    """Return everything that decides the packed bytes, except the content of the files."""
    return {
        "package": __version__,
        "layout": packing.layout,
        "dtype": dtype_name(dtype),
        "quantization": repr(quantization),
        "parameters": hashlib.sha256(repr(table).encode()).hexdigest(),
    }
