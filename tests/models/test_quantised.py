"""Checkpoints with quantised weights: dequantised at load, or rejected with the method's name or
the invalid tensor's name.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nano_inference import ModelLoadError, WeightUpdateError
from nano_inference.checkpoints import loading, stored_weight
from nano_inference.checkpoints.loading import load_params, load_spec, resolve_dtype
from nano_inference.checkpoints.quantised_weights import FORMATS, quantised_weight
from nano_inference.models.parameters.experts import block_formats
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.storage import form_of
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read
from nano_inference.models.sharding.shard import shard_of
from nano_inference.models.spec.quantisation import Quantisation, Scheme, read_quantisation
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.formats import FILE
from nano_inference.parallel.mesh import Mesh, Place
from nano_inference.weights.sources import read_folder
from tests.checkpoints.quantisers import QUANTISERS, quantised, write_quantised
from tests.models.strong import strong_model
from tests.models.tiny import (
    FAMILIES,
    MORE_FAMILIES,
    Weights,
    family_weights,
    llama_config,
    llama_weights,
    tiny_llama,
    write_model,
)

CPU = torch.device("cpu")
UP = "model.layers.1.mlp.up_proj"


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    rank_place: Place | None = None,
    quantization: Any = None,
) -> Weights:
    """Return a rank's weights under the checkpoint's names."""
    spec = load_spec(folder)
    part = None if rank_place is None else shard_of(spec, rank_place)
    params = load_params(folder, spec, dtype, CPU, part=part, quantization=quantization)
    if quantization == FILE:
        kept = {name for name, param in params.items() if form_of(param) is not None}
        assert kept == set(block_formats(spec, param_table(spec, part))) != set()
    return {name: read(params, slot) for name, slot in slots(param_table(spec, part)).items()}


def near(actual: Tensor, wanted: Tensor) -> bool:
    """Compare up to the order of two multiplications."""
    return torch.allclose(actual, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("panel", [2**22, 1])
@pytest.mark.parametrize("name", QUANTISERS)
def test_checkpoint_equals_its_dequantised_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, panel: int
) -> None:
    monkeypatch.setattr(stored_weight, "PANEL", panel)
    config = llama_config()
    reference = write_quantised(tmp_path, name, config, llama_weights(config))
    weights = load(tmp_path)
    assert weights.keys() == reference.keys()
    wrong = [each for each in weights if not near(weights[each], reference[each])]
    assert not wrong
    rounded = load(tmp_path, torch.bfloat16)
    assert all(torch.equal(rounded[each], weights[each].bfloat16()) for each in weights)


LOAD_AND_WATCH = """
import json, sys, threading, torch
from pathlib import Path
from nano_inference.checkpoints import stored_weight
from nano_inference.checkpoints.loading import load_params, load_spec

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    while not over.wait(0.001):
        seen.append(anonymous())

