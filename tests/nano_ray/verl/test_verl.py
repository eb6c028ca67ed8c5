"""verl 0.9.1 on Ray, unmodified, in a separate environment (`make test-slow` creates it)."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from tests.models.tiny import llama_config, llama_weights, tiny_llama

PYTHON = Path(sys.prefix) / "verl" / "bin" / "python"
SCRIPT = Path(__file__).with_name("with_verl.py")
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("verl")
    tiny_llama(folder / "model")
    for step in (4, 5, 6):
        save_file(llama_weights(llama_config(), seed=step), folder / f"step{step}.safetensors")
    (folder / "handed").mkdir()
    told = [PYTHON, SCRIPT, folder / "model", folder, folder / "handed"]
    # Ray adds long socket names to this folder, and a socket path has at most
    # 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:
        environment = os.environ | {"RAY_TMPDIR": short}
        ran = subprocess.run(told, capture_output=True, text=True, timeout=900, env=environment)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def alone(folder: Path, seed: int, prompt: list[int], max_tokens: int) -> TrainingSample:
    """Run the same request in this process, on the weights of a seed."""
    tiny_llama(folder, seed=seed)
    with InferenceEngine(
        EngineConfig(str(folder), dtype="float32", num_threads=1, kv_cache_memory=2**23)
    ) as engine:
        params = SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True)
        return engine.generate([prompt], params)[0]


def same(output: dict[str, Any], sample: TrainingSample) -> bool:
    return (output["token_ids"], output["log_probs"]) == (
        list(sample.completion_tokens),
        list(sample.logprobs),
    )


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it"
    ),
]


def test_requests(seen: dict[str, Any], tmp_path: Path) -> None:
    expected = alone(tmp_path, 0, PROMPT, 300)
    assert same(seen["whole"], expected)
    assert seen["whole"]["stop_reason"] == "completed"
    assert 0 < len(seen["plain"]["token_ids"]) == len(seen["plain"]["log_probs"]) <= 400
    assert "tensor_model_parallel_size=2: a replica is one process" in seen["two"]
    assert "'stop_regex' is not a sampling parameter" in seen["unknown"]


def test_aborts(seen: dict[str, Any], tmp_path: Path) -> None:
    expected = alone(tmp_path, 0, PROMPT, 300)
    assert seen["aborted"] == 1
    assert seen["parked"]
    assert same(seen["interrupted"], expected)  # bit for bit the uninterrupted sample
    partial = seen["partial"]
    count = len(partial["token_ids"])
    assert partial["stop_reason"] == seen["rejected"]["stop_reason"] == "aborted"
    assert partial["token_ids"] == list(expected.completion_tokens[:count])
    assert partial["log_probs"] == list(expected.logprobs[:count])
    assert 20 <= count < 300
    assert seen["rejected"]["token_ids"] == []


def test_weights(seen: dict[str, Any], tmp_path: Path) -> None:
    old, new = (alone(tmp_path / str(step), step, PROMPT, 300) for step in (4, 6))
    across = seen["across"]
    pairs = zip(across["log_probs"], old.logprobs, strict=True)
    count = next(place for place, (there, here) in enumerate(pairs) if there != here)
    rest = alone(tmp_path / "5", 5, PROMPT + across["token_ids"][:count], 300 - count)
    assert count >= 20
    assert across["token_ids"][count:] == list(rest.completion_tokens)
    assert across["log_probs"][count:] == list(rest.logprobs)
    assert steps(across) == (4, 5, 5)
    assert seen["under_way"]
    assert len(seen["under"]["token_ids"]) == 300
    assert steps(seen["under"]) == (5, 6, 6)
    assert same(seen["after"], new)
    assert steps(seen["after"]) == (6, 6, 6)
    assert seen["version"] == 6
    assert seen["broken"] == "SafetensorError"
    assert seen["still"]


def test_memory(seen: dict[str, Any], tmp_path: Path) -> None:
    assert seen["asleep"]
    assert same(seen["slept"], alone(tmp_path, 0, PROMPT, 300))


def steps(output: dict[str, Any]) -> tuple[int, int, int]:
    extra = output["extra_fields"]
    return extra["min_global_steps"], extra["max_global_steps"], extra["global_steps"]
