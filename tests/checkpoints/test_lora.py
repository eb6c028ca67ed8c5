"""Adapters of every family compared with PEFT, and adapters that do not fit the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.checkpoints.loading import load_spec
from nano_inference.checkpoints.lora import (
    CONFIG,
    WEIGHTS,
    LoraSettings,
    pairs_of,
    settings_of,
    targets_of,
    within,
)
from nano_inference.errors import AdapterError
from nano_inference.models.spec.read import spec_from_config
from tests.models.families import CASES, STATE_CASES
from tests.models.strong import NOTICED, TOLERANCE, strong_model, strong_prompts
from tests.models.tiny import WithoutNumbers, llama_config, tiny_llama

RANK = 5


def with_adapter(oracle: Any, folder: Path, out: Path, **settings: Any) -> Any:
    """Save into `out` the oracle with a strong random adapter on all its adaptable modules. PEFT
    would adapt experts too if given a dense layer's projections, so the list omits those.
    """
    spec = load_spec(folder)
    targets = [
        name
        for name, module in oracle.named_modules()
        if isinstance(module, torch.nn.Linear)
        and within(name) in targets_of(spec)
        and not (spec.moe is not None and ".mlp." in name)
    ]
    config = LoraConfig(r=RANK, lora_alpha=7, target_modules=targets, **settings)
    model = get_peft_model(oracle, config)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if "lora_" in name:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    model.save_pretrained(out)
    return model.eval()


@torch.no_grad()
def logprobs(model: Any, ids: list[int]) -> Tensor:
    rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)
    return rows[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]


@pytest.mark.thorough(cases=["vaultgemma", "mixtral", *list(CASES)[::2]])
@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)  # raised by PEFT
@pytest.mark.parametrize("family", CASES | STATE_CASES)
def test_adapter_agrees_with_peft(tmp_path: Path, family: str) -> None:
    case = (CASES | STATE_CASES)[family]
    oracle = strong_model(tmp_path, case.class_name, **case.config)
    prompts = strong_prompts(oracle.get_input_embeddings().num_embeddings, (5, 40, 200))
    plain = [logprobs(oracle, ids) for ids in prompts]
    model = with_adapter(oracle, tmp_path, tmp_path / "adapter", use_rslora=family > "m")
    options: dict[str, Any] = {"backend": case.backend, "dtype": "float32", "max_loras": 1}
    params = SamplingParams(max_tokens=1, prompt_logprobs=True, adapter="own")
    with InferenceEngine(
        EngineConfig(str(tmp_path), kv_cache_memory=2**24, device="cpu", **options)
    ) as engine:
        engine.load_adapter("own", tmp_path / "adapter")
        for ids, without in zip(prompts, plain, strict=True):
            (sample,) = engine.generate([ids], params)
            assert sample.prompt_logprobs is not None
            actual, expected = torch.tensor(sample.prompt_logprobs[1:]), logprobs(model, ids)
            assert (actual - expected).abs().max() < TOLERANCE
            assert (actual - without).abs().max() > NOTICED  # the adapter has an effect


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "deepseek-v3"])
def test_expert_adapter_error_names_the_working_setting(tmp_path: Path, family: str) -> None:
    """PEFT's "all-linear" adapts experts too. The setting named by the error does not."""
    case = CASES[family]

    def saved(targets: Any, name: str) -> Path:
        oracle = strong_model(tmp_path, case.class_name, **case.config)
        model = get_peft_model(oracle, LoraConfig(r=4, target_modules=targets))
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    every = saved("all-linear", "every")
    options: dict[str, Any] = {"kv_cache_memory": 2**24, "device": "cpu", "max_loras": 1}
    with InferenceEngine(EngineConfig(str(tmp_path), backend=case.backend, **options)) as engine:
        with pytest.raises(
            AdapterError, match=r"accepts no adapter in .*; train with target"
        ) as no:
            engine.load_adapter("own", every)
        setting = str(no.value).partition("target_modules=")[2].removesuffix(".")
        engine.load_adapter("own", saved(json.loads(setting), "some"))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("tied", [False, True])
