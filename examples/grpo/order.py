"""The task to write down who wants what, as JSON under a grammar, for json.toml."""

import json
import random
from functools import cache
from itertools import combinations, product

from nano_inference import Grammar, TrainingSample
from nano_train.questions import Question, Task

NAMES = ("Ann", "Ben", "Eve", "Tom")
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FIELDS = {
    "colour": ("red", "green", "blue", "black", "white"),
    "thing": ("cup", "hat", "lamp", "chair", "book"),
}
ORDER = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 1, "maximum": len(WORDS)},
        **{name: {"enum": list(values)} for name, values in FIELDS.items()},
    },
    "required": ["count", *FIELDS],
    "additionalProperties": False,
}


@cache
def order(seed: int, num_held_out: int = 64) -> Task:
    """Return the task to write one of two stated orders. Training contains no held-out pair of
    orders.
    """
    rng = random.Random(seed)
    orders = [*product(range(1, len(WORDS) + 1), FIELDS["colour"], FIELDS["thing"])]
    pairs = [*combinations(orders, 2)]
    rng.shuffle(pairs)
    questions: list[Question] = []
    for pair in pairs:
        names = rng.sample(NAMES, 2)
        wishes = [
            f"{name} wants {in_words(*wish)}." for name, wish in zip(names, pair, strict=True)
        ]
        asked = rng.randrange(2)
        answer = dict(zip(("count", *FIELDS), pair[asked], strict=True))
        prompt = f"{' '.join(wishes)}\n{names[asked]}'s order: "
        questions.append(Question(prompt, json.dumps(answer)))
    return Task(questions[num_held_out:], questions[:num_held_out], right_fields, grammar())


def train(seed: int) -> list[Question]:
    """Return the training questions."""
    return list(order(seed).train)


def held_out(seed: int) -> list[Question]:
    """Return the held-out questions."""
    return list(order(seed).held_out)


def grammar() -> Grammar:
    """Return the grammar of the answers."""
    return Grammar.json_schema(ORDER, whitespace="")


def in_words(count: int, colour: str, thing: str) -> str:
    """Return an order as a sentence names it."""
    return f"{WORDS[count - 1]} {colour} {thing}{'s' if count > 1 else ''}"


def right_fields(sample: TrainingSample, answer: str) -> float:
    """Return the share of correct fields. The grammar guarantees JSON if the answer is complete."""
    if sample.finish_reason != "stop":
        return 0.0
    written, right = json.loads(sample.text or ""), json.loads(answer)
    return sum(float(written[name] == value) for name, value in right.items()) / len(right)
