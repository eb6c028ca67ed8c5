"""The programs of docs/from-trl.md and docs/rl-frameworks.md, each in its framework's environment
(`make test-slow` builds them).
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nano_inference import EngineConfig
from nano_inference.checkpoints.loading import resolve_model
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.docs.test_docs import ROOT

TEXT = "".join((ROOT / "docs" / page).read_text() for page in ("from-trl.md", "rl-frameworks.md"))
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.M | re.S)
TRL, VERIFIERS = (Path(sys.prefix) / name / "bin" / "python" for name in ("trl", "rl-clients"))
QUIET = os.environ | {
    "OMP_NUM_THREADS": "2",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "HF_HUB_OFFLINE": "1",
}


def block(word: str) -> str:
    (match,) = (each for each in BLOCKS if word in each)
    return match


def run(python: Path, program: str, folder: Path) -> str:
    command = [python, "-W", "ignore", "-c", program]
    ran = subprocess.run(
        command, cwd=folder, env=QUIET, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout.splitlines()[-1]


def test_programs_of_the_page_are_all_run() -> None:
    assert {block("from trl"), block("from verifiers")} == set(BLOCKS)


@pytest.mark.slow
@pytest.mark.skipif(not TRL.exists(), reason=f"there is no {TRL}; make test-slow makes it")
def test_trl_trains(tmp_path: Path) -> None:
    (record,) = ast.literal_eval(run(TRL, block("from trl"), tmp_path))
    assert record["step"] == 2
    assert 0 < record["sampling/sampling_logp_difference/max"] < 1e-3


@pytest.mark.slow
@pytest.mark.skipif(
    not VERIFIERS.exists(), reason=f"there is no {VERIFIERS}; make test-slow makes it"
)
def test_verifiers_samples(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    engine = EngineConfig(
        "smollm2-135m", device="cpu", max_model_len=256, kv_cache_memory=2**26, num_threads=1
    )
    with running_server(engine, ServerConfig(port=0, in_process=True, rl=True)) as url:
        program = block("from verifiers").replace("http://127.0.0.1:8000", url)
        said = run(
            VERIFIERS, program.replace("MODEL_FOLDER", str(resolve_model("smollm2-135m"))), tmp_path
        )
    torch.set_num_threads(threads)
    ids, logprobs = ast.literal_eval(said.replace("] [", "], ["))
    assert 1 <= len(ids) == len(logprobs) <= 8
    assert all(each <= 0 for each in logprobs)
