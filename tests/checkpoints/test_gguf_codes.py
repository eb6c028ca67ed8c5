"""Engines that compute with the blocks of GGUF files without conversion."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.arrays import as_torch
from nano_inference.checkpoints import folders
from nano_inference.checkpoints.gguf import codes as gguf_codes
from nano_inference.checkpoints.loading import gguf_formats, load_params, load_spec
from nano_inference.errors import ConfigError, ModelLoadError
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.storage import formats_of
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.formats import FORMATS, Stack
from nano_inference.ops.quantised import encode
from nano_inference.ops.reference.backend import reference_ops
from tests.checkpoints.hf_to_gguf import hf_to_gguf
from tests.models.strong import strong_model
from tests.models.tiny_gguf import described, gguf

# Offsets of the float16 numbers in a block.
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}
CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.parametrize("name", gguf_codes.KINDS)
def test_blocks_agree_with_the_gguf_package(name: str) -> None:
    kind, layout = gguf.GGMLQuantizationType[name], gguf_codes.KINDS[name]
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    assert columns == layout.columns
    drawn = np.random.default_rng(7)
    raw = drawn.integers(0, 256, (6, 3 * size), dtype=np.uint8)
    raw[0], raw[1] = 0, 255
    for at in HALVES.get(name, (0,)):
        numbers = drawn.normal(size=(6, 3)).astype(np.float16)
        raw.reshape(6, 3, size)[..., at : at + 2] = numbers.view(np.uint8).reshape(6, 3, 2)
    if name == "MXFP4":  # an exponent of 255 is NaN
        raw.reshape(6, 3, size)[..., 0] %= 255
        raw[:2, 0] = 0, 254
    codes = gguf_codes.read_blocks(name, raw, 3 * columns)
    form = FORMATS[layout.form]
    assert (codes.mins is not None) == form.mins
    for scales, steps in ((codes.scales, codes.steps), (codes.mins, codes.min_steps)):
        assert (steps is not None) == (form.scales == "steps" and scales is not None)
        if steps is not None and scales is not None:
            whole = scales / steps.repeat(form.groups_per_step, 1)
            np.testing.assert_array_equal(whole, whole.round())
    group = 3 * columns // codes.scales.shape[1]
    assert group == form.group
    with np.errstate(over="ignore"):  # the largest exponent of MXFP4
        numbers = codes.codes.astype(np.float32) * codes.scales.astype(np.float32).repeat(group, 1)
        if codes.mins is not None:
            numbers -= codes.mins.repeat(group, 1)
        np.testing.assert_array_equal(numbers, gguf.dequantize(raw, kind))
    np.testing.assert_array_equal(gguf_codes.numbers_of(name, raw, 3 * columns), numbers)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_file_codes_are_read_unchanged(tmp_path: Path, name: str) -> None:
    """Every weight stored as codes decodes to exactly the file's numbers."""
    kind = gguf.GGMLQuantizationType[name]
    strong_model(tmp_path / "hf", "LlamaForCausalLM", **CONFIG)
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "llama", matrices=kind)
    coded = described(path, tmp_path / "cache", coded=True)
    plain = described(path, tmp_path / "cache")
    assert coded != plain
    spec, device = load_spec(coded), torch.device("cpu")
    params = load_params(
        *(coded, spec, torch.float32, device, reference_ops().allocate), quantization="file"
    )
    forms = formats_of(params)
    assert {each.name for each in forms.values()} == {gguf_codes.KINDS[name].form}
    assert {"head", "layers.0.qkv", "layers.1.down"} <= forms.keys()
    exact = load_params(coded, spec, torch.float32, device)
    numbers = load_params(plain, load_spec(plain), torch.float32, device)
    for slot in slots(param_table(spec)).values():
        if slot.param in forms:
            assert torch.equal(read(params, slot), read(exact, slot))
            assert torch.equal(read(exact, slot), read(numbers, slot))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_attention_matrices_keep_formats_of_their_own(tmp_path: Path, backend: str) -> None:
    config = CONFIG | {"hidden_size": 256}
    strong_model(tmp_path / "hf", "LlamaForCausalLM", **config)
    kinds = gguf.GGMLQuantizationType
    path = hf_to_gguf(
        *(tmp_path / "hf", tmp_path / "m.gguf", "llama"),
        matrices=kinds["Q4_0"],
        others={"blk.0.attn_v": kinds["Q8_0"], "blk.1.attn_q": kinds["Q5_1"]},
    )
    folder = described(path, tmp_path / "cache", coded=True)
    spec, device = load_spec(folder), torch.device("cpu")
    allocate = (cpu_ops(1) if backend == "cpu" else reference_ops()).allocate
    params = load_params(folder, spec, torch.float32, device, allocate, quantization="file")
    forms = formats_of(params)
    four, eight, five = (FORMATS[name] for name in ("int4-32", "int8-32", "int5-32-min-half"))
    assert forms["layers.0.qkv"] == Stack(((192, four), (64, eight)))
    assert forms["layers.1.qkv"] == Stack(((128, five), (128, four)))
    assert forms["layers.0.gate_up"] == four
    assert gguf_formats(path, param_table(spec)) == forms
    exact = load_params(folder, spec, torch.float32, device)
    for slot in slots(param_table(spec)).values():
        if slot.param in forms:
            assert torch.equal(read(params, slot), read(exact, slot))


