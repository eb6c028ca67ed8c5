"""`nano-inference info` against the engine that it predicts."""

import json
import shutil
from pathlib import Path

import pytest

from nano_inference import InferenceEngine
from nano_inference.config import EngineConfig
from nano_inference.ops.cpu import library
from nano_inference.ops.cpu.build import LAWS, law_of
from tests.checkpoints.hf_to_gguf import hf_to_gguf
from tests.checkpoints.quantisers import write_quantised
from tests.cli.running import run
from tests.models.strong import strong_model
from tests.models.tiny import llama_config, llama_weights, tiny_model
from tests.models.tiny_gguf import gguf


def test_info_as_json_agrees_with_an_engine(folders: dict[str, str]) -> None:
    result = run(
        "info", folders["chat"], "--json", "--kv-cache-memory", "8MiB", "--max-model-len", "100"
    )
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    config = EngineConfig(model_path=folders["chat"], kv_cache_memory=2**23, max_model_len=100)
    with InferenceEngine(config) as engine:
        assert report["numerics"]["fingerprint"] == engine.numerics.fingerprint
        operations = engine.model.ops.linear.__self__  # pyright: ignore
        assert operations.kernels is library.load(report["kernels"])
        assert report["memory"]["num_blocks"] == engine.memory_budget.num_blocks
        assert report["memory"]["num_tokens"] == engine.memory_budget.num_tokens
        assert report["num_parameters"] == sum(
            tensor.numel() for tensor in engine.model.params.values()
        )
        assert report["architecture"]["num_layers"] == engine.spec.num_layers
    assert report["tokenizer"]["has_chat_template"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="the reference backend runs")
def test_info_shows_the_build_for_an_order_of_sums(folders: dict[str, str]) -> None:
    for law in LAWS:
        result = run("info", folders["chat"], "--json", "--cpu-sums", law)
        assert law_of(json.loads(result.stdout)["kernels"]) == law


def test_info_reads_no_weights(folders: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(folders["bare"]) / "config.json").read_text())
    result = run("info", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert "none: pass token ids" in result.stdout


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "phi3", "olmo2", "granite"])
def test_info_of_every_kind(tmp_path: Path, family: str) -> None:
    result = run("info", str(tiny_model(tmp_path, family)), "--dtype", "bfloat16")
    assert result.exit_code == 0, result.stderr
    assert "cpu-" in result.stdout
    assert ("layers attend to the last" in result.stdout) == (family in ("gemma3", "phi3"))


@pytest.mark.thorough
def test_info_of_ranks_agrees_with_an_engine_of_several(folders: dict[str, str]) -> None:
    options = ("--tensor-parallel", "2", "--pipeline-parallel", "2", "--kv-cache-memory", "8MiB")
    result = run("info", folders["chat"], "--json", *options)
    assert result.exit_code == 0, result.stderr
    ranks = json.loads(result.stdout)["ranks"]
    assert [each["rank"] for each in ranks] == [0, 1, 2, 3]
    assert [each["layers"] for each in ranks] == [[0, 1], [0, 1], [1, 2], [1, 2]]
    assert [each["query_heads"] for each in ranks] == [[0, 2], [2, 4]] * 2
    config = EngineConfig(
        folders["chat"],
        kv_cache_memory=2**23,
        tensor_parallel=2,
        pipeline_parallel=2,
        num_threads=1,
    )
    with InferenceEngine(config) as engine:
        assert engine.memory_budget.weights == ranks[0]["memory"]["weights"]
        assert engine.memory_budget.num_blocks == min(
            each["memory"]["num_blocks"] for each in ranks
        )
    text = run("info", folders["chat"], *options).stdout
    assert "memory on cpu, rank 0" in text
    assert "layers 1; query heads 2 to 3" in " ".join(text.split())


def test_info_of_experts_in_ranks_and_in_lockstep(tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path, "mixtral"))
    for options in (
        ("--expert-parallel", "2"),
        ("--tensor-parallel", "2", "--expert-parallel", "2"),
    ):
        result = run("info", folder, "--json", *options)
        assert result.exit_code == 0, result.stderr
        ranks = json.loads(result.stdout)["ranks"]
        assert [each["experts"][0] for each in ranks][1] == ranks[0]["experts"][1]
    assert "ranks" not in json.loads(run("info", folder, "--json").stdout)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--pipeline-parallel", "99"), "--pipeline-parallel 99 exceeds the model's 2 layers"),
        (("--expert-parallel", "2"), "which has no experts"),
        (("--expert-parallel", "2", "--pipeline-parallel", "2"), "have one rank each"),
    ],
)
def test_info_reports_impossible_ranks(
    folders: dict[str, str], options: tuple[str, ...], words: str
) -> None:
    result = run("info", folders["bare"], *options)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


@pytest.mark.skipif(shutil.which("g++") is None, reason="plain weights are served then")
def test_info_counts_blocks_that_are_the_default(tmp_path: Path) -> None:
    strong_model(tmp_path / "hf", "LlamaForCausalLM")
    file = tmp_path / "m.gguf"
    hf_to_gguf(tmp_path / "hf", file, "llama", matrices=gguf.GGMLQuantizationType.Q4_1)
    own = ("--device", "cpu", "--kv-cache-memory", "1MiB", "--max-model-len", "64")
    taken = {}
    for asked in ("auto", "none"):
        result = run("info", str(file), "--json", "--quantization", asked, *own)
        assert result.exit_code == 0, result.stderr
        taken[asked] = json.loads(result.stdout)["memory"]["weights"]
        config = EngineConfig(
            str(file), quantization=asked, device="cpu", kv_cache_memory=2**20, max_model_len=64
        )
        with InferenceEngine(config) as engine:
            assert taken[asked] == engine.memory_budget.weights
            assert (engine.config.codes == "file") == (asked == "auto")
    assert taken["auto"] < taken["none"]


def test_info_describes_a_quantised_checkpoint(tmp_path: Path) -> None:
    config = llama_config()
    write_quantised(tmp_path, "compressed-int4", config, llama_weights(config))
    result = run("info", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    output = " ".join(result.stdout.split())
    assert "bfloat16 (checkpoint float32)" in output
    assert (
        "quantisation quantized with compressed-tensors (4 bits, a scale for 32), dequantized to "
        "bfloat16"
    ) in output
    assert "weights 0.2 MiB" in output
    output = " ".join(run("info", str(tmp_path), "--quantization", "file").stdout.split())
    assert "(4 bits, a scale for 32), computed with its own codes" in output
    report = json.loads(run("info", str(tmp_path), "--json").stdout)
    assert report["architecture"]["quantisation"]["method"] == "compressed-tensors"
