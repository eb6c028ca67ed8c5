"""Latent attention: the cache's contents, rejected settings, and ignored tensors of a
checkpoint.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.checkpoints.loading import load_params, load_spec
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.errors import ConfigError, ModelLoadError
from nano_inference.models.sharding.shard import shard_of
from nano_inference.models.spec.read import spec_from_config
from nano_inference.parallel.mesh import Mesh, Place
from tests.models.families import CASES
from tests.models.strong import rewrite_config, strong_model

CASE = CASES["deepseek-v3"]
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    strong_model(tmp_path, CASE.class_name, **CASE.config)
    return tmp_path


def config(**changes: Any) -> dict[str, Any]:
    from transformers import DeepseekV3Config

    fields = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3} | CASE.config
    hf_config: Any = DeepseekV3Config(**fields)
    return hf_config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]} | changes


def test_cache_holds_one_latent_and_one_key_per_token(folder: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 2**24}
    with InferenceEngine(EngineConfig(model_path=str(folder), **options)) as engine:
        assert engine.memory_budget.bytes_per_token == 3 * (32 + 16) * 4
        (storage,) = set(engine.runner.storages.values())
        assert [tuple(each.shape[::4]) for each in storage.tensors] == [(3, 48)]


def test_blocks_of_latents_are_read_and_written() -> None:
    spec = spec_from_config(config())
    one, other = (KVStorage(spec, 4, 16, torch.float32, CPU) for _ in range(2))
    one.keys.normal_()
    one.copy_blocks(((1, 3),))
    other.keys.zero_()
    other.write_blocks([0, 2], one.read_blocks([3, 2]))
    assert torch.equal(other.keys[:, :, 0], one.keys[:, :, 1])
    assert torch.equal(other.keys[:, :, 2], one.keys[:, :, 2])


@pytest.mark.parametrize("name", ["tensor", "context"])
def test_latents_reject_tensor_parallelism(name: str) -> None:
    spec = spec_from_config(config())
    with pytest.raises(ConfigError, match=f"{name}_parallel=2 is not possible for DeepseekV3"):
        shard_of(spec, Place(Mesh(**{name: 2})))
    assert shard_of(spec, Place(Mesh(pipeline=2))).spec.latent is not None


def test_latents_reject_other_attention_backends(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="DeepseekV3ForCausalLM, which has attention over latents"
    ):
        InferenceEngine(EngineConfig(model_path=str(folder), device="cpu", attention="flex"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32ForCausalLM .* sparse indexer"),
        ({"architectures": ["GlmMoeDsaForCausalLM"]}, "GlmMoeDsaForCausalLM .* sparse indexer"),
        ({"index_topk": 2048}, "index_topk=2048"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim=15 must be even"),
        ({"n_group": 5}, "5 groups of 12 experts"),
        ({"topk_group": 5}, "choose 5 of 4 groups of 12 experts"),
        ({"num_experts_per_tok": 7}, "choose 7 experts for each token from 2 groups of 3"),
        ({"kv_lora_rank": None}, "lacks 'kv_lora_rank'|wrong kind"),
    ],
)
def test_unsupported_latent_fields_are_rejected(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        spec_from_config(config(**changes))


def test_glm_layers_with_experts_are_listed_or_all_but_the_first() -> None:
    glm = {"architectures": ["Glm4MoeLiteForCausalLM"], "first_k_dense_replace": None}
    for kinds, layers in (
        (None, (False, True, True)),
        (["sparse", "dense", "sparse"], (True, False, True)),
    ):
        moe = spec_from_config(config(**glm, mlp_layer_types=kinds)).moe
        assert moe is not None
        assert moe.layers == layers
    for wrong in (["dense"], ["dense", "sparse", "latent"]):
        with pytest.raises(ModelLoadError, match=r"must name 'dense' or 'sparse' for each of 3"):
            spec_from_config(config(**glm, mlp_layer_types=wrong))


def test_multi_token_prediction_layers_are_not_read(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    further = {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}
    save_file(weights | further, folder / "model.safetensors", metadata={"format": "pt"})
    load_params(folder, load_spec(folder), torch.float32, CPU)
    rewrite_config(folder, num_nextn_predict_layers=0)
    with pytest.raises(ModelLoadError, match=r"eh_proj\.weight' is not part of"):
        load_params(folder, load_spec(folder), torch.float32, CPU)


def logprobs_of(engine: InferenceEngine) -> list[float]:
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True, prompt_logprobs=True)
    (sample,) = engine.generate([list(range(3, 60))], params)
    assert sample.prompt_logprobs is not None
    return [*sample.prompt_logprobs[1:], *sample.logprobs]


@pytest.mark.thorough(cases=["float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weight_survives_update_patch_and_sleep(folder: Path, dtype: Any) -> None:
    """After each change of weights, the engine has the bits of one that loaded these weights."""
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    weights = load_file(folder / "model.safetensors")
    new, places = weights[name] * 1.5, torch.tensor([0, 5, 31, 32, 24 * 32 + 3, 2303])
    patched = new.clone()
    patched.view(-1)[places] = torch.arange(6.0)
    options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "kv_cache_memory": 2**22}
    with InferenceEngine(EngineConfig(str(folder), backend="cpu", **options)) as engine:
        before = logprobs_of(engine)
        engine.update_weights({name: new})
        changed = logprobs_of(engine)
        engine.update_weights([(name, places, torch.arange(6.0))])
        actual = logprobs_of(engine)
        engine.sleep(weights=True)
        engine.wake()
        assert logprobs_of(engine) == actual
    assert before != changed != actual
    save_file(weights | {name: patched}, folder / "model.safetensors", metadata={"format": "pt"})
    with InferenceEngine(EngineConfig(str(folder), backend="cpu", **options)) as engine:
        assert logprobs_of(engine) == actual
