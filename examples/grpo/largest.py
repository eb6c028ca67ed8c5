"""The task to name the largest of three numbers, for run.toml."""

import random
from functools import cache
from itertools import combinations

from nano_inference import TrainingSample
from nano_train.questions import Question, Task

EXAMPLE = "17, 31 or 52? 52\n"  # prefix of every question
HELD_OUT = 64


@cache
def largest_number(seed: int, num_held_out: int = HELD_OUT) -> Task:
    """Return the task. Training contains no held-out triple in any order."""
    rng = random.Random(seed)
    triples = [rng.sample(triple, 3) for triple in combinations(range(10, 100), 3)]
    rng.shuffle(triples)
    questions = [Question(f"{EXAMPLE}{a}, {b} or {c}?", str(max(a, b, c))) for a, b, c in triples]
    return Task(questions[num_held_out:], questions[:num_held_out], exact_match)


def train(seed: int) -> list[Question]:
    """Return the training questions."""
    return list(largest_number(seed).train)


def held_out(seed: int) -> list[Question]:
    """Return the held-out questions."""
    return list(largest_number(seed).held_out)


def exact_match(sample: TrainingSample, answer: str) -> float:
    """Return 1 for exactly the answer (with or without a full stop), otherwise 0."""
    return float((sample.text or "").strip().removesuffix(".") == answer)
