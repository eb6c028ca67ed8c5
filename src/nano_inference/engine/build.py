"""Assembly of an engine's parts in this process, on all ranks, or in lockstep with other
engines.
"""

from typing import TYPE_CHECKING, Any

from nano_inference.checkpoints.shard_checks import mesh_of
from nano_inference.config import EngineConfig
from nano_inference.core.gate import Gate
from nano_inference.errors import ConfigError
from nano_inference.ranks.build import rank_in_lockstep
from nano_inference.ranks.parts import Parts, assemble

if TYPE_CHECKING:
    from nano_inference.ranks.launcher import Launcher
else:
    Launcher = Any


def assemble_all(
    config: EngineConfig, launcher: "Launcher | None", gate: Gate | None = None
) -> Parts:
    """Load everything that a config names, on all ranks. Raises `ConfigError` and
    `ModelLoadError`.
    """
    if gate is not None and not gate.alone:
        from nano_inference.ranks.lockstep import LockstepGate

        assert isinstance(gate, LockstepGate)
        return assemble(config, rank=rank_in_lockstep(config, gate.group, gate))
    if mesh_of(config).world_size == 1:
        if launcher is not None:
            raise ConfigError(
                "a launcher starts other ranks, but this config has only one; omit the launcher."
            )
        return assemble(config)
    try:
        from nano_inference.ranks.assembly import assemble_ranks  # brings in msgspec
    except ModuleNotFoundError as problem:
        raise ConfigError(
            f"an engine of several ranks needs {problem.name}; run pip install "
            "'nano-inference[parallel]'."
        ) from problem
    return assemble_ranks(config, launcher)