def read_numbers(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint as numbers."""
    spec = load_spec(folder)
    params = load_params(folder, spec, torch.float32, torch.device("cpu"))
    places = slots(param_table(spec)).items()
    return {name: read(params, slot) for name, slot in places if slot.tied_to is None}


def test_engine_computes_with_several_formats_in_a_matrix(tmp_path: Path) -> None:
    strong_model(tmp_path / "hf", "LlamaForCausalLM", **CONFIG | {"hidden_size": 256})
    kinds = gguf.GGMLQuantizationType
    path = hf_to_gguf(
        *(tmp_path / "hf", tmp_path / "m.gguf", "llama"),
        matrices=kinds["Q4_0"],
        others={"attn_v": kinds["Q8_0"]},
    )
    folder = described(path, tmp_path / "cache", coded=True)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=True)
    samples = {}
    for backend in ("reference", "cpu"):
        config = EngineConfig(
            str(folder), backend=backend, dtype="float32", max_model_len=64, max_batch_size=4
        )
        config = replace(config, quantization="file")
        with InferenceEngine(config) as engine:
            (samples[backend],) = engine.generate([list(range(3, 40))], params)
            if backend == "cpu":  # weights of a trainer are rounded to the same formats
                engine.update_weights(read_numbers(folder), blocking=True)
                (again,) = engine.generate([list(range(3, 40))], params)
                assert again.completion_tokens == samples[backend].completion_tokens
    one, other = samples["reference"], samples["cpu"]
    assert one.completion_tokens == other.completion_tokens
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize("name", ["IQ4_NL", "IQ4_XS", "MXFP4"])
def test_blocks_of_tables_are_held_and_updated(tmp_path: Path, name: str) -> None:
    """No matrix takes more than the file, and an update is rounded to the same formats."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    sizes["tie_word_embeddings"] = True
    strong_model(tmp_path / "hf", "LlamaForCausalLM", **CONFIG | sizes)
    kind = gguf.GGMLQuantizationType[name]
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "llama", matrices=kind)
    folder = described(path, tmp_path / "cache", coded=True)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=True)
    prompts = [list(range(3, 40)), [5, 6]]
    size = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    form = FORMATS[gguf_codes.KINDS[name].form]
    samples, sums = {}, []
    for backend, threads in (("reference", 1), ("cpu", 1), ("cpu", 2)):
        options = {"backend": backend, "num_threads": threads, "dtype": "bfloat16"}
        options |= {"max_model_len": 64, "max_batch_size": 4}
        with InferenceEngine(EngineConfig(str(folder), quantization="file", **options)) as engine:
            assert {*formats_of(engine.model.params).values()} == {form}
            assert engine.memory_budget.weights <= 1.03 * size
            samples[backend, threads] = engine.generate(prompts, params)
            before, numbers = engine.weights_checksum(), read_numbers(folder)
            numbers = {key: each * 1.3 for key, each in numbers.items()}
            engine.update_weights(numbers, blocking=True)
            down = engine.model.params["layers.0.down"]
            wanted = numbers["model.layers.0.mlp.down_proj.weight"].bfloat16()
            assert down.form == form
            held = encode(wanted, form, down.bounds).numbers().bfloat16()
            assert torch.equal(as_torch(down.read()), held)
            sums.append((before, engine.weights_checksum()))
    assert sums == sums[:1] * 3
    assert sums[0][0] != sums[0][1]
    for one, other, again in zip(*samples.values(), strict=True):
        apart = np.subtract(one.prompt_logprobs[1:], other.prompt_logprobs[1:])
        assert np.abs(apart).mean() < 0.1
        assert other.logprobs == again.logprobs


