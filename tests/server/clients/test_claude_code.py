"""Claude Code, unmodified, if it is on the path (`npm install -g @anthropic-ai/claude-code`): a loop
of six turns that runs commands and edits a file.
"""

import os
import shutil
import subprocess
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.main import running_server
from tests.server.scripted import TEMPLATE, Script, ScriptedClient, calling, with_template

CLAUDE = shutil.which("claude")


def calls_in(project: Path) -> list[tuple[str, dict[str, Any]]]:
    file = str(project / "a.txt")
    return [
        ("Bash", {"command": "echo one > a.txt"}),
        ("Read", {"file_path": file}),
        ("Edit", {"file_path": file, "old_string": "one", "new_string": "two"}),
        ("Grep", {"pattern": "two", "path": str(project), "output_mode": "content"}),
        ("Bash", {"command": "wc -c a.txt"}),
    ]


@pytest.mark.slow
@pytest.mark.skipif(CLAUDE is None, reason="Claude Code is not installed")
def test_claude_code_runs_its_tools(tmp_path: Path) -> None:
    assert CLAUDE is not None
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    turns = chain(calls := calling(calls_in(project)), repeat("All done."))
    engine = ScriptedClient(
        lambda *_: Script(next(turns)),
        tokenizer_folder=with_template(tmp_path / "tokenizer", TEMPLATE),
        max_model_len=1_000_000,
    )
    with running_server(engine) as url:
        server = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none"}
        quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CONFIG_DIR": str(home)}
        options = ["--model", "scripted", "--allowedTools", "Bash", "Read", "Edit", "Grep"]
        ran = subprocess.run(
            [CLAUDE, "-p", "Make a file.", *options],
            cwd=project,
            env=os.environ | server | quiet,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.strip() == "All done."
    assert (project / "a.txt").read_text() == "two\n"
    assert len(engine.requests) == len(calls) + 1
    last = engine.tokenizer.decode(engine.requests[-1].prompt)
    assert "a.txt:1:two" in last
    assert "4 a.txt" in last
