"""openai-agents, unmodified, in a separate environment (`make test-slow` creates it): loops of six
turns on a scripted model, and of five forced calls on a small one.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.server.scripted import TEMPLATE, Script, ScriptedClient, calling, with_template

PYTHON = Path(sys.prefix) / "agents" / "bin" / "python"
SCRIPT = Path(__file__).with_name("with_openai_agents.py")
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("weather", {"city": "Rome"}),
    ("shell", {"commands": ["ls"]}),
    ("apply_patch", {"type": "create_file", "path": "a.txt", "diff": "+b"}),
    ("query", {"input": "SELECT 1"}),
    ("weather", {"city": "Oslo"}),
)
RAN = ["weather Rome", "shell ls", "create_file a.txt", "query SELECT 1", "weather Oslo", "Done."]


@contextmanager
def scripted_server(folder: Path) -> Iterator[str]:
    turns = cycle([*calling(CALLS), "Done."])
    engine = ScriptedClient(
        lambda *_: Script(next(turns)), tokenizer_folder=with_template(folder, TEMPLATE)
    )
    engine.max_model_len = 1 << 14
    with running_server(engine) as url:
        yield url


def told(*arguments: str) -> dict[str, list[str]]:
    ran = subprocess.run(
        [PYTHON, SCRIPT, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it")
def test_agent_loops_end_on_a_scripted_model(tmp_path: Path) -> None:
    with scripted_server(tmp_path) as url:
        assert told(url, "scripted", "free") == dict.fromkeys(("whole", "streamed", "stored"), RAN)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it")
def test_agent_loop_ends_on_a_small_model() -> None:
    served = ServerConfig(port=0, in_process=True)
    config = EngineConfig("smollm2-135m", kv_cache_memory=256 << 20, seed=0)
    with running_server(config, served) as url:
        assert told(url, "smollm2-135m", "forced") == {"forced": ["weather"] * 5}