def test_head_saved_with_an_adapter_must_equal_the_model(tmp_path: Path, tied: bool) -> None:
    oracle = strong_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=tied)
    model = get_peft_model(oracle, LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    model.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / WEIGHTS
    tensors = load_file(path)
    (base,) = (name for name in tensors if "base_layer" in name)
    options: dict[str, Any] = {"kv_cache_memory": 2**24, "device": "cpu", "max_loras": 1}
    for dtype in ("float32", "bfloat16"):
        with InferenceEngine(EngineConfig(str(tmp_path), dtype=dtype, **options)) as engine:
            engine.load_adapter("own", tmp_path / "adapter")
            for changed in (tensors[base] * 1.5, tensors[base][1:]):
                with pytest.raises(AdapterError, match=r"differs from the model's head"):
                    engine.load_adapter("own", {**tensors, base: changed}, LoraSettings(4))
            engine.update_weights(engine.weight_sync.state_dict())
            engine.load_adapter("own", tmp_path / "adapter")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a tiny model's folder that contains a PEFT `adapter`."""
    tiny_llama(tmp_path)
    tensors: dict[str, Tensor] = {}
    for target in targets_of(load_spec(tmp_path)).values():
        out, width = target.slot.shape
        name = f"base_model.model.{target.module}"
        tensors |= {
            f"{name}.lora_A.weight": torch.ones(RANK, width),
            f"{name}.lora_B.weight": torch.ones(out, RANK),
        }
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / WEIGHTS)
    adapter_config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 10, "bias": "none"}
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(adapter_config))
    return tmp_path


Q = "base_model.model.model.layers.0.self_attn.q_proj"
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a module that is not there": (
        {f"{Q}x.lora_A.weight": torch.ones(RANK, 64)},
        "self_attn.q_projx', which accepts no adapter in LlamaForCausalLM",
    ),
    "an embedding": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(RANK, 300)},
        "is not a LoRA matrix",
    ),
    "another base": ({f"{Q}.lora_A.weight": torch.ones(RANK, 32)}, "belongs to another base model"),
    "another rank": ({f"{Q}.lora_B.weight": torch.ones(64, RANK + 1)}, "do not fit its weight"),
    "a rank too large": (
        {f"{Q}.lora_A.weight": torch.ones(65, 64), f"{Q}.lora_B.weight": torch.ones(64, 65)},
        "rank 65 of 'model.layers.0.self_attn.q_proj' exceeds max_lora_rank=64",
    ),
    "integers": (
        {f"{Q}.lora_A.weight": torch.ones(RANK, 64).int()},
        "int32, not a floating point dtype",
    ),
    "nan": ({f"{Q}.lora_A.weight": torch.full((RANK, 64), torch.nan)}, "is not finite"),
    "no numbers": ({f"{Q}.lora_A.weight": WithoutNumbers(RANK, 64)}, "that holds its numbers"),
    "negative bits": (
        {f"{Q}.lora_A.weight": torch.ones(1, dtype=torch.complex64).expand(RANK, 64).conj().imag},
        "that holds its numbers",
    ),
    "half of it": ({f"{Q}.lora_A.weight": None}, "lora_A of 'model.layers.0.self_attn.q_proj' is"),
    "DoRA": ({f"{Q}.lora_magnitude_vector": torch.ones(64)}, "is not a LoRA matrix"),
}
SETTINGS = {
    "another kind": ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
    "DoRA": ({"use_dora": True}, "use_dora=True is not supported"),
    "biases": ({"bias": "all"}, "bias='all' is not supported"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
    "PiSSA": (
        {"init_lora_weights": "pissa_niter_4"},
        "the adapter belongs to base weights that PEFT modified",
    ),
    "OLoRA": (
        {"init_lora_weights": "olora"},
        "init_lora_weights='olora': the adapter belongs to base weights",
    ),
    "from some tokens on": ({"alora_invocation_tokens": [7]}, "alora_invocation_tokens=[7] is"),
    "layers twice": ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication=[[0, 1], [0, 1]]"),
    "alphas": ({"alpha_pattern": {"(q|v)_proj": 3}}, "alpha_pattern: '(q|v)_proj' must be"),
    "alphas in a list": ({"alpha_pattern": ["q_proj"]}, "alpha_pattern=['q_proj'] must map"),
    "alpha": ({"lora_alpha": -1}, "alpha=-1 must be"),
    "rank": ({"r": 0}, "rank=0 must be"),
}


def engine_of(folder: Path, **options: Any) -> InferenceEngine:
    return InferenceEngine(
        EngineConfig(
            str(folder), device="cpu", **{"max_loras": 2, "kv_cache_memory": 2**22} | options
        )
    )


@pytest.mark.parametrize("how", BROKEN)
def test_mismatched_adapter_tensors_are_rejected(folder: Path, how: str) -> None:
    changed, expected = BROKEN[how]
    tensors = {**load_file(folder / "adapter" / WEIGHTS), **changed}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with engine_of(folder) as engine:
        with pytest.raises(AdapterError) as refused:
            engine.load_adapter("own", kept)
        assert expected in str(refused.value)
        assert engine.adapters() == []


@pytest.mark.parametrize("how", SETTINGS)
def test_unsupported_adapter_settings_are_rejected(folder: Path, how: str) -> None:
    changed, expected = SETTINGS[how]
    path = folder / "adapter" / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with engine_of(folder) as engine, pytest.raises(AdapterError) as refused:
        engine.load_adapter("own", folder / "adapter")
    assert expected in str(refused.value)


def test_alpha_pattern_matches_names_of_the_trained_class() -> None:
    model_config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": llama_config(),
    }
    module = "model.language_model.layers.0.self_attn.q_proj"
    tensors = {
        f"base_model.model.{module}.lora_A.weight": torch.ones(RANK, 64),
        f"base_model.model.{module}.lora_B.weight": torch.ones(64, RANK),
    }
    for name in (module, "model.layers.0.self_attn.q_proj", "q_proj"):
        settings = settings_of({"r": RANK, "lora_alpha": RANK, "alpha_pattern": {name: 3 * RANK}})
        (pair,) = pairs_of(tensors, settings, spec_from_config(model_config), RANK).values()
        assert pair.scale == 3


