"""The workloads: token ids in, a fixed number of tokens out. Every engine can import this module,
because it uses only the standard library.

All ids are in [100, 49,000), which every model of the benchmarks has. The end of a sequence is
ignored, so lengths are fixed. `variant=k` has the same shapes with other ids. Variants serve for
warm-up, and keep a run from reusing the prefixes of another.

W6 has the shape of a real rollout: 8 prompts with 8 samples each, a few of them much longer than
the others. A request has one `max_tokens` for all its samples, so W6 has 8 requests per prompt with
different lengths. The prefix cache then computes each prompt once, except for the last, partial
block of each request.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

LOWEST_ID, HIGHEST_ID = 100, 49_000
WARM_UP_TOKENS = 32  # the warm-up run cuts completions to this length
TAIL_MEDIAN, TAIL_SIGMA = 160, 1.0  # W6: parameters of the log-normal distribution of lengths
TAIL_SHORTEST, TAIL_LONGEST = 16, 1024


@dataclass(frozen=True)
class Request:
    """One prompt, `n` samples of it, each of exactly `max_tokens` tokens."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1


@dataclass(frozen=True)
class Workload:
    """Requests that arrive together.

    Attributes:
        name: `"W1"` ...
        what: Description for tables, one line.
        requests: Requests in order of arrival.
        sampling: Sampling options in addition to temperature 1, named as in `SamplingParams`.
    """

    name: str
    what: str
    requests: tuple[Request, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        return sum(request.n for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.n * request.max_tokens for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt tokens of all requests, counting each request's prompt once."""
        return sum(len(request.prompt) for request in self.requests)

    def cut(self, tokens: int) -> "Workload":
        """Return the same workload with completions of at most `tokens` tokens."""
        shorter = tuple(
            replace(request, max_tokens=min(request.max_tokens, tokens))
            for request in self.requests
        )
        return replace(self, requests=shorter)


def workload(name: str, variant: int = 0) -> Workload:
    """Return a workload by name.

    Raises:
        KeyError: There is no such workload.
    """
    what, shapes, sampling = _TABLE[name]
    seed = 1000 + variant if variant else 0
    return Workload(name, what, tuple(shapes(seed)), sampling)


def warm_up(name: str) -> Workload:
    """Return the warm-up run: the same prompt shapes with other ids and short completions."""
    return workload(name, variant=999).cut(WARM_UP_TOKENS)


def distinct_prompt_tokens(requests: Sequence[Request]) -> int:
    """Return the number of prompt tokens to compute if every shared prefix is computed once."""
    return sum(len(request.prompt) - shared for request, shared in with_shared_prefix(requests))


def with_shared_prefix(requests: Sequence[Request]) -> list[tuple[Request, int]]:
    """Return the requests sorted by prompt, each with the length of the prefix shared with the
    previous one.
    """
    ordered = sorted(requests, key=lambda request: request.prompt)
    before: tuple[int, ...] = ()
    pairs: list[tuple[Request, int]] = []
    for request in ordered:
        pairs.append((request, _common(before, request.prompt)))
        before = request.prompt
    return pairs


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(count))


def _single(seed: int) -> list[Request]:
    return [Request(_ids(random.Random(seed), 128), 128)]


def _group(seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [Request(_ids(rng, 256), 128, n=8) for _ in range(8)]


def _separate(seed: int) -> list[Request]:
    return [replace(request, n=1) for request in _group(seed) for _ in range(request.n)]


def _mixed(seed: int) -> list[Request]:
    shapes = random.Random(0)  # shared by every variant
    lengths = [(shapes.randint(32, 512), shapes.randint(16, 256)) for _ in range(64)]
    rng = random.Random(seed) if seed else shapes
    return [Request(_ids(rng, prompt), output) for prompt, output in lengths]


def _long_prompt(seed: int) -> list[Request]:
    return [Request(_ids(random.Random(seed), 4096), 1)]


def _short_prompt(seed: int) -> list[Request]:
    return [Request(_ids(random.Random(seed), 1024), 1)]


def _prompt_of_512(seed: int) -> list[Request]:
    return [Request(_ids(random.Random(seed), 512), 1)]


def _batch(seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [Request(_ids(rng, 128), 64) for _ in range(8)]


def _shared_prefix(seed: int) -> list[Request]:
    rng = random.Random(seed)
    prefix = _ids(rng, 2048)
    return [Request(prefix + _ids(rng, 64), 32) for _ in range(16)]


def _rollout(seed: int) -> list[Request]:
    shapes, rng = random.Random(6), random.Random(seed)
    drawn = [
        [shapes.lognormvariate(0.0, TAIL_SIGMA) * TAIL_MEDIAN for _ in range(8)] for _ in range(8)
    ]
    requests: list[Request] = []
    for lengths in drawn:
        prompt = _ids(rng, 256)
        requests += [
            Request(prompt, min(max(round(length), TAIL_SHORTEST), TAIL_LONGEST))
            for length in lengths
        ]
    return requests


_GROUP_SHAPE = "8 prompts x 8 samples, 256 -> 128"
_TABLE = {
    "W1": ("single stream: 128 -> 128", _single, {}),
    "W2": (f"rollout: {_GROUP_SHAPE}", _group, {}),
    "W3": ("mixed: 64 x (32..512 -> 16..256)", _mixed, {}),
    "W4": ("long prompt: 4,096 -> 1", _long_prompt, {}),
    "W5": ("shared prefix: 16 x (2,048 shared + 64 -> 32)", _shared_prefix, {}),
    "W6": ("long-tailed rollout: 8 prompts x 8 samples, 256 -> 16..1,024", _rollout, {}),
    "W1-batch": ("batch: 8 x (128 -> 64)", _batch, {}),
    "W4-short": ("prompt: 1,024 -> 1", _short_prompt, {}),
    "W4-512": ("prompt: 512 -> 1", _prompt_of_512, {}),
    "W2-filters": (f"{_GROUP_SHAPE}, top_p 0.95, top_k 50", _group, {"top_p": 0.95, "top_k": 50}),
    "W2-penalties": (
        f"{_GROUP_SHAPE}, all three penalties",
        _group,
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    ),
    "W2-separate": ("8 prompts x 8 requests of one sample, 256 -> 128", _separate, {}),
}
BASE = ("W1", "W2", "W3", "W4", "W5", "W6")
NAMES = tuple(_TABLE)
