"""Engines that compute with the stored codes of compressed-tensors, GPTQ, AWQ and bitsandbytes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import ConfigError, EngineConfig, InferenceEngine, SamplingParams
from nano_inference.arrays import as_torch
from nano_inference.checkpoints import stored_weight
from nano_inference.checkpoints.loading import load_params, load_spec
from nano_inference.errors import ModelLoadError
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.storage import formats_of, num_bytes
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.formats import FORMATS
from nano_inference.ops.interface import Ops
from nano_inference.ops.quantised import encode
from nano_inference.ops.reference.backend import reference_ops
from nano_inference.rl import PolicyModel, differences
from nano_inference.rl.replayer import Replayer
from tests.checkpoints.quantisers import quantised, write_quantised
from tests.models.test_quantised import LOAD_AND_WATCH
from tests.models.tiny import family_weights, llama_config, llama_weights, write_model
from tests.ops.cpu_kernels import kernels
from tests.ranks.rank_threads import ThreadLauncher
from tests.rl.test_policy_model import drawn_and_scored

CPU = torch.device("cpu")
UP = "model.layers.1.mlp.up_proj"
SIZES: dict[str, Any] = {"hidden": 128, "inner": 256, "layers": 2}
FORMS = {
    "compressed-int8": "int8",
    "compressed-int8-zeros": "int8-32-min",
    "compressed-int8-packed": "int8-32",
    "compressed-int8-128": "int8-128-wide",
    "compressed-int8-rows": "int8",
    "compressed-int4": "int4-32",
    "compressed-int4-zeros": "int4-32-min",
    "compressed-int4-32-bfloat16": "int4-32-wide",
    "compressed-int4-64": "int4-64-wide",
    "compressed-int4-128-zeros": "int4-128-min",
    "compressed-int4-float32": "int4-128-wide",
    "compressed-int4-rows": "int4-128-wide",
    "gptq": "int4-32",
    "gptq-2bit": "int4-32-min",
    "gptq-8bit": "int8-32-min",
    "gptq-128": "int4-128-wide",
    "gptq-8bit-128": "int8-128-wide",
    "awq": "int4-32-min",
    "awq-64": "int4-64-min",
    "awq-128": "int4-128-min",
    "bitsandbytes-int8": "int8",
    "compressed-mxfp4": "mxfp4-32",
}
REFUSED = {
    "compressed-int4-ordered": r"columns are reordered \(act-order\)",
    "gptq-ordered": r"columns are reordered \(act-order\)",
    "gptq-v2": r"columns are reordered \(act-order\)",
    "compressed-int4-48": "no format has codes of 4 bits in groups of 48 columns",
    "compressed-int4-float32-zeros": "zero points and 32-bit scales have too many digits",
    "fp8-blocks": "codes of fp8 are not integers",
    "compressed-nvfp4": "codes of nvfp4 are not integers",
    "bitsandbytes-nf4": "codes of bitsandbytes-4bit are not integers",
}


def ops_of(backend: str) -> Ops:
    if backend == "reference":
        return reference_ops()
    kernels()
    return cpu_ops(1)


def write(folder: Path, name: str, **sizes: Any) -> Path:
    config = llama_config(**{**SIZES, **sizes})
    write_quantised(folder, name, config, llama_weights(config))
    return folder


def load(folder: Path, backend: str, quantization: Any = "file") -> dict[str, Any]:
    allocate = ops_of(backend).allocate
    dtype = torch.float32
    return load_params(folder, load_spec(folder), dtype, CPU, allocate, None, quantization)


def engine_of(folder: Path, **options: Any) -> InferenceEngine:
    settled = {"max_model_len": 64, "max_batch_size": 4, "quantization": "file", "seed": 0}
    return InferenceEngine(EngineConfig(str(folder), **(settled | options)))


@pytest.mark.thorough(
    cases=[
        "bitsandbytes-int8-cpu-1",
        *(f"{form}-{each}" for form in FORMS for each in (f"cpu-{2**22}", "reference-1")),
    ]
)
@pytest.mark.parametrize("panel", [2**22, 1])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", FORMS)
def test_coded_weight_equals_its_dequantised_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, backend: str, panel: int
) -> None:
    monkeypatch.setattr(stored_weight, "PANEL", panel)
    folder = write(tmp_path, name, layers=1)
    params, exact = load(folder, backend), load(folder, backend, None)
    forms = formats_of(params)
    assert {each.name for each in forms.values()} == {FORMS[name]}
    assert {key.split(".")[-1] for key in forms} == {"qkv", "o", "gate_up", "down"}
    for slot in slots(param_table(load_spec(folder))).values():
        assert torch.equal(read(params, slot), read(exact, slot)), slot.name


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_codes_are_rejected_or_dequantised(tmp_path: Path, name: str) -> None:
    sizes = {"hidden": 192, "inner": 192} if name.endswith("48") else {}
    folder = write(tmp_path, name, layers=1, **sizes)
    with pytest.raises(ModelLoadError, match=REFUSED[name]) as raised:
        load(folder, "reference")
    message = str(raised.value)
    assert "'model.layers.0.self_attn.q_proj.weight'" in message
    assert message.endswith("omit the option to dequantize the checkpoint.")
    assert not formats_of(load(folder, "reference", None))


def test_plain_rows_among_codes_are_rejected(tmp_path: Path) -> None:
    config = llama_config(**SIZES)
    weights = llama_weights(config)
    stored, _ = quantised("compressed-int8", weights)
    kept = {key: each for key, each in stored.items() if not key.startswith(UP)}
    kept[f"{UP}.weight"] = weights[f"{UP}.weight"]
    fields = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": [UP]}
    groups = {"a": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}}
    fields |= {"config_groups": groups}
    write_model(tmp_path, config | {"quantization_config": fields}, kept)
    with pytest.raises(
        ModelLoadError, match=r"gate_proj\.weight'.*shares a parameter with '.*up_proj"
    ):
        load(tmp_path, "reference")


def test_mixed_formats_in_a_matrix_use_the_wider_one(tmp_path: Path) -> None:
    """gptqmodel's per-module overrides: 8 bits in one projection, 4 bits in its neighbour."""
    config = llama_config(**SIZES)
    weights = llama_weights(config)
    stored, _ = quantised("gptq", weights)
    more, _ = quantised("gptq-8bit", {f"{UP}.weight": weights[f"{UP}.weight"]})
    said = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    said["dynamic"] = {f"+:{UP}": {"bits": 8}}
    write_model(tmp_path, config | {"quantization_config": said}, stored | more)
    params, exact = load(tmp_path, "reference"), load(tmp_path, "reference", None)
    forms = {key: form.name for key, form in formats_of(params).items()}
    assert forms["layers.1.gate_up"] == "int8-32-min"
    assert forms["layers.0.gate_up"] == "int4-32"
    for slot in slots(param_table(load_spec(tmp_path))).values():
        assert torch.equal(read(params, slot), read(exact, slot))


