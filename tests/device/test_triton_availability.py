"""Missing requirements of the CUDA backend: error messages and fallbacks on a fake machine."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import ConfigError, EngineConfig, InferenceEngine
from nano_inference.checkpoints.loading import load_spec
from nano_inference.device import backends
from nano_inference.device.backends import choose_device, choose_ops, numerics_of, start_up_line
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.cuda import availability
from nano_inference.ops.cuda.backend import cuda_ops
from nano_inference.ops.interface import Ops
from tests.models.tiny import tiny_llama

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture(autouse=True)
def said_nothing() -> Iterator[None]:
    backends._warn_once.cache_clear()
    yield
    backends._warn_once.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return load_spec(folder)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Fake torch's report of a card. Nothing runs on it."""

    def make(capability: tuple[int, int] = (9, 0), interprets: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old Card")
        monkeypatch.setattr(availability, "_interprets", lambda: interprets)

    return make


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model_path="tiny", **options)


def chosen(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Ops:
    return choose_ops(config(**options), {"policy": spec}, dtype, device)(1)


def test_missing_gpu_error_quotes_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def too_old() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nUpdate it."
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", too_old)
    with pytest.raises(
        ConfigError,
        match=r"device='cuda' is not available: torch .*too old \(found version 11040\)",
    ):
        choose_device("cuda")
    monkeypatch.setattr(availability, "has_nvidia_device", lambda: True)
    assert choose_device("auto") == CPU
    assert "although there is a GPU" in caplog.text
    assert "too old" in caplog.text
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="built without CUDA"):
        choose_device("cuda:1")


def test_missing_card_is_rejected(card: Callable[..., None]) -> None:
    card()
    assert choose_device("auto") == torch.device("cuda")
    with pytest.raises(ConfigError, match=r"'cuda:2' does not exist: the last of 2 is 'cuda:1'"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    "reason", ["old card", "no triton", "old triton", "head", "dtype", "interpreter"]
)
def test_missing_requirement_is_named_and_the_reference_runs(
    spec: ModelSpec,
    card: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reason: str,
) -> None:
    card((7, 5) if reason == "old card" else (9, 0), interprets=reason == "interpreter")
    dtype, message = torch.bfloat16, "Triton's interpreter is on"
    if reason == "old card":
        message = "Old Card has compute capability 7.5; the kernels need 8.0"
    if reason == "no triton":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        message = "Triton is not installed; pip install"
    if reason == "old triton":
        monkeypatch.setattr("importlib.metadata.version", lambda _: "3.3.1")
        message = "Triton 3.3.1 is too old; the kernels need 3.4"
    if reason == "head":
        spec = replace(spec, head_dim=514)
        message = "head_dim=514 has no CUDA kernels"
    if reason == "dtype":
        dtype, message = torch.float64, "float64 has no CUDA kernels"
    assert chosen(spec, CUDA, dtype).name == "reference"
    assert message in caplog.text
    assert "CUDA kernels" in caplog.text
    assert len(caplog.records) == 1
    with pytest.raises(ConfigError, match=r"backend='cuda' is not available: "):
        chosen(spec, CUDA, dtype, backend="cuda")
    with pytest.raises(
        ConfigError,
        match="batch_invariant=True is not possible with the reference backend on cuda:0",
    ):
        chosen(spec, CUDA, dtype, batch_invariant=True)


def test_cpu_needs_the_triton_interpreter(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(spec, CPU, backend="cuda").name == "cuda"
    monkeypatch.setattr(availability, "_interprets", lambda: False)
    with pytest.raises(ConfigError, match=r"backend='cuda' is not available: .*TRITON_INTERPRET=1"):
        chosen(spec, CPU, backend="cuda")
    with pytest.raises(ConfigError, match="attention='flashinfer' is not available; choose one of"):
        config(attention="flashinfer")


def test_fingerprint_distinguishes_modes_and_generations(card: Callable[..., None]) -> None:
    ops_of = {mode: cuda_ops(batch_invariant=mode) for mode in (False, True)}
    prints = [
        numerics_of(config(), ops, torch.bfloat16, CPU).fingerprint for ops in ops_of.values()
    ]
    for capability in ((8, 0), (9, 0)):
        card(capability)
        prints += [
            numerics_of(config(), ops, torch.bfloat16, CUDA).fingerprint for ops in ops_of.values()
        ]
    assert len(set(prints)) == len(prints)
    line = start_up_line(
        config(),
        ops_of[True],
        numerics_of(config(), ops_of[True], torch.bfloat16, CUDA),
        CUDA,
        graphs=True,
    )
    for part in (
        "backend cuda",
        "attention triton",
        "Old Card",
        "bfloat16",
        ", batch invariant",
        ", CUDA graphs",
    ):
        assert part in line


def test_engine_logs_its_kernels(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"device": "cpu", "kv_cache_memory": 2**20, "num_threads": 1, "max_model_len": 32}
    with caplog.at_level(logging.INFO, logger="nano_inference"):
        asked = EngineConfig(
            model_path=str(folder), backend="cuda", batch_invariant=True, **options
        )
        with InferenceEngine(asked) as engine:
            assert engine.numerics.schedule_invariant
            assert engine.numerics.fingerprint.startswith("cuda-invariant-")
    assert "backend cuda (version " in caplog.text
    assert "attention triton, cpu, float32, batch invariant" in caplog.text