folder, stored_weight.PANEL = Path(sys.argv[1]), 2**16
spec = load_spec(folder)
torch.randn(300, 300) @ torch.randn(300, 300)  # starts its threads
over, seen, before = threading.Event(), [], anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
params = load_params(folder, spec, torch.bfloat16, torch.device("cpu"))
over.set()
watcher.join()
size = sum(each.nbytes for each in params.values())
print(json.dumps({"peak": max(seen) - before, "end": anonymous() - before, "size": size}))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what is anonymous")
@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-ordered", "bitsandbytes-nested"])
def test_memory_of_loading_is_the_parameters_and_one_tensor(tmp_path: Path, name: str) -> None:
    """A separate process may hold neither a full float32 tensor nor all codes of the model."""
    hidden, inner = 512, 16384
    config = llama_config(hidden=hidden, inner=inner, layers=1)
    write_quantised(tmp_path, name, config, family_weights(config))
    done = subprocess.run(
        [sys.executable, "-c", LOAD_AND_WATCH, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # return freed memory to the system
    )
    report = json.loads(done.stdout)
    tensor = 2 * hidden * inner
    assert report["size"] <= report["end"] + 2**21
    assert report["peak"] < report["size"] + 1.75 * tensor


@pytest.mark.parametrize("name", QUANTISERS)
def test_rank_loads_its_shard(tmp_path: Path, name: str) -> None:
    config = llama_config()
    write_quantised(tmp_path, name, config, llama_weights(config))
    spec, whole = load_spec(tmp_path), load(tmp_path)
    mesh = Mesh(2, 2)
    for rank in range(4):
        rank_place = Place(mesh, rank)
        shard = load(tmp_path, rank_place=rank_place)
        for tensor_name, slot in slots(param_table(spec, shard_of(spec, rank_place))).items():
            assert torch.equal(shard[tensor_name], slot.take(whole[tensor_name])), tensor_name


@pytest.mark.parametrize("family", ["phi3", "qwen3-moe", "gemma3"])
@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-ordered", "bitsandbytes-nested"])
def test_fused_projections_experts_and_tied_heads(tmp_path: Path, family: str, name: str) -> None:
    config = llama_config() | (FAMILIES | MORE_FAMILIES)[family]
    config = {key: value for key, value in config.items() if value is not None}
    reference = write_quantised(tmp_path, name, config, family_weights(config))
    whole = load(tmp_path)
    assert all(near(whole[each], reference[each]) for each in reference)
    spec = load_spec(tmp_path)
    rank_place = Place(Mesh(2), 1)
    shard = load(tmp_path, rank_place=rank_place)
    for tensor_name, slot in slots(param_table(spec, shard_of(spec, rank_place))).items():
        assert torch.equal(shard[tensor_name], slot.take(whole[tensor_name])), tensor_name


@pytest.mark.parametrize("quantization", [None, FILE])
@pytest.mark.parametrize("panel", [2**22, 64 * 7])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gpt_oss_experts_are_read_from_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, panel: int, quantization: Any
) -> None:
    """Unquantised experts have another layout, which is transformers' own. Codes that are kept have
    the same numbers.
    """
    monkeypatch.setattr(stored_weight, "PANEL", panel)
    gpt_oss_in_blocks(tmp_path)
    for rank in range(ranks):
        rank_place = Place(Mesh(ranks), rank)
        coded = load(tmp_path / "coded", rank_place=rank_place, quantization=quantization)
        wanted = load(tmp_path / "plain", rank_place=rank_place)
        assert coded.keys() == wanted.keys()
        wrong = [name for name in coded if not torch.equal(coded[name], wanted[name])]
        assert not wrong


def gpt_oss_in_blocks(tmp_path: Path) -> None:
    """Write the same model with experts in blocks, "coded", and decoded, "plain"."""
    strong_model(
        tmp_path,
        "GptOssForCausalLM",
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    plain = load_file(tmp_path / "model.safetensors")
    stored: Weights = {}
    for name, tensor in plain.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        parts, numbers = QUANTISERS["compressed-mxfp4"].pack(tensor.transpose(1, 2))
        stored[f"{name}_blocks"] = parts[".weight_packed"].unflatten(-1, (-1, 16))
        stored[f"{name}_scales"] = parts[".weight_scale"]
        plain[name] = numbers.transpose(1, 2).contiguous()
    config = json.loads((tmp_path / "config.json").read_text())
    write_model(tmp_path / "plain", config, plain)
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    write_model(tmp_path / "coded", config | {"quantization_config": said}, stored)


@pytest.mark.parametrize("panel", [2**22, 1])
def test_stacked_experts_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch, panel: int) -> None:
    """The experts are in MXFP4, as in gpt-oss."""
    monkeypatch.setattr(stored_weight, "PANEL", panel)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 10, 64, generator=generator)
    packed, reference = QUANTISERS["compressed-mxfp4"].pack(weights)
    tensors = {
        "experts.up_blocks": packed[".weight_packed"].unflatten(-1, (2, 16)),
        "experts.up_scales": packed[".weight_scale"],
    }
    said = read_quantisation({"quantization_config": {"quant_method": "mxfp4"}})
    assert said is not None
    stored = {name: InMemory(tensor) for name, tensor in tensors.items()}
    weight = quantised_weight("experts.up_blocks", (3, 10, 64), stored, said, torch.float32)
    assert weight is not None
    assert torch.equal(weight[:], reference)
    assert torch.equal(weight[1:3], reference[1:3])
    assert torch.equal(weight[2:3, 1:9, 32:], reference[2:3, 1:9, 32:])
    assert weight[1:1].shape == (0, 10, 64)


