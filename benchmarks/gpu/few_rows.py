"""The trunk of a decode step, captured without the rest: with the ordinary kernels, and with the
fused kernels for few rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.card import seconds_of
from benchmarks.gpu.scale import Scale
from nano_inference import InferenceEngine
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.queues import queue_of
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.sampling.tensors import to_device

CALLS = 50


@torch.inference_mode()
def measure(engine: InferenceEngine, rows: int, scale: Scale) -> dict[str, list[float]]:
    """Return the seconds of a trunk by name, for this many sequences at the scale's context."""
    model, device, block_size = engine.model, torch.device(scale.device), engine.config.block_size
    if model.ops.few_rows is None:
        raise ValueError(
            f"the {model.ops.name} backend has no kernels for few rows; use batch_invariant=False."
        )
    few_rows, per_table = model.ops.few_rows, -(-scale.context // block_size)
    storage = KVStorage(model.spec, rows * per_table, block_size, model.dtype, device)
    storage.keys.normal_()
    storage.values.normal_()
    tables = [range(row * per_table, (row + 1) * per_table) for row in range(rows)]
    decodes = [Rows([1 + row], scale.context - 1, table) for row, table in enumerate(tables)]
    batch = to_device(batch_of_rows(decodes, block_size), device)
    trunks: dict[str, Callable[[], Tensor]] = {
        "trunk": lambda: model.trunk(model.ops, batch, storage),
        "trunk, few rows": lambda: few_rows(model.trunk, batch, storage),
    }
    queue = queue_of(device)
    calls = CALLS if scale.device != "cpu" else 1
    found: dict[str, list[float]] = {}
    with queue.current():
        pool = queue.new_pool()
        for name, run in trunks.items():
            found[name] = seconds_of(
                queue.capture(run, pool).replay, scale.device, scale.repeats, calls
            )
    return found
