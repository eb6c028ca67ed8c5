"""`nano-inference replay` repeats the output of `generate --json` and detects every change."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import (
    EngineConfig,
    InferenceEngine,
    SamplingParams,
    TrainingSample,
    VersionSpan,
)
from nano_inference.cli.sample_files import numerics_options
from nano_inference.data import read_jsonl, write_jsonl, write_parquet
from nano_inference.types import ContextVersions
from tests.cli.running import FAST, run
from tests.models.tiny import family_weights, write_model

SAMPLING = (
    *(
        "--temperature",
        "1",
        "--top-p",
        "0.9",
        "--top-logprobs",
        "2",
        "--max-tokens",
        "9",
        "--stop",
        "e",
        "--repetition-penalty",
        "1.1",
    ),
    *("--seed", "3"),  # another seed may draw the same first token
)


@pytest.fixture(scope="module")
def written(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "samples.jsonl"
    result = run(
        "generate",
        folders["chat"],
        "-p",
        "ab",
        "-p",
        "a longer one",
        "-n",
        "3",
        "--json",
        *SAMPLING,
        *FAST,
    )
    assert result.exit_code == 0, result.stderr
    path.write_text(result.stdout)
    return path


@pytest.mark.parametrize(
    ("dtype", "sums"), [("float32", "auto"), ("bfloat16", "pairs"), ("bfloat16", "tiles")]
)
def test_generate_output_replays(
    folders: dict[str, str], written: Path, tmp_path: Path, dtype: str, sums: str
) -> None:
    """Read dtype, backend and summation order from the file."""
    path, model = tmp_path / "samples.jsonl", folders["chat"]
    more = ("--dtype", dtype, "--cpu-sums", sums, "--ref-model", model)
    made = run("generate", model, "-p", "ab", "-n", "4", "--json", *SAMPLING, *more, *FAST)
    path.write_text(made.stdout)
    result = run("replay", str(path), "--model", model, "--ref-model", model, *FAST)
    assert result.exit_code == 0, result.output
    tokens = sum(len(sample.completion_tokens) for sample in read_jsonl(path))
    assert (
        f"4 of 4 samples are bitwise equal: {tokens} tokens compared, weight version 0, "
        in result.stdout
    )
    assert f"/{dtype}/cpu" in result.stdout
    assert ("/tiles" in result.stdout) == (sums == "tiles")
    write_parquet(read_jsonl(written), tmp_path / "samples.parquet")
    result = run(
        "replay", str(tmp_path / "samples.parquet"), "--model", model, "--limit", "2", *FAST
    )
    assert result.exit_code == 0, result.output
    assert "2 of 2 samples" in result.stdout


def one_up(values: tuple[float, ...], place: int) -> tuple[float, ...]:
    nearest = torch.tensor(values[place]).nextafter(torch.tensor(1.0)).item()
    return (*values[:place], nearest, *values[place + 1 :])


Change = Callable[[TrainingSample], dict[str, Any]]
CHANGES: dict[str, tuple[Change, str]] = {
    "logprob": (lambda s: {"logprobs": one_up(s.logprobs, 1)}, "completion token 1: logprobs is "),
    "token": (
        lambda s: {"completion_tokens": (s.completion_tokens[0], 79, *s.completion_tokens[2:])},
        "completion token 1: completion_tokens is 79, replayed ",
    ),
    "seed": (lambda s: {"seed": s.seed + 1}, "completion token 0: "),
    "top": (
        lambda s: {"top_logprobs": (s.top_logprobs or ())[::-1]},
        "completion token 0: top_logprobs is ",
    ),
    "params": (
        lambda s: {
            "sampling_params": replace(s.sampling_params or SamplingParams(), temperature=1.01)
        },
        "completion token 0: logprobs is ",
    ),
    "reason": (lambda s: {"finish_reason": "stop", "stop_reason": 5}, "the sample: "),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_found(folders: dict[str, str], written: Path, tmp_path: Path, name: str) -> None:
    change, words = CHANGES[name]
    samples = read_jsonl(written)
    samples = [s for s in samples if len(s.completion_tokens) > 2]
    samples[1] = replace(samples[1], **change(samples[1]))
    write_jsonl(samples, tmp_path / "a.jsonl")
    result = run("replay", str(tmp_path / "a.jsonl"), "--model", folders["chat"], *FAST)
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("sample 2 ")
    assert words in lines[1]
    assert "every operation gives the same bits" in lines[2]
    assert "version 0, SHA-256 " in lines[2]
    assert lines[3].startswith(f"{len(samples) - 1} of {len(samples)} samples are bitwise equal")


def test_operation_that_breaks_the_law_is_named(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model_path=folders["chat"], num_threads=1, kv_cache_memory=2**23, backend="reference"
    )
    build = InferenceEngine.__init__

    def build_broken(self: InferenceEngine, config: EngineConfig) -> None:
        build(self, config)
        plain, down = self.model.ops.linear, self.model.params["layers.1.down"]

        def linear(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
            out = plain(x, weight, *rest)
            return out.nextafter(torch.tensor(9.0)) if weight is down and len(x) == 1 else out

        self.model.ops = replace(self.model.ops, linear=linear)

    monkeypatch.setattr(InferenceEngine, "__init__", build_broken)
    with InferenceEngine(config) as engine:
        params = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
        write_jsonl([engine.generate([5, 6, 7], params)[0]] * 5, tmp_path / "b.jsonl")
    result = run("replay", str(tmp_path / "b.jsonl"), "--model", folders["chat"], *FAST)
    assert result.exit_code == 1
    assert (
        result.stdout.count(
            "layer 1, linear (down): the row at position 0 has different bits in one chunk"
        )
        == 3
    )
    assert "0 of 5 samples" in result.stdout


@pytest.mark.thorough
def test_versions_come_from_folders(folders: dict[str, str], tmp_path: Path) -> None:
    config = json.loads((Path(folders["chat"]) / "config.json").read_text())
    new = family_weights(config, seed=5)
    folder = write_model(tmp_path / "new", config, new)
    made = EngineConfig(model_path=folders["chat"], num_threads=1, kv_cache_memory=2**23)
    with InferenceEngine(made) as engine:
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        samples = engine.generate([3, 4, 5], params, 2)
        engine.add_request([3, 4, 5], params)
        for _ in range(4):
            engine.step()
        engine.update_weights(new, version=3)  # keeps the context
        while engine.has_pending():
            samples += engine.step()
    spans = samples[-1].weight_versions
    at = spans[0].end
    assert [span.version for span in spans] == [0, 3]
    old = VersionSpan(0, 0, 3 + at - 1)
    kv = (
        ContextVersions(0, at, (old,)),
        ContextVersions(at, 10, (old, VersionSpan(3, old.end, 12))),
    )
    samples[-1] = replace(samples[-1], kv_versions=kv)
    write_jsonl(samples, tmp_path / "a.jsonl")
    arguments = ("replay", str(tmp_path / "a.jsonl"), "--model", folders["chat"], *FAST)
    result = run(*arguments, "--weights", f"3={folder}")
    assert result.exit_code == 0, result.output
    assert "weight versions 0, 3," in result.stdout
    result = run(*arguments)
    assert result.exit_code == 2
    assert "the weights of version 3 are missing" in result.stderr
    result = run(*arguments, "-w", f"3={folders['base']}")
    assert result.exit_code == 1, "other weights"


def test_bad_input(folders: dict[str, str], written: Path, tmp_path: Path) -> None:
    first, other, empty = read_jsonl(written)[0], tmp_path / "a.jsonl", tmp_path / "empty.jsonl"
    empty.write_text("")
    for sample, words in (
        (
            replace(first, numerics="cpu-0/float32/cpu/torch-1"),
            "sample 2: the sample's numerics are 'cpu-0/",
        ),
        (replace(first, sampling_params=None), "sample 2: the sample has no sampling_params"),
        (
            replace(first, weight_version=7, weight_versions=(), kv_versions=()),
            "version 7 are missing",
        ),
    ):
        write_jsonl([first, sample], other)
        result = run("replay", str(other), "--model", folders["chat"], *FAST)
        assert result.exit_code == 2
        assert words in " ".join(result.stderr.split())
    other.write_text("{}")
    for arguments, words in (
        ((str(other), "--model", folders["chat"]), "column 'prompt_tokens' is missing"),
        ((str(empty), "--model", folders["chat"]), "has no samples"),
        ((str(tmp_path / "none"), "--model", folders["chat"]), "no such file"),
        ((str(written), "--model", str(tmp_path)), "config.json"),
        ((str(written), "--model", folders["chat"], "-w", "3"), "VERSION=FOLDER"),
        ((str(written), "--model", folders["chat"], "-w", "3=a", "-w", "3=b"), "occurs twice"),
        ((str(written), "--model", folders["chat"], "-w", f"0={tmp_path}"), "no .safetensors file"),
        ((str(written),), "--model"),
    ):
        result = run("replay", *arguments, *FAST)
        assert result.exit_code == 2, result.output
        assert words in " ".join(result.stderr.split()).replace("│ ", "")


def test_numerics_of_a_gpu_name_its_kind_of_device() -> None:
    found = numerics_options("cuda-invariant-1/bfloat16/cuda-sm90/torch-2")
    assert EngineConfig("m", **found).device == "cuda"
    assert found["batch_invariant"]
    assert "batch_invariant" not in numerics_options("cuda-1/bfloat16/cuda-sm90/torch-2")
    assert numerics_options("cpu-3/float32/cpu-x86_64-default/torch-2")["device"] == "cpu"
