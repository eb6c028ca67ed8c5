"""Drafts and weight formats compared with the peers, with stand-ins for peers that are not
installed here.
"""

import json
import math
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.ours import Options
from benchmarks.peers import compare, drafts, file_formats, vllm_cpu
from benchmarks.peers.compare import OURS
from benchmarks.peers.drafts import Stream, compete
from benchmarks.peers.llama_cpp import (
    DRAFTS,
    LlamaServer,
    body,
    made_of,
    perplexity,
    quantised,
)
from benchmarks.peers.process import Made, PeerFailed, exact
from benchmarks.speculation import PEOPLE, TASKS, at, streams
from benchmarks.workloads import Workload, workload

gguf = pytest.importorskip("gguf")

STREAM = Stream("chat", "", ((1, 2), (3, 4)), 40, {"temperature": 1.0, "ignore_eos": True})


class Fake:
    """An engine with known figures: each prompt takes `seconds`."""

    config = ""

    def __init__(self, name: str, setting: str, seconds: float, accepted: int, fails: int = 99):
        self.name, self.setting, self.seconds = name, setting, seconds
        self.accepted, self.fails = accepted, fails
        self.seeds: list[int] = []

    def prepare(self, load: Workload) -> None:
        pass

    def make(self, load: Workload) -> Made:
        self.seeds.append(load.sampling["seed"])
        if len(self.seeds) > self.fails:
            raise PeerFailed("it has had enough")
        return Made(self.seconds, load.output_tokens, 2 * self.accepted, self.accepted)

    def run(self, load: Workload) -> float:
        return exact(self.name, load, self.make(load))

    def stop(self) -> None:
        pass

    def memory(self) -> int:
        return 0

    def peak_memory(self) -> int:
        return 0

    def cpu_seconds(self) -> float:
        return 0.0


def test_gain_is_relative_to_the_same_engine_without_drafts() -> None:
    plain, drafted = Fake("a", "no drafts", 2.0, 0), Fake("a", "ngram", 1.0, 10)
    other = Fake("b", "no drafts", 9.0, 0)
    rows = {row["name"]: row for row in compete(STREAM, [plain, drafted, other], 2)}
    assert rows["chat, a, no drafts"]["gain"]["runs"] == [1.0, 1.0]
    assert rows["chat, a, ngram"]["gain"]["runs"] == [2.0, 2.0]
    assert rows["chat, a, ngram"]["tokens_per_s"]["runs"] == [40.0, 40.0]
    # 10 of 40 tokens were drafts, so there were 30 steps
    assert rows["chat, a, ngram"]["tokens_a_step"]["median"] == pytest.approx(4 / 3, abs=1e-5)
    assert rows["chat, a, ngram"]["accepted_share"] == 0.5
    assert rows["chat, b, no drafts"]["accepted_share"] is None
    assert plain.seeds == drafted.seeds == [999_000, 999_001, 0, 1, 1000, 1001]


def test_failing_engine_skips_the_rest(capsys: pytest.CaptureFixture) -> None:
    rows = compete(STREAM, [Fake("a", "no drafts", 1.0, 0), Fake("b", "x", 1.0, 0, fails=5)], 3)
    assert [row["engine"] for row in rows] == ["a"]
    assert "b (x) failed: it has had enough" in capsys.readouterr().out


def test_peers_get_the_same_prompts_as_our_engine(options: Options) -> None:
    by_name = {stream.name: stream for stream in streams(options.model, at(0.0, TASKS))}
    assert list(by_name) == ["chat, greedy", "code, greedy", "JSON, greedy"]
    assert by_name["code, greedy"].sampling == {"temperature": 0.0, "ignore_eos": True}
    assert by_name["JSON, greedy"].sampling["json_schema"] == PEOPLE
    assert not by_name["JSON, greedy"].sampling["ignore_eos"]
    assert all(len(stream.prompts) >= 3 for stream in by_name.values())


