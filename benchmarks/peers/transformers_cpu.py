"""transformers' settings, and the start of a worker with one of them. The worker runs in this
environment.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.process import PeerFailed, Worker


@dataclass(frozen=True)
class TransformersSetting:
    """Settings that may affect its speed on a CPU.

    Attributes:
        experts: Computation of a mixture's experts. None: the model's default.
    """

    experts: str | None = None


SETTINGS = {
    "default": TransformersSetting(),
    "experts one by one": TransformersSetting(experts="eager"),
}
DEFAULTS: Mapping[str, str] = {}


def transformers_worker(setting: str, model: Path, dtype: str, threads: int, log: Path) -> Worker:
    """Start a worker with a setting. Raises `PeerFailed`."""
    if importlib.util.find_spec("transformers") is None:
        raise PeerFailed("it is not installed; run `pip install transformers`.")
    chosen = SETTINGS[setting]
    told = {
        "model": str(model),
        "dtype": dtype,
        "threads": threads,
        "experts": chosen.experts,
    }
    command = [sys.executable, "-m", "benchmarks.peers.transformers_worker", json.dumps(told)]
    config = f"transformers, {dtype}, {threads} threads, {chosen}"
    return Worker("transformers", setting, command, os.environ, log, config)
