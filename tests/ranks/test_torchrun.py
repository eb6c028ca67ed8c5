"""Ranks started by torchrun."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")

from nano_inference import ConfigError, EngineConfig, InferenceEngine, SamplingParams
from nano_inference.ranks import torchrun
from nano_inference.ranks.torchrun import NEEDED, TorchrunLauncher, environment, serve_rank
from tests.models.tiny import tiny_model
from tests.ports import free_port

PARAMS = {"max_tokens": 12, "seed": 3, "ignore_eos": True}
OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "seed": 1, "kv_cache_memory": 2**21}
PROMPTS = [[3, 5, 6, 7], list(range(10, 70))]

SCRIPT = """
import json, os, sys

from nano_inference import ConfigError, EngineConfig, InferenceEngine, SamplingParams
from nano_inference.ranks import TorchrunLauncher, serve_rank

model, other, out, params, options, prompts = json.loads(sys.argv[1])
if os.environ["RANK"] != "0":
    serve_rank()
    serve_rank()
    sys.exit()
found = []
launcher = TorchrunLauncher()
for folder in (model, other):
    with InferenceEngine(EngineConfig(folder, tensor_parallel=2, **options), launcher) as engine:
        found.append([[s.completion_tokens, s.logprobs] for s in engine.generate(prompts, SamplingParams(**params))])
        engine.update_weights(other, blocking=True)
        found.append(engine.weights_checksum())
try:
    InferenceEngine(EngineConfig(model, tensor_parallel=4, **options), launcher)
except ConfigError as problem:
    found.append(str(problem))
with open(out, "w") as file:
    json.dump(found, file)
"""


@pytest.mark.thorough
def test_torchrun_processes_host_two_engines_in_turn(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    folders = [
        str(tiny_model(tmp_path / name, "llama", seed=seed, **sizes))
        for seed, name in enumerate("ab")
    ]
    expected: list[Any] = []
    for folder in folders:
        with InferenceEngine(EngineConfig(folder, **OPTIONS)) as engine:
            samples = engine.generate(PROMPTS, SamplingParams(**PARAMS))
            expected.append(
                [[list(each.completion_tokens), list(each.logprobs)] for each in samples]
            )
            engine.update_weights(folders[1], blocking=True)
            expected.append(engine.weights_checksum())
    expected.append("torchrun has started 2 processes, but the config has 4 ranks.")

    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
    ]
    arguments = json.dumps([*folders, str(out), PARAMS, OPTIONS, PROMPTS])
    subprocess.run(
        [*command, f"--master-port={free_port()}", script, arguments], check=True, timeout=120
    )
    assert json.loads(out.read_text()) == expected


def test_missing_torchrun_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDED:
        monkeypatch.delenv(name, raising=False)
    for begin in (TorchrunLauncher, serve_rank):
        with pytest.raises(
            ConfigError,
            match=r"torchrun has not set RANK, WORLD_SIZE.*start the script with torchrun",
        ):
            begin()
    variables = dict.fromkeys(NEEDED, "1") | {"MASTER_ADDR": "127.0.0.1"}
    assert environment(variables.get) == variables
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match="TorchrunLauncher is for rank 0; the other ranks call serve_rank"
    ):
        TorchrunLauncher()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="rank 0 must build the engine, with TorchrunLauncher"):
        serve_rank()


def test_address_of_a_machine_is_that_of_the_route_to_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    for name, value in (variables | {"LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    launcher = TorchrunLauncher()
    assert (launcher.host, launcher.ranks_here(4)) == (torchrun.own_address("127.0.0.1"), 2)
    assert launcher.host == "127.0.0.1"
