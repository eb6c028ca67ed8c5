"""Two simulated machines whose network fails for a while."""

import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_docs import ROOT
from tests.nano_ray.networks import FAR, NEAR, Networks, inside, two_networks
from tests.nano_ray.test_ray import HERE, PYTHON, models

HEALTH = {
    "health_check_period_ms": 2000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
PORT = 6379

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it"
    ),
]


@pytest.fixture
def networks() -> Iterator[Networks]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(two_networks())
        except OSError as problem:
            pytest.skip(str(problem))
        yield found


def test_ray_recovers_from_a_network_cut(networks: Networks, tmp_path: Path) -> None:
    models(tmp_path)
    with ExitStack() as stack:
        short = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)
        )
        paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
        # Use this cluster's own token instead of a token of this machine.
        secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        environment = os.environ | secret | {"RAY_TMPDIR": short, "PYTHONPATH": paths}
        log = stack.enter_context((tmp_path / "log").open("w"))

        def start(namespace: str, *words: Any, **options: Any) -> "subprocess.Popen[str]":
            command = inside(namespace, [str(word) for word in (PYTHON, *words)])
            process = subprocess.Popen(command, env=environment, stderr=log, text=True, **options)
            stack.callback(process.wait, 30)
            stack.callback(process.kill)
            return process

        def node(namespace: str, address: str, *words: str) -> None:
            command = (
                "-m",
                "ray.scripts.scripts",
                "start",
                f"--node-ip-address={address}",
                "--num-cpus=1",
                "--block",
            )
            start(namespace, *command, *words, stdout=log)

        def far_node() -> None:
            node(networks.far, FAR, f"--address={NEAR}:{PORT}")

        head = (
            "--head",
            f"--port={PORT}",
            "--include-dashboard=false",
            f"--system-config={json.dumps(HEALTH)}",
        )
        node(networks.near, NEAR, *head)
        far_node()
        script = HERE / "with_two_networks.py"
        told = (script, tmp_path / "model", tmp_path, f"{NEAR}:{PORT}")
        ran = start(networks.near, *told, stdout=subprocess.PIPE)
        assert ran.stdout is not None
        said = ""
        with ran.stdout:
            for line in ran.stdout:
                said = line.strip()
                if said == "cut":
                    networks.cut()
                elif said == "mend":
                    networks.mend()
                    far_node()
        ran.wait(30)
    assert ran.returncode == 0, (tmp_path / "log").read_text()[-6000:]
    seen = json.loads(said)
    assert seen["nodes"] == seen["nodes again"] == 2
    assert seen["noticed"] < 60
    assert seen["running"]  # requests to the other side waited, then continued
    assert seen["cut"]
    assert seen["version"] == 1
    assert seen["versions"] == [1, 1]
    assert seen["mended"]
