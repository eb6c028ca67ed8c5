"""`PolicyModel` of an engine with quantized weights: bitwise equal logprobs, and gradients passed
straight through the rounding.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nano_inference import SamplingParams
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read
from nano_inference.ops.formats import QUANTIZATIONS
from nano_inference.rl import PolicyModel, differences
from nano_inference.rl.replayer import Replayer
from tests.models.tiny import tiny_llama, tiny_model, write_model
from tests.rl.test_policy_model import drawn_and_scored
from tests.rl.training import bits, build, gradients
from tests.weights.weight_cases import NEW

WHOLE = [name for name in QUANTIZATIONS if name != "fp8"]  # codes of the CPU kernels
CASES = [
    *(("cpu", "bfloat16", name, "llama") for name in WHOLE),
    ("reference", "bfloat16", "fp8", "llama"),
    ("cpu", "float32", "int4", "gemma3"),
    ("cpu", "bfloat16", "int8", "qwen3-moe"),
    ("reference", "bfloat16", "int4", "llama"),
    ("reference", "float32", "int8-32", "llama"),
]


@pytest.mark.thorough(but=["reference-bfloat16-int4-llama", "reference-float32-int8-32-llama"])
@pytest.mark.parametrize(("backend", "dtype", "quantization", "family"), CASES)
def test_publish_makes_quantized_logprobs_equal_the_model(
    tmp_path: Path, backend: str, dtype: str, quantization: str, family: str
) -> None:
    folder = tiny_model(tmp_path, family)
    with build(folder, dtype=dtype, backend=backend, quantization=quantization) as engine:
        model = PolicyModel(engine)
        reported, scored = drawn_and_scored(model)
        assert scored == reported
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        assert all(bool(grad.any()) for grad in gradients(model).values())
        optimizer.step()
        stepped, scored = drawn_and_scored(model)
        assert scored != stepped == reported
        model.publish()
        published, scored = drawn_and_scored(model)
        assert scored == published != reported


def dequantised(model: PolicyModel) -> dict[str, Tensor]:
    engine = model.engine
    return {
        name: read(engine.model.params, slot).clone()
        for name, slot in slots(param_table(engine.spec)).items()
    }


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_gradients_equal_those_of_the_dequantized_model(tmp_path: Path, quantization: str) -> None:
    folder = tiny_llama(tmp_path / "full")
    with build(folder, backend="reference", quantization=quantization) as engine:
        model = PolicyModel(engine)
        grads, numbers = gradients(model), dequantised(model)
        # the trainer keeps full precision
        embedding = "model.layers.0.mlp.up_proj.weight"
        assert not torch.equal(model.get_parameter(embedding), numbers[embedding])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with build(write_model(tmp_path / "rounded", config, numbers), backend="reference") as engine:
        expected = gradients(PolicyModel(engine))
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]), name


def test_saved_checkpoint_serves_the_published_bits(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "full")
    options = {"backend": "reference", "dtype": "bfloat16", "quantization": "int4"}
    with build(folder, **options) as engine:
        model = PolicyModel(engine)
        gradients(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.publish()
        expected = engine.weights_checksum()
        model.save_pretrained(tmp_path / "saved")
        (sample,) = engine.generate(list(range(3, 20)), SamplingParams(max_tokens=8, seed=1))
        trained = {name: param.detach() for name, param in model.named_parameters()}
        for weights in (None, {1: trained}, {1: tmp_path / "saved"}):
            replayed = Replayer(engine, weights).replay(sample)
            assert not differences(sample, replayed)
    with build(tmp_path / "saved", **options) as engine:
        assert engine.weights_checksum() == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", WHOLE)
def test_model_starts_with_the_codes_of_an_updated_engine(
    tmp_path: Path, quantization: str, dtype: str
) -> None:
    with build(tiny_llama(tmp_path), backend="cpu", dtype=dtype, quantization=quantization) as one:
        one.update_weights(NEW, blocking=True)
        reported, scored = drawn_and_scored(PolicyModel(one))
        assert scored == reported


def test_swapped_parameter_updates_the_bits(tmp_path: Path) -> None:
    with build(tiny_llama(tmp_path), backend="reference", quantization="int8") as engine:
        model = PolicyModel(engine)
        before = bits(model.logprobs([[3, 4, 5, 6]])[0])
        with torch.no_grad():
            model.get_parameter("lm_head.weight").mul_(1.5)
        assert bits(model.logprobs([[3, 4, 5, 6]])[0]) != before
