"""Requests of a load: lengths of prompts and outputs, shared prefixes, and sending times. A seed
determines all of them.
"""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nano_inference.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOWEST_ID, HIGHEST_ID = 100, 49_000  # bounds of random token ids; special tokens are below
WORDS = (
    "time year way day thing man world life hand part child eye woman place work week case "
    "point company number"
)


@dataclass(frozen=True)
class Ask:
    """One request. The body lacks the model's name."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers.

    Attributes:
        kind: `fixed`, `uniform` or `lognormal`.
        numbers: The length, or minimum and maximum, or median, sigma and maximum.
    """

    kind: str
    numbers: tuple[float, ...]

    @classmethod
    def read(cls, text: str) -> "Lengths":
        """Parse `128`, `uniform:16:512`, `lognormal:200:0.8` or `lognormal:200:0.8:2048`. Raises
        `ConfigError`.
        """
        name, *parts = text.split(":")
        kind, parts = ("fixed", [name]) if not parts else (name, parts)
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        if kind == "lognormal" and len(numbers) == 2:
            numbers.append(math.inf)
        if len(numbers) != _COUNTS.get(kind) or not _make_sense(kind, numbers):
            raise ConfigError(
                f"{text!r} is not a length; write 128, uniform:16:512 (min, max) or "
                "lognormal:200:0.8:2048 (median, sigma, max)."
            )
        return cls(kind, tuple(numbers))

    def draw(self, rng: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.numbers[0])
        if self.kind == "uniform":
            return rng.randint(int(self.numbers[0]), int(self.numbers[1]))
        median, sigma, most = self.numbers
        return max(1, round(min(rng.lognormvariate(math.log(median), sigma), most)))

    def __str__(self) -> str:
        shown = [f"{number:g}" for number in self.numbers if not math.isinf(number)]
        return ":".join(shown if self.kind == "fixed" else [self.kind, *shown])


_COUNTS = {"fixed": 1, "uniform": 2, "lognormal": 3}  # number of parameters of each kind


def _make_sense(kind: str, numbers: Sequence[float]) -> bool:
    if kind == "lognormal":
        median, sigma, most = numbers
        return 1 <= median <= most and 0 < sigma < 10 and not math.isinf(median)
    return 1 <= numbers[0] <= numbers[-1] < math.inf and all(each == int(each) for each in numbers)


@dataclass(frozen=True)
class Shape:
    """Distribution of requests.

    Attributes:
        prompt: Tokens of a prompt after its shared prefix. Words if `kind` is not "tokens".
        output: Tokens of an output, sent as `max_tokens`.
        kind: "tokens" (completions of token ids), "text" (completions of words) or "chat" (chats
            of words).
        stream: True to stream replies.
        shared_prefix: Number of tokens (or words) that all prompts of a group begin with.
        groups: Number of groups with a shared prefix. Each request belongs to a random one.
        highest_id: Exclusive upper bound of random token ids.
        more: Additional fields of every body, which override generated ones. None omits a field.
    """

    prompt: Lengths
    output: Lengths
    kind: str = "tokens"
    stream: bool = True
    shared_prefix: int = 0
    groups: int = 1
    highest_id: int = HIGHEST_ID
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def asks(self, seed: int) -> Iterator[Ask]:
        """Yield requests endlessly. The same seed gives the same requests."""
        content = random.Random(seed)
        lengths = random.Random(f"{seed}, lengths")
        # equal for all seeds, so that a warm-up puts the prefixes into the server's cache
        shared = random.Random("prefixes")
        prefixes = [
            self._parts(shared, self.shared_prefix) for _ in range(self.groups * self._shares)
        ]
        while True:
            prefix = lengths.choice(prefixes) if prefixes else []
            yield self._ask(
                prefix + self._parts(content, self.prompt.draw(lengths)), self.output.draw(lengths)
            )

    @property
    def _shares(self) -> bool:
        return self.shared_prefix > 0

    def _parts(self, rng: random.Random, count: int) -> list[Any]:
        if self.kind == "tokens":
            return [rng.randrange(LOWEST_ID, self.highest_id) for _ in range(count)]
        return rng.choices(WORDS.split(), k=count)

    def _ask(self, parts: list[Any], output_tokens: int) -> Ask:
        options: dict[str, Any] = {
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": self.stream,
        }
        if self.stream:
            options["stream_options"] = {"include_usage": True}
        options = {
            name: value for name, value in (options | dict(self.more)).items() if value is not None
        }
        if self.kind == "chat":
            return Ask(CHAT, {"messages": [{"role": "user", "content": " ".join(parts)}]} | options)
        prompt = parts if self.kind == "tokens" else " ".join(parts)
        return Ask(COMPLETIONS, {"prompt": prompt} | options)

    def __str__(self) -> str:
        unit = "tokens" if self.kind == "tokens" else "words"
        what = "chats" if self.kind == "chat" else "completions"
        shared = f"{self.shared_prefix} shared by {self.groups} groups + " * self._shares
        form = "streamed" if self.stream else "whole"
        return f"{what}, {shared}{self.prompt} {unit} -> {self.output} tokens, {form}"


def token_requests(
    count: int, prompt_tokens: int, output_tokens: int, *, stream: bool, seed: int = 0, **more: Any
) -> list[Ask]:
    """Return completion requests of random token ids with exactly `output_tokens` tokens each."""
    return _requests(count, "tokens", prompt_tokens, output_tokens, stream, seed, more)


def chat_requests(
    count: int, words: int, output_tokens: int, *, stream: bool, seed: int = 0, **more: Any
) -> list[Ask]:
    """Return chat requests with one message of random words."""
    return _requests(count, "chat", words, output_tokens, stream, seed, more)


def _requests(
    count: int, kind: str, prompt: int, output: int, stream: bool, seed: int, more: dict[str, Any]
) -> list[Ask]:
    lengths = [Lengths("fixed", (number,)) for number in (prompt, output)]
    shape = Shape(*lengths, kind=kind, stream=stream, more=more)
    return list(itertools.islice(shape.asks(seed), count))


def start_times(
    rate: float,
    *,
    seed: int = 0,
    evenly: bool = False,
    end_rate: float | None = None,
    span: float = math.inf,
) -> Iterator[float]:
    """Yield sending times endlessly, in seconds since the start.

    Args:
        rate: Requests per second.
        seed: Seed of the intervals, which are random (a Poisson process).
        evenly: Use constant instead of random intervals.
        end_rate: Rate after `span` seconds. Until then, the rate changes linearly from `rate`.
        span: Seconds until the rate is `end_rate`.
    """
    rng = random.Random(seed)
    last = rate if end_rate is None else end_rate
    slope = (last - rate) / span
    in_span = (rate + last) / 2 * span
    due = 0.0  # expected number of requests so far
    while True:
        if not evenly:
            due += rng.expovariate(1.0)
        if due > in_span:
            yield span + (due - in_span) / last
        else:  # the time t with rate * t + slope / 2 * t ** 2 == due
            yield 2 * due / (rate + math.sqrt(max(rate * rate + 2 * slope * due, 0.0)))
        if evenly:
            due += 1.0
