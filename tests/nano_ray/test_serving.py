"""`nano-inference serve --ray`: streams continue after an actor is killed."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_docs import ROOT
from tests.nano_ray.test_ray import PYTHON, models

PATIENCE = 180.0
NUM_STREAMS = 32
OPTIONS = (
    "--ray --replicas 2 --restart-engine --threads 1 --max-batch-size 8 --dtype float32 "
    "--kv-cache-memory 16MiB"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it"
    ),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    models(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Ray adds long socket names to this folder, and a socket path has at most
    # 107 characters.
    with ExitStack() as stack:
        short = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)
        )
        log = stack.enter_context((tmp_path / "log").open("w"))
        paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
        environment = os.environ | {"RAY_TMPDIR": short, "PYTHONPATH": paths}
        serve = "from nano_inference.cli import app; app()"
        words = [
            str(PYTHON),
            "-c",
            serve,
            "serve",
            str(tmp_path / "model"),
            "--port",
            str(port),
            "--admin-key",
            "key",
        ]
        process = subprocess.Popen(
            [*words, *OPTIONS.split()], env=environment, stdout=log, stderr=log
        )
        url = f"http://127.0.0.1:{port}"
        try:
            end = time.monotonic() + PATIENCE
            while True:
                with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
                assert time.monotonic() < end, (tmp_path / "log").read_text()[-4000:]
                time.sleep(0.2)
            yield process, url
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


def asked(url: str, path: str, body: Any = None) -> Any:
    headers = {"content-type": "application/json", "authorization": "Bearer key"}
    request = urllib.request.Request(
        url + path, None if body is None else json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def tokens(url: str, number: int) -> list[int]:
    """Return the token ids of one stream."""
    body = {
        "model": "x",
        "prompt": [5 + number, 6, 7, 8],
        "max_tokens": 400,
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    body["model"] = asked(url, "/v1/models")["data"][0]["id"]
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    results: list[int] = []
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    results += choice.get("token_ids") or []
    return results


def all_streams(url: str) -> list[list[int]]:
    """Return the token ids of all streams, which run concurrently."""
    found: list[list[int]] = [[] for _ in range(NUM_STREAMS)]

    def one(number: int) -> None:
        found[number] = tokens(url, number)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ray_streams_continue_after_a_failure(
    server: tuple["subprocess.Popen[bytes]", str],
) -> None:
    process, url = server
    quiet = all_streams(url)
    assert all(len(each) == 400 for each in quiet)
    pid = asked(url, "/fleet")["replicas"][0]["pid"]
    running: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: running.append(all_streams(url)))
    thread.start()
    time.sleep(1.0)
    os.kill(pid, signal.SIGKILL)
    thread.join()
    assert running == [quiet]
    fleet = asked(url, "/fleet")
    assert fleet["failovers"]["deaths"] == 1
    assert fleet["failovers"]["moved"] > 0
    end = time.monotonic() + PATIENCE
    while [each["state"] for each in asked(url, "/fleet")["replicas"]] != ["serving", "serving"]:
        assert time.monotonic() < end
        time.sleep(0.2)
    process.terminate()
    assert process.wait(60) == 0
