"""Conversion of a rollout configuration to the engine's, without verl."""

from types import SimpleNamespace
from typing import Any

import pytest

from nano_inference.config import EngineConfig
from nano_inference.errors import ConfigError
from nano_ray.verl.mapping import RequestDefaults
from nano_ray.verl.settings import engine_config, request_defaults, require_no_adapter


def rollout(**changes: Any) -> Any:
    """Return the defaults of verl 0.9.1's `RolloutConfig`, except for the parallelism."""
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": 1,
        "data_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_parallel_size": 1,
        "quantization": None,
        "enable_rollout_routing_replay": False,
        "limit_images": None,
        "logprobs_mode": "processed_logprobs",
        "load_format": "dummy",
        "prometheus": SimpleNamespace(enable=False),
        "mtp": SimpleNamespace(enable=False, enable_rollout=False),
        "dtype": "bfloat16",
        "max_model_len": None,
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.5,
        "seed": 42,
        "full_determinism": False,
        "prompt_length": 512,
        "response_length": 256,
        "repetition_penalty": 1.0,
        "ignore_eos": False,
        "engine_kwargs": {},
    }
    return SimpleNamespace(**(fields | changes))


def test_options_of_both_are_shared() -> None:
    config = rollout(
        max_num_seqs=64, max_model_len=900, dtype="float32", enable_prefix_caching=False
    )
    assert engine_config(config, "some/model", 3) == EngineConfig(
        "some/model",
        dtype="float32",
        quantization=None,
        max_model_len=900,
        max_batch_size=64,
        max_tokens_per_batch=8192,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        seed=45,
    )


def test_options_of_only_the_engine() -> None:
    told = rollout(
        engine_kwargs={
            "vllm": {"x": 1},
            "nano": {"num_threads": 2, "kv_cache_memory": None, "dtype": "auto"},
        }
    )
    config = engine_config(told, "some/model", 0)
    assert (config.num_threads, config.kv_cache_memory, config.dtype) == (2, None, "auto")
    with pytest.raises(ConfigError, match="num_threats"):
        engine_config(rollout(engine_kwargs={"nano": {"num_threats": 2}}), "some/model", 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_model_parallel_size": 2},
        {"data_parallel_size": 4},
        {"quantization": "fp8"},
        {"logprobs_mode": "raw_logits"},
        {"load_format": "pt"},
        {"prometheus": SimpleNamespace(enable=True)},
        {"mtp": SimpleNamespace(enable=True, enable_rollout=True)},
    ],
)
def test_unsupported_option_is_rejected_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        engine_config(rollout(**changes), "some/model", 0)


def test_routing_replay_asks_for_routed_experts() -> None:
    config = rollout(enable_rollout_routing_replay=True)
    assert engine_config(config, "some/model", 0).enable_return_routed_experts
    assert not engine_config(rollout(), "some/model", 0).enable_return_routed_experts
    assert request_defaults(config, 700, 1).routed_experts


def test_request_defaults_apply_to_omitted_parameters() -> None:
    assert request_defaults(rollout(), 700, 1) == RequestDefaults(512, 256, 700)
    config = rollout(
        full_determinism=True, logprobs_mode="raw_logprobs", ignore_eos=True, repetition_penalty=1.1
    )
    assert request_defaults(config, 700, 1) == RequestDefaults(512, 256, 700, 1.1, True, 43, True)


@pytest.mark.parametrize(
    ("model", "fine"),
    [
        ({"lora_rank": 0, "lora": {}}, True),
        ({"lora_rank": 8, "lora": {"merge": True}}, True),
        ({"lora_rank": 8, "lora": {}}, False),
        ({"lora_rank": 0, "lora": {"rank": 4}}, False),
    ],
)
def test_adapters_are_merged_or_refused(model: dict[str, Any], fine: bool) -> None:
    if fine:
        require_no_adapter(SimpleNamespace(**model))
    else:
        with pytest.raises(ConfigError, match="merge"):
            require_no_adapter(SimpleNamespace(**model))