@pytest.mark.parametrize("same", [True, False])
def test_tied_head_in_codes_is_compared(tmp_path: Path, same: bool) -> None:
    config = llama_config(**SIZES, tie=True)
    stored, _ = quantised("compressed-int8", llama_weights(config))
    drawn = torch.Generator().manual_seed(0)
    codes = torch.randint(-99, 99, (300, 128), generator=drawn).to(torch.int8)  # no 127
    scales = torch.rand(300, 1, generator=drawn)
    for module in ("model.embed_tokens", "lm_head"):
        factor = 1 if same or module != "lm_head" else 2
        stored |= {f"{module}.weight": codes.clone(), f"{module}.weight_scale": scales * factor}
    weights = {"num_bits": 8, "strategy": "channel"}
    groups = {"a": {"targets": ["Linear", "Embedding"], "weights": weights}}
    fields = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    fields |= {"config_groups": groups}
    write_model(tmp_path, config | {"quantization_config": fields}, stored)
    if same:
        params = load(tmp_path, "reference")
        assert torch.equal(params["embed"].read(), codes.float() * scales)
    else:
        with pytest.raises(ModelLoadError, match=r"'lm_head\.weight' is tied to"):
            load(tmp_path, "reference")


def test_matching_codes_are_kept_unchanged(tmp_path: Path) -> None:
    """With `quantization="int8"`, stored int8 codes are not rounded a second time."""
    folder = write(tmp_path, "compressed-int8")
    params, exact = load(folder, "reference", "int8"), load(folder, "reference", None)
    assert torch.equal(params["layers.0.o"].read(), exact["layers.0.o"])
    rounded = load(folder, "reference", "int8-32")["layers.0.o"].read()
    assert not torch.equal(rounded, exact["layers.0.o"])


