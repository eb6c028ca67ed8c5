"""Codex CLI, unmodified, if it is on the path (`npm install -g @openai/codex`): a loop of six turns
that runs commands in a folder.
"""

import os
import shutil
import subprocess
from itertools import chain, repeat
from pathlib import Path

import pytest

from nano_inference.server.main import running_server
from tests.server.scripted import TEMPLATE, Script, ScriptedClient, calling, with_template

CODEX = shutil.which("codex")
CALLS = (
    ("exec_command", {"cmd": "echo one > a.txt"}),
    ("exec_command", {"cmd": "cat a.txt"}),
    ("get_goal", {}),
    ("multi_agent_v1.close_agent", {"target": "x"}),
    ("exec_command", {"cmd": "wc -c a.txt"}),
)
CONFIG = """
model = "scripted"
model_provider = "nano"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.nano]
name = "nano"
base_url = "{url}/v1"
wire_api = "responses"
"""


@pytest.mark.slow
@pytest.mark.skipif(CODEX is None, reason="Codex CLI is not installed")
def test_codex_runs_its_commands(tmp_path: Path) -> None:
    assert CODEX is not None
    turns = chain(calling(CALLS), repeat("All done."))
    engine = ScriptedClient(
        lambda *_: Script(next(turns)),
        tokenizer_folder=with_template(tmp_path / "tokenizer", TEMPLATE),
        max_model_len=1_000_000,
    )
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    with running_server(engine) as url:
        (home / "config.toml").write_text(CONFIG.format(url=url))
        ran = subprocess.run(
            [CODEX, "exec", "--skip-git-repo-check", "Make a file."],
            cwd=project,
            env=os.environ | {"CODEX_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "All done."
    assert (project / "a.txt").read_text() == "one\n"
    assert len(engine.requests) == len(CALLS) + 1
    last = engine.tokenizer.decode(engine.requests[-1].prompt)
    assert "4 a.txt" in last
    assert "invalid agent id" in last