def test_folder_without_adapter_is_rejected(folder: Path) -> None:
    with engine_of(folder) as engine:
        with pytest.raises(AdapterError, match=r"adapter_config\.json is missing"):
            engine.load_adapter("own", folder)
        (folder / "adapter" / WEIGHTS).unlink()
        with pytest.raises(AdapterError, match="pickled adapters are not supported"):
            engine.load_adapter("own", folder / "adapter")


def test_engine_starts_with_configured_adapters(folder: Path) -> None:
    with engine_of(folder, max_loras=0, loras=(f"one={folder / 'adapter'}",)) as engine:
        (info,) = engine.adapters()
        assert (info.name, info.version, info.rank) == ("one", 1, RANK)
        assert info.targets == (
            "down_proj",
            "gate_proj",
            "k_proj",
            "lm_head",
            "o_proj",
            "q_proj",
            "up_proj",
            "v_proj",
        )


def test_adapter_scales_follow_the_settings(folder: Path) -> None:
    tensors = load_file(folder / "adapter" / WEIGHTS)
    spec = load_spec(folder)
    for settings, scale in (
        (LoraSettings(alpha=10), 2.0),
        (LoraSettings(alpha=10, rslora=True), 10 / 5**0.5),
    ):
        assert {pair.scale for pair in pairs_of(tensors, settings, spec, 64).values()} == {scale}
    of_modules = LoraSettings(alpha=10, alphas=(("q_proj", 5),))
    scales = {place: pair.scale for place, pair in pairs_of(tensors, of_modules, spec, 64).items()}
    assert {place for place, scale in scales.items() if scale == 1.0} == {
        "layers.0.self_attn.q_proj",
        "layers.1.self_attn.q_proj",
    }