def test_damaged_scales_are_rejected(tmp_path: Path) -> None:
    config = llama_config(**SIZES)
    stored, _ = quantised("awq", llama_weights(config))
    stored[f"{UP}.scales"][1, 7] = torch.inf
    fields = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    write_model(tmp_path, config | {"quantization_config": fields}, stored)
    with pytest.raises(ModelLoadError, match=f"'{UP}.weight' is dequantized to NaN or infinite"):
        load(tmp_path, "reference")


@pytest.mark.thorough(cases=["compressed-int8-cpu", "gptq-128-cpu"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["compressed-int8", "gptq-128", "awq-64"])
def test_engine_answers_with_a_checkpoints_codes(tmp_path: Path, name: str, backend: str) -> None:
    folder = write(tmp_path, name)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = [[5, 6, 7, 8], [9] * 20, [11, 3]]
    results = []
    for quantization in ("file", None):
        with engine_of(
            folder, quantization=quantization, backend=backend, dtype="float32"
        ) as engine:
            results.append(engine.generate(prompts, params))
            alone = [engine.generate([each], params)[0] for each in prompts]
        for one, other in zip(results[-1], alone, strict=True):
            assert one.completion_tokens == other.completion_tokens
            assert one.logprobs == other.logprobs
    for coded, exact in zip(*results, strict=True):  # inputs are rounded to 8-bit codes
        assert 0 < abs(coded.logprobs[0] - exact.logprobs[0]) < 0.2


def test_start_up_line_reports_codes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path, "awq-64")
    with caplog.at_level("INFO", logger="nano_inference"), engine_of(folder, backend="reference"):
        (line,) = [text for text in caplog.messages if "quantized with" in text]
    assert line == (
        f"{folder}: quantized with awq (4 bits, a scale for 64), computed with its own codes"
    )


@pytest.mark.parametrize("name", ["compressed-int8", "compressed-int4-128-zeros", "gptq"])
def test_memory_is_reported_by_format_and_updates_keep_it(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, name)
    weights = llama_weights(llama_config(**SIZES), seed=1)
    sums: list[Any] = []
    for backend in ("reference", "cpu"):
        with engine_of(folder, backend=backend, dtype="bfloat16") as engine:
            forms = formats_of(engine.model.params)
            table = param_table(engine.spec)
            assert engine.memory_budget.weights == num_bytes(table, torch.bfloat16, forms)
            before = engine.weights_checksum()
            engine.update_weights(weights, blocking=True)
            assert formats_of(engine.model.params) == forms
            down = engine.model.params["layers.0.down"]
            tensor = weights["model.layers.0.mlp.down_proj.weight"].bfloat16()
            wanted = encode(tensor, down.form, down.bounds).numbers().bfloat16()
            assert torch.equal(as_torch(down.read()), wanted)
            assert before != engine.weights_checksum()
            sums.append((before, engine.weights_checksum()))
    assert sums[0] == sums[1]


