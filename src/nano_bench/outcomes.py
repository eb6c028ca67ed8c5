"""The outcome of each request of a load, and the figures of all of them."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a request. Times are seconds from `time.perf_counter`.

    Attributes:
        began: Time when the request was sent, or planned to be sent.
        pieces: Arrival time of each event with output. Empty if the reply was not streamed.
        cached_tokens: Prompt tokens from the server's cache. None: the server did not report them.
        tokens: Number of output tokens: from the server's usage, otherwise the number of pieces.
        counted_by: Source of `tokens`: "usage", "pieces", or "nothing" for an unstreamed reply
            without usage.
        error: Text of the error, or None.
        kind: Kind of the error, or None.
    """

    began: float
    ended: float
    pieces: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    tokens: int = 0
    counted_by: str = "usage"
    error: str | None = None
    kind: str | None = None

    @property
    def first_token(self) -> float | None:
        """Seconds until the first piece. None if nothing was streamed."""
        return self.pieces[0] - self.began if self.pieces else None

    @property
    def per_token(self) -> float | None:
        """Mean seconds per token after the first. None if there are none."""
        if len(self.pieces) < 2 or self.tokens < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1)


# Figures of a request that can be limited, by the name of the limit.
LIMITED: dict[str, Callable[[Outcome], float | None]] = {
    "ttft": lambda each: each.first_token,
    "itl": lambda each: max(gaps(each.pieces), default=None),
    "tpot": lambda each: each.per_token,
    "e2e": lambda each: each.ended - each.began,
}


@dataclass
class Load:
    """Results of a load.

    Attributes:
        seconds: Duration of the load.
        began: `time.perf_counter` at the start.
        cpu: CPU seconds of the client and of each watched part of the server.
        gave_up: True if the load ended early because the server was unreachable.
        interrupted: True if Ctrl-C ended the load.
    """

    seconds: float
    outcomes: list[Outcome]
    cpu: dict[str, float] = field(default_factory=dict[str, float])
    began: float = 0.0
    gave_up: bool = False
    interrupted: bool = False

    @property
    def good(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.error is None]

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.outcomes)

    @property
    def errors(self) -> list[str]:
        return [each.error for each in self.outcomes if each.error is not None]

    @property
    def first_tokens(self) -> list[float]:
        return [each.pieces[0] - each.began for each in self.outcomes if each.pieces]

    @property
    def gaps(self) -> list[float]:
        return [gap for each in self.outcomes for gap in gaps(each.pieces)]

    def within(self, limits: Mapping[str, float]) -> int:
        """Count the successful requests within limits, given in seconds by names of `LIMITED`. A
        missing figure, such as the gap of a single piece, counts as within.
        """
        return sum(
            all((LIMITED[name](each) or 0.0) <= most for name, most in limits.items())
            for each in self.good
        )

    def row(self) -> dict[str, Any]:
        """Return figures for a report. Latencies are in milliseconds."""
        good, seconds = self.good, max(self.seconds, 1e-9)
        events = sum(len(each.pieces) for each in good)
        streamed = sum(each.tokens for each in good if each.pieces)
        per_token = [each.per_token for each in good]
        return {
            "requests": len(self.outcomes),
            "errors": len(self.errors),
            "errors_by_kind": dict(Counter(each.kind for each in self.outcomes if each.kind)),
            "seconds": round(self.seconds, 4),
            "prompt_tokens": sum(each.prompt_tokens for each in good),
            "cached_tokens": sum(each.cached_tokens or 0 for each in good),
            "output_tokens": self.tokens,
            "counted_by": dict(Counter(each.counted_by for each in good)),
            "requests_per_s": round(len(good) / seconds, 4),
            "output_tokens_per_s": round(self.tokens / seconds, 2),
            "tokens_per_event": round(streamed / events, 3) if events else None,
            "first_token_ms": shares(self.first_tokens, 50, 90, 99),
            "between_tokens_ms": shares(self.gaps, 50, 90, 99, 100),
            "per_token_ms": shares([each for each in per_token if each is not None], 50, 90, 99),
            "whole_ms": shares([each.ended - each.began for each in good], 50, 90, 99),
            "cpu_s": {name: round(spent, 3) for name, spent in self.cpu.items()},
        }


def gaps(pieces: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(pieces)]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` percent of the values do not exceed."""
    ordered = sorted(values)
    index = -(-len(ordered) * share // 100) - 1  # rounded up
    return ordered[max(int(index), 0)]


def shares(seconds: Sequence[float], *percents: int) -> dict[str, float] | None:
    """Return percentiles in milliseconds by name, or None if there are no values."""
    return (
        {f"p{share}": round(percentile(seconds, share) * 1e3, 3) for share in percents}
        if seconds
        else None
    )
