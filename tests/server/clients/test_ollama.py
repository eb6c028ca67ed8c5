"""Ollama's Python client, unmodified, in a separate environment (`make test-slow` creates it)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nano_inference import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server

PYTHON = Path(sys.prefix) / "sdks" / "bin" / "python"
SCRIPT = Path(__file__).with_name("with_ollama.py")
NAME = "smollm2-135m"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it")
def test_ollama() -> None:
    engine = EngineConfig(NAME, device="cpu", kv_cache_memory=256 << 20)
    with running_server(engine, ServerConfig(port=0, in_process=True)) as url:
        ran = subprocess.run(
            [PYTHON, SCRIPT, url, NAME], capture_output=True, text=True, timeout=300
        )
    assert ran.returncode == 0, ran.stderr[-4000:]
    seen = json.loads(ran.stdout.splitlines()[-1])
    assert seen["chat"] == seen["streamed"]
    text, reason, prompt, count = seen["chat"]
    assert (seen["awaited"], reason, count) == (text, "length", 12)
    assert prompt > 30  # includes the template's words
    assert seen["num_streamed"] > 5
    assert min(seen["durations"]) > 0
    first, second, context, continued = seen["generated"]
    assert first == seen["generate_streamed"] != second
    assert continued > context
    assert seen["raw"] is None
    assert [len(row) for row in seen["logprobs"]] == [3] * 12
    assert seen["tools"][0] == seen["after_tools"] == "assistant"
    assert set(json.loads(seen["json"])) == {"age", "busy"}
    assert seen["list"] == [NAME]
    assert seen["sizes"][0] > 50 << 20
    assert seen["running"] == [[NAME, 8192]]
    family, capabilities, info = seen["show"]
    assert (family, capabilities) == ("llama", ["completion"])
    assert info["llama.context_length"] == 8192
    assert seen["embed"] == [2, pytest.approx(1.0)]
    assert seen["old_embed"] == 576
    assert seen["loaded"] == "load"
    statuses = {name: seen[name][0] for name in ("no_model", "image", "pull", "hot", "thinks")}
    assert statuses == {"no_model": 404, "image": 400, "pull": 501, "hot": 400, "thinks": 400}
    assert seen["unload"][0] == 409