@pytest.mark.parametrize(
    ("architecture", "class_name", "name"),
    [
        ("gpt-oss", "GptOssForCausalLM", "MXFP4"),
        ("qwen3moe", "Qwen3MoeForCausalLM", "IQ4_XS"),
        ("qwen3moe", "Qwen3MoeForCausalLM", "IQ4_NL"),
    ],
)
def test_experts_compute_with_blocks_of_tables(
    tmp_path: Path, architecture: str, class_name: str, name: str
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
    count = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    strong_model(tmp_path / "hf", class_name, **CONFIG | sizes | count)
    kind = gguf.GGMLQuantizationType[name]
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", architecture, experts=kind)
    folder = described(path, tmp_path / "cache", coded=True)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=True)
    prompts, results = [list(range(3, 60)), [5, 6, 7], [9]], []
    for backend, quantization in (("reference", "file"), ("cpu", "file"), ("cpu", None)):
        options = {"backend": backend, "dtype": "float32", "max_model_len": 80}
        config = EngineConfig(str(folder), quantization=quantization, max_batch_size=4, **options)
        with InferenceEngine(config) as engine:
            if quantization is not None:
                forms = formats_of(engine.model.params)
                assert forms.keys() == {
                    f"layers.{layer}.experts_{part}"
                    for layer in (0, 1)
                    for part in ("down", "gate_up")
                }
                assert {*forms.values()} == {FORMATS[gguf_codes.KINDS[name].form]}
            results.append(engine.generate(prompts, params))
            alone = [engine.generate([each], params)[0] for each in prompts]
        assert [each.logprobs for each in alone] == [each.logprobs for each in results[-1]]
    for one, other, exact in zip(*results, strict=True):
        assert one.completion_tokens == other.completion_tokens
        # inputs that differ in their last bits may get other codes
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=0.05)
        assert 0 < abs(other.logprobs[0] - exact.logprobs[0]) < 0.2


def test_ranks_do_not_split_the_steps_of_iq4_xs(tmp_path: Path) -> None:
    strong_model(
        tmp_path / "hf", "LlamaForCausalLM", **CONFIG | {"hidden_size": 256, "head_dim": 64}
    )
    kind = gguf.GGMLQuantizationType["IQ4_XS"]
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "llama", others={"attn_output": kind})
    folder = described(path, tmp_path / "cache", coded=True)
    message = "256 columns of 'layers.0.o' are not divided at multiples of 256; use fewer ranks"
    with pytest.raises(ConfigError, match=message):
        InferenceEngine(EngineConfig(str(folder), quantization="file", tensor_parallel=2))


@pytest.mark.thorough(cases=["reference"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_engine_answers_with_a_file_s_blocks(tmp_path: Path, backend: str) -> None:
    strong_model(tmp_path / "hf", "LlamaForCausalLM", **CONFIG)
    kind = gguf.GGMLQuantizationType["Q8_0"]
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "llama", matrices=kind)
    folder = described(path, tmp_path / "cache", coded=True)
    config = {"max_model_len": 64, "max_batch_size": 4, "dtype": "float32", "backend": backend}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = [[5, 6, 7, 8], [9] * 20, [11, 3]]
    results = []
    for quantization in ("file", None):
        engine_config = EngineConfig(str(folder), quantization=quantization, **config)
        with InferenceEngine(engine_config) as engine:
            results.append(engine.generate(prompts, params))
            alone = [engine.generate([each], params)[0] for each in prompts]
        for one, other in zip(results[-1], alone, strict=True):
            assert one.completion_tokens == other.completion_tokens
            assert one.logprobs == other.logprobs
    for coded, exact in zip(*results, strict=True):  # inputs are rounded to 8-bit codes
        assert abs(coded.logprobs[0] - exact.logprobs[0]) < 0.2


def test_folder_of_plain_weights_has_no_codes(tmp_path: Path) -> None:
    strong_model(tmp_path, "LlamaForCausalLM", **CONFIG)
    with pytest.raises(ModelLoadError, match="'file' needs a quantized checkpoint"):
        InferenceEngine(EngineConfig(str(tmp_path), quantization="file"))


def test_more_ranks_than_segments_do_not_share_blocks(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    strong_model(tmp_path, "LlamaForCausalLM", **{**CONFIG, **heads})
    config = EngineConfig(str(tmp_path), quantization="file", tensor_parallel=16)
    with pytest.raises(ConfigError, match="'file' is not possible with tensor_parallel=16"):
        InferenceEngine(config)


def test_file_s_name_finds_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def describe(_path: Path, coded: bool = False) -> Path:
        asked.append(coded)
        return tmp_path

    monkeypatch.setattr(folders, "describe_gguf", describe)
    (tmp_path / "m.gguf").touch()
    folders.resolve_model(str(tmp_path / "m.gguf"), coded=True)
    folders.resolve_model(str(tmp_path / "m.gguf"))
    assert asked == [True, False]
