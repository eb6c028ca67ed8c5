"""The service with an engine: samplers and trainers agree bit for bit, clients are independent."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nano_inference import EngineConfig
from nano_training_service.config import TrainServiceConfig
from nano_training_service.main import running_service
from tests.models.tiny import tiny_llama
from tests.nano_training_service.asking import Asker, drawn, scored

VOCAB = 259
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service") / "state"


@pytest.fixture(scope="module")
def url(state: Path) -> Iterator[str]:
    folder = state.parent
    model = tiny_llama(folder / "model", vocab_size=VOCAB, std=0.1)
    config = TrainServiceConfig(
        port=0, state_dir=str(state), served_model_name="tiny", max_models=16
    )
    with running_service(EngineConfig(str(model), num_threads=1), config) as url:
        try:
            yield url
        finally:
            while Asker.opened:
                Asker.opened.pop().close()


def train(url: str, number: int, rounds: int = 2) -> tuple[Asker, str]:
    """Train by rounds of sampling and policy gradients, and return the checkpoint's path."""
    asker = Asker(url, timeout=300)
    asker.create(base_model="tiny", seed=number, rank=4)
    for step in range(rounds):
        sample = asker.sample(asker.sampler(step), PROMPT, num_samples=3, max_tokens=6)
        data = []
        for index, (tokens, logprobs) in enumerate(drawn(sample)):
            padding = [0.0] * (len(PROMPT) - 1)
            inputs = {
                "logprobs": [*padding, *np.frombuffer(logprobs, "<f4").tolist()],
                "advantages": [*padding, *([1.0 - index] * len(tokens))],
            }
            data.append((PROMPT + tokens, inputs))
        asker.send_batch(data, "importance_sampling")
        assert asker.step(1e-2)["metrics"]["grad_norm"] > 0
    return asker, asker.save("end")["path"]


def digest(folder: Path, path: str) -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    file = folder / "runs" / run / kind / name / "adapter_model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("options", [{}, {"train_unembed": False}, {"train_attn": False}])
def test_samplers_and_trainers_give_the_same_bits(url: str, options: dict[str, bool]) -> None:
    asker = Asker(url, timeout=300)
    asker.create(base_model="tiny", rank=4, **options)
    before = asker.sample(asker.sampler(0), PROMPT, max_tokens=8)
    for step in range(2):
        asker.send_batch([(PROMPT + [step] * 4, {})])
        asker.step(0.05)
    sample = asker.sample(asker.sampler(1), PROMPT, max_tokens=8)
    assert sample != before
    for tokens, logprobs in drawn(sample):
        reply = asker.result(asker.send_batch([(PROMPT + tokens, {})], forward_only=True))
        assert scored(reply)[4 * (len(PROMPT) - 1) :] == logprobs


def test_concurrent_clients_get_the_results_of_single_ones(url: str, state: Path) -> None:
    alone = [digest(state, train(url, number)[1]) for number in (1, 2)]
    together: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda n=n: together.update({n: train(url, n)[1]})) for n in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [digest(state, together[number]) for number in (1, 2)] == alone
    assert alone[0] != alone[1]
