"""renderers and verifiers, unmodified, in a separate environment (`make test-slow` creates it)."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.main import running_server
from tests.server.trainers.asking import GENERATE, ask
from tests.server.trainers.conftest import RL, engine_config

PYTHON = Path(sys.prefix) / "rl-clients" / "bin" / "python"
SCRIPT = Path(__file__).with_name("with_verifiers.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it"
    ),
]


@pytest.fixture(scope="module")
def seen(tiny_folder: Path) -> dict[str, Any]:
    """Return the clients' results and the reply to a plain request."""
    with running_server(engine_config(tiny_folder), RL) as url:
        quiet = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [PYTHON, "-W", "ignore", SCRIPT, url, tiny_folder]
        ran = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr[-4000:]
        report = json.loads(ran.stdout.splitlines()[-1])
        sampling = {"temperature": 0, "max_tokens": 6, "logprobs": 1}
        prompt = report["renderers"]["plain"]["prompt_ids"]
        report["plain"] = ask(url, GENERATE, {"token_ids": prompt, "sampling_params": sampling})[
            "choices"
        ][0]
    return report


def test_renderers_sample_by_token_ids(seen: dict[str, Any]) -> None:
    told, plain = seen["renderers"], seen["plain"]
    assert told["plain"]["completion_ids"] == told["salted"]["completion_ids"] == plain["token_ids"]
    assert told["plain"]["completion_logprobs"] == [
        each["logprob"] for each in plain["logprobs"]["content"]
    ]
    assert told["plain"]["finish_reason"] == plain["finish_reason"]
    assert told["plain"]["routed_experts"] is None
    assert len(told["plain"]["prompt_ids"]) == len("user: Hi there\nassistant: ")
    assert told["salted"]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    masked = told["masked"]
    assert [len(row) for row in masked["sampling_mask"]] == [2] * len(masked["completion_ids"])
    assert told["refused"] == {"too long": "OverlongPromptError", "a grammar": "BadRequestError"}


def test_verifiers_train_on_what_was_sampled(seen: dict[str, Any]) -> None:
    first, second = seen["train"]
    assert first["tokens"]["completion_ids"] == seen["plain"]["token_ids"]
    for reply in (first, second):
        tokens = reply["tokens"]
        assert len(tokens["completion_logprobs"]) == len(tokens["completion_ids"]) > 0
        assert all(math.isfinite(each) and each < 0 for each in tokens["completion_logprobs"])
    assert second["tokens"]["prompt_ids"][:10] == first["tokens"]["prompt_ids"][:10]
    assert len(second["tokens"]["prompt_ids"]) > len(first["tokens"]["prompt_ids"])


def test_verifiers_evaluate_by_chat(seen: dict[str, Any]) -> None:
    for trained, evaluated in zip(seen["train"][:1], seen["eval"][:1], strict=True):
        assert evaluated["message"]["content"] == trained["message"]["content"]
        assert evaluated["finish_reason"] == trained["finish_reason"]
    assert len(seen["eval"]) == 2
