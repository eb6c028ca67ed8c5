"""Task of the tests' runs: ids in the lower half of the vocabulary are rewarded."""

from typing import Any

from nano_inference import TrainingSample


def train(seed: int) -> list[dict[str, Any]]:
    return [{"prompt": [10 + n, 200, 30 + 7 * n % 50, 5 + seed]} for n in range(8, 40)]


def held_out(seed: int) -> list[dict[str, Any]]:
    return [{"prompt": [10 + n, 200, 30 + 7 * n % 50, 5 + seed]} for n in range(8)]


def answers(seed: int) -> list[dict[str, Any]]:
    return [{"prompt": [10 + n, 200, 5 + seed], "answer": [7, 8 + n, 9]} for n in range(16)]


def reward(sample: TrainingSample, _: Any) -> float:
    return sum(token < 150 for token in sample.completion_tokens) / len(sample.completion_tokens)