def test_trainer_has_the_engines_bits_from_its_first_publish_on(tmp_path: Path) -> None:
    """Before the first publish, the engine has the checkpoint's codes and the trainer has codes
    made from its own weights.
    """
    with engine_of(write(tmp_path, "compressed-int4-64"), backend="cpu") as engine:
        model = PolicyModel(engine)
        for _ in range(2):
            model.publish()
            reported, scored = drawn_and_scored(model)
            assert scored == reported
            with torch.no_grad():
                model.get_parameter(f"{UP}.weight").mul_(1.01)


def test_sample_is_replayed_with_the_checkpoint_codes(tmp_path: Path) -> None:
    folder = write(tmp_path, "awq")
    weights = llama_weights(llama_config(**SIZES), seed=1)
    with engine_of(folder, backend="cpu", dtype="bfloat16") as engine:
        (sample,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8, raw_logprobs=True))
        engine.update_weights(weights, blocking=True)
        assert not differences(sample, Replayer(engine, {0: str(folder)}).replay(sample))
        other = {0: llama_weights(llama_config(**SIZES))}  # the weights before quantisation
        assert differences(sample, Replayer(engine, other).replay(sample))


WATCH = LOAD_AND_WATCH.replace(
    'torch.device("cpu"))', 'torch.device("cpu"), quantization="file")'
).replace("each.nbytes for", "getattr(each, 'data', each).nbytes for")


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what is anonymous")
@pytest.mark.parametrize("name", ["compressed-int8", "gptq", "awq-128"])
def test_coded_weights_are_never_dequantised_in_memory(tmp_path: Path, name: str) -> None:
    hidden, inner = 512, 16384
    config = llama_config(hidden=hidden, inner=inner, layers=1)
    write_quantised(tmp_path, name, config, family_weights(config))
    done = subprocess.run(
        [sys.executable, "-c", WATCH, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # return freed memory to the system
    )
    report = json.loads(done.stdout)
    assert report["size"] < 4 * hidden * inner
    assert report["peak"] < report["size"] + hidden * inner  # a bfloat16 matrix takes twice as much


def test_engine_of_two_ranks_has_the_bits_of_one(tmp_path: Path) -> None:
    folder = write(tmp_path, "awq", hidden=256, num_heads=8, num_kv_heads=4)
    params = SamplingParams(max_tokens=8, temperature=1.0)
    calls: list[Any] = []
    for ranks in (1, 2):
        options: dict[str, Any] = {"backend": "cpu", "dtype": "bfloat16", "tensor_parallel": ranks}
        settled = {"max_model_len": 64, "max_batch_size": 4, "seed": 0, "num_threads": 1}
        config = EngineConfig(str(folder), quantization="file", **settled, **options)
        with InferenceEngine(config, launcher=ThreadLauncher() if ranks > 1 else None) as engine:
            (sample,) = engine.generate([[5, 6, 7]], params)
            bits = sample.completion_tokens, sample.logprobs
            calls.append((bits, engine.weights_checksum(), engine.numerics.fingerprint))
    assert calls[0] == calls[1]


@pytest.mark.thorough
def test_ranks_do_not_split_groups(tmp_path: Path) -> None:
    folder = write(tmp_path, "awq-128")
    message = "128 columns of 'layers.0.o' are not divided at multiples of 128; use fewer ranks"
    with pytest.raises(ConfigError, match=f"'file' is not possible .*{message}"):
        engine_of(folder, backend="reference", tensor_parallel=2)


def test_table_covers_every_checkpoint_format() -> None:
    of_gguf_files = {form.name for form in FORMATS.values() if form.bits in (5, 6)}
    of_gguf_files |= {"int8-16-wide", "int8-16-min", "int4-32-min-half", "int4-32-steps"}
    of_gguf_files |= {form.name for form in FORMATS.values() if form.values} - {"mxfp4-32"}
    assert {*FORMS.values()} == FORMATS.keys() - of_gguf_files
