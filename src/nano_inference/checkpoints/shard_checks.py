"""Checks that the ranks of a config can share a model, from the model's config.json."""

from collections.abc import Iterable

from nano_inference.checkpoints.folders import config_folder, load_spec
from nano_inference.config import EngineConfig
from nano_inference.errors import ModelLoadError
from nano_inference.features import ENGINE_LIMITS, NO_EXPERTS, Setting, require
from nano_inference.models.sharding.shard import shard_of
from nano_inference.models.spec.model import ModelSpec
from nano_inference.parallel.mesh import Mesh, Place


def mesh_of(config: EngineConfig) -> Mesh:
    """Return the mesh of an engine with this config."""
    return Mesh(config.tensor_parallel, config.pipeline_parallel, config.context_parallel)


def require_shardable(config: EngineConfig) -> None:
    """Raise `ConfigError` if ranks cannot share the models of a config. Nothing is started.

    A model whose config.json cannot be read here is skipped: the engine's construction reports the
    reason.
    """
    if mesh_of(config).world_size == config.expert_parallel == 1:
        return
    paths = {config.model_path, config.ref_model_path or config.model_path}
    specs: list[ModelSpec] = []
    for folder in filter(None, map(config_folder, sorted(paths))):
        try:
            specs.append(load_spec(folder))
        except ModelLoadError:
            return
    if len(specs) < len(paths):
        return
    require_experts(config, specs)
    engines = config.expert_parallel if config.tensor_parallel == 1 else 1
    for spec in specs:
        shard_of(spec, Place(mesh_of(config)), (0, engines))


def require_experts(config: EngineConfig, specs: Iterable[ModelSpec]) -> None:
    """Raise `ConfigError` if expert parallelism is configured for models without experts."""
    if all(spec.moe is None for spec in specs):
        require(ENGINE_LIMITS, Setting(config, **{NO_EXPERTS: repr(config.model_path)}))