@pytest.mark.thorough
def test_ours_drafts_in_a_process_of_its_own(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(drafts.SETTINGS, OURS, ("no drafts", "suffix"))
    worker = compare.Worker

    def steady(name: str, setting: str, command: list[str], *rest: Any) -> Any:
        python, flag, _, *arguments = command
        steady_command = [python, flag, "tests.benchmarks.steady_worker", *arguments]
        return worker(name, setting, steady_command, *rest)

    monkeypatch.setattr(compare, "Worker", steady)
    # the tiny model repeats one word, so drafts are accepted
    stream = Stream("chat", "", ((100, 101),), 24, {"temperature": 0.0, "ignore_eos": True})
    plain, drafted = drafts.measure(options, [stream], (OURS, "vllm"), "float32", tmp_path)
    assert plain["tokens"] == drafted["tokens"] == [24]
    assert plain["tokens_a_step"]["median"] == 1
    assert drafted["tokens_a_step"]["median"] > 1
    assert 0 < drafted["accepted_share"] <= 1


def test_llama_server_request_fields() -> None:
    asked = body((1, 2), 5, 1, {"temperature": 0.0, "seed": 3, "ignore_eos": False})
    assert (asked["temperature"], asked["seed"], asked["ignore_eos"]) == (0.0, 3, False)
    assert "json_schema" not in asked
    assert body((1,), 5, 1, {"json_schema": PEOPLE})["json_schema"] == PEOPLE
    plain = body((1,), 5, 1, {})
    assert (plain["temperature"], plain["ignore_eos"]) == (1.0, True)
    assert "seed" not in plain


def test_llama_server_draft_counts_are_read() -> None:
    one = {"tokens": [1, 2, 3], "timings": {"draft_n": 4, "draft_n_accepted": 2}}
    answers = [json.dumps({"results": [one, one]}), json.dumps(one | {"timings": {}})]
    assert made_of(1.5, answers) == Made(1.5, 9, 8, 4)
    assert made_of(1.5, [json.dumps([one])]) == Made(1.5, 3, 4, 2)
    with pytest.raises(PeerFailed, match="made 3 tokens of 8192 in W2"):
        exact("llama-server", workload("W2"), made_of(1.5, [json.dumps(one)]))


def test_vllm_draft_options_use_its_names() -> None:
    assert vllm_cpu.drafter(0) is None
    assert vllm_cpu.drafter(4) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    variables = vllm_cpu.environment(vllm_cpu.DRAFTS["ngram"], 2, Path())
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "1"


def tool(cache: Path, name: str, script: str) -> None:
    path = cache / "llama.cpp" / "build" / "bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_files_are_quantised_once(tmp_path: Path) -> None:
    plain = tmp_path / "model-bf16.gguf"
    plain.write_text("weights")
    tool(
        tmp_path,
        "llama-quantize",
        f'echo called >> {tmp_path}/calls; cp "$1" "$2"; echo $3 >> "$2"',
    )
    for _ in range(2):
        path = quantised(plain, "Q8_0", tmp_path)
        assert (path.name, path.read_text()) == ("model-Q8_0.gguf", "weightsQ8_0\n")
    assert (tmp_path / "calls").read_text() == "called\n"
    tool(tmp_path, "llama-quantize", "echo no such type; exit 3")
    with pytest.raises(PeerFailed, match="status 3:\nno such type"):
        quantised(plain, "Q4_0", tmp_path)
    assert not (tmp_path / "model-Q4_0.gguf").exists()
    setting = "its own weights in Q4_0"
    assert DRAFTS[setting].draft == "Q4_0"
    with pytest.raises(PeerFailed, match="no such type"):
        LlamaServer(setting, plain, 1, tmp_path, tmp_path / "log")


def test_perplexity_of_llama_cpp(tmp_path: Path) -> None:
    tool(
        tmp_path,
        "llama-perplexity",
        'echo "[1]9.1,[2]8.2,"; echo "Final estimate: PPL = 8.2500 +/- 0.1"',
    )
    assert perplexity(tmp_path / "x.gguf", tmp_path / "text", 512, 2, tmp_path) == 8.25
    tool(tmp_path, "llama-perplexity", "echo too short a text")
    with pytest.raises(PeerFailed, match="too short a text"):
        perplexity(tmp_path / "x.gguf", tmp_path / "text", 512, 2, tmp_path)


def test_perplexity_counts_the_second_half_of_a_piece() -> None:
    # tokens 1 to 7 of 8 have logprobs; llama-perplexity counts tokens 5, 6 and 7
    logprobs = [0.0, 0.0, 0.0, 0.0, math.log(0.5), math.log(0.5), math.log(0.5)]
    assert file_formats.of_second_halves([logprobs, logprobs]) == pytest.approx(2.0)


def written(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    ones = np.ones((4, 64), dtype=np.float32)
    writer.add_tensor("a", ones)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("b", gguf.quantize(ones, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_bytes_and_types_of_a_file(tmp_path: Path) -> None:
    size, tensors = file_formats.weights_of(written(tmp_path / "x.gguf"))
    assert size == 4 * 64 * 4 + 4 * 2 * 34
    assert tensors == {"F32": 1, "Q8_0": 1}


@pytest.mark.thorough
def test_formats_beside_llama_cpp(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    sizes = file_formats.Sizes(("BF16",), ("W1",), tmp_path)
    assert file_formats.measure(options, sizes) == []
    assert "make peers" in capsys.readouterr().out

    (tmp_path / "llama.cpp.json").write_text("{}")  # but its server is missing
    path = written(tmp_path / "x.gguf")
    monkeypatch.setattr(file_formats, "file_of", lambda *_: path)
    text = file_formats.Text(tmp_path / "text", (tuple(range(100, 116)),) * 2, "a text")
    monkeypatch.setattr(file_formats.Text, "of", lambda *_: text)
    (row,) = file_formats.measure(replace(options, repeats=2), sizes)
    assert "llama.cpp, BF16 failed" in capsys.readouterr().out
    assert (row["engine"], row["weights"]) == (OURS, "float32")
    assert (
        len(row["start_to_first_token_s"]["runs"]) == len(row["decode_tokens_per_s"]["runs"]) == 2
    )
    assert row["weight_mb"] > 0
    assert row["peak_memory_mib"] > 50
    assert row["perplexity"] > 1
    assert row["text"] == "a text"
    json.dumps(row)


def test_participants_with_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_formats, "file_of", lambda *_: written(tmp_path / "x.gguf"))
    monkeypatch.setattr(file_formats, "resolve_model", lambda *_, **__: None)

    def keys(kind: str) -> list[Any]:
        return [each.key for each in file_formats.entries_of(kind, Options(), tmp_path, None)]

    assert keys("BF16") == [(OURS, "bfloat16"), ("llama.cpp", "BF16")]
    assert keys("Q4_1") == [(OURS, "Q4_1"), ("llama.cpp", "Q4_1")]
    assert keys("Q8_0") == [(OURS, "Q8_0"), (OURS, "int8"), ("llama.cpp", "Q8_0")]
