"""Gemma 4: its config.json, its memory layout, and rejected settings.

tests/models/test_families.py compares its numbers with transformers.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.device.kv_tensors import KVStorage, common_layout, unit_width
from nano_inference.errors import ConfigError, ModelLoadError
from nano_inference.kv_cache.sliding_window import UNIFORM, BlockLayout
from nano_inference.models.sharding.shard import shard_of
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.kv_codes import KvFormat
from nano_inference.parallel.mesh import Mesh, Place
from tests.models.families import CASES
from tests.models.strong import strong_model
from tests.models.tiny import MORE_FAMILIES, family_weights, llama_config, tiny_model

SLIDING, FULL = "sliding_attention", "full_attention"
# Sizes of published models: layers, period of full layers, key-value heads, and other sizes that
# matter.
PUBLISHED: dict[str, dict[str, Any]] = {
    "E2B": {
        "num_hidden_layers": 35,
        "layer_types": [SLIDING, SLIDING, SLIDING, SLIDING, FULL] * 7,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
    },
    "31B": {
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
    },
    "26B-A4B": {
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
    },
}


def spec_of(**fields: Any) -> ModelSpec:
    return spec_from_config({"architectures": ["Gemma4ForCausalLM"], **fields})


@pytest.mark.parametrize(
    ("name", "width", "layout"),
    [
        # 3 full layers of 512 numbers and 12 others of 256 store keys
        ("E2B", 1536, BlockLayout(1, 2, 512)),
        # 10 of 4 * 512, 50 of 16 * 256
        ("31B", 20480, BlockLayout(1, 10, 512)),
        # 5 of 2 * 512, 25 of 8 * 256: a unit of full layers has room for one more layer
        ("26B-A4B", 2048, BlockLayout(3, 25, 512)),
    ],
)
def test_units_of_published_models(name: str, width: int, layout: BlockLayout) -> None:
    spec = spec_of(**PUBLISHED[name])
    assert common_layout([spec], 8192) == layout
    assert unit_width(spec, layout, KvFormat(torch.bfloat16)) == width
    assert common_layout([spec], 512) == UNIFORM
    kept = sum(kind.kept for layer, kind in enumerate(spec.kinds) if kind.keys_of == layer)
    assert unit_width(spec, UNIFORM, KvFormat(torch.bfloat16)) == kept


def test_sharing_layers_read_the_last_layer_of_their_kind() -> None:
    spec = spec_of(**PUBLISHED["E2B"], use_double_wide_mlp=True, intermediate_size=6144)
    assert [kind.keys_of for kind in spec.kinds[:15]] == list(range(15))
    assert [kind.keys_of for kind in spec.kinds[15:]] == [13, 13, 13, 13, 14] * 4
    assert [kind.intermediate_size for kind in spec.kinds] == [6144] * 15 + [12288] * 20


def test_storage_layers_do_not_overlap() -> None:
    spec = spec_from_config(llama_config() | MORE_FAMILIES["gemma4"] | {"hidden_act": None})
    storage = KVStorage(spec, 3, 4, torch.float32, torch.device("cpu"))
    slots = torch.arange(12)
    wrote: dict[int, tuple[Tensor, Tensor]] = {}
    for layer, kind in enumerate(spec.kinds):
        if kind.keys_of == layer:
            rows = torch.randn(2, 12, kind.num_kv_heads, kind.head_dim)
            storage.write(layer, slots, rows[0], rows[1])
            wrote[layer] = rows[0].transpose(0, 1), rows[1].transpose(0, 1)
    for layer, kind in enumerate(spec.kinds):
        for stored, expected in zip(storage.gather(layer, slots), wrote[kind.keys_of], strict=True):
            assert torch.equal(stored, expected)


def test_full_layer_heads_have_two_equivalent_spellings() -> None:
    fields: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL]}
    explicit = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 64}
    by_layer = {"2": {"num_key_value_heads": 1, "head_dim": 64}}
    one = spec_of(**fields, **explicit)
    assert one == spec_of(**fields, attention_k_eq_v=True, per_layer_config=by_layer)
    assert one.kinds[2][:3] == (1, 64, True)
    assert one.kinds[0][:3] == (4, 256, False)
    without = spec_of(**fields, num_global_key_value_heads=1)
    assert without.kinds[2][:3] == (4, 512, False), "only if keys are also the values"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config has 1: "),
        ({"per_layer_config": {"77": {"head_dim": 64}}}, "per_layer_config has 77: "),
        ({"per_layer_config": {"1": {"head_dim": "x"}}}, "per_layer_config: 1 has head_dim="),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        (
            {"vocab_size_per_layer_input": 5},
            "vocab_size_per_layer_input=5; it must be at least the vocabulary size",
        ),
        ({"num_kv_shared_layers": 30}, "num_kv_shared_layers=30; the first 0 layers must include"),
        ({"num_kv_shared_layers": 26}, "num_kv_shared_layers=26; the first 4 layers must include"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "8 attention heads cannot"),
    ],
)
def test_unsupported_config_fields_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec_of(**fields)


def test_gemma4_rejects_tensor_parallelism() -> None:
    spec = spec_of(**PUBLISHED["31B"])
    for mesh in (Mesh(tensor=2), Mesh(pipeline=2), Mesh(context=2)):
        with pytest.raises(
            ConfigError, match="Gemma4ForCausalLM, which has layers of several kinds"
        ):
            shard_of(spec, Place(mesh))
    with pytest.raises(ConfigError, match="expert_parallel=2 is not possible for Gemma4"):
        shard_of(spec, engines=(0, 2))


def test_backends_without_kernels_are_rejected_by_name(tmp_path: Path) -> None:
    tiny_model(tmp_path, "gemma4")
    with pytest.raises(ConfigError, match="Gemma4ForCausalLM, which has layers of several"):
        InferenceEngine(EngineConfig(str(tmp_path), device="cpu", attention="flex"))


def test_keys_of_sharing_layers_are_ignored(tmp_path: Path) -> None:
    """Published checkpoints contain these keys."""
    from safetensors.torch import load_file, save_file

    folder = tiny_model(tmp_path, "gemma4")
    file = folder / "model.safetensors"
    held = load_file(file)
    prefix = "model.layers.6.self_attn."
    assert not any(name.startswith(prefix + "k_") for name in held)
    save_file(
        {
            **held,
            prefix + "k_proj.weight": torch.zeros(3),
            prefix + "k_norm.weight": torch.zeros(3),
        },
        file,
    )
    with InferenceEngine(EngineConfig(str(folder), device="cpu", kv_cache_memory=2**22)) as engine:
        assert engine.spec.kinds[6].keys_of == 4


@pytest.mark.thorough(cases=["gemma4 with experts"])
@pytest.mark.parametrize("family", ["gemma4 with inputs of layers", "gemma4 with experts"])
def test_update_by_the_names_of_transformers(tmp_path: Path, family: str) -> None:
    """The update has the tied head, buffers and fused experts, and must equal loading the same
    weights.
    """
    case = CASES[family]
    strong_model(tmp_path / "old", case.class_name, **case.config)
    new = strong_model(tmp_path / "new", case.class_name, seed=1, **case.config)
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    calls: list[Any] = []
    for start in ("new", "old"):
        config = EngineConfig(str(tmp_path / start), device="cpu", kv_cache_memory=2**22)
        with InferenceEngine(config) as engine:
            if start == "old":
                engine.generate([[3, 4, 5] * 20], params)  # a prefix of the old version
                engine.update_weights(new.state_dict(), blocking=True, complete=True)
            sample = engine.generate([[3, 4, 5] * 20], params)[0]
            calls.append((sample.completion_tokens, sample.logprobs, engine.weights_checksum()))
    assert calls[0] == calls[1]


def test_tiny_model_has_weights_for_every_layer() -> None:
    config: dict[str, Any] = llama_config() | MORE_FAMILIES["gemma4"] | {"hidden_act": None}
    names = family_weights(config)
    assert "model.layers.4.self_attn.k_proj.weight" in names
    assert "model.layers.5.self_attn.k_proj.weight" not in names
    assert names["model.layers.5.mlp.up_proj.weight"].shape[0] == 2 * config["intermediate_size"]
