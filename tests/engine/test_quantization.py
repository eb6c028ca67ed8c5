"""Engines with 8-bit and 4-bit weights: updates, sleep, copies, memory and rejected options."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import (
    ConfigError,
    EngineConfig,
    InferenceEngine,
    ModelLoadError,
    WeightUpdateError,
)
from nano_inference.arrays import dtype_for
from nano_inference.checkpoints.loading import load_spec
from nano_inference.device.backends import choose_ops
from nano_inference.models.parameters.storage import form_of, num_bytes
from nano_inference.models.parameters.table import param_table
from nano_inference.ops.formats import FORMATS, QUANTIZATIONS
from nano_inference.ranks.build import plan_engine
from tests.engine.test_control import same
from tests.models.tiny import Weights, llama_config, llama_weights, tiny_llama, write_model
from tests.weights.weight_cases import (
    EMBEDDING,
    HEAD,
    NEW,
    NEWER,
    NORM,
    PROMPT,
    UP,
    Build,
    bits,
    current,
    drain,
    drawn,
    greedy,
)

BACKENDS = ("reference", "cpu")
DTYPES = ("float32", "bfloat16")
CASES = [
    (backend, name)
    for name in QUANTIZATIONS
    for backend in BACKENDS
    if (backend, name) != ("cpu", "fp8")
]


@pytest.mark.thorough(cases=["float32-reference-int8"])
@pytest.mark.parametrize(("backend", "quantization"), CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_updated_engine_equals_a_fresh_engine(
    build: Build, backend: str, dtype: str, quantization: str
) -> None:
    options: dict[str, Any] = {"backend": backend, "dtype": dtype, "quantization": quantization}
    fresh = build(NEW, **options)
    expected = bits(fresh.generate(PROMPT, drawn())[0])
    rounded = {
        name: tensor.to(dtype_for(tensor, fresh.model.dtype)) for name, tensor in NEW.items()
    }
    for weights, blocking in ((NEW, True), (NEW, False), (rounded, True)):
        engine = build(**options)
        before = bits(engine.generate(PROMPT, drawn())[0])
        engine.update_weights(weights, blocking=blocking, check_finite=True)
        actual = bits(engine.generate(PROMPT, drawn())[0])
        assert before != actual == expected
        assert engine.weights_checksum() == fresh.weights_checksum()
        assert engine.numerics.fingerprint.endswith(f"/{quantization}")
    forms = {name: form_of(param) for name, param in fresh.model.params.items()}
    layers, head = QUANTIZATIONS[quantization]
    assert forms.pop("head") == head
    assert all(
        form == (layers if name.endswith(("qkv", "o", "gate_up", "down")) else None)
        for name, form in forms.items()
    )


@pytest.mark.parametrize(("backend", "quantization"), CASES)
def test_exported_weights_load_identically_elsewhere(
    build: Build, backend: str, quantization: str
) -> None:
    options: dict[str, Any] = {"backend": backend, "quantization": quantization}
    engine = build(NEW, dtype="bfloat16", **options)
    other = build(dtype="bfloat16", **options)
    other.update_weights(current(engine), blocking=True)
    assert other.weights_checksum() == engine.weights_checksum()
    assert bits(other.generate(PROMPT, drawn())[0]) == bits(engine.generate(PROMPT, drawn())[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_patch_rejects_codes_and_accepts_plain_tensors(build: Build, backend: str) -> None:
    engine = build(backend=backend, quantization="int8-32")
    before = engine.weights_checksum()
    places = torch.tensor([3])
    good, bad = (NORM, places, torch.tensor([1.5])), (UP, places, torch.tensor([0.5]))
    for name in (UP, HEAD):
        with pytest.raises(WeightUpdateError, match=r"cannot be patched, .* send the whole tensor"):
            engine.update_weights([good, (name, *bad[1:])], blocking=True)
    assert engine.weights_checksum() == before
    embedding = (EMBEDDING, places, torch.tensor([0.5]))  # not the head
    engine.update_weights([good, embedding], blocking=True)
    assert current(engine)[NORM][3] == 1.5


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_non_finite_weights_are_rejected_if_checked(build: Build, quantization: str) -> None:
    engine = build(backend="reference", quantization=quantization)
    before = engine.weights_checksum()
    for bad in (torch.nan, -torch.inf, *((2e7,) if quantization not in ("int8", "fp8") else ())):
        wrong = NEW[UP].clone()
        wrong[2, 5] = bad
        with pytest.raises(WeightUpdateError, match=f"{UP}.*holds NaN or infinite values"):
            engine.update_weights({**NEW, UP: wrong}, blocking=True, check_finite=True)
    with pytest.raises(WeightUpdateError, match="must be a floating point tensor"):
        engine.update_weights({UP: NEW[UP].to(torch.int8)}, blocking=True)
    assert engine.weights_checksum() == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_tied_head_is_compared_as_codes(tied: Path, build: Build, backend: str) -> None:
    old, new = (llama_weights(llama_config(tie=True), seed=seed) for seed in (0, 1))
    engine = build(model_path=str(tied), backend=backend, quantization="int4")
    assert engine.model.params["embed"].form == FORMATS["int8-32"]
    engine.update_weights({HEAD: old[EMBEDDING]}, blocking=True)
    for weights in ({HEAD: new[EMBEDDING]}, {EMBEDDING: new[EMBEDDING], HEAD: old[EMBEDDING]}):
        with pytest.raises(WeightUpdateError, match="is tied to"):
            engine.update_weights(weights, blocking=True)
    engine.update_weights({**new, HEAD: new[EMBEDDING]}, blocking=True)
    assert engine.weights_checksum().keys() == new.keys()


@pytest.mark.parametrize("same_head", [True, False])
def test_tied_head_of_a_checkpoint_is_compared(tmp_path: Path, same_head: bool) -> None:
    config = llama_config(tie=True)
    weights: Weights = llama_weights(config)
    weights[HEAD] = weights[EMBEDDING].clone()
    weights[HEAD][7] *= 1 if same_head else 1.5
    folder = write_model(tmp_path / "tied", config, weights)
    options = EngineConfig(str(folder), backend="reference", quantization="int8")
    if same_head:
        InferenceEngine(options).shutdown()
    else:
        with pytest.raises(ModelLoadError, match="is tied to"):
            InferenceEngine(options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sleep_and_old_weights_change_no_bit(build: Build, model: Path, backend: str) -> None:
    options: dict[str, Any] = {"backend": backend, "quantization": "int4"}
    params = replace(drawn(), raw_logprobs=True)
    expected = build(**options).generate(PROMPT, params)[0]
    engine = build(**options, ref_model_path=str(model))
    checksum = engine.weights_checksum()
    engine.add_request(PROMPT, params)
    for _ in range(3):
        engine.step()
    engine.sleep(weights=True)
    engine.wake()
    assert engine.weights_checksum() == checksum
    engine.update_weights(NEWER, blocking=False, kv_policy="finish_old")
    (sample,) = drain(engine)
    assert same(replace(sample, ref_logprobs=None), expected)
    assert sample.ref_logprobs == sample.raw_logprobs
    assert engine.get_weight_version() == 1
    assert bits(engine.generate(PROMPT, greedy())[0]) == bits(
        build(NEWER, **options).generate(PROMPT, greedy())[0]
    )


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_memory_is_counted_by_format(tmp_path: Path, quantization: str, tie: bool) -> None:
    folder = tiny_llama(tmp_path / "m", tie=tie)
    options: Any = {"dtype": "float32", "quantization": quantization}
    config = EngineConfig(str(folder), backend="reference", **options)
    plain = plan_engine(replace(config, quantization=None)).memory_budget.weights
    with InferenceEngine(config) as engine:
        params = engine.model.params.values()
        held = sum(
            param.nbytes if isinstance(param, Tensor) else param.data.nbytes for param in params
        )
        counted = engine.memory_budget.weights
    assert counted <= held <= counted * 1.02  # rows are padded to multiples of 4 bytes
    assert counted == num_bytes(param_table(load_spec(folder)), torch.float32, quantization)
    assert counted < plain / 1.8


REFUSED = [
    ({"backend": "cuda"}, "is not possible with backend='cuda'"),
    ({"attention": "triton"}, "is not possible with attention='triton'"),
    ({"tensor_parallel": 16}, "at most 8 ranks"),
    ({"tensor_parallel": 2}, "96 columns of 'layers.0.down' are not divided at multiples of 32"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_impossible_options_are_rejected_before_loading(
    tmp_path: Path, options: Any, reason: str
) -> None:
    folder = tiny_llama(tmp_path / "m", num_heads=16, num_kv_heads=16)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=reason):
        plan_engine(EngineConfig(str(folder), quantization="int4", device="cpu", **options))


def test_cuda_rejects_codes_without_kernels(model: Path) -> None:
    config = EngineConfig(str(model), quantization="int8-32")
    specs = {"policy": load_spec(model)}
    with pytest.raises(
        ConfigError, match=r"quantization='int8-32' is not possible with the cuda backend on cuda"
    ):
        choose_ops(config, specs, torch.bfloat16, torch.device("cuda"))


def test_unknown_quantization_names_are_rejected(model: Path) -> None:
    for wrong in ("fp8_e5m2", "int8-64", True, 8):
        with pytest.raises(
            ConfigError, match=r"one of None, 'auto', 'none', 'int8', 'int8-32', 'int4'"
        ):
            EngineConfig(str(model), quantization=wrong)  # pyright: ignore


def test_numerics_name_the_quantization_only_if_quantized(build: Build) -> None:
    assert build(backend="reference").numerics.fingerprint.count("/") == 3
    numerics = build(backend="reference", quantization="int8").numerics
    assert (numerics.quantization, numerics.fingerprint.split("/")[-1]) == ("int8", "int8")
