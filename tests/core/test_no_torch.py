"""The host side of a step runs without torch."""

import subprocess
import sys

STEPS = """
import importlib, pkgutil, sys

sys.modules["torch"] = None  # any import of it fails
import nano_inference.core, nano_inference.kv_cache

for folder in (nano_inference.core, nano_inference.kv_cache):
    for module in pkgutil.walk_packages(folder.__path__, folder.__name__ + "."):
        importlib.import_module(module.name)

from tests.simulation.workload import random_workload, run

print(sum(run(random_workload(seed)).samples for seed in range(3)))
"""


def test_core_steps_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
