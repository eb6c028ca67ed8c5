"""The commands of docs/tools.md run in their order against a server of SmolLM2."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nano_inference import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.docs.test_docs import ROOT

ADDRESS = "http://127.0.0.1:8000"  # as the document writes it
BLOCKS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "tools.md").read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    threads = torch.get_num_threads()
    engine = EngineConfig(
        "smollm2-135m", device="cpu", max_model_len=512, kv_cache_memory=2**27, num_threads=1
    )
    with running_server(engine, ServerConfig(port=0, in_process=True)) as address:
        yield address
    torch.set_num_threads(threads)


@pytest.mark.thorough
def test_blocks_run_and_create_their_files(url: str, tmp_path: Path) -> None:
    assert len(BLOCKS) == 6
    command = tmp_path / "bin" / "nano-inference"
    command.parent.mkdir()
    entry = "from nano_inference.cli import app; app()"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{entry}' \"$@\"\n")
    command.chmod(0o755)
    search_path = os.pathsep.join((str(command.parent), os.environ["PATH"]))
    for block in BLOCKS:
        done = subprocess.run(
            ["bash", "-e", "-c", block.replace(ADDRESS, url)],
            cwd=tmp_path,
            env=os.environ | {"PATH": search_path, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["summary"]["within_limits"] <= run["summary"]["requests"] == len(run["requests"])
    assert (tmp_path / "run.png").stat().st_size > 10_000
    for name in ("out.jsonl", "asked.jsonl"):
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert [row["custom_id"] for row in rows] == ["one", "two"]
        assert [row["response"]["status_code"] for row in rows] == [200, 200]
    assert 'id="data">{"texts":[' in (tmp_path / "report.html").read_text()
