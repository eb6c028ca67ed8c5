"""An engine with one rank next to an engine whose ranks share the model."""

from dataclasses import replace

from nano_inference.config import EngineConfig
from nano_inference.engine.engine import InferenceEngine
from nano_inference.errors import ConfigError
from nano_inference.ranks.parts import is_shared

_OMITTED = {
    "ref_model_path": None,
    "speculation": EngineConfig.speculation,
    "draft_model": None,
    "draft_layers": None,
    "draft_quantization": None,
    "kept_cache_folder": None,
    "kept_cache_bytes": None,
    "receipt_key": None,
    "loras": (),
    "rank_timeout": EngineConfig.rank_timeout,
}


def one_rank(engine: InferenceEngine) -> InferenceEngine:
    """Build an engine in this process with the live weights, version and bits of another one, whose
    model several ranks share.

    Use it for calls that need the whole model, such as `replay` and `embed`. It takes the memory of
    all weights, has the same adapters, and no reference model and no drafts. It does not follow
    updates. Shut it down as any engine. `PolicyModel` and `LoraPolicy` make their own.

    Args:
        engine: Engine with any number of ranks.

    Raises:
        ConfigError: The bits of the ranks are not those of one rank, or the memory does not
            suffice.
    """
    if engine.numerics.tensor_parallel != 1:
        raise ConfigError(
            f"the numerics {engine.numerics.fingerprint!r} are not those of one rank; use an "
            "engine with one rank, or up to 8 tensor ranks on CPUs."
        )
    config = engine.config
    counts = config.tensor_parallel, config.pipeline_parallel, config.context_parallel
    budget = engine.memory_budget
    longest = budget.max_model_len
    # Shares may be uneven, so there is memory for two of the longest sequences.
    whole_token = budget.bytes_per_token * counts[0] * counts[1] * counts[2]
    single = replace(
        config,
        tensor_parallel=1,
        pipeline_parallel=1,
        context_parallel=1,
        expert_parallel=1,
        max_model_len=longest,
        kv_cache_memory=max(budget.kv_cache, 2 * longest * whole_token),
        max_loras=max(config.max_loras, len(config.loras)),
        **_OMITTED,
    )
    other = InferenceEngine(single)
    try:
        if other.numerics.fingerprint != engine.numerics.fingerprint:
            raise ConfigError(
                f"one rank has the numerics {other.numerics.fingerprint!r}, the ranks have "
                f"{engine.numerics.fingerprint!r}; use an engine with one rank."
            )
        follow(engine, other)
        for info in engine.adapters():
            table = other.adapter_table
            table.take(info.name, engine.adapter_table.pairs(info.name), info.version)
    except BaseException:
        other.shutdown()
        raise
    return other


def follow(engine: InferenceEngine, other: InferenceEngine) -> None:
    """Give an engine of one rank the live weights of another engine, if their versions differ."""
    while (version := engine.get_weight_version()) != other.get_weight_version():
        weights = engine.weight_sync.state_dict()
        if version == engine.get_weight_version():  # no update came between
            other.update_weights(weights, blocking=True, version=version, complete=True)


def scorer_of(engine: InferenceEngine) -> InferenceEngine:
    """Return the engine itself if it holds the whole model, otherwise one of one rank."""
    return one_rank(engine) if is_shared(engine.runner) else engine
