"""The package works where torch is not installed."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys

sys.modules["torch"] = None  # importing it raises ImportError

import numpy as np

from nano_inference.arrays import (
    HOST, as_host, dtype_name, host, is_floating, is_tensor, namespace, without_gradients
)


@without_gradients
def double(x):
    xp = namespace(x)
    return xp.cat([x, x], dim=-1).to(xp.bfloat16)


rows = as_host(np.arange(6.0).reshape(2, 3))
assert is_tensor(rows) and not is_tensor([1])
twice = double(rows)
assert (twice.shape, dtype_name(twice.dtype), is_floating(twice.dtype)) == ((2, 6), "bfloat16", True)
assert twice.device is HOST and namespace(HOST) is host
assert twice.sum().item() == 30
assert twice.narrow(1, 2, 2).unsqueeze(0).flatten().argsort(descending=True).tolist() == [2, 3, 0, 1]
try:
    as_host([1])
except TypeError as error:
    assert "got list" in str(error)
else:
    raise AssertionError
try:
    namespace("cuda")
except ImportError as error:
    print(type(error).__name__)
loaded = [name for name in sys.modules if name.split(".")[0] == "torch"]
assert loaded == ["torch"], loaded
"""


def test_package_works_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ModuleNotFoundError"]


IMPORTING = """
import sys
import threading

from nano_inference.arrays import host, is_tensor, without_gradients

sys.path.insert(0, sys.argv[1])
sys.importing, sys.may_go_on = threading.Event(), threading.Event()
thread = threading.Thread(target=__import__, args=("torch",))
thread.start()
assert sys.importing.wait(60)
assert "torch" in sys.modules
assert without_gradients(host.zeros)(3).tolist() == [0, 0, 0] and not is_tensor([1])
sys.may_go_on.set()
thread.join()
assert is_tensor([1])  # the stand-in's answer
"""
STAND_IN = """
import sys

sys.importing.set()
assert sys.may_go_on.wait(60)
is_tensor = bool
"""


def test_package_works_while_another_thread_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(STAND_IN)
    command = [sys.executable, "-W", "error", "-c", IMPORTING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
