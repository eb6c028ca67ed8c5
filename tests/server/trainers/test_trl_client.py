"""TRL's clients of a vLLM server, unmodified, in a separate environment (`make test-slow` creates
it).
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.main import running_server
from tests.server.trainers.asking import ask
from tests.server.trainers.conftest import RL, engine_config

PYTHON = Path(sys.prefix) / "trl" / "bin" / "python"
SCRIPT = Path(__file__).with_name("with_trl_client.py")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it")
def test_trl_client(tiny_folder: Path) -> None:
    with running_server(engine_config(tiny_folder), RL) as url:
        body = {
            "prompt": [[5, 6, 7], [8, 9]],
            "n": 2,
            "max_tokens": 4,
            "seed": 3,
            "ignore_eos": True,
            "logprobs": 0,
        }
        expected = ask(url, "/v1/completions", body | {"return_token_ids": True})["choices"]
        quiet = os.environ | {
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [PYTHON, "-W", "ignore", SCRIPT, url, tiny_folder]
        ran = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    seen = json.loads(ran.stdout.splitlines()[-1])
    assert (seen["model"], seen["info"]["model_config"]["logprobs_mode"]) == (
        "tiny",
        "processed_logprobs",
    )
    generated = seen["generated"]
    assert generated["prompt_ids"] == [[5, 6, 7], [8, 9]]
    assert generated["completion_ids"] == [choice["token_ids"] for choice in expected]
    assert generated["logprobs"] == [
        [[each] for each in choice["logprobs"]["token_logprobs"]] for choice in expected
    ]
    assert generated["logprob_token_ids"] == [
        [[each] for each in choice["token_ids"]] for choice in expected
    ]
    assert all(len(each) in (3, 4) for row in seen["best"]["logprobs"] for each in row)
    assert [len(ids) for ids in seen["texts"]["completion_ids"]] == [3, 3]
    assert (seen["without"], seen["many"]) == (None, 512)
    assert [len(ids) for ids in seen["chatted"]["prompt_ids"]] == [20, 21]  # one per character
    check_scores(seen["scored"])
    assert seen["updates"] == {
        each: {"match": True, "mismatches": []} for each in ("first", "second")
    }
    check_update_in_flight(seen["in_flight"])


def check_scores(scored: dict[str, Any]) -> None:
    assert scored["actual_token_ids"] == [[[7], [8], [9]]]
    for best, actual in zip(scored["logprobs"][0], scored["actual_logprobs"][0], strict=True):
        assert len(best) == 100
        assert best == sorted(best, reverse=True)
        assert math.isfinite(actual[0])


def check_update_in_flight(seen: dict[str, Any]) -> None:
    assert seen["weights"] == {"match": True, "mismatches": []}
    assert seen["length"] == 512
    choice = seen["choice"]
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 400
    old, new = choice["weight_versions"]
    assert int(old["version"]) < int(new["version"])
    assert (old["start"], old["end"], new["end"]) == (0, new["start"], 400)
