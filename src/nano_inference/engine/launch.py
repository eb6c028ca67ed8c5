"""An engine of one process, or of several: who starts the others, and what only one of them can
do.
"""

from typing import TYPE_CHECKING, Any

from nano_inference.config import EngineConfig
from nano_inference.engine.assembly import Parts, assemble, rank_in_lockstep
from nano_inference.engine.lockstep import Lockstep
from nano_inference.engine.runner import ModelRunner
from nano_inference.errors import ConfigError, InvalidRequest
from nano_inference.models.shares import mesh_of

if TYPE_CHECKING:
    from nano_inference.engine.ranks.launcher import Launcher
else:
    Launcher = Any


def assemble_all(
    config: EngineConfig, launcher: "Launcher | None", lockstep: Lockstep | None = None
) -> Parts:
    """Load everything that a config names, on all ranks. Raises `ConfigError` or
    `ModelLoadError`.
    """
    if lockstep is not None:
        return assemble(config, rank=rank_in_lockstep(config, lockstep.group))
    if mesh_of(config).world_size == 1:
        if launcher is not None:
            raise ConfigError(
                "a launcher starts other ranks, and this config has none; leave it out."
            )
        return assemble(config)
    try:
        from nano_inference.engine.ranks.assembly import assemble_ranks  # brings in msgspec
    except ModuleNotFoundError as problem:
        raise ConfigError(
            f"an engine of several ranks needs {problem.name}: pip install "
            "'nano-inference[parallel]'."
        ) from problem
    return assemble_ranks(config, launcher)


def require_one_rank(runner: ModelRunner, what: str) -> None:
    """Raise `InvalidRequest` where several ranks share the model; `what` needs all of it in one
    process.
    """
    if runner.shares is not None:
        raise InvalidRequest(
            f"{what} needs an engine of one rank: it works on the whole model in one process."
        )
