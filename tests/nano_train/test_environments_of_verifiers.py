"""Environments with verifiers itself, in a separate environment (`make test-slow` creates it) that
borrows pytest and torch from this one.
"""

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from nano_inference.data import read_jsonl
from nano_inference.system.cache_folder import cache_folder
from tests.nano_train.test_environments import RUN, model, steps_of
from tests.server.trainers import test_verifiers

__all__ = ["model"]

pytestmark = test_verifiers.pytestmark
ROOT = Path(__file__).parents[2]
BORROW = "import sys; sys.path.append(sys.argv.pop(1)); "


def run_with_verifiers(code: str, *arguments: str | Path, **variables: Any) -> str:
    """Return the output of code in the interpreter that has verifiers."""
    folders = ROOT / "src", ROOT, Path(test_verifiers.__file__).parent
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
    quiet |= {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [test_verifiers.PYTHON, "-W", "ignore", "-c", BORROW + code]
    done = subprocess.run(
        [*command, sysconfig.get_path("purelib"), *arguments],
        env=os.environ | quiet | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_environments_run_with_verifiers() -> None:
    code = "import pytest; sys.exit(pytest.main())"
    tests = "tests/nano_train/test_environments.py"
    assert "passed" in run_with_verifiers(
        code, "-q", "-p", "no:cacheprovider", "-W", "default", "--tier", "all", tests
    )


def test_verifiers_play_their_own_chat_program(model: Path, tmp_path: Path) -> None:
    """The default program of a plain taskset streams, and its tool is a server in a process. Its
    environment comes from `uv`, which names the one that has verifiers, so nothing is downloaded.
    """
    uv = tmp_path / "home" / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(
        f'#!/bin/sh\ncase "$*" in *--help) echo --script;; *find*) echo {test_verifiers.PYTHON};; '
        "esac\n"
    )
    uv.chmod(0o755)
    text = RUN.format(model=model, turns=1).replace("max_model_len = 512", "max_model_len = 1024")
    _, _, rest = text.partition("environment = ")
    plain = '{ id = "verifiers-tools", args.agent = { max_turns = 3 } }'
    file = tmp_path / "run.toml"
    file.write_text(text.replace(rest.splitlines()[0], plain).replace("steps = 3", "steps = 1"))
    code = "from nano_inference.cli import app; app()"
    run_with_verifiers(
        *(code, "train", file, "--out", tmp_path / "out"),
        HOME=str(tmp_path / "home"),
        XDG_CACHE_HOME=str(cache_folder("kernels").parents[1]),
    )
    samples = list(read_jsonl(tmp_path / "out/samples/0.jsonl"))
    assert [step["mismatch"] for step in steps_of(tmp_path / "out")] == [0.0]
    assert {all(sample.loss_mask) for sample in samples} == {True, False}
