"""The decoder on host arrays compared with the decoder on tensors, with the same CPU kernels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nano_inference.arrays import HOST, Device, as_host, namespace
from nano_inference.checkpoints.loading import load_params, load_spec
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.models.decoder import Decoder
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ops.cpu.backend import cpu_ops
from tests.models.families import CASES
from tests.models.strong import strong_model
from tests.models.tiny import FAMILIES, MORE_FAMILIES, tiny_model
from tests.ops.compiler import NEEDS_COMPILER

STEPS = [[(0, 0, 5), (1, 0, 40)], [(0, 5, 6), (1, 40, 41)], [(0, 6, 30), (1, 41, 42)]]
BLOCKS = {0: list(range(0, 16, 2)), 1: list(range(1, 16, 2))}  # of 8 rows, by sequence


def logits(folder: Path, dtype: str, device: Device) -> list[np.ndarray]:
    spec, ops, library = load_spec(folder), cpu_ops(1), getattr(namespace(device), dtype)
    params = load_params(folder, spec, library, device, ops.allocate)
    model = Decoder(spec, params, ops, 64)
    storage = KVStorage(spec, 16, 8, library, device)
    results = []
    for step in STEPS:
        chunks = [
            Rows([(37 * at + 11 * seq) % 300 for at in range(start, end)], start, BLOCKS[seq])
            for seq, start, end in step
        ]
        batch = batch_of_rows(chunks, 8, draws=range(len(step)), device=device)
        hidden = model.forward(batch, storage).hidden
        assert len(hidden) == len(step)
        results.append(as_host(model.logits(hidden)).numpy().copy())
    return results


def difference(folder: Path, dtype: str) -> float:
    both = zip(logits(folder, dtype, HOST), logits(folder, dtype, torch.device("cpu")), strict=True)
    return max(np.abs(a - b).max().item() for a, b in both)


@pytest.mark.thorough(but=["float32-llama", "bfloat16-qwen3-moe"])
@NEEDS_COMPILER
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoder_on_host_arrays_has_the_same_bits(tmp_path: Path, family: str, dtype: str) -> None:
    # the norm of the layers' inputs adds up squares in the order of the library
    allowed: Any = 1e-5 if (family, dtype) == ("gemma4", "float32") else 0
    assert difference(tiny_model(tmp_path, family), dtype) <= allowed


@NEEDS_COMPILER
def test_decoder_with_xielu_agrees_on_host_arrays(tmp_path: Path) -> None:
    case = CASES["apertus"]
    strong_model(tmp_path, case.class_name, **case.config)
    assert difference(tmp_path, "float32") < 1e-4
