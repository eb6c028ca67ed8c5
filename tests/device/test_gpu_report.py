"""`find_gpus` and `nano-inference info --gpu`, with a stand-in for the driver."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nano_inference.device import gpu_report
from tests.cli.running import run

GIB = 2**30
CARDS = {
    0: SimpleNamespace(name="NVIDIA H100", major=9, minor=0, total_memory=80 * GIB),
    1: SimpleNamespace(name="Tesla V100", major=7, minor=0, total_memory=16 * GIB),
    2: SimpleNamespace(name="NVIDIA H100 MIG 1g.10gb", major=9, minor=0, total_memory=10 * GIB),
    3: SimpleNamespace(name="NVIDIA A100", major=8, minor=0, total_memory=40 * GIB),
}
FREE = {0: 79.5, 1: 16, 2: 2.5}


def memory(device: torch.device) -> tuple[int, int]:
    if device.index not in FREE:
        raise RuntimeError("CUDA error: CUDA-capable device(s)\n is/are busy or unavailable")
    return int(FREE[device.index] * GIB), CARDS[device.index].total_memory


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda: Any = torch.cuda
    stand_ins = {
        "is_available": lambda: True,
        "device_count": lambda: len(CARDS),
        "get_device_properties": lambda device: CARDS[device.index],
        "get_device_capability": lambda device: tuple(
            getattr(CARDS[device.index], part) for part in ("major", "minor")
        ),
        "get_device_name": lambda device: CARDS[device.index].name,
        "mem_get_info": memory,
    }
    for name, function in stand_ins.items():
        monkeypatch.setattr(cuda, name, function)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu_report, "problem_with_triton", lambda _: None)
    monkeypatch.setattr(gpu_report, "compiler_problem", lambda: None)


@pytest.mark.usefixtures("cards")
def test_report_names_unusable_cards_and_other_programs() -> None:
    report = gpu_report.find_gpus()
    assert report.usable
    assert [card.device for card in report.cards] == [f"cuda:{index}" for index in CARDS]
    good, old, divided, busy = report.cards
    assert (good.problem, good.note) == (None, None)
    assert old.problem is not None
    assert "capability 7.0; the kernels need 8.0" in old.problem
    assert divided.problem is None
    assert divided.note is not None
    assert "hold 7.5 GiB" in divided.note
    assert "at most 0.25" in divided.note
    assert busy.problem == "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    assert (busy.free, busy.total) == (0, 40 * GIB)


@pytest.mark.usefixtures("cards")
def test_report_is_unusable_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "Triton is not installed; pip install 'triton>=3.4'."
    monkeypatch.setattr(gpu_report, "problem_with_triton", lambda _: problem)
    report = gpu_report.find_gpus()
    assert not report.usable
    assert problem in [each.problem for each in report.requirements]


@pytest.mark.usefixtures("cards")
def test_info_shows_cards() -> None:
    result = run("info", "--gpu")
    assert result.exit_code == 0, result.stderr
    shown = " ".join(result.stdout.split())
    assert "card NVIDIA H100, compute capability 9.0" in shown
    assert "the CUDA kernels can run" in shown
    assert "the kernels need 8.0" in shown
    report = json.loads(run("info", "--gpu", "--json").stdout)
    assert report["usable"] is True
    assert [card["free"] for card in report["cards"]][1] == 16 * GIB


def test_info_without_a_card_exits_with_the_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    result = run("info", "--gpu")
    assert result.exit_code == 1
    shown = " ".join(result.stdout.split())
    assert "no card found" in shown
    assert f"torch {torch.__version__}" in shown
