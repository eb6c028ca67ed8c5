"""The serving side of the package in processes that have no torch, their children included."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.tiny import tiny_model
from tests.ops.compiler import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
ROOT = Path(__file__).parents[1]
START = """
import json, sys
from pathlib import Path
import numpy as np
from nano_inference import EngineConfig, InferenceEngine, LoraSettings, SamplingParams
from nano_inference.types import TrainingSample

folder = sys.argv[1]
small = {"kv_cache_memory": 2**24, "num_threads": 1}
greedy = SamplingParams(temperature=0, max_tokens=6)
"""
PARTS = {
    "engine": """
with InferenceEngine(EngineConfig(folder, enable_prefix_caching=True, **small)) as engine:
    first = engine.generate([[1, 2, 3], [4, 5]], greedy, num_samples_per_prompt=2)
    assert len(first) == 4 and all(len(each.completion_tokens) == 6 for each in first)
    engine.update_weights({"model.embed_tokens.weight": np.zeros((300, 64), np.float32)})
    assert engine.generate([[1, 2, 3]], greedy)[0].weight_versions[-1].version == 1
    assert engine.weights_checksum()
    engine.sleep(weights=True)
    engine.wake()
    engine.generate([[1, 2, 3]], greedy)
""",
    "formats": """
for options in (
    {"quantization": "int8"},
    {"quantization": "int4", "dtype": "bfloat16"},
    {"kv_cache_dtype": "int8"},
    {"cache_type": "radix"},
    {"speculation": "ngram"},
    {"draft_model": "self", "draft_layers": 1},
    {"kept_cache_folder": str(Path(folder) / "kept")},
):
    with InferenceEngine(EngineConfig(folder, **small, **options)) as engine:
        (sample,) = engine.generate([[1, 2, 3, 1, 2, 3, 1, 2]], greedy)
        assert len(sample.completion_tokens) == 6, options
""",
    "adapter": """
with InferenceEngine(EngineConfig(folder, max_loras=1, **small)) as engine:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    rng = np.random.default_rng(0)
    halves = {"A": (4, 64), "B": (64, 4)}
    tensors = {
        name.format(half): rng.normal(size=shape).astype(np.float32)
        for half, shape in halves.items()
    }
    plain = engine.generate([[1, 2, 3]], greedy)[0].logprobs
    engine.load_adapter("mine", tensors, settings=LoraSettings(rank=4))
    params = SamplingParams(temperature=0, max_tokens=6, adapter="mine")
    assert engine.generate([[1, 2, 3]], params)[0].logprobs != plain
""",
    "server": """
import urllib.request
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server

def post(url, **body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)

def main():
    model = EngineConfig("smollm2-135m", max_model_len=256, **small)
    for options in ({"in_process": True}, {}, {"replicas": 2}):
        config = ServerConfig(port=0, served_model_name="m", **options)
        with running_server(model, config) as url:
            text = post(url + "/v1/completions", model="m", prompt="The sky is", max_tokens=4, logprobs=1)
            assert len(text["choices"][0]["logprobs"]["tokens"]) == 4
            schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
            tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
            chat = post(
                url + "/v1/chat/completions", model="m", max_tokens=60, temperature=0, tools=[tool],
                messages=[{"role": "user", "content": "Hi"}], tool_choice="required",
            )
            call = chat["choices"][0]["message"]["tool_calls"][0]["function"]
            assert json.loads(call["arguments"]) == {"city": "Rome"}

if __name__ == "__main__":
    main()
""",
    "extras": """
from nano_inference.errors import ConfigError

for options, extra in (({"device": "cuda"}, "gpu"), ({"backend": "reference"}, "train")):
    try:
        InferenceEngine(EngineConfig(folder, **small, **options))
    except ConfigError as error:
        assert f"pip install 'nano-inference[{extra}]'" in str(error), error
    else:
        raise AssertionError(f"an engine with {options} was built")
""",
    "no compiler": """
import os, tempfile
from nano_inference.errors import ConfigError
from nano_inference.ops.cpu import build

os.environ["PATH"] = ""
build.PREBUILT = Path(tempfile.mkdtemp())
try:
    InferenceEngine(EngineConfig(folder, **small))
except ConfigError as error:
    assert "no C++ compiler was found" in str(error), error
else:
    raise AssertionError("an engine without kernels was built")
""",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose `torch` cannot be imported, also by child processes."""
    absent = tmp_path_factory.mktemp("absent")
    (absent / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')")
    paths = [str(absent), str(ROOT / "src"), str(ROOT)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize("part", PARTS)
def test_package_serves_without_torch(
    tmp_path: Path, environment: dict[str, str], part: str
) -> None:
    folder = tiny_model(tmp_path / "model", "llama")
    script = tmp_path / "script.py"
    script.write_text(START + PARTS[part] + "\nassert 'torch' not in sys.modules\n")
    ended = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
