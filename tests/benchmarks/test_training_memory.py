"""The memory table of docs/gpu.md: its arithmetic, and its numbers."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nano_inference import InferenceEngine
from nano_inference.models.parameters.table import param_table
from nano_inference.ops.gradients import PathRows
from nano_inference.rl import LoraPolicy, PolicyModel
from nano_inference.rl.backward.layer import Rows
from nano_inference.rl.backward.weights import LazyParams, Weights
from tests.models.tiny import tiny_model
from tests.rl.training import build

pytest.importorskip("triton")

from benchmarks.gpu.training_memory import GIB, Training, layer_bytes, trainings

DOCS = Path(__file__).parents[2] / "docs/gpu.md"


def engine_of(folder: Path, family: str) -> InferenceEngine:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"backend": "cuda", "cuda_graphs": False, "kv_cache_memory": 2**22}
    return build(tiny_model(folder, family), device=device, max_loras=1, **options)


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors within nested tuples."""
    if isinstance(value, Tensor):
        return [value]
    return [each for part in value for each in tensors_in(part)] if isinstance(value, tuple) else []


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layer_bytes_are_those_of_its_state(tmp_path: Path, family: str) -> None:
    rows = 3
    with engine_of(tmp_path, family) as engine:
        policy = PolicyModel(engine)
        kernels, decoder = policy._kernels(torch.float32), policy._kernel_decoder()
        held = policy._trainer._decoder.params
        weights = Weights(kernels, LazyParams(held, lambda name: held[name]))
        residual = torch.randn(rows, engine.spec.hidden_size).to(kernels.device)
        ids = torch.arange(rows)
        paths = kernels.paths([PathRows(ids, rows)])
        rows_of = Rows(ids.to(kernels.device), paths)
        _, state = decoder._forward(decoder.layers[0], weights, residual, rows_of, {})
    memory = {each.untyped_storage().data_ptr(): each.nbytes for each in tensors_in(state)}
    assert sum(memory.values()) == rows * layer_bytes(engine.spec, itemsize=4)


def test_trained_numbers_are_those_of_the_policies(tmp_path: Path) -> None:
    with engine_of(tmp_path, "llama") as engine:
        adapter = LoraPolicy(engine)
        assert Training(engine.spec, adapter=adapter.settings).trained == sum(
            param.numel() for param in adapter.parameters()
        )
        assert Training(engine.spec).trained == sum(
            param.numel() for param in PolicyModel(engine).parameters()
        )
        numbers = sum(math.prod(param.shape) for param in param_table(engine.spec))
        assert Training(engine.spec).served == 2 * numbers


def test_table_of_training_memory_is_current() -> None:
    """Each row of docs/gpu.md has the bytes that the script computes."""
    text = DOCS.read_text(encoding="utf-8")
    for name, training in trainings().items():
        (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", text, re.MULTILINE)
        parts = [*training.parts().values(), training.rest()]
        assert [float(cell) for cell in row.split("|")] == [round(n / GIB, 1) for n in parts], name
    spec = next(iter(trainings().values())).spec
    shown = [f"{layer_bytes(spec) / 1024:.0f} KiB", f"{4 * spec.hidden_size / 1024:.0f}"]
    for rows in (512, 4096):
        for choice in (False, True):
            training = Training(spec, rows, recompute_activations=choice)
            shown.append(f"{training.activations() / GIB:.1f}")
    (sentence,) = re.findall(r"^A layer keeps .*?4,096\.$", text, re.MULTILINE | re.DOTALL)
    figures = re.findall(r"\d+ KiB|\d+\.\d|(?<=or )\d+(?= if)", sentence)
    assert figures == shown


def test_training_recomputes_long_micro_batches_by_default() -> None:
    training = next(iter(trainings().values()))
    for rows, chosen in ((1024, False), (1025, True)):
        expected = replace(training, rows=rows, recompute_activations=chosen).activations()
        assert replace(training, rows=rows).activations() == expected
