"""verl's configuration of a rollout as the engine's. Settings that this engine lacks
are refused, not passed over.
"""

from collections.abc import Iterator
from typing import Any

from nano_inference.config import EngineConfig, with_plain_weights
from nano_inference.errors import ConfigError
from nano_ray.verl.mapping import RequestDefaults

_ONE_PROCESS = "a replica is one process; set it to 1 and use more replicas"

# Option of the rollout -> what it may be, and why.
_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "tensor_model_parallel_size": ((1,), _ONE_PROCESS),
    "data_parallel_size": ((1,), _ONE_PROCESS),
    "pipeline_model_parallel_size": ((1,), _ONE_PROCESS),
    "expert_parallel_size": ((1, None), _ONE_PROCESS),
    "quantization": ((None,), "weights are served as they are; leave it out"),
    "limit_images": ((None,), "there are no images"),
    "logprobs_mode": (("processed_logprobs", "raw_logprobs"), "other modes are not known"),
    "load_format": (
        ("dummy", "auto", "safetensors"),
        "weights are read from safetensors, also where they are replaced",
    ),
}


def engine_config(rollout: Any, model_path: str, replica_rank: int) -> EngineConfig:
    """The engine of one replica.

    Args:
        rollout: verl's `RolloutConfig`. Its `engine_kwargs["nano"]` are more options of
            `EngineConfig`.
        model_path: the model's folder on this machine.
        replica_rank: number of the replica; with `rollout.seed` it decides the seeds of requests
            that bring none.

    Raises `ConfigError` for an option that this engine does not have.
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
    """What requests of this rollout are when they do not say; `max_model_len` is the engine's."""
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
    """Raise `ConfigError` that names every option of the rollout which this engine does not
    have.
    """
    problems = list(_problems(rollout))
    if problems:
        raise ConfigError(" ".join(problems))


def own_options(rollout: Any) -> dict[str, Any]:
    """`engine_kwargs.nano`."""
    return {
        name: value
        for name, value in dict(rollout.engine_kwargs.get("nano") or {}).items()
        if value is not None
    }


def require_no_adapter(model: Any) -> None:
    """Raise `ConfigError` where verl would serve a LoRA adapter by itself; merged into the weights
    it is fine.
    """
    lora = dict(model.lora or {})
    if (model.lora_rank > 0 or lora.get("rank", 0) > 0) and not lora.get("merge", False):
        raise ConfigError(
            "LoRA adapters are not served by themselves; set "
            "actor_rollout_ref.model.lora.merge=True."
        )


def _problems(rollout: Any) -> Iterator[str]:
    for name, (allowed, why) in _ONLY.items():
        value = getattr(rollout, name)
        if value not in allowed:
            yield f"rollout.{name}={value!r}: {why}."
    if rollout.prometheus.enable:
        yield (
            "rollout.prometheus.enable=True: a replica has no HTTP server to ask for metrics; "
            "leave it off."
        )
    if rollout.mtp is not None and rollout.mtp.enable and rollout.mtp.enable_rollout:
        yield "rollout.mtp.enable_rollout=True: there is no multi-token prediction; leave it off."