class InMemory:
    """A tensor read by slices, as safetensors does."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get_dtype(self) -> str:
        return {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16"}[self.tensor.dtype]

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]


def test_table_covers_every_format() -> None:
    schemes = {
        scheme.format for each in QUANTISERS.values() for _, scheme in said(each.fields).schemes
    }
    assert schemes | {"mxfp4"} == FORMATS.keys()


def said(fields: Any) -> Quantisation:
    scheme = read_quantisation({"quantization_config": fields})
    assert scheme is not None
    return scheme


def test_dtype_of_quantised_checkpoint_defaults_to_bfloat16() -> None:
    spec = spec_from_config(
        llama_config() | {"quantization_config": QUANTISERS["awq"].fields, "torch_dtype": "float16"}
    )
    assert resolve_dtype("auto", spec) == torch.bfloat16
    assert resolve_dtype("float16", spec) == torch.float16
    assert resolve_dtype("auto", replace(spec, quantisation=None)) == torch.float16


# --- quantisation settings in config.json

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mlx": ({"bits": 4, "group_size": 64}, r"mlx \(4 bits\)"),
    "torchao": (
        {"quant_method": "torchao", "quant_type": "int4_weight_only"},
        r"torchao \(int4_weight_only\)",
    ),
    "quanto": ({"quant_method": "quanto", "weights": "int8"}, r"quanto \(int8\)"),
    "a method to come": ({"quant_method": "newquant"}, "newquant"),
    "no name": ({"something": 1}, "an unnamed method"),
    "modelopt": ({"quant_algo": "W4A8_AWQ"}, r"modelopt \(W4A8_AWQ\)"),
    "marlin": ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "gptq .marlin"),
    "gemv": ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, r"awq \(gemv\)"),
    "sparse": (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
        r"compressed-tensors \(sparse-24-bitmask sparsity\)",
    ),
    "rotated": (
        {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}},
        r"compressed-tensors \(transforms of activations\)",
    ),
    "mxfp6": (
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp6-pack-quantized",
            "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 6}}},
        },
        r"compressed-tensors \(mxfp6-pack-quantized\)",
    ),
    "five bits": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 5}}},
        },
        r"compressed-tensors \(pack-quantized of int with 5 bits\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(
    "wrap",
    [lambda q: {"quantization_config": q}, lambda q: {"text_config": {"quantization_config": q}}],
)
def test_unknown_quantisation_is_rejected_by_name(name: str, wrap: Callable[[Any], Any]) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(
        ModelLoadError,
        match=f"quantization ({message}).*, declared in config.json,.*unquantized.*GGUF",
    ):
        spec_from_config(llama_config() | wrap(fields))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"bits": 3}, r"\(gptq\) with bits=3; it must be 2 or 4 or 8"),
        ("gptq", {"bits": "4"}, r"\(gptq\) with bits='4'"),
        ("gptq", {"group_size": 0}, r"\(gptq\) with group_size=0"),
        ("gptq", {"checkpoint_format": "gptq_v3"}, "checkpoint_format='gptq_v3'"),
        ("gptq", {"dynamic": {"+:(": {}}}, r"\(gptq\) with a value of the wrong kind"),
        ("awq", {"bits": 8}, r"\(awq\) with bits=8; it must be 4"),
        ("awq", {"group_size": True}, r"\(awq\) with group_size=True"),
        (
            "fp8-blocks",
            {"weight_block_size": [128]},
            r"weight_block_size=\[128\]; it must be the rows and",
        ),
        ("bitsandbytes-nf4", {"load_in_8bit": True}, "the opposite of load_in_8bit"),
        ("compressed-int8", {"config_groups": [1]}, "value of the wrong kind"),
    ],
)
def test_value_that_is_not_known_is_named(name: str, changes: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=f"config.json describes a quantization .*{message}"):
        said(QUANTISERS[name].fields | changes)


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {},
        {"quant_method": None},
        {"quant_method": "none"},
        {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
)
def test_config_without_weight_quantisation_is_read(fields: Any) -> None:
    spec = spec_from_config(llama_config() | {"quantization_config": fields})
    assert spec.num_layers == 2
    assert spec.quantisation is None


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
            Scheme("fp8", 8),
        ),
        (
            "quantize_config.json",
            {"bits": 4, "group_size": 128, "desc_act": False, "sym": False},
            Scheme("gptq", 4, (1, 128), symmetric=False, zero_offset=1),
        ),
        (
            "quant_config.json",
            {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"},
            Scheme("awq", 4, (1, 64), symmetric=False),
        ),
    ],
)
def test_quantisation_is_read_from_a_separate_file(
    tmp_path: Path, file: str, content: Any, expected: Scheme
) -> None:
    folder = tiny_llama(tmp_path)
    (folder / file).write_text(json.dumps(content))
    scheme = load_spec(folder).quantisation
    assert scheme is not None
    assert scheme.scheme_of(UP) == expected
    assert scheme.where == str(folder / file)
    with pytest.raises(WeightUpdateError, match=rf"quantized with .*{file} says.*plain weights"):
        list(read_folder(folder))


def test_modules_have_schemes_of_their_own() -> None:
    """compressed-tensors prefers a name to a pattern, and a pattern to a class."""
    fields = {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head", "re:.*router$"],
        "config_groups": {
            "a": {
                "targets": ["Linear"],
                "format": "pack-quantized",
                "weights": {"num_bits": 4, "group_size": 128},
            },
            "b": {
                "targets": ["re:.*down_proj$"],
                "format": "float-quantized",
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
            },
            "c": {
                "targets": ["model.layers.0.mlp.down_proj"],
                "format": "int-quantized",
                "weights": {"num_bits": 8, "strategy": "channel"},
            },
            "activations alone": {"targets": ["Linear"], "input_activations": {"num_bits": 8}},
        },
    }
    scheme = said(fields)
    assert scheme.scheme_of("model.layers.0.mlp.up_proj") == Scheme("packed-int", 4, (1, 128))
    assert scheme.scheme_of("model.layers.1.mlp.down_proj") == Scheme("fp8", 8, (1, None))
    assert scheme.scheme_of("model.layers.0.mlp.down_proj") == Scheme("int8", 8, (1, None))
    for module in ("lm_head", "model.layers.0.mlp.router", "model.embed_tokens"):
        assert scheme.scheme_of(module) is None
    assert scheme.activations == "fp8, dynamic"


@pytest.mark.parametrize(
    ("names", "out"),
    [
        (["lm_head"], ["lm_head", "model.lm_head"]),
        (["model.layers.1"], ["model.layers.1.mlp.up_proj"]),
        (["mlp.gate"], ["model.layers.0.mlp.gate"]),
        (["model.layers.0.mlp.*"], ["model.layers.0.mlp.up_proj"]),
    ],
)
def test_excluded_modules_follow_the_transformers_rule(names: list[str], out: list[str]) -> None:
    scheme = said(QUANTISERS["fp8-blocks"].fields | {"modules_to_not_convert": names})
    assert all(scheme.scheme_of(module) is None for module in out)
    for module in ("model.layers.11.mlp.up_proj", "model.layers.2.mlp.gate_proj"):
        assert scheme.scheme_of(module) is not None


def test_gptqmodel_overrides_apply_to_their_modules(tmp_path: Path) -> None:
    config = llama_config()
    weights = llama_weights(config)
    eight, others = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"
    stored, reference = quantised("gptq", weights)
    more, also = quantised("gptq-8bit", {f"{eight}.weight": weights[f"{eight}.weight"]})
    for end in (".qweight", ".qzeros", ".scales", ".g_idx"):
        del stored[others + end]
    stored |= more | {f"{others}.weight": weights[f"{others}.weight"]}
    reference |= also | {f"{others}.weight": weights[f"{others}.weight"]}
    fields = QUANTISERS["gptq"].fields | {
        "sym": False,
        "dynamic": {"+:.*0.mlp.down_proj": {"bits": 8}, "-:.*1.mlp.down_proj": {}},
    }
    write_model(tmp_path, config | {"quantization_config": fields}, stored)
    loaded = load(tmp_path)
    assert all(near(loaded[each], reference[each]) for each in reference)


# --- tensors that contradict config.json

Change = Callable[[Weights], Any]


def drop(end: str) -> Change:
    return lambda tensors: tensors.pop(UP + end)


def put(end: str, made: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({UP + end: made(tensors[UP + end])})


def huge_blocks(state: Tensor) -> Tensor:
    state_fields = json.loads(bytes(state.tolist())) | {"blocksize": 2**40}
    return torch.tensor(list(json.dumps(state_fields).encode()), dtype=torch.uint8)


WRONG: dict[str, tuple[str, Change, str]] = {
    "no scale": ("fp8-blocks", drop(".weight_scale_inv"), "'U.weight_scale_inv' is missing"),
    "no scale of int8": ("compressed-int8", drop(".weight_scale"), "'U.weight_scale' is missing"),
    "no maxima": ("bitsandbytes-int8", drop(".SCB"), "'U.SCB' is missing"),
    "no zero points": (
        "compressed-int4-zeros",
        drop(".weight_zero_point"),
        "'U.weight_zero_point' is missing",
    ),
    "no order": ("gptq-ordered", drop(".g_idx"), "'U.g_idx' is missing"),
    "no outer maxima": (
        "bitsandbytes-nested",
        drop(".weight.nested_absmax"),
        "'U.weight.nested_absmax' is missing",
    ),
    "no codes": ("awq", drop(".qweight"), "'U.qzeros' is not part of|'U.scales' is not part of"),
    "scale of a wrong shape": (
        "fp8-blocks",
        put(".weight_scale_inv", lambda _: torch.ones(4, 3)),
        r"'U.weight_scale_inv' has shape \(4, 3\), expected \(4, 2\).*24 rows and 40 columns",
    ),
    "other groups than the config has": (
        "gptq",
        put(".scales", lambda scales: scales[:1].clone()),
        r"'U.scales' has shape \(1, 96\), expected \(2, 96\).*32 columns",
    ),
    "codes of another width": (
        "gptq",
        put(".qweight", lambda codes: codes.repeat(2, 1)),
        r"'U.qweight' has shape \(16, 96\), expected \(8, 96\).*codes have 4 bits",
    ),
    "another dtype of a scale": (
        "awq",
        put(".scales", lambda scales: scales.int()),
        "'U.scales' has dtype I32, expected BF16 or F16 or F32",
    ),
    "another dtype of codes": (
        "fp8-blocks",
        put(".weight", lambda codes: codes.to(torch.int8)),
        "'U.weight' has dtype I8, expected F8_E4M3 or F8_E5M2",
    ),
    "groups that are not there": (
        "gptq-ordered",
        put(".g_idx", lambda groups: groups + 1),
        "'U.g_idx' contains a group outside of 0 to 1",
    ),
    "another weight's shape": (
        "compressed-int4",
        put(".weight_shape", lambda _: torch.tensor([96, 60])),
        r"'U.weight_shape' is \(96, 60\), expected \(96, 64\)",
    ),
    "a layout that is no number": (
        "bitsandbytes-int8",
        put(".weight_format", lambda _: torch.zeros(2).byte()),
        r"'U.weight_format' has shape \(2,\)",
    ),
    "no bytes": ("bitsandbytes-nf4", drop(".weight"), "'U.weight' is missing"),
    "tiles": (
        "bitsandbytes-int8",
        put(".weight_format", lambda _: torch.tensor(2).byte()),
        "'U.weight_format' is 2, a tiled layout",
    ),
    "a state that is no JSON": (
        "bitsandbytes-nf4",
        put(".weight.quant_state.bitsandbytes__nf4", lambda state: state[1:].clone()),
        "'U.weight.quant_state.bitsandbytes__nf4' does not describe its weight",
    ),
    "blocks larger than memory": (
        "bitsandbytes-nf4",
        put(".weight.quant_state.bitsandbytes__nf4", huge_blocks),
        r"does not describe its weight: ValueError: blocks of \[1099511627776\]",
    ),
    "an infinite scale": (
        "fp8-blocks",
        put(".weight_scale_inv", lambda scales: scales * torch.inf),
        "weight 'U.weight' is dequantized to NaN or infinite numbers",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mismatched_tensor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    name, change, message = WRONG[case]
    config = llama_config()
    stored, _ = quantised(name, llama_weights(config))
    change(stored)
    write_model(tmp_path, config | {"quantization_config": QUANTISERS[name].fields}, stored)
    if case != "an infinite scale":  # unknown until it is read
        monkeypatch.setattr(loading, "allocate", None)
    with pytest.raises(ModelLoadError, match=message.replace("U.", UP + ".")) as raised:
        load(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-int4"])
def test_indivisible_groups_are_rejected(tmp_path: Path, name: str) -> None:
    config = llama_config()
    fields = json.loads(json.dumps(QUANTISERS[name].fields).replace(": 32", ": 48"))
    write_quantised(tmp_path, name, config, llama_weights(config), **fields)
    with pytest.raises(
        ModelLoadError,
        match=r"q_proj.weight' has 64 columns, .*not a multiple of the group size 48",
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("fp8-blocks", {"modules_to_not_convert": [UP]}),
        ("compressed-int4", {"ignore": [UP]}),
        ("awq", {"modules_to_not_convert": ["up_proj"]}),
        ("bitsandbytes-nf4", {"llm_int8_skip_modules": ["up_proj"]}),
        ("gptq", {"dynamic": {"-:.*up_proj": {}}}),
    ],
)
def test_codes_of_an_excluded_module_are_rejected(tmp_path: Path, name: str, fields: Any) -> None:
    config = llama_config()
    write_quantised(tmp_path, name, config, llama_weights(config), **fields)
    with pytest.raises(
        ModelLoadError, match=r"up_proj.*holds codes.*config\.json excludes '.*up_proj' from"
    ):
        load(tmp_path)


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "bitsandbytes-nf4", "compressed-int8"])
def test_module_may_be_stored_unquantised(tmp_path: Path, name: str) -> None:
    config = llama_config()
    weights = llama_weights(config)
    stored, reference = quantised(name, weights)
    stored = {each: tensor for each, tensor in stored.items() if not each.startswith(UP)}
    kept = {f"{UP}.weight": weights[f"{UP}.weight"]}
    write_model(tmp_path, config | {"quantization_config": QUANTISERS[name].fields}, stored | kept)
    assert torch.equal(load(tmp_path)[f"{UP}.weight"], kept[f"{UP}.weight"])
    assert near(
        load(tmp_path)[f"{UP[:-7]}down_proj.weight"], reference[f"{UP[:-7]}down_proj.weight"]
    )


@pytest.mark.parametrize("quantisation", [None, "fp8-blocks", "gptq", "bitsandbytes-nf4"])
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("name", ["model.norm.weight", f"{UP}.weight"])
def test_non_floating_point_weight_is_rejected(
    tmp_path: Path, dtype: torch.dtype, name: str, quantisation: str | None
) -> None:
    """If such weights were cast to floating point, the model would answer garbage."""
    config = llama_config()
    weights = llama_weights(config)
    if quantisation:
        config["quantization_config"] = QUANTISERS[quantisation].fields
    weights[name] = weights[name].to(dtype)
    folder = write_model(tmp_path, config, weights)
    with pytest.raises(ModelLoadError, match=rf"{name}"):
        load_params(folder, load_spec(folder), torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_floating_point_weights_are_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tiny_llama(tmp_path, dtype=dtype)
    params = load_params(folder, load_spec(folder), torch.float32, torch.device("cpu"))
    assert all(tensor.dtype == torch.float32 for tensor in params.values())


def test_activation_scales_are_ignored(tmp_path: Path) -> None:
    config = llama_config()
    stored, reference = quantised("modelopt-fp8", llama_weights(config))
    for end in ("k_proj.k_scale", "v_proj.v_scale", "q_proj.input_scale", "o_proj.output_scale"):
        stored[f"model.layers.0.self_attn.{end}"] = torch.tensor(1.0)
    fields = QUANTISERS["modelopt-fp8"].fields
    write_model(tmp_path, config | {"quantization_config": fields}, stored)
    assert all(near(tensor, reference[name]) for name, tensor in load(tmp_path).items())
