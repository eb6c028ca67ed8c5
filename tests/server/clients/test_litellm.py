"""LiteLLM, unmodified, in a separate environment (`make test-slow` creates it)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nano_inference import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server

PYTHON = Path(sys.prefix) / "sdks" / "bin" / "python"
SCRIPT = Path(__file__).with_name("with_litellm.py")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it")
def test_litellm() -> None:
    config = ServerConfig(port=0, in_process=True, api_keys=("sk-test",))
    with running_server(EngineConfig("smollm2-135m", kv_cache_memory=256 << 20), config) as url:
        ran = subprocess.run([PYTHON, SCRIPT, url], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    seen = json.loads(ran.stdout.splitlines()[-1])
    answer = seen["chat"]
    assert "Paris" in answer["text"]
    assert answer["finish"] == "stop"
    assert answer["prompt"] > 30  # includes the template's words
    assert seen["chat_streamed"] == answer
    assert seen["chat_awaited"] == answer["text"]
    assert seen["messages"] == answer
    assert seen["messages_streamed"] == answer
    assert seen["text"].strip().startswith("Paris")
    assert seen["too_hot"] == "BadRequestError"
    assert seen["too_long"] in ("BadRequestError", "ContextWindowExceededError")
    assert seen["wrong_key"] == seen["wrong_key_messages"] == "AuthenticationError"
    assert seen["wrong_model"] == "NotFoundError"
