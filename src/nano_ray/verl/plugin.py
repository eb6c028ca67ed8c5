"""Plugin that registers the rollout "nano" with verl. The entry point `verl.plugins` or
`VERL_USE_EXTERNAL_MODULES` loads it.
"""
# pyright: reportMissingImports=false

from typing import Any

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

NAME = "nano"


def _replica() -> Any:
    from nano_ray.verl.replica import NanoReplica

    return NanoReplica


RolloutReplicaRegistry.register(NAME, _replica)
_ROLLOUT_REGISTRY[NAME, "async"] = "nano_ray.verl.adapter.NanoRollout"
