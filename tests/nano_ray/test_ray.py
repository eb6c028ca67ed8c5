"""Replicas on Ray, in a separate environment (`make test-slow` creates it)."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.docs.test_docs import ROOT
from tests.models.tiny import llama_config, llama_weights, tiny_llama

PYTHON = Path(sys.prefix) / "ray" / "bin" / "python"
HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it"
    ),
]


def models(folder: Path) -> None:
    """Create a tiny model and two updates."""
    tiny_llama(folder / "model")
    whole = llama_weights(llama_config(), seed=5)
    save_file(whole, folder / "whole.safetensors")
    part = llama_weights(llama_config(), seed=6)
    save_file({name: part[name] for name in sorted(part)[::3]}, folder / "part.safetensors")


def run(*told: object) -> str:
    """Run a script with Ray's Python and return its last line of output."""
    # Ray adds long socket names to this folder, and a socket path has at most
    # 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:
        paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
        environment = os.environ | {"RAY_TMPDIR": short, "PYTHONPATH": paths}
        command = list(map(str, (PYTHON, *told)))
        ran = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert ran.returncode == 0, ran.stderr[-6000:]
    return ran.stdout


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ray")
    models(folder)
    return json.loads(run(HERE / "with_ray.py", folder / "model", folder).splitlines()[-1])


def test_bits_of_one_engine(seen: dict[str, Any]) -> None:
    assert seen["nodes"]
    assert seen["generate"]
    assert seen["ids"]


def test_replicas_all_take_new_weights(seen: dict[str, Any]) -> None:
    assert seen["versions"] == [1, 2]
    assert seen["each version"] == [2, 2]
    assert seen["checksum"]


def test_rejected_update_changes_nothing(seen: dict[str, Any]) -> None:
    said = seen["refused"]
    assert "shape" in said["shape"]
    assert "the update is empty" in said["none"]
    assert "is missing" in said["missing"]
    assert "version=1 must be higher" in said["old"]
    assert "takes token ids" in said["text"]
    assert "outside the vocabulary" in said["ids"]
    assert "max_model_len" in said["long"]
    assert "at least one must remain" in said["all"]
    assert "tensor_parallel=3" in said["tensor"]
    assert "set device='cuda'" in said["device"]
    assert "engines in lockstep are not supported on Ray" in said["lockstep"]
    assert "no node had room" in said["room"]
    assert seen["still"] == [2, True]


def test_node_dies_and_another_takes_its_place(seen: dict[str, Any]) -> None:
    assert seen["in the middle"]
    assert seen["while dead"] == [["0", 2]]
    assert seen["killed"]
    on_the_new_node, version, num_starts = seen["replaced"]
    assert on_the_new_node
    assert version == 2
    assert num_starts >= 2
    assert seen["checksum of the new one"]


def test_replicas_come_and_go_under_load(seen: dict[str, Any]) -> None:
    assert seen["added"] == [["2"], True, True]
    assert seen["three"] == [2, 2, 2]
    assert seen["removed"] == [True, ["1", "2"]]
    assert seen["elastic"] == [True, 1]


def test_fleet_survives_the_death_of_all_replicas(seen: dict[str, Any]) -> None:
    assert seen["all killed"]
    assert seen["after all"] == [2, True]
    assert seen["next"] == 3


def test_shutdown_leaves_no_process(seen: dict[str, Any]) -> None:
    assert seen["given back"] >= 2


def test_replica_of_two_ranks(tmp_path: Path) -> None:
    models(tmp_path)
    seen = json.loads(run(HERE / "with_ranks.py", tmp_path / "model", tmp_path).splitlines()[-1])
    # two CPUs on two nodes
    assert "2 ranks of {'CPU': 1.0} on one node" in seen["apart"]
    assert seen["generate"]
    assert seen["version"] == 1
    assert seen["checksum"]
    assert seen["updated"]
    assert "rank 1" in seen["why"]
    assert seen["again"]


def test_program_of_the_document(tmp_path: Path) -> None:
    models(tmp_path)
    (program,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "ray.md").read_text(), flags=re.M | re.S
    )
    said = re.findall(r"^    print.*?# (?:.*: )?(.*)$", program, flags=re.M)
    ahead = (
        f"from safetensors.torch import load_file\nnew_weights = "
        f"load_file({str(tmp_path / 'whole.safetensors')!r})\n"
    )
    script = tmp_path / "program.py"
    script.write_text(ahead + program.replace("MODEL_FOLDER", str(tmp_path / "model")))
    assert run(script).splitlines() == said
