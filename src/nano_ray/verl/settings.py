"""Conversion of verl's rollout configuration for the engine. Unsupported settings are errors."""

from collections.abc import Iterator
from typing import Any

from nano_inference.config import EngineConfig, with_plain_weights
from nano_inference.errors import ConfigError
from nano_ray.verl.mapping import RequestDefaults

_ONE_PROCESS = "a replica is one process; set it to 1 and use more replicas"

# Option of the rollout -> allowed values, and the reason.
_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "tensor_model_parallel_size": ((1,), _ONE_PROCESS),
    "data_parallel_size": ((1,), _ONE_PROCESS),
    "pipeline_model_parallel_size": ((1,), _ONE_PROCESS),
    "expert_parallel_size": ((1, None), _ONE_PROCESS),
    "quantization": ((None,), "weights are served unquantized; leave it out"),
    "limit_images": ((None,), "images are not supported; leave it out"),
    "logprobs_mode": (
        ("processed_logprobs", "raw_logprobs"),
        "set it to processed_logprobs or raw_logprobs",
    ),
    "load_format": (
        ("dummy", "auto", "safetensors"),
        "weights are always read from safetensors; set it to auto",
    ),
}


def engine_config(rollout: Any, model_path: str, replica_rank: int) -> EngineConfig:
    """Return the engine configuration of one replica.

    Args:
        rollout: verl's `RolloutConfig`. `engine_kwargs["nano"]` holds additional options of
            `EngineConfig`.
        model_path: Folder of the model on this machine.
        replica_rank: Number of the replica. Together with `rollout.seed` it determines the seeds of
            requests without one.

    Raises `ConfigError` for an unsupported option.
    """
    require_able(rollout)
    options: dict[str, Any] = {
        "dtype": rollout.dtype,
        "max_model_len": rollout.max_model_len,
        "max_batch_size": rollout.max_num_seqs,
        "max_tokens_per_batch": rollout.max_num_batched_tokens,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "seed": replica_rank + rollout.seed,
        "enable_return_routed_experts": rollout.enable_rollout_routing_replay,
    }
    config = EngineConfig(model_path, **{**options, **own_options(rollout)})
    return with_plain_weights(config)


def request_defaults(rollout: Any, max_model_len: int, replica_rank: int) -> RequestDefaults:
    """Return the defaults for requests of this rollout."""
    return RequestDefaults(
        prompt_length=rollout.prompt_length,
        response_length=rollout.response_length,
        max_model_len=max_model_len,
        repetition_penalty=rollout.repetition_penalty,
        ignore_eos=rollout.ignore_eos,
        seed=replica_rank + rollout.seed if rollout.full_determinism else None,
        raw_logprobs=rollout.logprobs_mode == "raw_logprobs",
        routed_experts=rollout.enable_rollout_routing_replay,
    )


def require_able(rollout: Any) -> None:
    """Raise `ConfigError` with all unsupported options of the rollout, if any."""
    problems = list(_problems(rollout))
    if problems:
        raise ConfigError(" ".join(problems))


def own_options(rollout: Any) -> dict[str, Any]:
    """Return the options in `engine_kwargs.nano` that are not None."""
    return {
        name: value
        for name, value in dict(rollout.engine_kwargs.get("nano") or {}).items()
        if value is not None
    }


def require_no_adapter(model: Any) -> None:
    """Raise `ConfigError` if verl would serve an unmerged LoRA adapter."""
    lora = dict(model.lora or {})
    if (model.lora_rank > 0 or lora.get("rank", 0) > 0) and not lora.get("merge", False):
        raise ConfigError(
            "LoRA adapters are not supported without merging; set "
            "actor_rollout_ref.model.lora.merge=True."
        )


def _problems(rollout: Any) -> Iterator[str]:
    for name, (allowed, why) in _ONLY.items():
        value = getattr(rollout, name)
        if value not in allowed:
            yield f"rollout.{name}={value!r}: {why}."
    if rollout.prometheus.enable:
        yield (
            "rollout.prometheus.enable=True: a replica has no HTTP server for metrics; set it to "
            "False."
        )
    if rollout.mtp is not None and rollout.mtp.enable and rollout.mtp.enable_rollout:
        yield (
            "rollout.mtp.enable_rollout=True: multi-token prediction is not supported; set it to "
            "False."
        )
